"""`make lock`: derive every lock and pin list from constraints.txt and the pyproject files. Standard library only.

A committed list carries hashes and no address of an index and no path of this machine. For the compute side, uv must be
able to see vLLM's CPU build of torch: REFIT_TORCH_WHEELS names a folder with its wheel.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from standalone.venvs import IMAGES, LOCKS, ROOT, Command, SetupFailed, run, step, uv

LINUX = ["--python-platform", "x86_64-manylinux_2_28"]
IMAGE_FOLDERS = ("base", "data", "train", "evaluate", "serve")
EXTRAS = {"train": ["--extra", "cards"]}
"""What an image holds beside what its package needs everywhere: plain torch of the pin list is the build for cards."""


def main() -> int:
    """Write both locks and the images' pin lists."""
    wheels = os.environ.get("REFIT_TORCH_WHEELS")
    if not wheels or not Path(wheels).is_dir():
        print("lock: set REFIT_TORCH_WHEELS to a folder with the wheel of torch's CPU build.", file=sys.stderr)
        return 10
    try:
        with step("locks"):
            _control()
            _compute(Path(wheels))
            for name in IMAGE_FOLDERS:
                _image(name)
    except SetupFailed as failure:
        print(f"lock: {failure}", file=sys.stderr)
        return 1
    return 0


def _control() -> None:
    projects = [_project(name) for name in ("base", "data", "evaluate", "serve", "standalone")]
    _compile(LOCKS / "control.lock", ROOT / "pyproject.toml", *projects, LOCKS / "control.in", more=["--universal"])


def _compute(wheels: Path) -> None:
    torch = [
        "--find-links",
        str(wheels),
        "--override",
        str(_here(LOCKS / "compute.override")),
        "--no-emit-package",
        "torch",
    ]
    _compile(LOCKS / "compute.lock", _project("base"), _project("train"), LOCKS / "compute.in", more=[*LINUX, *torch])


def _image(name: str) -> None:
    projects = [_project("base")] if name == "base" else [_project("base"), _project(name)]
    _compile(IMAGES / name / "requirements.txt", *projects, more=[*LINUX, *EXTRAS.get(name, [])])


def _compile(output: Path, *inputs: Path, more: list[str]) -> None:
    options = ["--quiet", "--generate-hashes", "--python-version", "3.11", "--extra", "s3"]
    ours = ["--no-emit-package", "refit-base", "--custom-compile-command", "make lock"]
    constraints: Command = ["--constraints", _here(IMAGES / "constraints.txt")]
    files: Command = [*(_here(path) for path in inputs), "--output-file", _here(output)]
    run([uv(), "pip", "compile", *options, *ours, *constraints, *more, *files])


def _project(name: str) -> Path:
    return IMAGES / name / "pyproject.toml"


def _here(path: Path) -> Path:
    """Relative to the checkout: the path is written into the list as the reason for a line."""
    return path.relative_to(ROOT)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
