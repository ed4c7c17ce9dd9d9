"""Faults on demand in a real training, at the steps that are named: a rank's loss or gradient is not finite; or, once
in an output and not again after a resume, it enters a collective alone, hangs in its forward pass, or has its launcher
told to stop when it looks at the validation split.

`trainer` as a person calls it, but for its ranks, which are started through this file. FAULTS holds a JSON list of
{"rank", "step" (from 1), "what": "loss", "gradient", "collective", "hang" or "stop"}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
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

    from trainer import loop, rank, validation

    faults = json.loads(os.environ[FAULTS])
    mine = {f["step"]: f["what"] for f in faults if f["rank"] == int(os.environ["RANK"])}
    step, at = loop.Loop.step, dict[str, Any](step=0)

    def once(what: str, folder: Path) -> bool:
        if mine.get(at["step"]) != what or (done := folder / f"once-{what}").exists():
            return False
        done.touch()
        return True

    def taking(self: Any, number: int) -> dict[str, Any]:
        at["step"], at["folder"] = number + 1, self._task.folder
        self._engine.loss = faulty(self._engine)
        return step(self, number)

    def faulty(engine: Any) -> Any:
        def loss(batch: Any) -> Tensor:
            found = type(engine).loss(engine, batch)
            what = mine.get(at["step"])
            if what == "loss":
                return found + float("inf")  # its gradient is finite
            if once("hang", at["folder"]):
                time.sleep(3600)
            if what == "gradient":
                found.register_hook(lambda gradient: gradient * float("nan"))
            return found

        return loss

    agree = loop.Loop._agree

    def agreeing(self: Any, *arguments: Any) -> Any:
        agreement = agree(self, *arguments)
        if once("collective", self._task.folder):
            agree(self, *arguments).heard()
        return agreement

    turns = validation.Validator._turns

    def stopped(self: Any) -> Any:
        if at["step"] and once("stop", at["folder"]):
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(2)  # until it has told the ranks
        return turns(self)

    validation.Validator._turns = stopped  # type: ignore[method-assign]
    loop.Loop.step = taking  # type: ignore[method-assign]
    loop.Loop._agree = agreeing  # type: ignore[method-assign]
    sys.argv = sys.argv[2:]
    rank.leave(rank.main())


if __name__ == "__main__":
    sys.exit(rank() if sys.argv[1:2] == ["-m"] else trainer())
