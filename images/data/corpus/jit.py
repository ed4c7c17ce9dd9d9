"""The one door to Numba: compiled at the first call, kept on disk, free of the interpreter's lock."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def _sources() -> str:
    """A digest of the package's modules: Numba itself looks at the file of a kernel, not at those of what it calls."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


numba.config.CACHE_DIR = str(Path(__file__).parent / "__pycache__" / f"kernels-{_sources()}")


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
