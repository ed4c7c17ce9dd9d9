"""Which files a source is, and what they count as."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from corpus.readers import is_data
from corpus.walk import Input
from refit.errors import BadInput
from refit.fingerprint import file_digest
from refit.spec import Pipeline, Source
from refit.store import Store, join, matching, store_for


def inputs(spec: Pipeline) -> dict[str, Input]:
    """The files of all sources by role, `<source>/<file>`, in a stable order.

    Raises:
        BadInput: a source has no file that can be read.
    """
    found: dict[str, Input] = {}
    for index, source in enumerate(spec.data.sources):
        store = store_for(source.uri)
        files = list(files_of(store, source))
        if not files:
            raise BadInput(
                f"data.sources[{index}] ({source.name}): {source.uri} holds no data file. "
                "Expected .jsonl, .json, .csv, .tsv, .txt (also .gz, .bz2, .zst), .parquet or .arrow."
            )
        for name, uri in files:
            path = store.local(uri)
            found[f"{source.name}/{name}"] = Input(digest=file_digest(path), fetch=partial(store.local, uri))
    return found


def files_of(store: Store, source: Source) -> Iterator[tuple[str, str]]:
    """(name, uri) of every file of a source: itself, those that its pattern names, or the data files of a folder."""
    for uri in matching(source.uri):
        if store.children(uri):
            below = "" if uri == source.uri else f"{uri.rsplit('/', 1)[-1]}/"
            yield from _below(store, uri, below)
        else:
            yield uri.rstrip("/").rsplit("/", 1)[-1], uri


def _below(store: Store, folder: str, prefix: str) -> Iterator[tuple[str, str]]:
    for name in store.children(folder):
        uri = join(folder, name)
        if store.children(uri):
            yield from _below(store, uri, f"{prefix}{name}/")
        elif is_data(name):
            yield f"{prefix}{name}", uri
