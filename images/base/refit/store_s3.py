"""The store on S3: no append, no rename. Outputs go up before their manifest, which is created only where none is."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
from boto3.exceptions import Boto3Error
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from refit import fetched, files, log, s3_objects
from refit.errors import Damaged, StoreUnavailable
from refit.manifest import MANIFEST, Manifest, damage
from refit.store import Check, Copy, Draft, Heard, Judge, Store, hashed, join, unheard

_MISSING = {"404", "NoSuchKey", "NoSuchBucket"}
_NOT_OFFERED = {"AccessDenied", "NotImplemented", "MethodNotAllowed", "NoSuchUpload"}
_TAKEN = {"412", "PreconditionFailed", "ConditionalRequestConflict"}


class S3Store(Store):
    """`s3://bucket/key`, by boto3; credentials and endpoint come from the usual AWS variables."""

    def __init__(self) -> None:
        self._client: Any = boto3.client("s3", config=Config(retries={"max_attempts": 8, "mode": "standard"}))

    def read(self, uri: str, *, first: int | None = None) -> bytes:
        with self._call("get_object", uri)["Body"] as stream:
            try:
                body: bytes = stream.read(first)
            except BotoCoreError as error:
                raise StoreUnavailable(f"{uri}: {error}") from error
        return body

    def write(self, uri: str, data: bytes) -> None:
        self._call("put_object", uri, Body=data)

    def create(self, uri: str, data: bytes) -> bool:
        try:
            self._call("put_object", uri, Body=data, IfNoneMatch="*")
        except FileExistsError:
            return False
        return True

    def exists(self, uri: str) -> bool:
        try:
            self._call("head_object", uri)
        except FileNotFoundError:
            return False
        return True

    def modified(self, uri: str) -> float:
        return float(self._call("head_object", uri)["LastModified"].timestamp())

    def version(self, uri: str) -> str | None:
        head = self._call("head_object", uri)
        return f"{head['ETag']} {head['ContentLength']}"

    def children(self, uri: str) -> list[str]:
        bucket, key = _split(join(uri, ""))
        names: set[str] = set()
        try:
            for page in self._client.get_paginator("list_objects_v2").paginate(
                Bucket=bucket, Prefix=key, Delimiter="/"
            ):
                names |= {item["Key"][len(key) :] for item in page.get("Contents", [])}
                names |= {item["Prefix"][len(key) :].rstrip("/") for item in page.get("CommonPrefixes", [])}
        except (BotoCoreError, ClientError) as error:
            raise StoreUnavailable(f"{uri}: {error}") from error
        return sorted(names - {""})

    def local(self, uri: str, heard: Heard = unheard) -> Path:
        manifest = self.manifest(uri)
        if manifest is None:
            return self.copy(uri, heard).path
        target = _place(manifest)
        with fetched.on_this_disk():
            while True:
                if fetched.hold(target):
                    seen = fetched.mark(target)
                    if not damage(target, manifest, hashes=False):
                        return target
                    fetched.discard(target, seen)
                self._fetch(uri, manifest, target, heard)

    def judged(
        self, uri: str, manifest: Manifest, heard: Heard = unheard, by: Judge = hashed
    ) -> tuple[Path, list[str]]:
        folder = self.local(uri, heard)
        seen = fetched.mark(folder)
        if wrong := by(folder, manifest, heard):
            log.event("copy_damaged", uri=uri, copy=str(folder), why="; ".join(wrong[:3]), then="fetched once more")
            fetched.discard(folder, seen)
            folder = self.local(uri, heard)
            wrong = by(folder, manifest, heard)
        if wrong:  # it came whole, and was not when it was read again
            raise StoreUnavailable(
                f"{uri}: its copy {folder} differs from what was just fetched: {'; '.join(wrong[:3])}. Look at this "
                "machine's disk; or the folder was replaced meanwhile. Run again."
            )
        return folder, []

    def let_go(self, manifest: Manifest) -> None:
        fetched.let_go(_place(manifest))

    def _fetch(self, uri: str, manifest: Manifest, target: Path, heard: Heard) -> None:
        """Bring a committed folder here, checked; where another one was faster, theirs stands."""
        fetched.make_room(sum(file.size for file in manifest.files))
        draft = fetched.draft()
        try:
            for name in [*(file.path for file in manifest.files), MANIFEST]:
                self._download(join(uri, name), draft / name, heard)
            wrong = damage(draft, manifest, heard=heard)
            if wrong:
                # The way here can damage too (a torn answer leaves a hole): what is there is read once more.
                kind = Damaged if self.damage(uri, manifest, heard) else StoreUnavailable
                raise kind(f"{uri}: what was fetched is damaged: {'; '.join(wrong[:3])}.")
            files.sync_tree(draft)  # names and sizes outlive a power cut that the bytes do not
            fetched.become(draft, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            fetched.let_go(draft)

    def copy(self, uri: str, heard: Heard = unheard) -> Copy:
        bucket, key = _split(uri)
        return s3_objects.fetch(self._client, bucket, key, fetched.place() / "objects", heard)

    def damage(self, uri: str, manifest: Manifest, heard: Heard = unheard) -> list[str]:
        wrong = []
        for file in manifest.files:
            try:
                size, digest = self._hash(join(uri, file.path), heard)
            except FileNotFoundError:
                wrong.append(f"{file.path} is missing")
                continue
            if size != file.size:
                wrong.append(f"{file.path} has {size} bytes, the manifest says {file.size}")
            elif digest != file.sha256:
                wrong.append(f"{file.path} differs from its hash")
        return wrong

    def _hash(self, uri: str, heard: Heard) -> tuple[int, str]:
        """Size and sha256 of an object that is read and not kept."""
        digest, size = hashlib.sha256(), 0
        answer = self._call("get_object", uri)
        with answer["Body"] as stream:
            try:
                while data := stream.read(s3_objects.CHUNK):
                    digest.update(data)
                    size += len(data)
                    heard()
            except BotoCoreError as error:
                raise StoreUnavailable(f"{uri}: {error}") from error
        if size != answer["ContentLength"]:
            raise StoreUnavailable(f"{uri}: {size} bytes came of {answer['ContentLength']}.")
        return size, digest.hexdigest()

    def remove(self, uri: str) -> None:
        try:
            manifest = self.manifest(uri)
            names = [file.path for file in manifest.files] if manifest else None
        except Damaged:  # what it names cannot be read: what lies below goes
            names = []
        if names is None:
            return
        self._call("delete_object", join(uri, MANIFEST))
        for name in names or self._below(uri):
            self._call("delete_object", join(uri, name))

    def sweep(self, uri: str, ours: Callable[[str], bool]) -> None:
        bucket, key = _split(join(uri, ""))
        below = self._below(uri)
        whole = {name.partition("/")[0] for name in below if name.count("/") == 1 and name.endswith("/" + MANIFEST)}
        for name in below:
            first, _, rest = name.partition("/")
            if rest and ours(first) and first not in whole:
                self._call("delete_object", join(uri, name))
        try:
            pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=key)
            for upload in [upload for page in pages for upload in page.get("Uploads", [])]:
                if ours(upload["Key"][len(key) :].partition("/")[0]):
                    self._client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        except ClientError as error:
            if str(error.response.get("Error", {}).get("Code", "")) not in _NOT_OFFERED:
                raise StoreUnavailable(f"{uri}: {error}") from error
            log.event("uploads_not_swept", uri=uri, why=str(error))  # what they hold costs room, and nothing else
        except BotoCoreError as error:
            raise StoreUnavailable(f"{uri}: {error}") from error

    def _below(self, uri: str) -> list[str]:
        """Every object below a folder, however deep, by its name from there."""
        bucket, key = _split(join(uri, ""))
        try:
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=key)
            return [item["Key"][len(key) :] for page in pages for item in page.get("Contents", [])]
        except (BotoCoreError, ClientError) as error:
            raise StoreUnavailable(f"{uri}: {error}") from error

    @contextmanager
    def publish(self, uri: str) -> Iterator[Draft]:
        with tempfile.TemporaryDirectory() as folder:
            yield Draft(Path(folder), lambda *of: self._finish(uri, *of))

    def _finish(self, uri: str, draft: Path, manifest: Manifest, check: Check, heard: Heard) -> Manifest:
        theirs = self.manifest(uri)
        if theirs is not None:
            return theirs
        for file in manifest.files:
            bucket, key = _split(join(uri, file.path))
            try:
                self._client.upload_file(str(draft / file.path), bucket, key, Callback=lambda _bytes: heard())
            except (Boto3Error, BotoCoreError, ClientError, OSError) as error:
                raise StoreUnavailable(f"{uri}/{file.path}: {error}") from error
        check()
        if self.create(join(uri, MANIFEST), manifest.model_dump_json(indent=1).encode()):
            return manifest
        return self.manifest(uri) or manifest

    def _download(self, uri: str, target: Path, heard: Heard) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        bucket, key = _split(uri)
        try:
            self._client.download_file(bucket, key, str(target), Callback=lambda _bytes: heard())
        except ClientError as error:
            raise _translate(error, uri) from error
        except (Boto3Error, BotoCoreError) as error:
            raise StoreUnavailable(f"{uri}: {error}") from error

    def _call(self, method: str, uri: str, **arguments: Any) -> Any:
        bucket, key = _split(uri)
        try:
            return getattr(self._client, method)(Bucket=bucket, Key=key, **arguments)
        except ClientError as error:
            raise _translate(error, uri) from error
        except BotoCoreError as error:
            raise StoreUnavailable(f"{uri}: {error}") from error


def _place(manifest: Manifest) -> Path:
    """A committed folder never changes: its copy is named by its content."""
    return fetched.place() / manifest.content_digest()


def _translate(error: ClientError, uri: str) -> Exception:
    code = str(error.response.get("Error", {}).get("Code", ""))
    if code in _MISSING:
        return FileNotFoundError(uri)
    if code in _TAKEN:
        return FileExistsError(uri)
    return StoreUnavailable(f"{uri}: {error}")


def _split(uri: str) -> tuple[str, str]:
    parts = urlsplit(uri)
    return parts.netloc, parts.path.lstrip("/")
