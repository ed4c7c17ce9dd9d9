"""Which files a source is, and what they count as."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from corpus.cut import Slice, shared_out
from corpus.cuts import Cuts
from corpus.extracts import Extracts
from corpus.readers import is_data
from corpus.sharded import Shard
from corpus.signs import seldom
from corpus.task import EVALUATION
from corpus.walk import Input
from refit.errors import BadInput, StoreUnavailable
from refit.fingerprint import file_digest
from refit.spec import Pipeline, Source
from refit.store import FileStore, Heard, Store, join, matching, store_for, unheard

T = TypeVar("T")


@dataclass(frozen=True)
class Deliveries:
    """The sources of a line as a run sees them: how they are cut is noted, what a query says is asked once."""

    spec: Pipeline
    cuts: Cuts
    extracts: Extracts

    def shards(self, heard: Heard = unheard) -> Iterator[Shard]:
        """The files of all sources, cut and put together to shards, in a stable order. `heard` is called now and then,
        also while a big file is fetched or a query's rows come.

        Where only so many records of a source are wanted, all of it is one shard: who comes first must not depend on
        cuts.

        Raises:
            BadInput: a source has no file that can be read, or a database refuses its query.
            ServerUnavailable: a database does not answer.
        """
        heard = seldom(heard)
        for index, source in enumerate(self.spec.data.sources):
            found = self._slices(index, source, heard)
            for shard in [found] if self.spec.data.max_records else shared_out(found):
                yield Shard(
                    source=source.name, size=sum(slice.size for slice in shard),
                    inputs={slice.role: Input(slice.digest, slice.fetch) for slice in shard},
                    spans={slice.role: slice.span for slice in shard if slice.span},
                )  # fmt: skip

    def cut(self, share: int, shares: int, heard: Heard = unheard) -> int:
        """Ask and cut one machine's share of what lies elsewhere, so that no machine has to read all of it.

        Returns:
            How many objects and queries that were.

        Raises:
            BadInput: as `shards`.
            ServerUnavailable: as `shards`.
        """
        heard = seldom(heard)
        work: list[Callable[[], object]] = []
        for index, source in enumerate(self.spec.data.sources):
            if source.query is not None:
                work.append(partial(self._slices, index, source, heard))
            elif not isinstance(store_for(source.uri), FileStore):
                where = _where(index, source)
                work += [partial(self._cut, one, where, heard) for one in _named(source.uri, where)]
        for one in work[share::shares]:
            one()
        return len(work[share::shares])

    def _slices(self, index: int, source: Source, heard: Heard) -> list[Slice]:
        where, query = _where(index, source), source.query
        files = _named(source.uri, where) if query is None else [self.extracts.of(source, query, where, heard)]
        return [slice for one in files for slice in self._cut(one, where, heard)]

    def _cut(self, file: tuple[str, str], where: str, heard: Heard) -> list[Slice]:
        return _there(partial(self.cuts.of, *file, heard), where, file[1])


def evaluations(spec: Pipeline) -> dict[str, Input]:
    """The files of the evaluation sets to be kept out of training by role, `evaluation/<number>/<file>`.

    Raises:
        BadInput: a set has no file that can be read.
    """
    found: dict[str, Input] = {}
    for index, uri in enumerate(spec.data.decontaminate.against):
        where = f"data.decontaminate.against[{index}]"
        for name, place in _named(uri, where):
            path = _there(partial(store_for(uri).local, place), where, place)
            found[f"{EVALUATION}/{index}/{name}"] = Input(file_digest(path), partial(Path, path))
    return found


def score_model(spec: Pipeline) -> dict[str, Input]:
    """The folder of the model that `data.score` names, as the input `score`; none where it names none.

    Raises:
        BadInput: there is no such model.
    """
    uri = spec.data.score.model
    if uri is None:
        return {}
    store = store_for(uri)
    try:
        found = store.require(uri, "score")
    except BadInput as error:
        raise BadInput(f"data.score.model is {uri!r}: {error} `corpus fit` makes one.") from error
    return {"score": Input(digest=found.content_digest(), fetch=partial(store.local, uri))}


def _where(index: int, source: Source) -> str:
    return f"data.sources[{index}] ({source.name})"


def _named(uri: str, where: str) -> list[tuple[str, str]]:
    # A name on a disk may be no text; what is written of it must be.
    found = [(name.encode("utf-8", "backslashreplace").decode(), at) for name, at in files_of(store_for(uri), uri)]
    if not found:
        raise BadInput(
            f"{where}: {uri} holds no data file. "
            "Expected .jsonl, .json, .csv, .tsv, .txt (also .gz, .bz2, .zst), .parquet or .arrow."
        )
    return found


def _there(read: Callable[[], T], where: str, uri: str) -> T:
    """What is read of a file that was listed."""
    try:
        return read()
    except FileNotFoundError as error:
        raise StoreUnavailable(f"{where}: {uri} was there a moment ago and is gone. Run again.") from error


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
