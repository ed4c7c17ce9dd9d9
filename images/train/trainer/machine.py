"""What this machine is good at; nothing here needs torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Literal

from refit.spec import Train
from trainer import gpus

Arithmetic = Literal["float32", "bfloat16"]

BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
"""Processor flags with which bfloat16 products are faster than float32 ones, not emulated by them."""

BFLOAT16_CARDS = (8, 0)
"""Cards from this compute capability on compute in bfloat16."""

GROUP = Path("/sys/fs/cgroup")
"""Where a container finds its own control group."""


def arithmetic(train: Train) -> Arithmetic:
    """The recipe's dtype, with "auto" settled for this machine; cards that are not seen from here are taken for new."""
    if train.dtype != "auto":
        return train.dtype
    if train.gpus_per_node > 0:
        known = [gpu.capability for gpu in gpus.look().gpus[: train.gpus_per_node] if gpu.capability]
        return "bfloat16" if min(known, default=BFLOAT16_CARDS) >= BFLOAT16_CARDS else "float32"
    return "bfloat16" if flags() & BFLOAT16_FLAGS else "float32"


def flags() -> frozenset[str]:
    """The processor's flags, as Linux names them."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def processor() -> str:
    """The processor's name, as Linux has it; its architecture where it has none."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    line = next((line for line in text.splitlines() if line.startswith("model name")), "")
    return line.partition(":")[2].strip() or platform.machine()


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    """Memory that is available now, in bytes: the machine's, or what a container's limit leaves of it."""
    left = _group_bytes()
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            return available if left is None else min(available, left)
    raise OSError("/proc/meminfo has no MemAvailable")


def _group_bytes() -> int | None:
    """What is left below our control group's limit (version 2); None where there is no limit.

    File pages that nobody uses are counted as free: the kernel gives them up before it kills.
    """
    try:
        limit = (GROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((GROUP / "memory.current").read_text(encoding="ascii"))
        lines = (GROUP / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    idle = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    return max(0, int(limit) - used + idle)
