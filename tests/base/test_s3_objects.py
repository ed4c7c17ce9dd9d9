"""Objects of S3 on this machine's disk: whole, of one version, and fetched once."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from refit import s3_objects
from refit.errors import StoreUnavailable
from refit.store import Copy, join, store_for
from tests.proxy import breaking

BODY = random.Random(1).randbytes(2_500_000)


@pytest.fixture
def place(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("REFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(s3_objects, "PAUSE", 0)
    uri = join(s3, tmp_path.name, "../odd name/part-1.bin")
    store_for(uri).write(uri, BODY)
    return uri


class Asked:
    """The requests that a store has sent since the last look."""

    def __init__(self, store: Any) -> None:
        self.names: list[str] = []
        store._client.meta.events.register("before-call.s3", lambda model, **_: self.names.append(model.name))

    def look(self) -> list[str]:
        names, self.names = sorted(self.names), []
        return names


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_an_object_is_fetched_with_one_request_and_an_unchanged_one_costs_a_head(place: str, tmp_path: Path) -> None:
    store = store_for(place)
    asked = Asked(store)
    copy = store.copy(place)
    assert asked.look() == ["GetObject", "HeadObject"]
    assert copy.digest == sha256(BODY)
    assert copy.path.read_bytes() == BODY
    assert copy.path.is_relative_to(tmp_path / "cache" / "fetched")
    assert store.copy(place) == copy
    assert asked.look() == ["HeadObject"]


def test_who_waits_for_a_big_object_hears_of_every_piece(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_objects, "CHUNK", len(BODY) // 8)
    heard: list[int] = []
    store_for(place).copy(place, lambda: heard.append(1))
    assert len(heard) >= 8
    store_for(place).copy(place, lambda: heard.append(1))
    assert len(heard) < 16


def test_a_new_version_is_fetched_and_the_old_copy_stays_for_who_reads_it(place: str) -> None:
    store = store_for(place)
    old = store.copy(place)
    store.write(place, b"new")
    new = store.copy(place)
    assert (new.digest, new.path.read_bytes(), old.path.read_bytes()) == (sha256(b"new"), b"new", BODY)
    for number in range(2 * s3_objects.KEPT):
        store.write(place, b"%d" % number)
        new = store.copy(place)
    assert len(list(new.path.parent.iterdir())) == 2 * s3_objects.KEPT


def test_a_copy_that_was_touched_is_fetched_again(place: str) -> None:
    store = store_for(place)
    copy = store.copy(place)
    copy.path.write_bytes(b"x" * len(BODY))
    assert store.copy(place).path.read_bytes() == BODY
    copy.path.unlink()
    assert store.copy(place).path.read_bytes() == BODY


def test_a_body_that_breaks_off_is_asked_for_again_from_where_it_broke(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = urlsplit(os.environ["AWS_ENDPOINT_URL"])
    assert server.hostname
    assert server.port
    with breaking(server.hostname, server.port, [700_000, 300_000, 100]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        copy = store_for(place).copy(place)
        assert proxy.cuts == []
        assert proxy.sent < len(BODY) + 100_000
    assert copy.digest == sha256(BODY)
    assert copy.path.read_bytes() == BODY


def test_a_body_that_always_breaks_off_is_given_up_and_leaves_nothing(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_objects, "ATTEMPTS", 3)
    server = urlsplit(os.environ["AWS_ENDPOINT_URL"])
    with breaking(str(server.hostname), int(server.port or 0), [900_000] + [100] * 50) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        with pytest.raises(StoreUnavailable, match=r"s3://refit/.*part-1.bin"):
            store_for(place).copy(place)
    assert [path for path in (tmp_path / "cache" / "fetched" / "objects").rglob("*") if path.is_file()] == []


def test_an_object_that_changes_between_head_and_get_is_noticed_and_fetched_as_it_is_now(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, head, changes = store_for(place), s3_objects._head, [b"n" * len(BODY)]

    def and_then_it_changes(*given: Any) -> s3_objects.Version:
        version = head(*given)
        if changes:
            store.write(place, changes.pop())
        return version

    monkeypatch.setattr(s3_objects, "_head", and_then_it_changes)
    copy = store.copy(place)
    assert copy == Copy(copy.path, sha256(b"n" * len(BODY)))
    changes += [b"%d" % number * len(BODY) for number in range(s3_objects.ATTEMPTS)]
    store.write(place, b"another")
    with pytest.raises(StoreUnavailable, match="was replaced 5 times"):
        store.copy(place)


def test_what_differs_from_the_checksum_is_not_kept(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = s3_objects._head
    wrong = (("ChecksumSHA256", "bm90IGl0"),)
    monkeypatch.setattr(
        s3_objects, "_head", lambda *given: s3_objects.Version(head(*given).etag, head(*given).size, wrong)
    )
    with pytest.raises(StoreUnavailable, match="differs from the checksum"):
        store_for(place).copy(place)
    assert [path for path in (tmp_path / "cache" / "fetched" / "objects").rglob("*") if path.is_file()] == []


def test_an_empty_object_and_none_at_all(place: str) -> None:
    store = store_for(place)
    store.write(place, b"")
    assert store.copy(place).digest == sha256(b"")
    with pytest.raises(FileNotFoundError):
        store.copy(place + "x")
