"""A vLLM plugin: its processes sleep while they wait for each other, where they share cores with everything else.

vLLM's engine and worker pass messages through shared memory, and look for the next one without a pause for a second
after each. On processors that is a second of two cores after every request, taken from whoever computes there. Between
two looks they can as well wait for the notice that the writer sends anyway.

vLLM loads it in each of its processes (entry point `vllm.general_plugins`). It does nothing unless REFIT_SPIN_SECONDS
is set.
"""

from __future__ import annotations

import os
from typing import Any

SPIN_SECONDS = "REFIT_SPIN_SECONDS"
"""How long a process looks without a pause before it waits for a notice, in seconds."""


def register() -> None:
    """Set how long vLLM's readers spin; may be called more than once."""
    given = os.environ.get(SPIN_SECONDS)
    if not given:
        return
    from vllm.distributed.device_communicators import shm_broadcast

    spinning = shm_broadcast.SpinCondition
    if spinning.__module__ == __name__:
        return
    seconds = float(given)

    class Patient(spinning):  # type: ignore[misc, valid-type]
        """A reader that spins for `seconds` only."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self.is_reader:
                self.busy_loop_s = seconds

    shm_broadcast.SpinCondition = Patient
