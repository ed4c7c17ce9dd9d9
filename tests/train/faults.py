"""Faults on demand in a real training, at the steps that are named: a rank's loss or gradient is not finite, or it
enters a collective alone (once in an output, not again after a resume).

`trainer` as a person calls it, but for its ranks, which are started through this file. FAULTS holds a JSON list of
{"rank", "step" (from 1), "what": "loss", "gradient" or "collective"}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

FAULTS = "REFIT_TEST_FAULTS"


def trainer() -> int:
    """The trainer, whose ranks are started as `faults.py -m trainer.rank TASK`."""
    import trainer.ranks
    from trainer.cli import main

    python = Path(os.environ[f"{FAULTS}_FOLDER"]) / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    trainer.ranks.sys.executable = str(python)
    return main(sys.argv[1:])


def rank() -> NoReturn:
    """A rank with faults in it."""
    from torch import Tensor

    from trainer import loop, rank

    faults = json.loads(os.environ[FAULTS])
    mine = {f["step"]: f["what"] for f in faults if f["rank"] == int(os.environ["RANK"])}
    step, at = loop.Loop.step, {"step": 0}

    def taking(self: Any, number: int) -> dict[str, Any]:
        at["step"] = number + 1
        self._engine.loss = faulty(self._engine)
        return step(self, number)

    def faulty(engine: Any) -> Any:
        def loss(batch: Any) -> Tensor:
            found = type(engine).loss(engine, batch)
            what = mine.get(at["step"])
            if what == "loss":
                return found + float("inf")  # its gradient is finite
            if what == "gradient":
                found.register_hook(lambda gradient: gradient * float("nan"))
            return found

        return loss

    agree = loop.Loop._agree

    def agreeing(self: Any, *arguments: Any) -> Any:
        agreement = agree(self, *arguments)
        if mine.get(at["step"]) == "collective" and not (done := self._task.folder / "entered-alone").exists():
            done.touch()
            agree(self, *arguments).heard()
        return agreement

    loop.Loop.step = taking  # type: ignore[method-assign]
    loop.Loop._agree = agreeing  # type: ignore[method-assign]
    sys.argv = sys.argv[2:]
    rank.leave(rank.main())


if __name__ == "__main__":
    sys.exit(rank() if sys.argv[1:2] == ["-m"] else trainer())
