"""`make setup` on a clean clone: interrupted at a bad moment, and run again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from standalone import venvs

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What is committed, without the venvs. The caches are shared, so that little is downloaded."""
    subprocess.run(["git", "clone", "--quiet", "--local", ROOT, tmp_path / "clone"], check=True)
    return tmp_path / "clone"


def make_control(clone: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(clone / "images" / "standalone")}
    environment.pop("VIRTUAL_ENV", None)
    return subprocess.Popen(
        [sys.executable, "-S", "-c", "from standalone import venvs; venvs.make_control()"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )


def test_a_set_up_that_was_stopped_half_way_is_finished_by_the_next(clone: Path) -> None:
    stopped = make_control(clone)
    assert stopped.stderr is not None
    for line in stopped.stderr:
        if line.startswith(".venv:"):
            break
    packages = clone / ".venv" / "lib" / "python3.11" / "site-packages"
    while not packages.is_dir() or len(list(packages.iterdir())) < 50:
        assert stopped.poll() is None
        time.sleep(0.02)
    os.killpg(stopped.pid, signal.SIGINT)  # as a terminal does: the whole group
    stopped.communicate()
    assert stopped.returncode != 0
    assert not (clone / ".venv" / venvs.STAMP).exists()

    again = make_control(clone)
    _, words = again.communicate()
    assert again.returncode == 0, words
    assert (clone / ".venv" / venvs.STAMP).exists()
    helped = subprocess.run([clone / ".venv" / "bin" / "refit", "--help"], capture_output=True, text=True)
    assert helped.returncode == 0, helped.stderr
    dry = ["pip", "install", "--dry-run", "--no-deps", "--python", clone / ".venv" / "bin" / "python", "--requirements"]
    asked = subprocess.run(
        [venvs.uv(), *dry, clone / "images/standalone/control.lock"], capture_output=True, text=True, check=True
    )
    assert "Would make no changes" in asked.stderr

    third = make_control(clone)
    assert third.communicate()[1] == "", "a third run has nothing to say"
