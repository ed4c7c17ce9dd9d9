"""What an orchestrator sees go wrong with a job, beside what the job says of itself (`refit.errors`).

RefitError
├── GateRefused
│   └── RolledBack           the controller took the candidate back
├── TimedOut                 never retried: the run's time is over, and the job was stopped
├── Cancelled                never retried: a person said so
├── Preempted
│   └── Evicted              a pod that made room for another, or that its node could not keep
└── Infrastructure
    ├── NodeLost
    │   ├── NodeSlow         a rank is slow on one machine; stopped, to be started again elsewhere
    │   └── PodDeleted       somebody, or a controller, deleted the pod
    ├── Hung                 no sign of life for too long; stopped, then started again
    ├── OutOfMemory          killed for memory
    ├── ImagePullFailed      the image cannot be fetched
    └── Unschedulable        no node has room
"""

from __future__ import annotations

from typing import Any

from refit import errors
from refit.errors import GateRefused, Infrastructure, NodeLost, Preempted, RefitError


class RolledBack(GateRefused):
    """The controller put the champion back: harm was proven, or the step's deadline passed."""


class TimedOut(RefitError):
    """The job was stopped because the run's time was over."""


class Cancelled(RefitError):
    """The job was stopped because a person ended its task."""


class Evicted(Preempted):
    """The pod had to go for a reason outside of it."""


class PodDeleted(NodeLost):
    """The pod was deleted while it ran."""


class NodeSlow(NodeLost):
    """A machine slows a training down; it is in quarantine, and the job was stopped after a checkpoint."""


class Hung(Infrastructure):
    """The job lives but gave no sign of it for too long."""


class OutOfMemory(Infrastructure):
    """The kernel or the kubelet killed the job for its memory."""


class ImagePullFailed(Infrastructure):
    """The image is not there, or may not be read."""


class Unschedulable(Infrastructure):
    """No node fits what the job asks for."""


NEVER_RETRIED: tuple[type[RefitError], ...] = (
    errors.BadInput, errors.PreflightRefused, errors.Diverged, GateRefused, TimedOut, Cancelled,
)  # fmt: skip


def describe(error: RefitError) -> dict[str, str]:
    """An error as a trigger's event carries it."""
    return {"error": type(error).__name__, "message": str(error)}


def restore(event: dict[str, Any]) -> RefitError:
    """The error that `describe` described; one of an unknown name is Infrastructure."""
    found = _BY_NAME.get(str(event.get("error")), Infrastructure)
    return found(str(event.get("message", "the job failed and gave no reason")))


def _all(root: type[RefitError]) -> dict[str, type[RefitError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _all(child)
    return found


_BY_NAME = _all(RefitError)
