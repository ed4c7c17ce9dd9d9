"""The store on S3: no append, no rename. Outputs go up before their manifest, which is created only where none is."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
from boto3.exceptions import Boto3Error
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from refit import files, s3_objects
from refit.errors import StoreUnavailable
from refit.manifest import MANIFEST, Manifest, damage
from refit.store import Check, Copy, Draft, Heard, Store, cache_folder, join, unheard

_MISSING = {"404", "NoSuchKey", "NoSuchBucket"}
_TAKEN = {"412", "PreconditionFailed", "ConditionalRequestConflict"}


class S3Store(Store):
    """`s3://bucket/key`, by boto3; credentials and endpoint come from the usual AWS variables."""

    def __init__(self) -> None:
        self._client: Any = boto3.client("s3", config=Config(retries={"max_attempts": 8, "mode": "standard"}))

    def read(self, uri: str, *, first: int | None = None) -> bytes:
        with self._call("get_object", uri)["Body"] as stream:
            body: bytes = stream.read(first)
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
        # A committed folder never changes: its copy is named by its content.
        target = cache_folder() / "fetched" / manifest.content_digest()
        if target.is_dir() and not damage(target, manifest, hashes=False):
            return target
        draft = Path(tempfile.mkdtemp(dir=_made(target.parent)))
        try:
            for name in [*(file.path for file in manifest.files), MANIFEST]:
                self._download(join(uri, name), draft / name)
                heard()
            wrong = damage(draft, manifest)
            if wrong:
                raise StoreUnavailable(f"{uri}: what was fetched is damaged: {'; '.join(wrong[:3])}.")
            if not files.rename_folder(draft, target) and damage(target, manifest, hashes=False):
                # What is there is no copy that another one made at the same time: it makes room.
                shutil.rmtree(target, ignore_errors=True)
                files.rename_folder(draft, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return target

    def copy(self, uri: str, heard: Heard = unheard) -> Copy:
        bucket, key = _split(uri)
        return s3_objects.fetch(self._client, bucket, key, cache_folder() / "fetched" / "objects", heard)

    def remove(self, uri: str) -> None:
        manifest = self.manifest(uri)
        for name in [MANIFEST, *(file.path for file in manifest.files)] if manifest else []:
            self._call("delete_object", join(uri, name))

    @contextmanager
    def publish(self, uri: str) -> Iterator[Draft]:
        with tempfile.TemporaryDirectory() as folder:
            yield Draft(Path(folder), lambda path, manifest, check: self._finish(uri, path, manifest, check))

    def _finish(self, uri: str, draft: Path, manifest: Manifest, check: Check) -> Manifest:
        theirs = self.manifest(uri)
        if theirs is not None:
            return theirs
        for file in manifest.files:
            bucket, key = _split(join(uri, file.path))
            try:
                self._client.upload_file(str(draft / file.path), bucket, key)
            except (Boto3Error, BotoCoreError, ClientError, OSError) as error:
                raise StoreUnavailable(f"{uri}/{file.path}: {error}") from error
        check()
        if self.create(join(uri, MANIFEST), manifest.model_dump_json(indent=1).encode()):
            return manifest
        return self.manifest(uri) or manifest

    def _download(self, uri: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        bucket, key = _split(uri)
        try:
            self._client.download_file(bucket, key, str(target))
        except ClientError as error:
            raise _translate(error, uri) from error
        except BotoCoreError as error:
            raise StoreUnavailable(f"{uri}: {error}") from error

    def _call(self, method: str, uri: str, **arguments: Any) -> Any:
        bucket, key = _split(uri)
        try:
            return getattr(self._client, method)(Bucket=bucket, Key=key, **arguments)
        except ClientError as error:
            raise _translate(error, uri) from error
        except BotoCoreError as error:
            raise StoreUnavailable(f"{uri}: {error}") from error


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


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
