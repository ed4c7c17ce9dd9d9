"""Where an object elsewhere is cut, noted in the line's store: who only has to know it does not fetch the object.

To cut an object, and to know what its stretches count as, takes all of its bytes. So a machine that has read them
leaves a note, named by the object's address and version: the others, and every later run, read that. A file of this
machine's own disk has no version that could be trusted, and is read each time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version as library
from pathlib import Path

from corpus import cut
from corpus.cut import Slice
from corpus.span import Span
from refit import fingerprint
from refit.errors import StoreUnavailable
from refit.store import Heard, join, store_for, unheard


@dataclass(frozen=True)
class Cuts:
    """The notes of a line; `folder` is the address of where they are."""

    folder: str

    def of(self, file: str, uri: str, heard: Heard = unheard) -> list[Slice]:
        """The slices of a file.

        Raises:
            FileNotFoundError: there is none at `uri`.
            StoreUnavailable: it does not come, or changes all the while.
        """
        version = store_for(uri).version(uri)
        if version is None:
            return _with_signs(file, store_for(uri).local(uri, heard), heard)
        fetch = partial(fetched, uri, version)
        # The encoding that a stretch is read in is told with it.
        how = fingerprint.code_digest("corpus.cut"), library("charset-normalizer")
        note = join(self.folder, fingerprint.digest([file, uri, version, *how])[:32])
        store = store_for(note)
        try:
            return _from_note(file, store.read(note), fetch)
        except FileNotFoundError:
            found = _with_signs(file, fetched(uri, version, heard), heard)
        store.write(note, _noted(found))
        return _from_note(file, _noted(found), fetch)


def fetched(uri: str, version: str, heard: Heard = unheard) -> Path:
    """A copy of just that version.

    Raises:
        StoreUnavailable: it is another one by now.
    """
    store = store_for(uri)
    try:
        path = store.local(uri, heard)
        now = store.version(uri)
    except FileNotFoundError as error:
        raise StoreUnavailable(f"{uri}: was there a moment ago and is gone. Run again.") from error
    if now != version:
        raise StoreUnavailable(f"{uri}: the object was replaced while it was read. Run again.")
    return path


def _with_signs(file: str, path: Path, heard: Heard) -> list[Slice]:
    found = []
    for one in cut.slices(file, path):
        found.append(one)
        heard()
    return found


def _noted(found: list[Slice]) -> bytes:
    return json.dumps([[one.digest, one.size, vars(one.span) if one.span else None] for one in found]).encode()


def _from_note(file: str, note: bytes, fetch: Callable[[], Path]) -> list[Slice]:
    return [Slice(file, digest, size, fetch, Span(**span) if span else None) for digest, size, span in json.loads(note)]
