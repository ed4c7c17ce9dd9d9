"""Look on at a training until it has ended: the view redrawn in place, or a line when something changed."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from refit.errors import BadInput
from refit.job import EVENTS, last_word, read_events
from refit.progress import status_of
from refit.store import join, store_for
from trainer import checkpoints, view
from trainer.metrics import Tail
from trainer.view import Scene

EVERY_SECONDS = 1.5


def look(output: str, tail: Tail) -> Scene:
    """What the folder of a training says now; every file may be in the middle of being written.

    Raises:
        BadInput: no job has run there.
    """
    try:
        events = read_events(store_for(output).read(join(output, EVENTS)).decode(errors="replace"))
    except FileNotFoundError as error:
        raise BadInput(f"{output}: no job has run there. Give the exact output folder.") from error
    committed = store_for(output).manifest(output) is not None
    newest = next(checkpoints.committed(output), None)
    return Scene(
        event=last_word(events, committed=committed), status=status_of(output) or {}, records=tail.read(),
        checkpoint=(newest.step, newest.manifest.created.timestamp()) if newest else None,
    )  # fmt: skip


def follow(
    output: str, *, to: TextIO | None = None, pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.time,
) -> None:  # fmt: skip
    """Show a training on `to` (stderr) until it has ended or a Ctrl-C comes, which ends only the looking on."""
    to = to or sys.stderr
    tail = Tail(output)
    show = _redraw(to) if to.isatty() else _tell(to)
    try:
        while True:
            scene = look(output, tail)
            show(scene, clock())
            if scene.ended:
                return
            pause(EVERY_SECONDS)
    except KeyboardInterrupt:
        return


def _redraw(to: TextIO) -> Callable[[Scene, float], None]:
    drawn = 0

    def show(scene: Scene, now: float) -> None:
        nonlocal drawn
        lines = view.render(scene, now, shutil.get_terminal_size().columns - 1)
        back = f"\x1b[{drawn}F\x1b[J" if drawn else ""  # up to the first line, and clear from there
        to.write(back + "".join(f"{line}\n" for line in lines))
        to.flush()
        drawn = len(lines)

    return show


def _tell(to: TextIO) -> Callable[[Scene, float], None]:
    before: tuple[object, ...] | None = None

    def show(scene: Scene, now: float) -> None:
        nonlocal before
        if (now_changed := view.changed(scene)) != before:
            before = now_changed
            print(view.line(scene, now), file=to, flush=True)

    return show
