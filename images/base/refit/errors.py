"""What can go wrong with a job, and what happens next.

RefitError                      exit
├── BadInput                    10   never retried: the person who gave it must change it
│   ├── BadSpec                      a pipeline file, a form or an override
│   └── BadRecords                   more bad records than the spec allows
├── PreflightRefused            11   never retried: the cluster must change
├── Diverged                    12   never retried: the scene is kept
├── GateRefused                 13   never retried: the candidate is not better
├── Preempted                   20   resumed from its checkpoint; its own, generous budget
└── Infrastructure              30   resumed or retried
    ├── NodeLost                     the process or its machine is gone
    ├── Occupied                     somebody else is at it, who goes on undisturbed
    ├── DiskFull                     what was to be fetched finds no room on this machine
    ├── StoreUnavailable             the store does not answer
    │   └── Damaged                  it answers, and what it holds is not what was committed
    └── ServerUnavailable            a model server, the controller or a database does not answer

Exit 0 is success, and only together with a manifest. Any other code (a traceback's 1, a signal) counts as
Infrastructure, because nobody chose it.
"""

from __future__ import annotations

from typing import ClassVar


class RefitError(Exception):
    """The root: `exit_code` is what a program exits with, `retry` what an orchestrator does about it."""

    exit_code: ClassVar[int] = 1
    retry: ClassVar[bool] = False


class BadInput(RefitError):
    """Somebody gave something that cannot work; running it again gives the same answer."""

    exit_code = 10


class BadSpec(BadInput):
    """A pipeline file, a form or an override that is not a valid spec."""


class BadRecords(BadInput):
    """More records than the spec allows went to quarantine."""


class PreflightRefused(RefitError):
    """The machines are not fit for this job."""

    exit_code = 11


class Diverged(RefitError):
    """Training left the path of sense (NaN, a spike); the scene is kept beside the checkpoints."""

    exit_code = 12


class GateRefused(RefitError):
    """The candidate did not pass the gate: worse, or not measured well enough to know."""

    exit_code = 13


class Preempted(RefitError):
    """Stopped from outside after a checkpoint was written."""

    exit_code = 20
    retry = True


class Infrastructure(RefitError):
    """Something under the job failed."""

    exit_code = 30
    retry = True


class NodeLost(Infrastructure):
    """The process, or the machine under it, is gone."""


class Occupied(Infrastructure):
    """Another process works at the same output; this one has touched nothing."""


class DiskFull(Infrastructure):
    """What was to be fetched finds no room on this machine. The store is well, and what it holds too."""


class StoreUnavailable(Infrastructure):
    """The store does not answer, or lost what it was given."""


class Damaged(StoreUnavailable):
    """A committed folder is not what its manifest says, or its manifest is not what was written."""


class ServerUnavailable(Infrastructure):
    """A model server, the controller or a database does not answer."""


BY_EXIT_CODE: dict[int, type[RefitError]] = {
    error.exit_code: error for error in (BadInput, PreflightRefused, Diverged, GateRefused, Preempted, Infrastructure)
}


def from_exit_code(code: int, message: str) -> RefitError:
    """The error that a program's exit code stands for (a code nobody chose is Infrastructure)."""
    return BY_EXIT_CODE.get(code, Infrastructure)(message)
