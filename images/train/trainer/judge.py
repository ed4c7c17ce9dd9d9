"""Whether machines are fit for a training: a pure function of all ranks' reports, of one node or many.

Every check looks at all reports and names everything that is wrong, so that one round of mending is enough. Adding a
check is a function and its place in `CHECKS`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainer.reports import Report

CLOCK_SECONDS = 5.0
"""Clocks may differ by this much. Heartbeats, and events of several machines in one list, are read to the second."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a training needs of each node: ranks, GPUs, bytes of disk (and what for), bytes of memory a rank, and of
    each GPU at the very least."""

    ranks: int
    gpus: int
    disk: int
    disk_for: str
    memory_per_rank: int
    memory_per_card: int = 0


@dataclass(frozen=True)
class Fault:
    """What is wrong where. `passing` marks what may be over by itself, as a store that does not answer."""

    where: str
    what: str
    found: str
    wanted: str
    do: str
    passing: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.what} is {self.found}; wanted: {self.wanted}. {self.do}"


@dataclass(frozen=True)
class Check:
    """A check's outcome; it is good where there are no faults."""

    name: str
    faults: tuple[Fault, ...]

    def facts(self) -> dict[str, Any]:
        """For the answer."""
        return {"check": self.name, "ok": not self.faults, "faults": [str(fault) for fault in self.faults]}


def judge(reports: Sequence[Report], need: Need) -> list[Check]:
    """Every check over all reports."""
    heard = [report for report in reports if report.silent is None]
    return [
        Check("ranks", tuple(_ranks(reports, need))),
        *(Check(name, tuple(check(heard, need))) for name, check in CHECKS.items()),
    ]


def _ranks(reports: Sequence[Report], need: Need) -> Iterator[Fault]:
    for report in reports:
        if report.silent is not None:
            yield Fault(_where([report]), "its report", f"missing ({report.silent})", "one",
                        "Look at this machine; a rank would not start there either.")  # fmt: skip
    for host, members in _by_host(reports).items():
        counted = Counter(report.rank for report in members)
        if len(counted) < need.ranks:
            yield Fault(host, "the number of ranks", str(len(counted)), str(need.ranks),
                        "Run preflight there with the same spec and --ranks.")  # fmt: skip


def _versions(reports: Sequence[Report], _need: Need) -> Iterator[Fault]:
    names = list(dict.fromkeys(name for report in reports for name in report.versions))
    for name in names:
        what = "the trainer's source" if name == "trainer" else f"the version of {name}"
        yield from _differing(reports, what, partial(_version, name))
    yield from _differing(reports, "the image", lambda report: report.image)


def _drivers(reports: Sequence[Report], _need: Need) -> Iterator[Fault]:
    install = "Bring all nodes to one driver and image."
    for what, value_of in {
        "the GPU driver": lambda report: report.cards.driver,
        "CUDA (of torch)": lambda report: report.cuda,
        "NCCL": lambda report: report.nccl,
        "the set of GPUs": _cards,
    }.items():  # fmt: skip
        yield from _differing(reports, what, value_of, install)


def _gpus(reports: Sequence[Report], need: Need) -> Iterator[Fault]:
    for host, members in _by_host(reports).items():
        first = members[0]
        if need.gpus and first.cards.fault:
            yield Fault(host, "the GPU driver's answer", first.cards.fault, "none",
                        "Restart the machine, or mend its driver.")  # fmt: skip
        if len(first.cards.gpus) < need.gpus:
            yield Fault(host, "the number of GPUs", str(len(first.cards.gpus)), f"at least {need.gpus}",
                        "Use a node with enough, or lower train.gpus_per_node.")  # fmt: skip
        elif need.gpus and (first.usable_gpus or 0) < need.gpus:
            yield Fault(host, "the number of GPUs that torch can use", str(first.usable_gpus or 0),
                        f"at least {need.gpus}", "Use an image whose torch was built for this driver.")  # fmt: skip
        for index, gpu in enumerate(first.cards.gpus):
            where = f"{host} GPU {index}"
            if index < need.gpus and gpu.memory < need.memory_per_card:
                yield Fault(where, "its memory", _size(gpu.memory),
                            f"{_size(need.memory_per_card)} for weights and optimizer alone",
                            "Use larger cards, raise train.zero_stage, or set train.offload or train.method "
                            "lora.")  # fmt: skip
            if gpu.ecc_errors:
                yield Fault(where, "its count of uncorrected memory errors", str(gpu.ecc_errors), "0",
                            "Drain the node and reset the card; replace it if they come back.")  # fmt: skip
            if gpu.remap_failed:
                yield Fault(where, "its row remapping", "failed", "no failure", "Replace the card.")
            elif gpu.remap_pending:
                yield Fault(where, "its row remapping", "pending", "done", "Drain the node and reset the card.")


def _disk(reports: Sequence[Report], need: Need) -> Iterator[Fault]:
    for host, members in _by_host(reports).items():
        least = min(members, key=lambda report: report.disk_free)
        if least.disk_free < need.disk:
            yield Fault(host, f"free disk in {least.disk_folder}", _size(least.disk_free),
                        f"{_size(need.disk)} ({need.disk_for})",
                        "Make room, write to a larger disk, or lower train.checkpoint.keep_last.")  # fmt: skip


def _memory(reports: Sequence[Report], need: Need) -> Iterator[Fault]:
    for host, members in _by_host(reports).items():
        free = min(report.memory_free for report in members)
        wanted = need.memory_per_rank * len({report.rank for report in members})
        if free < wanted:
            yield Fault(host, "free memory", _size(free), f"{_size(wanted)} ({len(members)} rank(s), as planned)",
                        "End what else runs there, or lower train.micro_batch; trainer plan says what takes "
                        "it.")  # fmt: skip


def _store(reports: Sequence[Report], _need: Need) -> Iterator[Fault]:
    for report in reports:
        if report.store.fault:
            do = "Wait until the store answers." if report.store.away else "Give this node the right to write there."
            yield Fault(_where([report]), "the write test on the store", report.store.fault,
                        "written, read back and removed", do, passing=report.store.away)  # fmt: skip


def _clock(reports: Sequence[Report], _need: Need) -> Iterator[Fault]:
    do = "Set its clock (chrony, or the host's)."
    told = [(report.store.ahead, report) for report in reports if report.store.ahead is not None]
    wrong = [(ahead, report) for ahead, report in told if abs(ahead) > CLOCK_SECONDS]
    for ahead, report in wrong:
        yield Fault(_where([report]), "its clock", f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the "
                    "store's", f"at most {CLOCK_SECONDS:g} s apart", do)  # fmt: skip
    if not wrong and told:
        (low, slow), (high, fast) = (pick(told, key=lambda pair: pair[0]) for pick in (min, max))
        if high - low > CLOCK_SECONDS:
            yield Fault(_where([fast]), "its clock", f"{high - low:.1f} s ahead of the one of {_where([slow])}",
                        f"at most {CLOCK_SECONDS:g} s apart", do)  # fmt: skip


CHECKS: dict[str, Callable[[Sequence[Report], Need], Iterable[Fault]]] = {
    "versions": _versions, "drivers": _drivers, "gpus": _gpus, "disk": _disk, "memory": _memory, "store": _store,
    "clock": _clock,
}  # fmt: skip


def _differing(
    reports: Sequence[Report], what: str, value_of: Callable[[Report], str | None],
    do: str = "Start every rank from the same image.",
) -> Iterator[Fault]:  # fmt: skip
    """A fault for every node and value that is not the most common one (of equally common ones: the first)."""
    holders: dict[str, list[Report]] = defaultdict(list)
    for report in reports:
        holders[value_of(report) or "none"].append(report)
    if len(holders) < 2:
        return
    usual = max(holders, key=lambda value: len(holders[value]))
    for value, members in holders.items():
        for same in _by_host(members).values() if value != usual else ():
            yield Fault(_where(same), what, value, f"{usual}, as on {_where(holders[usual][:1])}", do)


def _version(name: str, report: Report) -> str | None:
    return report.versions.get(name)


def _by_host(reports: Iterable[Report]) -> dict[str, list[Report]]:
    hosts: dict[str, list[Report]] = defaultdict(list)
    for report in reports:
        hosts[report.host].append(report)
    return hosts


def _where(members: Sequence[Report]) -> str:
    """`node-b rank 1`, or `node-b ranks 0, 1`; the reports are of one host."""
    ranks = sorted({report.rank for report in members})
    return f"{members[0].host} rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _cards(report: Report) -> str | None:
    kinds = Counter(f"{gpu.name} of {_size(gpu.memory)}" for gpu in report.cards.gpus)
    return ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())) or None


def _size(size: float) -> str:
    return f"{size / (1 << 30):.2f} GiB"
