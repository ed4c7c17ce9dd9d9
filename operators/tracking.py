"""A training's steps as a run of MLflow, while it is at work.

One run a job, found again by a tag with the job's id. Which steps are in it is asked of MLflow itself: a triggerer that
restarts, the next try and whoever catches up later go on after the last one. MLflow is a mirror: it may be away, which
neither fails nor delays anything here, and what was missed is logged at the next time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from operators import curves, registry
from operators.errors import Cancelled
from refit.errors import Preempted, RefitError
from refit.job import EVENTS, Job, last_word, read_events
from refit.states import State
from refit.store import join, store_for

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

log = logging.getLogger(__name__)

JOB, OUTPUT = "refit.job", "refit.output"
FINISHED, FAILED, KILLED = "FINISHED", "FAILED", "KILLED"

LOG_SECONDS = 30.0
"""How often new steps are logged."""

WAIT_SECONDS = 10.0
"""How long anybody waits for MLflow when a training is over."""


class Follower:
    """Carries the steps of one job; does nothing for a job that does not train, and where no MLflow is named.

    One thread at a time logs, beside its caller: MLflow takes seconds to import, and minutes to give up on a server.

    Known race: who ends a job while another process makes its run may make a second one. The older one counts.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._follows = job.kind == "train" and bool(os.environ.get("MLFLOW_TRACKING_URI"))
        self._curve = curves.Growing(job.output, job.spec.train.max_steps)
        self._thread: threading.Thread | None = None
        self._began_at: float | None = None
        self._run: Run | None = None
        self._is_away = False

    def carry(self) -> None:
        """Have new steps logged, if it is time; returns at once."""
        now = time.monotonic()
        if self._began_at is None or now - self._began_at >= LOG_SECONDS:
            self._start(None)

    def settle(self) -> None:
        """Wait for what is being logged, not for long: another process goes on."""
        if self._thread is not None:
            self._thread.join(WAIT_SECONDS)

    def end(self, status: str) -> None:
        """Log what is left and say how the job has ended; where MLflow is away, that is for a later call of anybody."""
        self.settle()
        self._start(status)
        self.settle()

    def complete(self, status: str) -> str | None:
        """As `end`, in this thread; the run's id, None where there is nothing to follow.

        Raises:
            ServerUnavailable: MLflow does not answer, or refuses.
        """
        if not self._follows:
            return None
        with registry.connected() as client:
            run = self._log(client, status)
            self._conclude(client, run, status)
            return str(run.info.run_id)

    def _start(self, status: str | None) -> None:
        if not self._follows or (self._thread is not None and self._thread.is_alive()):
            return
        self._began_at = time.monotonic()
        self._thread = threading.Thread(target=self._try, args=(status,), name="mlflow", daemon=True)
        self._thread.start()

    def _try(self, status: str | None) -> None:
        try:
            with registry.connected() as client:
                run = self._log(client, status)
                if status is not None:
                    self._conclude(client, run, status)
            self._is_away = False
        except (RefitError, OSError) as error:
            if not self._is_away:
                log.warning("%s: its steps will be logged later: %s", self._job.id, str(error).splitlines()[0])
            self._is_away = True

    def _log(self, client: MlflowClient, status: str | None) -> Run:
        """Log what is new; at the end the last step, too."""
        from mlflow.entities import Metric

        if self._run is None:
            found = self._found(client)
            self._curve.logged = _last(client, found, curves.ALWAYS)
            self._curve.looked = _last(client, found, curves.LOOK)
            if status is None and found.info.status != "RUNNING":  # an earlier try ended
                client.update_run(found.info.run_id, status="RUNNING")
            self._run = found
        began, number = self._run.info.start_time, self._run.info.run_id
        for points in self._curve.batches(ended=status is not None):
            client.log_batch(number, metrics=[Metric(one.key, one.value, began + one.at, one.step) for one in points])
            self._curve.keep(points)
        return self._run

    def _found(self, client: MlflowClient) -> Run:
        job, number = self._job, registry.experiment_of(client, self._job.pipeline)
        found = client.search_runs(
            [number], f"tags.`{JOB}` = '{job.id}'", max_results=1, order_by=["attributes.start_time ASC"]
        )
        tags = {JOB: job.id, OUTPUT: job.output, "refit.team": job.team, "refit.owner": job.owner}
        return found[0] if found else client.create_run(number, tags=tags, run_name=job.id)

    def _conclude(self, client: MlflowClient, run: Run, status: str) -> None:
        """A success stands whatever was said before it; of two other ends the first one is right."""
        said = client.get_run(run.info.run_id).info.status
        if said != status and (said == "RUNNING" or status == FINISHED):
            client.set_terminated(run.info.run_id, status)


def end(job: Job, error: RefitError | None = None) -> None:
    """Log what is left of a job's steps, and that it has ended: well, or with an error."""
    Follower(job).end(FINISHED if error is None else KILLED if isinstance(error, Preempted | Cancelled) else FAILED)


def catch_up(job: Job) -> None:
    """The same for a job of which nobody knows any more how it ended, by what it left."""
    Follower(job).end(_status(job))


def run_of(job: Job) -> str | None:
    """The id of the run of a job that has ended, with all its steps.

    Raises:
        ServerUnavailable: MLflow does not answer, or refuses.
    """
    return Follower(job).complete(_status(job))


def _status(job: Job) -> str:
    store = store_for(job.output)
    if store.manifest(job.output) is not None:
        return FINISHED
    place = join(job.output, EVENTS)
    events = read_events(store.read(place).decode()) if store.exists(place) else []
    return KILLED if last_word(events, committed=False).get("state") == State.SUSPENDED else FAILED


def _last(client: MlflowClient, run: Run, key: str) -> int:
    """The last step of a run's curve."""
    return max((point.step for point in client.get_metric_history(run.info.run_id, key)), default=0)
