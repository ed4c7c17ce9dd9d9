"""Where a rank's random numbers stand: those of torch, numpy, Python and, where it computes on one, its card."""

from __future__ import annotations

import base64
import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from refit import fingerprint
from trainer import device


class Numbers(NamedTuple):
    """All states of one moment, as the libraries give them: taken in microseconds, put into words when asked for."""

    torch: Tensor
    card: Tensor | None
    numpy: tuple[Any, ...]
    python: tuple[Any, ...]

    @classmethod
    def now(cls) -> Numbers:
        """Where they stand."""
        return cls(torch.get_rng_state(), device.random_state(), tuple(np.random.get_state()), random.getstate())

    def document(self) -> dict[str, Any]:
        """For a JSON file."""
        name, keys, place, has_gauss, gauss = self.numpy
        version, numbers, gauss_next = self.python
        return {
            "torch": text(self.torch),
            **({} if self.card is None else {"card": text(self.card)}),
            "numpy": [name, [int(key) for key in keys], int(place), int(has_gauss), float(gauss)],
            "python": [version, list(numbers), gauss_next],
        }

    @property
    def digest(self) -> str:
        """Equal where all of them are."""
        return fingerprint.digest(self.document())


def begin(seed: int) -> None:
    """Let all of this rank's random numbers begin where the seed says."""
    torch.manual_seed(seed)  # the card's too
    np.random.seed(seed)
    random.seed(seed)


def go_on(document: dict[str, Any]) -> None:
    """Let this rank's random numbers go on from where those of a document stood."""
    torch.set_rng_state(_bytes(document["torch"]))
    if "card" in document:  # not of a checkpoint that a processor wrote: then the card's are as the seed made them
        device.set_random_state(_bytes(document["card"]))
    name, keys, place, has_gauss, gauss = document["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), place, has_gauss, gauss))
    version, numbers, gauss_next = document["python"]
    random.setstate((version, tuple(numbers), gauss_next))


def text(state: Tensor) -> str:
    """Bytes for a JSON document."""
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(state: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(state), dtype=np.uint8).copy())
