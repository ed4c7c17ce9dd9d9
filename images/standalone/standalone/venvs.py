"""The two virtual environments of the embedded stack. Standard library only: it runs before either exists.

`.venv` (Airflow, MLflow, the data and serving packages, the tools) is made by uv from `control.lock`. `.venv-compute`
(torch, DeepSpeed, vLLM) is made with pip where torch is concerned and with uv for the rest: vLLM's CPU build wants
exactly `torch==X+cpu`, a version that no public index may carry, so it comes from a folder or an extra index that pip
was told of, and uv does not look in pip's places.

Each venv gets a stamp, written last: the hash of everything it was made from. With the right stamp it is left alone;
without one it is made or repaired, whatever state a Ctrl-C left it in.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
IMAGES = ROOT / "images"
LOCKS = IMAGES / "standalone"
STAMP = ".refit-stamp"
RECIPE = "1"
"""Raise it when this file makes a venv differently."""

CONTROL = ROOT / ".venv"
COMPUTE = ROOT / ".venv-compute"
CONTROL_PACKAGES = [ROOT, *(IMAGES / name for name in ("base", "data", "evaluate", "serve", "standalone"))]
COMPUTE_PACKAGES = [IMAGES / name for name in ("base", "train", "serve")]
"""serve is there for the middleware that vLLM loads; it needs nothing but the standard library."""

COMPUTE_PROGRAMS = ("trainer",)
"""Programs of the compute side that are called as `.venv/bin/NAME` too."""


Command = list[str | Path]


class SetupFailed(Exception):
    """One clear line for the person who ran `make setup`."""


def cache() -> Path:
    """REFIT_CACHE: what is downloaded or prepared once a machine, outside of any home."""
    return Path(os.environ.get("REFIT_CACHE") or "~/.cache/refit").expanduser()


def pinned(package: str) -> str:
    """The version that constraints.txt gives a package."""
    text = (IMAGES / "constraints.txt").read_text(encoding="utf-8")
    match = re.search(rf"^{re.escape(package)}==(\S+)$", text, re.MULTILINE)
    if match is None:
        raise SetupFailed(f"images/constraints.txt has no line {package}==VERSION; add it.")
    return match[1]


def uv() -> Path:
    """uv of the pinned version, in a small venv of its own under the cache."""
    folder = cache() / "tools" / f"uv-{pinned('uv')}"
    program = folder / "bin" / "uv"
    if not _runs([program, "--version"]):
        shutil.rmtree(folder, ignore_errors=True)
        with step("uv"):
            run([sys.executable, "-m", "venv", folder])
            run([folder / "bin" / "pip", "install", "--quiet", f"uv=={pinned('uv')}"])
    return program


def are_current() -> bool:
    """True when there is nothing to make."""
    return _is_current(CONTROL, _control_stamp()) and _is_current(COMPUTE, _compute_stamp())


def make_control() -> None:
    """`.venv`: exactly what control.lock says, our packages, and the shims."""
    stamp = _control_stamp()
    if _is_current(CONTROL, stamp):
        return
    (CONTROL / STAMP).unlink(missing_ok=True)
    tool = uv()
    if not _runs([CONTROL / "bin" / "python", "-c", "pass"]):
        shutil.rmtree(CONTROL, ignore_errors=True)
        run([tool, "venv", "--quiet", "--python", sys.executable, CONTROL])
    with step(".venv: Airflow, MLflow, data, serving, tools"):
        target: Command = ["--python", CONTROL / "bin" / "python"]
        run(
            [tool, "pip", "sync", "--quiet", "--require-hashes", *target, LOCKS / "control.lock"], env=_uv_environment()
        )
        _install_ours(tool, CONTROL, CONTROL_PACKAGES)
    for name in COMPUTE_PROGRAMS:
        _write_shim(name)
    (CONTROL / STAMP).write_text(stamp)


def make_compute() -> None:
    """`.venv-compute`: torch by pip, the rest by uv with hashes."""
    stamp = _compute_stamp()
    if _is_current(COMPUTE, stamp):
        return
    (COMPUTE / STAMP).unlink(missing_ok=True)
    tool = uv()
    python = COMPUTE / "bin" / "python"
    if not _runs([python, "-m", "pip", "--version"]):
        shutil.rmtree(COMPUTE, ignore_errors=True)
        run([sys.executable, "-m", "venv", COMPUTE])
    with step(".venv-compute: torch"):
        _install_torch(python, torch_version())
    with step(".venv-compute: DeepSpeed, transformers, vLLM"):
        install: Command = [tool, "pip", "install", "--quiet", "--no-deps", "--python", python]
        # DeepSpeed compiles its operators when they are first used, or never: nothing here needs a compiler.
        environment = {**_uv_environment(), "DS_BUILD_OPS": "0"}
        run([*install, "--require-hashes", "--requirements", LOCKS / "compute.lock"], env=environment)
        _install_ours(tool, COMPUTE, COMPUTE_PACKAGES)
    (COMPUTE / STAMP).write_text(stamp)


def _install_torch(python: Path, version: str) -> None:
    if _runs([python, "-c", f"import importlib.metadata as m; assert m.version('torch') == '{version}'"]):
        return
    command: Command = [python, "-m", "pip", "install", "--no-deps", "--progress-bar", "off", f"torch=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    if "No matching distribution" in done.stderr:
        raise SetupFailed(
            f"pip finds no torch {version}: set PIP_EXTRA_INDEX_URL to an index that has PyTorch's CPU builds, "
            "or PIP_FIND_LINKS to a folder with the wheel, and run `make setup` again."
        )
    raise SetupFailed(f"pip could not install torch {version}: {_last_line(done.stderr)}")


def _install_ours(tool: Path, venv: Path, packages: Iterable[Path]) -> None:
    editable = [argument for package in packages for argument in ("--editable", str(package))]
    run([tool, "pip", "install", "--quiet", "--no-deps", "--python", venv / "bin" / "python", *editable])


def _write_shim(name: str) -> None:
    """`.venv/bin/NAME` for a program that lives in the compute venv."""
    shim = CONTROL / "bin" / name
    draft = shim.with_name(f".{name}.draft")
    draft.write_text(f'#!/bin/sh\nexec "{COMPUTE}/bin/{name}" "$@"\n')
    draft.chmod(0o755)
    draft.replace(shim)


def torch_version() -> str:
    """The CPU build of the pinned torch."""
    return f"{pinned('torch')}+cpu"


def _control_stamp() -> str:
    return _stamp([LOCKS / "control.lock", *(package / "pyproject.toml" for package in CONTROL_PACKAGES)])


def _compute_stamp() -> str:
    inputs = [LOCKS / "compute.lock", *(package / "pyproject.toml" for package in COMPUTE_PACKAGES)]
    return _stamp(inputs, torch_version())


def _stamp(inputs: Iterable[Path], *more: str) -> str:
    digest = hashlib.sha256(f"{RECIPE} {sys.version} {more}".encode())
    for path in inputs:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _is_current(venv: Path, stamp: str) -> bool:
    path = venv / STAMP
    return path.exists() and path.read_text() == stamp and _runs([venv / "bin" / "python", "-c", "pass"])


def _uv_environment() -> dict[str, str]:
    """uv's settings: no interpreter of its own, and the index that pip was given, where it was given one."""
    environment = {
        **os.environ,
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_LINK_MODE": os.environ.get("UV_LINK_MODE", "hardlink"),
    }
    environment.pop("VIRTUAL_ENV", None)
    if (index := os.environ.get("PIP_INDEX_URL")) and "UV_DEFAULT_INDEX" not in os.environ:
        environment["UV_DEFAULT_INDEX"] = index
    return environment


@contextmanager
def step(title: str) -> Iterator[None]:
    """A line when something long begins, and its seconds when it has ended."""
    print(f"{title} …", file=sys.stderr, flush=True)
    start = time.monotonic()
    yield
    print(f"{title}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def run(command: Command, *, env: dict[str, str] | None = None) -> None:
    """Run a command; its failure is one line, with its own words before it."""
    done = subprocess.run(command, env=env, stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise SetupFailed(f"{' '.join(map(str, command[:4]))} … failed with exit code {done.returncode}; see above.")


def _runs(command: Command) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it says nothing"
