"""A phase in shards: each made by itself, on any core or machine, named by what decides its bytes.

A shard is a folder, `<store>/datasets/<line>/shards/<phase>/<fingerprint>/`; the phase's own folder lists its shards
and holds the sum of what they told. A shard that is there is not made again: a run that was killed goes on where it
was, and of a source that grew only the new shards are made. Which machine makes which shard decides nothing.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corpus import quarantine
from corpus.settings import Settings
from corpus.signs import beating
from corpus.span import Span
from corpus.task import QUARANTINE, SHARDS, Facts, Report, Task, silent
from corpus.walk import AT_ONCE, Done, Input, Phase, Walk
from refit import fingerprint, log
from refit.errors import Infrastructure
from refit.manifest import Manifest
from refit.store import Heard, join, store_for

KIND = "shard"
# Less than this is done before another process has started.
WORTH_A_PROCESS = 4 << 20
# What a worker may need for a shard, its libraries counted.
WORKER_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A piece of a phase's work: what it reads, and about how many bytes that are."""

    source: str
    inputs: Mapping[str, Input]
    size: int
    spans: Mapping[str, Span] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Made:
    """A shard that has its output."""

    source: str
    name: str
    digest: str
    records: int
    size: int


@dataclass(frozen=True, kw_only=True)
class _Order:
    """One shard to make, as another process needs it told."""

    phase: str
    settings: Settings
    uri: str
    code: str
    digests: Mapping[str, str]
    paths: Mapping[str, Path]
    spans: Mapping[str, Span]


def run(
    walk: Walk, phase: Phase, shards: Sequence[Shard], report: Report, history: list[dict[str, Any]]
) -> tuple[Done, list[Made]]:
    """The phase's output, with its shards; what is not there is made now."""
    started = time.monotonic()
    found = None if walk.force else find(walk, phase, shards)
    if found is None:
        there = make(walk, phase, shards, report)
        addresses = [address(walk, phase, shard) for shard in shards]
        manifests = _required(walk, addresses)
        finished = _as_made(shards, manifests)

        def write(folder: Path) -> Facts:
            (folder / SHARDS).write_text(json.dumps([vars(one) for one in finished], indent=1), encoding="utf-8")
            quarantine.merge(_fetched(walk, addresses, QUARANTINE), folder / QUARANTINE)
            if phase.merges:
                _merge(phase, shards, _fetched(walk, addresses, phase.merges), folder)
            return {**_told(manifests), "shards": len(shards), "shards_made": len(shards) - there}

        uri, manifest = walk.commit(phase, _names(addresses), write, history, started)
        seconds = time.monotonic() - started
        found = Done(phase=phase.name, uri=uri, manifest=manifest, cached=False, seconds=seconds), finished
    log.event("phase", **found[0].summary())
    return found


def find(walk: Walk, phase: Phase, shards: Sequence[Shard]) -> tuple[Done, list[Made]] | None:
    """The phase's output where it and every shard of it are there."""
    addresses = [address(walk, phase, shard) for shard in shards]
    done = walk.find(phase, _names(addresses))
    if done is None:
        return None
    if None in walk.manifests(addresses):
        walk.store.remove(done.uri)
        return None
    return done, [Made(**one) for one in json.loads(walk.store.read(join(done.uri, SHARDS)))]


def make(walk: Walk, phase: Phase, shards: Sequence[Shard], report: Report) -> int:
    """Make those shards that are not there (with `force`, all), as many at once as there are cores.

    Returns:
        How many were there.

    Raises:
        Infrastructure: a process that made one died.
        RefitError: what a shard's work came to.
    """
    addresses = [address(walk, phase, shard) for shard in shards]
    found = [None] * len(shards) if walk.force else walk.manifests(addresses)
    there = {uri for uri, manifest in zip(addresses, found, strict=True) if manifest}
    # Two shards of one content are one folder.
    wanted = {uri: shard for shard, uri in zip(shards, addresses, strict=True) if uri not in there}
    cores = 1 if phase.wide else min(workers(), len(wanted))
    done = 0

    def heard() -> None:
        report(done, len(wanted))

    orders = (_order(walk, phase, shard, uri, heard) for uri, shard in wanted.items())
    if cores < 2 or sum(shard.size for shard in wanted.values()) < WORTH_A_PROCESS:
        for done, order in enumerate(orders):  # noqa: B007 (heard tells it)
            _make(order, walk.force, report)
        return len(shards) - len(wanted)
    pool = ProcessPoolExecutor(cores, multiprocessing.get_context("spawn"), _die_with, (os.getpid(),))
    try:
        for done in _finished(pool, orders, walk.force, ahead=cores + 1):
            report(done, len(wanted))
    except BrokenProcessPool as error:
        raise Infrastructure(f"{phase.name}: a process that made a shard died (killed, or out of memory).") from error
    finally:
        pool.shutdown(cancel_futures=True)
    return len(shards) - len(wanted)


def made(walk: Walk, phase: Phase, shards: Sequence[Shard]) -> list[Made]:
    """Shards that must be there by now."""
    return _as_made(shards, _required(walk, [address(walk, phase, shard) for shard in shards]))


def workers() -> int:
    """How many shards to make at once: one a core, and no more than there is memory for."""
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = memory if text == "max" else min(memory, int(text))
    return max(1, min(len(os.sched_getaffinity(0)), memory // WORKER_BYTES))


def address(walk: Walk, phase: Phase, shard: Shard) -> str:
    """The folder that a shard has."""
    settings = phase.settings_of(walk.spec, shard.source)
    digests = {role: one.digest for role, one in shard.inputs.items()}
    return place(walk, phase, fingerprint.fingerprint(f"{phase.name} shard", phase.code(settings), settings, digests))


def place(walk: Walk, phase: Phase, name: str) -> str:
    """The address of a shard's folder."""
    return join(walk.root, "shards", phase.name, name)


def folders(walk: Walk, phase: Phase, made: Sequence[Made]) -> list[Path]:
    """The shards' folders on this machine, fetched where they are elsewhere."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(walk.store.local, [place(walk, phase, one.name) for one in made]))


def _finished(pool: ProcessPoolExecutor, orders: Iterator[_Order], force: bool, ahead: int) -> Iterator[int]:
    """How many are done, whenever that is worth saying; only so many are fetched ahead of the work."""
    running: set[Future[None]] = set()
    done = 0
    for order in orders:
        running.add(pool.submit(_make, order, force))
        while len(running) >= ahead:
            done += len(_ended(running))
            yield done
    while running:
        done += len(_ended(running))
        yield done


def _ended(running: set[Future[None]]) -> set[Future[None]]:
    """Those that ended within a second, which is also how often somebody hears of us; raises what one of them did."""
    ended, _ = wait(running, timeout=1, return_when=FIRST_COMPLETED)
    running -= ended
    for future in ended:
        future.result()
    return ended


def _die_with(parent: int) -> None:
    """Of a worker: end when the one that started us does, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _make(order: _Order, force: bool, report: Report = silent) -> None:
    # Records are many small objects that live as long as their group: the collector would go through them again and
    # again, a sixth of the time, and find nothing.
    gc.set_threshold(50_000, 20, 20)
    started = time.monotonic()
    module = importlib.import_module(f"corpus.{order.phase}")
    store = store_for(order.uri)
    with store.publish(order.uri) as draft:
        task = Task(
            settings=order.settings, inputs=order.paths, spans=order.spans, folder=draft.path, report=report
        )  # fmt: skip
        facts: Facts = module.run(task)
        if force:
            store.remove(order.uri)
        draft.commit(
            Manifest(
                kind=KIND, fingerprint=order.uri.rsplit("/", 1)[-1], code=order.code, inputs=dict(order.digests),
                facts={**facts, "seconds": time.monotonic() - started},
            )
        )  # fmt: skip


def _order(walk: Walk, phase: Phase, shard: Shard, uri: str, heard: Heard) -> _Order:
    """What there is to make, with everything that it reads on this machine."""
    settings = phase.settings_of(walk.spec, shard.source)
    with beating(heard), ThreadPoolExecutor(AT_ONCE) as pool:
        paths = list(pool.map(lambda one: one.fetch(), shard.inputs.values()))
    return _Order(
        phase=phase.name, settings=settings, uri=uri, code=phase.code(settings), spans=dict(shard.spans),
        digests={role: one.digest for role, one in shard.inputs.items()},
        paths=dict(zip(shard.inputs, paths, strict=True)),
    )  # fmt: skip


def _fetched(walk: Walk, addresses: Sequence[str], name: str) -> list[Path]:
    """A file of every shard, on this machine."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(walk.store.local, [join(uri, name) for uri in addresses]))


def _merge(phase: Phase, shards: Sequence[Shard], paths: Sequence[Path], folder: Path) -> None:
    """Let the phase's module write what only all shards of a source tell."""
    of: dict[str, list[Path]] = {}
    for shard, path in zip(shards, paths, strict=True):
        of.setdefault(shard.source, []).append(path)
    importlib.import_module(f"corpus.{phase.name}").merge(of, folder)


def _names(addresses: Sequence[str]) -> dict[str, Input]:
    """Shards as the inputs of their phase: they count by their names, which follow from what they are made of."""
    return {f"{number:06d}": Input(uri.rsplit("/", 1)[-1], Path) for number, uri in enumerate(addresses)}


def _required(walk: Walk, addresses: Sequence[str]) -> list[Manifest]:
    """The manifests of shards that must be there."""
    found = walk.manifests(addresses)
    return [manifest or walk.store.require(uri, KIND) for uri, manifest in zip(addresses, found, strict=True)]


def _as_made(shards: Sequence[Shard], manifests: Sequence[Manifest]) -> list[Made]:
    return [
        Made(
            source=shard.source, name=manifest.fingerprint, digest=manifest.content_digest(),
            records=manifest.facts["records_out"], size=shard.size,
        )
        for shard, manifest in zip(shards, manifests, strict=True)
    ]  # fmt: skip


def _told(manifests: Sequence[Manifest]) -> Facts:
    """The sum of what the shards told."""
    facts: Facts = {}
    for manifest in manifests:
        facts = added(facts, {k: v for k, v in manifest.facts.items() if k != "seconds"})
    return facts


def added(left: Facts, right: Facts) -> Facts:
    """Two reports in one: numbers are added up, what is below a name likewise, and of anything else the first stays."""
    both = dict(left)
    for name, value in right.items():
        if name not in both:
            both[name] = value
        elif isinstance(value, dict):
            both[name] = added(both[name], value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            both[name] = both[name] + value
    return both
