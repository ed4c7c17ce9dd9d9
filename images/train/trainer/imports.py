"""What a rank imports, seconds of it: all at once, and with the garbage collector off.

The imports make a million objects that stay for good. The collector would look through them again and again while they
come, and later at each of its rounds: a quarter of what the imports take, in processor time, and pauses in training.
"""

from __future__ import annotations

import gc

from trainer.task import Task


def of(task: Task) -> None:
    """Import what a task takes; what is there then is never looked through again."""
    gc.disable()
    try:
        from trainer import engines, work  # noqa: F401 (torch and transformers)

        if engines.kind(task.train, task.ranks) == "plain":
            from trainer import plain  # noqa: F401
        else:
            from trainer import engine  # noqa: F401 (DeepSpeed)
        if task.train.method != "full":
            import peft  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()
