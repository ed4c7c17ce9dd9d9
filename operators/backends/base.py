"""Where jobs run: one face for a local process and a cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from refit.errors import RefitError
from refit.job import Job

if TYPE_CHECKING:
    from kubernetes.client import V1Pod


class Phase(StrEnum):
    """Where what runs a job stands. Whether the job succeeded is the manifest's to say, and nobody else's."""

    ABSENT = "absent"
    """Nothing was ever started, or nothing of it is left."""
    WAITING = "waiting"
    """Accepted, not running yet: a queue, an image to pull."""
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Standing:
    """A look at what runs a job. `fault` is what it died of, as far as the backend can tell; None for a clean exit."""

    phase: Phase
    why: str = ""
    exit_code: int | None = None
    fault: RefitError | None = None

    @property
    def alive(self) -> bool:
        """Whether it can still come to a manifest."""
        return self.phase in (Phase.WAITING, Phase.RUNNING)


class Backend(ABC):
    """Starts, watches and ends jobs. A job is named by its output folder, so that any process can find it again.

    The promise: however many callers submit the same job at the same time, and wherever one of them is killed, at most
    one process (or pod) of it lives.
    """

    name: ClassVar[str]

    @abstractmethod
    def submit(self, job: Job, pod: Callable[[], V1Pod] | None = None) -> bool:
        """Start a job, or adopt the living one.

        Args:
            job: written to its folder before anything starts.
            pod: builds the pod; only a cluster asks for it.

        Returns:
            True when it was started, False when a living one was found.
        """

    @abstractmethod
    def adopt(self, output: str) -> bool:
        """Whether a job with this output lives, wherever it was started."""

    @abstractmethod
    def state(self, output: str) -> Standing:
        """Where it stands now. Cheap: it is asked every few seconds."""

    def node_of(self, output: str, host: str) -> str | None:
        """The node that a job's part with this host name runs on, where a job can be kept off it; else None."""
        return None

    @abstractmethod
    def logs(self, output: str, cursor: str = "") -> tuple[list[str], str]:
        """The lines it printed since `cursor` (empty: from the start), and the next cursor."""

    @abstractmethod
    def end_of_log(self, output: str) -> str:
        """The cursor after what an earlier try printed, so that a new try shows its own lines only."""

    @abstractmethod
    def stop(self, output: str, *, grace: float = 20.0) -> bool:
        """End it, with all that belongs to it, and return only when that is verified.

        Returns:
            False when nothing was running.
        """
