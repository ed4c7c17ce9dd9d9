"""From a job to finished ranks: launch, listen, and launch again from the newest checkpoint when one is lost.

What it does not do: look for the cause of a loss on the machine (that is the operator's side), or go on from another
launcher's ranks (they have ended with it).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal

from refit import log
from refit.errors import (
    BY_EXIT_CODE,
    Diverged,
    Infrastructure,
    NodeLost,
    Occupied,
    Preempted,
    PreflightRefused,
    RefitError,
    StoreUnavailable,
    from_exit_code,
)
from refit.job import JobRun
from refit.states import State
from trainer import checkpoints, grace, metrics, tried, warm, writer
from trainer import scene as scenes
from trainer.checkpoints import Checkpoint
from trainer.heartbeat import Heartbeat
from trainer.idle import Idle, Idleness
from trainer.inputs import Inputs
from trainer.pauses import Pauses
from trainer.ranks import Ranks
from trainer.scene import Scene
from trainer.silence import Silence
from trainer.task import Mode, Task
from trainer.watch import HISTORY_STEPS, Watch

POLL_SECONDS = 0.2
LAST_WORDS_SECONDS = 5.0
"""How long the other ranks may take to end when one has said how it ends."""

SAVING = {
    "save_failed": "the {tier} of step {step} could not be saved, on rank {rank}: {why}",
    "save_skipped": "told to stop {seconds_left:.0f} s before the end; step {step} is not saved, that takes "
    "{save_seconds:.0f} s. Raise train.checkpoint.grace_seconds",
    "copy_failed": "the checkpoint of step {step} has no copy below {to}: {why}",
    "save_stuck": "the save of step {step} has been under way for {seconds:.0f} s; look at the disk",
}
"""What rank 0 tells of saves that did not go well, in words."""


class Launcher:
    """The launches of one job. `resumed_from` is the step that the last launch went on from, None from scratch.

    `planned` is how many seconds the training takes by its plan, where there is one.
    """

    def __init__(
        self,
        run: JobRun,
        inputs: Inputs,
        *,
        mode: Mode,
        dtype: Literal["float32", "bfloat16"],
        token: str,
        scene: Scene | None = None,
        planned: float | None = None,
    ) -> None:
        self._run, self._inputs, self._mode, self._dtype, self._token = run, inputs, mode, dtype, token
        self._train = run.spec.train
        self._scene, self._planned = scene, planned
        total = scene.step if scene else self._train.max_steps if mode == "train" else self._train.smoke_steps + 1
        self._heartbeat = Heartbeat(run, mode, total)
        self._grace = grace.budget(self._train.checkpoint)
        self._stop = False
        self._phase: str | None = None
        self._idleness, self._silence = Idleness(), Silence()
        self._pauses = Pauses()
        self._away = False
        self._gone_on_from: Checkpoint | None = None
        self.resumed_from: int | None = None
        self.last: dict[str, Any] = {}

    def supervise(self) -> dict[str, Any]:
        """Launch until the ranks have finished; returns what rank 0 made of it.

        Raises:
            Occupied: another trainer has taken the output over. From then on nothing is written there.
            Preempted: we were told to stop; the ranks wrote a checkpoint, or had taken no step.
            NodeLost: ranks were lost more often than the spec allows.
            RefitError: a rank gave up with a reason; it is raised as its own kind.
        """
        with self._stopped_by_signals():
            for launch in range(1, self._train.max_restarts + 2):
                try:
                    return self._launch(launch)
                except RefitError as error:
                    self._leave_if_taken_over(error)
                    if isinstance(error, Diverged):
                        self._upload_scene()
                    if self._stop or isinstance(error, Occupied) or not isinstance(error, Infrastructure):
                        raise  # no launch more: there is no time for one, or it would end alike
                    if self._phase == tried.LOOK and isinstance(error, NodeLost):  # for memory it is killed wordlessly
                        raise PreflightRefused(tried.blind(self._train, str(error))) from error
                    if launch > self._train.max_restarts:
                        raise NodeLost(f"{error}\nThe ranks were lost {launch} times; train.max_restarts allows "
                                       f"{self._train.max_restarts}.") from error  # fmt: skip
                    self._rest(self._pauses.after(error, stepped=self._heartbeat.has_stepped), error)
                    self._run.event(State.RETRYING, str(error), launch=launch)
                    self._run.event(State.RUNNING, f"launch {launch + 1}")
        raise AssertionError("the last launch returns or raises")

    def _launch(self, launch: int) -> dict[str, Any]:
        self._phase = None
        self._heartbeat.launch()
        task = self._task()
        log.event("launch", mode=self._mode, ranks=task.ranks, resumed_from=self.resumed_from, dtype=task.dtype)
        began, self._idleness, self._silence = time.monotonic(), Idleness(), Silence()
        asked_at: float | None = None
        with Ranks(task) as ranks:
            while True:
                result = self._listen(ranks, POLL_SECONDS) or self._check(ranks)
                if result is not None:
                    return result
                self._show()
                self._tell_idle(
                    ranks, self._idleness.see(time.monotonic(), [member.process.pid for member in ranks.members])
                )
                self._tell_silent(ranks)
                if self._stop and self._mode != "train":
                    raise Preempted(f"told to stop; a {self._mode} run keeps nothing, and starts afresh")
                if self._stop and asked_at is None:
                    asked_at = time.monotonic()
                    ranks.signal(signal.SIGTERM)
                if asked_at is not None and time.monotonic() - asked_at > self._grace:
                    raise Preempted(
                        f"told to stop; the ranks had not ended within {self._grace:.0f} s. Raise "
                        "train.checkpoint.grace_seconds"
                    )
                limit = tried.minutes(self._mode, self._train, self._planned)
                if limit is not None and time.monotonic() - began > 60 * limit:
                    raise PreflightRefused(tried.too_slow(self._mode, self._train, limit))

    def _rest(self, seconds: float, error: RefitError) -> None:
        """Wait before the next launch; a stop ends the job at once.

        No heartbeat is written meanwhile: where the store is away that takes minutes, in which no stop is heeded.
        """
        if seconds == 0:
            return
        self._run.event(State.RUNNING, f"launched again in {seconds:.0f} s: {error}", pause=seconds)
        until = time.monotonic() + seconds
        while not self._stop and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        if self._stop:
            raise Preempted("told to stop between two launches; what was saved before stands") from error

    def _leave_if_taken_over(self, error: RefitError) -> None:
        """Have a zombie say nothing: what it would tell of its end would lie over its successor's words."""
        try:
            self._check_token()
        except (OSError, StoreUnavailable):
            return  # nobody can say; what the launch died of is what counts
        except Occupied as taken:
            raise taken from error

    def _check_token(self) -> None:
        if not writer.holds(self._run.job.output, self._token):
            raise Occupied(f"{self._run.job.output}: another trainer has taken over; this one leaves it alone.")

    def _upload_scene(self, step: int | None = None) -> None:
        try:
            scenes.upload(self._run.folder, self._run.job.output, step)
        except StoreUnavailable as error:  # a scene more or less changes nothing of how the training goes on or ends
            log.event("scene_not_uploaded", step=step, why=str(error))

    def _upload_metrics(self) -> None:
        try:
            metrics.upload(self._run.folder, self._run.job.output)
        except StoreUnavailable as error:  # they come with the next save; the checkpoint itself is there
            log.event("metrics_not_uploaded", why=str(error))

    def _task(self) -> Task:
        output = self._run.job.output
        self._check_token()  # a zombie would take away its successor's drafts, and the records of its steps
        checkpoints.clear_drafts(output)
        if self._mode == "train":  # nobody else writes there
            checkpoints.clear_copies(self._train.checkpoint.copy_to, self._inputs.fingerprint, output)
        if self._gone_on_from is not None:
            checkpoints.let_go(self._gone_on_from)  # the ranks that read it have ended
        found = self._gone_on_from = self._found(output)
        self.resumed_from = found.step if found else None
        self._look_at_warm_start(found)
        writer.sign(self._run.job)
        metrics.download(self._run.folder, output, found.step if found else 0)
        metrics.rewind(self._run.folder, found.step if found else 0)
        done = metrics.last(self._run.folder, HISTORY_STEPS)
        self.last = next(reversed(done), {})
        self._watch = Watch(self._run.event, ranks=self._train.ranks, zero_stage=self._train.zero_stage, history=done)
        return Task(
            mode=self._mode, job=self._run.job, fingerprint=self._inputs.fingerprint, dataset=self._inputs.dataset,
            base=self._inputs.base, base_digest=self._inputs.base_digest, folder=self._run.folder, token=self._token,
            data=self._inputs.data, ranks=self._train.ranks,
            # Arithmetic does not change under way, not even on another machine.
            dtype=found.manifest.facts["dtype"] if found else self._dtype,
            rendezvous=self._run.folder / "ranks" / "rendezvous",
            checkpoint=found.uri if found else None, step=found.step if found else 0,
            until=self._scene.step - 1 if self._scene else 0,
        )  # fmt: skip

    def _look_at_warm_start(self, found: Checkpoint | None) -> None:
        """Hash the checkpoint that the ranks are to begin with, or that is the reference of all their steps."""
        if found is not None and self._train.objective != "dpo":
            return
        begun = warm.verified(self._train, self._inputs.warm_start, self._waiting)
        if begun is not None and found is None and self._mode == "train":
            told = {"checkpoint": begun.uri, "step": begun.step, "digest": self._inputs.warm_start}
            self._run.event(State.RUNNING, f"begins with the weights of {begun.uri}", warm_start=told)

    def _found(self, output: str) -> Checkpoint | None:
        """The checkpoint to go on from."""
        if self._mode == "train":
            return checkpoints.found(output, self._train.checkpoint.copy_to, self._inputs.fingerprint, self._waiting)
        if self._scene is None or self._scene.checkpoint is None:
            return None
        return checkpoints.of_step(
            str(self._run.job.options["of"]), self._train.checkpoint.copy_to, self._inputs.fingerprint,
            self._scene.checkpoint, self._waiting,
        )  # fmt: skip

    def _listen(self, ranks: Ranks, timeout: float) -> dict[str, Any] | None:
        """Take in what the ranks say; rank 0's result, when it is there."""
        for member, message in ranks.messages(timeout):
            kind = message.pop("kind")
            if kind == "error":
                ranks.wait(LAST_WORDS_SECONDS)  # they give up together: let rank 0 write the scene
                raise from_exit_code(message["exit_code"], message["message"])
            if kind == "step":
                self._watch.step(member.number, message)
                self._tell_idle(ranks, self._idleness.stepped())
            if member.number != 0:
                continue
            if kind == "batch":
                self._watch.batch(message)
            elif kind == "step":
                self.last = message
                self._silence.stepped(sum(message.get(part, 0.0) for part in ("seconds", "save", "validation")))
                self._heartbeat.stepped(message)
                if message.get("skipped"):
                    self._upload_scene(message["step"])
                if "validation_loss" in message:
                    log.event("validation", step=message["step"], loss=message["validation_loss"])
            elif kind == "phase":
                self._phase = message["name"]
                self._silence.pause()
                log.event("phase", name=self._phase)
            elif kind == "saved":
                log.event("checkpoint", **message)
                self._upload_metrics()
            elif kind in SAVING:
                self._run.event(State.RUNNING, SAVING[kind].format(**message), **{kind: message})
            elif kind == "result":
                ranks.wait(LAST_WORDS_SECONDS)
                return message
        return None

    def _tell_idle(self, ranks: Ranks, idle: Idle | None) -> None:
        if idle is not None:
            self._watch.idle(idle, ranks.members[idle.rank].log)

    def _tell_silent(self, ranks: Ranks) -> None:
        def blame(seconds: float) -> int:
            found = ranks.silent(seconds)
            assert found is not None
            return found.number

        silent = self._silence.see(ranks.listened, [member.heard for member in ranks.members], blame)
        if silent is not None:
            member = ranks.members[silent.rank]
            self._watch.silent(silent, member.process.pid, member.log, ranks.patience)

    def _check(self, ranks: Ranks) -> dict[str, Any] | None:
        """Look for ranks that hang or have ended; the result again, when it was a rank's last word."""
        hung = ranks.hung()
        if hung is not None:
            held = ", held by a signal" if hung.stopped else ""
            raise NodeLost(
                f"rank {hung.number} said nothing for {ranks.patience:.0f} s{held}; where it stood is in {hung.log}"
            )
        # One that was killed before those that broke off because of it: it is the cause.
        for member in sorted(ranks.ended(), key=lambda member: member.process.returncode >= 0):
            result = self._listen(ranks, 0)  # its last words may still be on the wire
            if result is not None:
                return result
            code = member.process.returncode
            if code == 0:
                continue  # done; rank 0's result is what counts
            if self._stop and code in (-signal.SIGTERM, Preempted.exit_code):
                raise Preempted("told to stop before the first step of this launch; what was saved before stands")
            kind = BY_EXIT_CODE.get(code, NodeLost)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise (NodeLost if issubclass(kind, Infrastructure) else kind)(
                f"rank {member.number} ended by {how}\n{member.tail()}"
            )
        return None

    def _waiting(self) -> None:
        """Tell of life while there are no ranks to do so, and heed a stop: hashing a checkpoint may take minutes."""
        if self._stop:
            raise Preempted("told to stop before this launch; what was saved before stands")
        self._show()

    def _show(self) -> None:
        if not self._heartbeat.is_due():
            return
        try:
            self._check_token()
            self._heartbeat.beat(self.last, self.resumed_from)
        except (OSError, StoreUnavailable) as error:
            # Of a store that is away, or a disk that is full. The ranks go on: whether a checkpoint can be written, and
            # whether the output is still ours, is asked again before its commit. And who looks for a checkpoint
            # meanwhile must not take this for an answer of the store that he looks in.
            if not self._away:
                log.event("heartbeat_not_written", why=str(error))
            self._away = True
        else:
            self._away = False

    @contextmanager
    def _stopped_by_signals(self) -> Iterator[None]:
        def stop(_number: int, _frame: FrameType | None) -> None:
            self._stop = True

        before: list[tuple[signal.Signals, Callable[..., Any] | int | None]] = [
            (number, signal.signal(number, stop)) for number in (signal.SIGTERM, signal.SIGINT)
        ]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)
