"""Signs of life, for work that is silent for long: whoever is not heard of is taken for dead."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from refit.store import Heard

SECONDS = 2.0
"""Between two signs."""


def seldom(heard: Heard) -> Heard:
    """The same, called through once in a while: a sign of life is a file to write, a piece of an object is not."""
    last = time.monotonic()

    def told() -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS:
            last = time.monotonic()
            heard()

    return told


@contextmanager
def beating(heard: Heard) -> Iterator[None]:
    """Give signs of life while one waits for somebody else, who ends the waiting if nothing comes."""
    done = Event()

    def beat() -> None:
        while not done.wait(SECONDS):
            heard()

    thread = Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
