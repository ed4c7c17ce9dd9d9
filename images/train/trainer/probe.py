"""Where a number that is not finite first appears in a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class Probe:
    """The first module whose answer was not finite."""

    def __init__(self) -> None:
        self.first: str | None = None

    @contextmanager
    def listening(self, model: nn.Module) -> Iterator[None]:
        """Look at what every module answers, the innermost first."""
        hooks = [
            module.register_forward_hook(lambda _module, _inputs, answer, name=name: self._see(name, answer))
            for name, module in model.named_modules()
            if name
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _see(self, name: str, answer: Any) -> None:
        found = answer if isinstance(answer, Tensor) else answer[0] if isinstance(answer, tuple) and answer else None
        if self.first is None and isinstance(found, Tensor) and not bool(found.isfinite().all()):
            self.first = name
