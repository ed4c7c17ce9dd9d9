"""Two backends, one face: a process on this machine, or a pod in a cluster. REFIT_BACKEND chooses."""

from __future__ import annotations

import os

from operators.backends.base import Backend, Phase, Standing
from refit.errors import BadInput

__all__ = ["Backend", "Phase", "Standing", "chosen", "named"]


def chosen() -> str:
    """The name of the backend that REFIT_BACKEND names; the local one without it."""
    return os.environ.get("REFIT_BACKEND") or "local"


def named(name: str) -> Backend:
    """A backend by its name; each is imported only where it is used."""
    if name == "local":
        from operators.backends.local import LocalBackend

        return LocalBackend()
    if name == "kubernetes":
        from operators.backends.kubernetes import KubernetesBackend

        return KubernetesBackend()
    raise BadInput(f"REFIT_BACKEND is {name!r}; it must be local or kubernetes.")
