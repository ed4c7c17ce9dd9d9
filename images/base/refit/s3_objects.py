"""Copies of S3 objects on this machine's disk: streamed, resumed, checked, and fetched once a version of an object.

A copy lies under the object's address and its version (ETag, size), its sha256 in a note beside it: where both are
there, the object costs one HEAD. A body that breaks off is asked for again from where it broke, under If-Match, so
that a copy is of one version or is not made. It is checked (size, and the checksum that S3 has of the whole), synced,
and renamed into place. (boto3's own download takes a torn answer for an empty piece and leaves a hole of zeros.)

What it does not do: go on with what a process left that died; fetch pieces side by side.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from refit import fetched, files, fingerprint, log
from refit.errors import StoreUnavailable
from refit.store import Copy, Heard, unheard

CHUNK = 1 << 20
"""Bytes that are in memory at once."""
ATTEMPTS = 5
"""How often an object may be asked for in vain, and how often one that keeps changing is begun anew."""
PAUSE = 0.25
"""Seconds after a body that broke off; doubled with each that brought nothing."""
KEPT = 3
"""Versions of one object that stay on this machine: another run may still read the last ones."""
_GONE = ("404", "NoSuchKey", "412", "PreconditionFailed", "416", "InvalidRange")
_MD5 = re.compile(r'^"?([0-9a-f]{32})"?$')


@dataclass(frozen=True)
class Version:
    """An object as it is now."""

    etag: str
    size: int
    checksums: tuple[tuple[str, str], ...] = ()  # of the whole object, as S3 names and writes them


class _Changed(Exception):
    pass


def fetch(client: Any, bucket: str, key: str, folder: Path, heard: Heard = unheard) -> Copy:
    """The object's copy, made now if there is none of its present version; `heard` is called with every piece.

    Raises:
        FileNotFoundError: there is no such object.
        StoreUnavailable: S3 does not answer, sends what fails its checksum, or the object keeps changing.
        DiskFull: there is no room for it here.
    """
    with fetched.on_this_disk():
        return _fetch(client, bucket, key, folder, heard)


def _fetch(client: Any, bucket: str, key: str, folder: Path, heard: Heard) -> Copy:
    uri = f"s3://{bucket}/{key}"
    own = folder / fingerprint.digest([str(client.meta.endpoint_url), bucket, key])[:32]
    fetched.make(own)
    for attempt in range(ATTEMPTS):
        version = _head(client, bucket, key, uri)
        path = own / fingerprint.digest([version.etag, version.size])[:32]
        known = _noted(path, version.size)
        if known:
            return Copy(path, known)
        fetched.make_room(version.size)
        try:
            digest = _download(client, bucket, key, version, path, heard)
        except _Changed:
            log.event("object_changed", uri=uri, attempt=attempt + 1)
            continue
        files.keep_newest(own, 2 * KEPT)  # copies and their notes
        return Copy(path, digest)
    raise StoreUnavailable(f"{uri}: the object was replaced {ATTEMPTS} times while it was fetched. Run again.")


def _head(client: Any, bucket: str, key: str, uri: str) -> Version:
    try:
        head = client.head_object(Bucket=bucket, Key=key, ChecksumMode="ENABLED")
    except ClientError as error:
        if str(error.response.get("Error", {}).get("Code", "")) in ("404", "NoSuchKey", "NoSuchBucket"):
            raise FileNotFoundError(uri) from error
        raise StoreUnavailable(f"{uri}: {error}") from error
    except BotoCoreError as error:
        raise StoreUnavailable(f"{uri}: {error}") from error
    whole = head.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
    names = [name for name in _CHECKS if name in head and whole and "-" not in head[name]]
    return Version(head["ETag"], int(head["ContentLength"]), tuple((name, head[name]) for name in names))


def _noted(path: Path, size: int) -> str | None:
    """The sha256 that was noted of a copy; None where copy or note are not there, or not as they were left."""
    try:
        note = json.loads(path.with_suffix(".json").read_bytes())
        state = path.stat()
    except (FileNotFoundError, ValueError):
        return None
    as_it_was = state.st_size == size and note["mtime"] == state.st_mtime_ns
    return str(note["sha256"]) if as_it_was else None


def _download(client: Any, bucket: str, key: str, version: Version, path: Path, heard: Heard) -> str:
    uri = f"s3://{bucket}/{key}"
    with files.replacing(path) as draft:
        _transfer(client, bucket, key, version, draft, heard)
        digest = _checked(draft, version, uri, heard)
    note = {"sha256": digest, "mtime": path.stat().st_mtime_ns, "uri": uri}
    files.write(path.with_suffix(".json"), json.dumps(note).encode())
    return digest


def _transfer(client: Any, bucket: str, key: str, version: Version, draft: Path, heard: Heard) -> None:
    """Write the object's bytes; a body that breaks off is asked for again from where it broke."""
    uri = f"s3://{bucket}/{key}"
    failures = 0
    with draft.open("wb") as sink:
        while sink.tell() < version.size:
            before = sink.tell()
            try:
                for data in _body(client, bucket, key, version, before):
                    sink.write(data)
                    heard()
                why = "the body broke off"
            except (BotoCoreError, ConnectionError) as error:
                why = str(error)
            failures = 0 if sink.tell() > before else failures + 1
            if failures >= ATTEMPTS:
                raise StoreUnavailable(f"{uri}: nothing came {failures} times from byte {before} on: {why}")
            if sink.tell() < version.size:
                log.event("object_again", uri=uri, byte=sink.tell(), why=why)
                time.sleep(PAUSE * 2**failures)


def _body(client: Any, bucket: str, key: str, version: Version, start: int) -> Iterator[bytes]:
    """The object from a byte on; empty where the answer is not about exactly that (a torn one looks like success)."""
    try:
        answer = client.get_object(Bucket=bucket, Key=key, IfMatch=version.etag, Range=f"bytes={start}-")
    except ClientError as error:
        if str(error.response.get("Error", {}).get("Code", "")) in _GONE:
            raise _Changed from error
        raise StoreUnavailable(f"s3://{bucket}/{key}: {error}") from error
    with answer["Body"] as stream:
        if answer.get("ContentRange") == f"bytes {start}-{version.size - 1}/{version.size}":
            while data := stream.read(CHUNK):
                yield data


def _checked(path: Path, version: Version, uri: str, heard: Heard) -> str:
    """The sha256 of a copy that is what S3 says it should be."""
    size = path.stat().st_size
    if size != version.size:
        raise StoreUnavailable(f"{uri}: {size} bytes came, S3 says {version.size}. Run again.")
    expected = [(_CHECKS[name](), value) for name, value in version.checksums]
    simple = _MD5.match(version.etag)
    hashes = [hashlib.sha256(), *(check for check, _ in expected)]
    md5 = hashlib.md5(usedforsecurity=False) if simple and not expected else None
    with path.open("rb") as handle:
        while data := handle.read(1 << 20):
            for one in [*hashes, *([md5] if md5 else [])]:
                one.update(data)
            heard()
    wrong = [value for check, value in expected if base64.b64encode(check.digest()).decode() != value]
    if wrong:
        raise StoreUnavailable(f"{uri}: what was fetched differs from the checksum that S3 has of it. Run again.")
    # An ETag of 32 hex digits is the MD5 unless the object is encrypted with a key of its own: not an error by itself.
    if md5 and simple and md5.hexdigest() != simple[1]:
        log.event("etag_is_no_md5", uri=uri)
    return str(hashes[0].hexdigest())


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


_CHECKS: dict[str, Callable[[], Any]] = {
    "ChecksumCRC32": _Crc32, "ChecksumSHA1": hashlib.sha1, "ChecksumSHA256": hashlib.sha256,
}  # fmt: skip
