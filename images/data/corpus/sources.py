"""Which files a source is, and what they count as."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from corpus.readers import is_data
from corpus.walk import Input
from refit.errors import BadInput
from refit.fingerprint import file_digest
from refit.spec import Pipeline
from refit.store import Store, join, matching, store_for

EVALUATION = "evaluation"


def inputs(spec: Pipeline) -> dict[str, Input]:
    """The files of all sources by role, `<source>/<file>`, in a stable order.

    Raises:
        BadInput: a source has no file that can be read.
    """
    found: dict[str, Input] = {}
    for index, source in enumerate(spec.data.sources):
        found |= _inputs(source.uri, source.name, f"data.sources[{index}] ({source.name})")
    return found


def evaluations(spec: Pipeline) -> dict[str, Input]:
    """The files of the evaluation sets to be kept out of training by role, `evaluation/<number>/<file>`.

    Raises:
        BadInput: a set has no file that can be read.
    """
    found: dict[str, Input] = {}
    for index, uri in enumerate(spec.data.decontaminate.against):
        found |= _inputs(uri, f"{EVALUATION}/{index}", f"data.decontaminate.against[{index}]")
    return found


def _inputs(uri: str, role: str, where: str) -> dict[str, Input]:
    store = store_for(uri)
    found = {f"{role}/{name}": place for name, place in files_of(store, uri)}
    if not found:
        raise BadInput(
            f"{where}: {uri} holds no data file. "
            "Expected .jsonl, .json, .csv, .tsv, .txt (also .gz, .bz2, .zst), .parquet or .arrow."
        )
    return {
        name: Input(digest=file_digest(store.local(place)), fetch=partial(store.local, place))
        for name, place in found.items()
    }


def files_of(store: Store, given: str) -> Iterator[tuple[str, str]]:
    """(name, uri) of every file that an address names: itself, those of its pattern, or the data files of a folder."""
    for uri in matching(given):
        if store.children(uri):
            below = "" if uri == given else f"{uri.rsplit('/', 1)[-1]}/"
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
