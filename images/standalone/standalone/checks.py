"""What this machine must have, checked before anything is begun. Standard library only: it runs before any venv exists.

Each check returns the problems it found, one clear line each: what was found, what is needed, what to do.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

PYTHON = (3, 11)
"""The Python that the lock files are for: the compute side is made of wheels of this version."""

GB = 10**9
SETUP_DISK_GB = 9.0
"""Both venvs (5 GB), the package cache's copy of what cannot be linked, the demo's base model and data."""
SETUP_MEMORY_GB = 1.5
RUN_DISK_GB = 2.0
RUN_MEMORY_GB = 3.0
"""The idle stack takes 2.5 GB; a training or a model server comes on top."""


def python_problems() -> list[str]:
    """This interpreter: its version, and whether it can make a venv."""
    found = sys.version_info[:2]
    if found != PYTHON or sys.implementation.name != "cpython":
        return [
            f"Python {found[0]}.{found[1]} runs this, and {PYTHON[0]}.{PYTHON[1]} is needed; "
            "install it (Debian 12: apt-get install python3-venv), or name it: make setup PYTHON=/path/to/python3.11"
        ]
    if importlib.util.find_spec("ensurepip") is None:  # Debian packs it apart
        return ["Python's venv module is incomplete; install it (Debian 12: apt-get install python3-venv)."]
    return []


def tool_problems(tools: tuple[str, ...] = ("make", "git")) -> list[str]:
    """Commands that must be on PATH."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    return [f"{tool} is missing (Debian: apt-get install {tool})." for tool in missing]


def disk_problems(folder: Path, needed_gb: float) -> list[str]:
    """Free space where `folder` is, or will be. REFIT_MIN_DISK_GB replaces the bound."""
    needed = float(os.environ.get("REFIT_MIN_DISK_GB", needed_gb))
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free / GB
    if free >= needed:
        return []
    return [
        f"{free:.1f} GB of disk are free at {existing}, and {needed:.1f} GB are needed; free some, or move it away."
    ]


def memory_problems(needed_gb: float = RUN_MEMORY_GB) -> list[str]:
    """Memory that is free now, within this container's limit. REFIT_MIN_MEMORY_GB replaces the bound."""
    needed = float(os.environ.get("REFIT_MIN_MEMORY_GB", needed_gb))
    free = free_memory() / GB
    if free >= needed:
        return []
    return [f"{free:.1f} GB of memory are free, and {needed:.1f} GB are needed; stop something that uses much."]


def free_memory() -> int:
    """Bytes that a program could get now: the machine's, or what is left of the control group's limit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        statistics = Path("/sys/fs/cgroup/memory.stat").read_text().split()
    except (OSError, ValueError):
        return available
    if limit == "max":
        return available
    cache = int(statistics[statistics.index("inactive_file") + 1])  # given back when somebody needs it
    return min(available, int(limit) - used + cache)


def processor_problems() -> list[str]:
    """vLLM's CPU build needs AVX2."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return (
        [] if "avx2" in flags else ["this processor has no AVX2, and vLLM's CPU build needs it; use another machine."]
    )
