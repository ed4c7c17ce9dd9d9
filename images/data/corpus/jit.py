"""The one door to Numba: compiled at the first call, kept on disk, free of the interpreter's lock."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import numba

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def kernel(function: Kernel) -> Kernel:
    """Compile a function on arrays. Several threads may run it at once, on parts that do not overlap."""
    return cast(Kernel, numba.njit(cache=True, nogil=True)(function))


def in_parts(function: Callable[[int, int], None], count: int, smallest: int = 256) -> None:
    """Call `function(first, last)` for parts of `range(count)`, a thread a core."""
    cores = len(os.sched_getaffinity(0))
    parts = max(1, min(cores * 4, count // smallest))
    edges = [count * part // parts for part in range(parts + 1)]
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(function, edges[:-1], edges[1:]))
