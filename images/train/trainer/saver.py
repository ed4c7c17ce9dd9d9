"""Saving behind the training: at a save step every rank copies its part, and a thread of its own writes it.

Rank 0's thread makes room and the draft, and says where it lies in a small file where the ranks have met; the others'
threads write their parts into it; when all are there rank 0's commits. Threads take no part in collectives: those of
two threads might cross. What became of a save the ranks learn in the agreement of each step, by two votes: how many
threads have ended, and how many have failed. So all ranks know it at the same step, and think the same of it.

One save is in flight at a time: one that comes due by the clock meanwhile is put off to the first step after, one
that is of just this step waits for it. A save that fails removes what it wrote, is told, and is tried again when the
next is due.

What it does not do: wait for a disk that hangs; that is told too, and training goes on.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, distributed

from refit import files, log
from refit.errors import Infrastructure, Preempted, RefitError, StoreUnavailable
from refit.store import Draft, store_for
from trainer import checkpoints, grace, room, snapshot
from trainer.checkpoints import FAST, KIND, Checkpoint
from trainer.engines import Engine
from trainer.flight import Flight, GivenUp
from trainer.snapshot import Part, TakenOver
from trainer.task import Task, Wire

POLL_SECONDS = 0.005
"""How often a thread looks whether the others' threads have come so far."""

WAIT_SECONDS = 0.5
"""How long a rank that waits for its thread goes without a sign of life."""

STUCK_SECONDS = 1800.0
"""After so long a save is told to be stuck, and who waits for it gives no sign of life any more."""


Facts = Callable[[], dict[str, Any]]
"""What a manifest tells of a step, asked when its save begins: that of an earlier one may have failed till then."""


class Saver:
    """The saves of one launch; the same calls, in the same order, on every rank."""

    def __init__(
        self, engine: Engine, task: Task, wire: Wire, best: int | None = None,
        stopping: Callable[[], float] = lambda: 0.0, forget: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._task, self._wire = engine, task, wire
        self._settings = task.train.checkpoint
        self._rank = distributed.get_rank()
        self._buffers: dict[str, Tensor] = {}
        self._flight: Flight | None = None
        self._count, self._failures, self._cause, self._refused = 0, 0, "", False
        self._due: set[str] = set()
        self._when = dict.fromkeys((KIND, FAST), time.monotonic())
        self._best = best  # the step of the last best checkpoint that is there
        self._forget = forget  # told of a best step that could not be saved
        self._durations = grace.Durations()
        self._stopping, self._hurry = stopping, threading.Event()  # once a stop is asked for no copy is made
        self._held: float | None = None
        self._stuck = False
        self.saved_at: int | None = task.step if task.checkpoint else None
        for left in self._meeting(0).parent.glob("draft-*") if self._rank == 0 else ():
            left.unlink()

    def votes(self) -> list[float]:
        """What this rank adds to the agreement: whether a full or a fast save is overdue, whether the thread of the
        save in flight has ended, whether it has failed."""
        flight = self._flight
        if flight and self._rank == 0 and flight.silence > STUCK_SECONDS and not self._stuck:
            self._stuck = True
            self._wire.send("save_stuck", step=flight.step, seconds=flight.age)
        ended = flight is not None and flight.ended
        return [*self._overdue(), float(ended), float(ended and flight is not None and flight.error is not None)]

    def heard(self, votes: list[float]) -> None:
        """Take in the sums of all ranks' votes.

        Raises:
            Infrastructure: saves have failed too often in a row, or another trainer has taken over.
        """
        full, fast, ended, failed = votes
        self._due |= {kind for kind, vote in ((KIND, full), (FAST, fast)) if vote > 0}
        if self._flight is None:
            return
        if failed > 0:
            self._flight.given_up.set()  # who waits for others waits no longer
        if ended == self._task.ranks:
            flight, self._flight = self._flight, None
            self._failed(flight) if failed > 0 else self._succeeded(flight)

    def after(self, step: int, facts: Facts, *, must: bool = False) -> None:
        """At the end of a step: begin a save if one is due and none is in flight. One that is of just this step, by
        the spec's steps or because it `must`, waits for that in flight."""
        tiers = ((KIND, self._settings.every_steps), (FAST, self._settings.fast_every_steps))
        exact = {kind for kind, every in tiers if every is not None and step % every == 0}
        exact |= {KIND} if must else set()
        if exact:
            self._due |= exact
            self.finish()
        if self._flight is None and self._due:
            self._begin(step, KIND if KIND in self._due else FAST, facts)

    def last(self, step: int, facts: Facts, told_ago: float = 0.0) -> None:
        """Have everything written before the training stops here; after a stop only as far as the grace period goes.

        Args:
            told_ago: how many seconds ago this rank was told to stop; 0 when it was not.

        Raises:
            Infrastructure: the step is not in a checkpoint though there was time for it.
        """
        told_ago = self._most(told_ago)  # one collective that every rank reaches, whichever of them was told
        if told_ago > 0:
            self._hurry.set()
            left = grace.budget(self._settings) - told_ago
            fits = self._durations.fits(left, self._flight.age if self._flight else None)
            if not self._of_rank_0(float(fits)):
                self.finish()
                self._tell("save_skipped", step=step, seconds_left=left, save_seconds=self._durations.slowest)
                return
        self.save(step, facts)

    def save(self, step: int, facts: Facts) -> None:
        """Write a checkpoint of this step, unless it is in one, and wait until it is there.

        Raises:
            Infrastructure: it could not be written.
        """
        self.finish()
        if step != self.saved_at:
            self._begin(step, KIND, facts)
            self.finish()
        if step != self.saved_at:
            raise Infrastructure(f"the checkpoint of step {step} could not be written: {self._cause}")

    def finish(self, *, strict: bool = True) -> None:
        """Wait for the save in flight. All ranks together.

        Raises:
            Infrastructure: as `heard` does; not where `strict` is false, for who has something worse to tell.
        """
        with self._holding():
            while self._flight is not None:
                self._flight.thread.join(WAIT_SECONDS)
                if self._flight.ended or self._flight.silence < STUCK_SECONDS:  # who waits for a stuck one is not it
                    self._wire.beat()
                votes = torch.tensor(self.votes(), dtype=torch.float64)
                distributed.all_reduce(votes)
                try:
                    self.heard(votes.tolist())
                except Infrastructure:
                    if strict:
                        raise

    def told(self) -> dict[str, float]:
        """For a step's record: `save`, the seconds that the training was held up by saving since the last one; nothing
        where none was under way."""
        held, self._held = self._held, 0.0 if self._flight else None
        return {} if held is None else {"save": held}

    def _begin(self, step: int, kind: str, facts: Facts) -> None:
        with self._holding():
            tiers = {KIND, FAST} if kind == KIND else {FAST}  # who has the full one has the weights
            self._due -= tiers
            self._when |= dict.fromkeys(tiers, time.monotonic())
            self._count += 1
            part = Part.take(self._engine, kind, self._buffers)
            told = facts()
            best = (told.get("best") or {}).get("step")
            shares = self._task.ranks if self._task.train.zero_stage > 0 else 1
            self._flight = Flight(
                self._count, step, kind, told, part, needed=part.state.size * shares, refused=self._refused,
                keep=frozenset(one for one in (best, self._best) if one is not None),
            )  # fmt: skip
            thread = threading.Thread(target=self._work, args=(self._flight,), name=f"save-{step}", daemon=True)
            self._flight.thread = thread
            thread.start()

    def _work(self, flight: Flight) -> None:
        """What a rank's thread does."""
        try:
            if self._rank == 0:
                self._lead(flight)
            else:
                self._follow(flight)
            flight.error = None
        except (OSError, RefitError, SafetensorError, GivenUp) as error:
            flight.error = error
        flight.seconds, flight.cpu_seconds = flight.seconds or flight.age, time.thread_time()

    def _lead(self, flight: Flight) -> None:
        output = self._task.job.output
        room.ensure(output, flight.needed, flight.keep, refused=flight.refused)
        uri = checkpoints.address(output, flight.step, flight.kind)
        with store_for(uri).publish(uri) as draft:
            flight.folder = draft.path
            files.write(self._meeting(flight.number), str(draft.path).encode())
            flight.part.write(draft.path)
            self._await(flight, lambda: snapshot.written(draft.path, self._task.ranks))
            self._commit(flight, draft)

    def _commit(self, flight: Flight, draft: Draft) -> None:
        snapshot.commit(draft, self._task, flight.step, flight.kind, flight.facts)
        flight.seconds = flight.age  # what comes now is no part of saving, and not counted on before a stop
        flight.stir()
        self._meeting(flight.number).unlink(missing_ok=True)
        output, settings = self._task.job.output, self._settings
        try:
            if flight.kind == FAST:
                checkpoints.retain_fast(output, settings.keep_fast)
            else:
                checkpoints.retain(output, settings.keep_last, flight.keep, written=flight.step)
        except (OSError, StoreUnavailable) as error:  # the checkpoint is there, and that is what counts
            log.event("retention_failed", output=output, why=str(error))
        # What is only tried is thrown away, and nobody would throw its copies away.
        if flight.kind == KIND and settings.copy_to is not None and self._task.mode == "train":
            self._copy(flight, draft, settings.copy_to)

    def _copy(self, flight: Flight, draft: Draft, to: str) -> None:
        """The redundant copy. Where it fails, or is cut short by a stop, the checkpoint is there all the same, and that
        is told."""
        there = checkpoints.copies_of(to, self._task.fingerprint, self._task.job.output)
        try:
            self._in_time()
            assert draft.manifest is not None
            uri = checkpoints.address(self._task.job.output, flight.step)
            made = Checkpoint(uri, flight.step, draft.manifest)
            # Where the store is elsewhere the draft still lies here: nothing is fetched back.
            source = draft.path if draft.path.is_dir() else store_for(uri).local(uri)
            checkpoints.copy(made, there, source, heard=flight.stir, check=self._in_time)
            checkpoints.retain(there, self._settings.keep_last, flight.keep, written=flight.step)
        except (OSError, RefitError) as error:
            self._tell("copy_failed", step=flight.step, why=str(error), to=there)

    def _in_time(self) -> None:
        if self._hurry.is_set() or self._stopping() > 0:
            raise Preempted("told to stop: there is no time for a copy")

    def _follow(self, flight: Flight) -> None:
        meeting = self._meeting(flight.number)
        self._await(flight, meeting.is_file)
        flight.folder = Path(meeting.read_text(encoding="utf-8"))
        try:
            flight.part.write(flight.folder)
        except FileNotFoundError:
            # Rank 0 has committed, between this part's having its name and the fsync of its folder, and has synced it
            # all; or it has given up, and says so itself.
            if flight.folder.exists():
                raise

    def _await(self, flight: Flight, happened: Callable[[], bool]) -> None:
        while not happened():
            if flight.given_up.wait(POLL_SECONDS):
                raise GivenUp("another rank's part could not be written")

    def _succeeded(self, flight: Flight) -> None:
        self._durations.add(flight.seconds)
        self._failures, self._refused, self._stuck = 0, False, False
        if flight.kind == KIND:
            self.saved_at = flight.step
            best = (flight.facts.get("best") or {}).get("step")
            self._best = best if best == flight.step else self._best
        self._tell(
            "saved", step=flight.step, tier=flight.kind, seconds=flight.seconds, cpu_seconds=flight.cpu_seconds,
            bytes=flight.needed,
        )  # fmt: skip

    def _failed(self, flight: Flight) -> None:
        output = self._task.job.output
        own = None
        if flight.error is not None and not isinstance(flight.error, GivenUp):
            own = {**room.explain(flight.error, output, flight.needed), "rank": self._rank,
                   "fatal": str(flight.error) if isinstance(flight.error, TakenOver) else None}  # fmt: skip
        told: list[dict[str, Any] | None] = [None] * self._task.ranks
        distributed.all_gather_object(told, own)
        # Threads that still wrote when the draft was taken away have left something of it.
        if self._rank == 0:
            self._clear(flight)
        cause = next(one for one in told if one is not None)
        if cause["fatal"]:
            raise TakenOver(cause["fatal"])
        if self._forget and flight.kind == KIND:
            self._forget(flight.step)
        self._failures += 1
        self._refused = cause["refused"]
        self._cause = f"rank {cause['rank']}: {cause['why']}"
        self._tell("save_failed", step=flight.step, tier=flight.kind, failures=self._failures, **cause)
        if self._failures >= self._settings.max_failures:
            raise Infrastructure(
                f"{self._failures} saves in a row have failed, the last one of step {flight.step}: {self._cause}"
            )

    def _clear(self, flight: Flight) -> None:
        self._meeting(flight.number).unlink(missing_ok=True)
        if flight.folder is not None:
            shutil.rmtree(flight.folder, ignore_errors=True)

    def _meeting(self, number: int) -> Path:
        return self._task.rendezvous.with_name(f"draft-{number}")

    def _overdue(self) -> list[float]:
        if self._rank != 0:
            return [0.0, 0.0]
        now, settings = time.monotonic(), self._settings
        every = ((KIND, settings.every_minutes), (FAST, settings.fast_every_minutes))
        return [float(minutes is not None and now - self._when[kind] >= 60 * minutes) for kind, minutes in every]

    def _tell(self, kind: str, **facts: Any) -> None:
        if self._rank == 0:
            self._wire.send(kind, **facts)

    def _most(self, value: float) -> float:
        held = torch.tensor([value], dtype=torch.float64)
        distributed.all_reduce(held, op=distributed.ReduceOp.MAX)
        return float(held)

    def _of_rank_0(self, value: float) -> float:
        held = torch.tensor([value], dtype=torch.float64)
        distributed.broadcast(held, src=0)
        return float(held)

    @contextmanager
    def _holding(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._held = (self._held or 0.0) + time.perf_counter() - began
