"""The way through the phases: each in its turn run or answered, the doors between them, and what has come of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from corpus import door, inputs, sharded, sources
from corpus.cuts import Cuts
from corpus.extracts import Extracts
from corpus.phases import (
    BEFORE,
    CLEAN,
    DEDUP,
    DOORS,
    IN_SHARDS,
    INGEST,
    MATCH,
    MIX,
    PACK,
    PHASES,
    SIGN,
    SPLIT,
    TOKENIZE,
)
from corpus.sharded import Made, Shard
from corpus.sources import Deliveries
from corpus.task import Report, silent
from corpus.walk import Done, Input, Phase, Walk
from refit import fingerprint
from refit.errors import BadInput
from refit.job import JobRun
from refit.store import join


@dataclass
class Course:
    """The phases in their order, and what has come of them so far."""

    walk: Walk
    run: JobRun
    only: str | None = None

    def __post_init__(self) -> None:
        self.done: dict[str, Done] = {}
        self.made: dict[str, list[Made]] = {}
        self.doors: dict[str, Done] = {}

    @property
    def deliveries(self) -> Deliveries:
        """The line's sources, as this run sees them."""
        run = self.run.job.output.rstrip("/").rpartition("/")[0]
        extracts = Extracts(join(run, "extracts") if self.walk.spec.data.machines > 1 else None)
        return Deliveries(self.walk.spec, Cuts(join(self.walk.root, "cuts")), extracts)

    def phases(self) -> Iterator[Done]:
        """Run each, or answer it; with `only`, answer what is before that one and run it alone."""
        for number, phase in enumerate(PHASES):
            self.run.progress(phase.name, number, len(PHASES))
            report = reporter(self.run, number, phase, len(PHASES))
            if phase in IN_SHARDS:
                self._in_shards(phase, report)
            else:
                self._whole(phase, report)
            yield self.done[phase.name]
            if phase.name == self.only:
                return
        self.run.progress("done", len(PHASES), len(PHASES))

    def before(self, phase: Phase) -> list[Shard]:
        """Come as far as a phase in shards; returns its shards."""
        for number, ahead in enumerate(PHASES[: PHASES.index(phase)]):
            self._in_shards(ahead, reporter(self.run, number, ahead, len(PHASES)))
        return self.shards(phase)

    def pass_door(self) -> None:
        """Ask what there is to ask of the last phase, before the next one begins.

        Raises:
            BadRecords: an expectation is not met.
        """
        name = list(self.done)[-1]
        asking = DOORS.get(name)
        if asking is None or self.only not in (None, name):
            return
        phase = next(one for one in PHASES if one.name == name)
        role = "records" if phase is CLEAN else "rows"
        shards = self._folders({"records": CLEAN} if phase is CLEAN else {})
        asked = {role: self._input(phase)}
        passed = self.walk.find(asking, asked)
        # One that was not passed is asked again: what failed may have been the asking.
        again = passed is not None and bool(passed.facts["expectations"]["failed"])
        self.doors[name] = replace(self.walk, force=again or self.walk.force).run(asking, asked, silent, [], shards)
        door.require(self.doors[name].facts["expectations"], f"after {name}")

    def _in_shards(self, phase: Phase, report: Report) -> None:
        shards = self.shards(phase)
        if self.only in (None, phase.name):
            found = sharded.run(self.walk, phase, shards, report, self._history())
        else:
            found = sharded.find(self.walk, phase, shards) or self._missing(phase)
        self.done[phase.name], self.made[phase.name] = found

    def _whole(self, phase: Phase, report: Report) -> None:
        read = self._inputs(phase)
        if self.only in (None, phase.name):
            self.done[phase.name] = self.walk.run(phase, read, report, self._history(), self._parts(phase))
        else:
            self.done[phase.name] = self.walk.find(phase, read) or self._missing(phase)

    def _missing(self, phase: Phase) -> Any:
        raise BadInput(
            f"--only {self.only}: its phase before, {phase.name}, has not run with these settings and this data. "
            "Run all phases first (without --only)."
        )

    def _history(self) -> list[dict[str, Any]]:
        return [{"fingerprint": one.manifest.fingerprint, **_told(one)} for one in self.done.values()]

    def shards(self, phase: Phase) -> list[Shard]:
        """Those of a phase in shards, when the phases before it have theirs."""
        if phase is MATCH:
            return inputs.parts(self.walk, self.made, self.done[CLEAN.name])
        before = BEFORE.get(phase.name)
        if before is None:
            return list(self.deliveries.shards(lambda: self.run.progress(phase.name, 0, len(PHASES))))
        return inputs.after(self.walk, before, self.made[before.name], inputs.beside(self.walk, phase, self.done))

    def _inputs(self, phase: Phase) -> dict[str, Input]:
        read = {"records": self._input(CLEAN)}
        if phase in (DEDUP, SPLIT):
            read["signatures"] = self._input(SIGN)
        if phase is DEDUP:
            read["pairs"] = self._input(MATCH)
        else:
            read["rows"] = self._input(PHASES[PHASES.index(phase) - 1])
        if phase is SPLIT:
            read |= sources.evaluations(self.walk.spec)
        if phase is MIX:
            del read["records"]
        if phase is PACK:
            read["tokenizer"] = inputs.tokenizer(self.walk.spec.train.base)
            read["tokens"] = self._input(TOKENIZE)
            read["ingested"] = self._input(INGEST)
        return read

    def _input(self, phase: Phase) -> Input:
        found = self.done[phase.name].as_input(self.walk.store)
        if phase not in IN_SHARDS:
            return found
        # By what the shards hold: their names change with the code that made them.
        return Input(fingerprint.digest([one.digest for one in self.made[phase.name]]), found.fetch)

    def _parts(self, phase: Phase) -> dict[str, Callable[[], Sequence[Path]]]:
        """The inputs of a phase that are in shards."""
        wanted = {} if phase is MIX else {"records": CLEAN}
        if phase in (DEDUP, SPLIT):
            wanted["signatures"] = SIGN
        if phase is DEDUP:
            wanted["pairs"] = MATCH
        if phase is PACK:
            wanted["tokens"] = TOKENIZE
        return self._folders(wanted)

    def _folders(self, wanted: Mapping[str, Phase]) -> dict[str, Callable[[], Sequence[Path]]]:
        return {role: partial(sharded.folders, self.walk, of, self.made[of.name]) for role, of in wanted.items()}


def reporter(run: JobRun, number: int, phase: Phase, of: int) -> Report:
    """Tells of a phase's records as the run's progress, one step of `of` a phase."""

    def report(done: int, total: int) -> None:
        share = done / total if total else 0.5
        run.progress(phase.name, number + share, of, records=done, records_total=total)

    return report


def _told(done: Done) -> dict[str, Any]:
    """What a phase told, short: its counts and what is its own, without what follows from the spec."""
    return {"name": done.phase} | {k: v for k, v in done.facts.items() if k not in ("settings", "before", "versions")}
