"""The set-up: what a clean clone needs, before anything is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from standalone import checks, venvs

ROOT = Path(__file__).resolve().parents[2]
LISTS = sorted([*ROOT.glob("images/*/*.lock"), *ROOT.glob("images/*/requirements.txt")])


@pytest.mark.parametrize("path", LISTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_pin_list_has_hashes_and_no_address_and_no_path_of_a_machine(path: Path) -> None:
    text = path.read_text()
    assert re.findall(r"^[^#\s].*\S$", text, re.MULTILINE)
    assert re.findall(r"://|--find-links|--(?:extra-)?index-url|(?<![\w.])/(?:home|root|tmp|opt|work)/", text) == []
    for block in re.split(r"\n(?=\S)", text):
        if "==" in block and not block.startswith("#"):
            assert "--hash=sha256:" in block, block.splitlines()[0]


@pytest.mark.parametrize("path", LISTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_pin_list_agrees_with_the_constraints(path: Path) -> None:
    """A version that was changed in one place only: run `make lock`."""
    wanted = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "images/constraints.txt").read_text(), re.MULTILINE))
    wanted = {name.lower(): version for name, version in wanted.items()}
    found = dict(re.findall(r"^([\w.-]+)(?:\[[\w,]+\])?==([^\s;]+)", path.read_text(), re.MULTILINE))
    both = wanted.keys() & found.keys()
    assert both
    assert {name: found[name] for name in both} == {name: wanted[name] for name in both}


def test_what_a_pyproject_asks_for_has_a_version_in_the_constraints() -> None:
    constrained = re.findall(r"^([\w.-]+)==", (ROOT / "images/constraints.txt").read_text(), re.MULTILINE)
    asked = set()
    for path in [ROOT / "pyproject.toml", *ROOT.glob("images/*/pyproject.toml")]:
        (block,) = re.findall(r"^dependencies = \[(.*?)\]$", path.read_text(), re.MULTILINE | re.DOTALL)
        asked.update(re.findall(r'"([\w.-]+)', block))
    assert sorted(asked - {"refit-base"} - set(constrained)) == []


def test_the_bootstrap_needs_nothing_but_the_standard_library() -> None:
    """It runs before any venv: -S leaves out site-packages."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "images" / "standalone")}
    load = "import standalone.bootstrap, standalone.lock, standalone.checks"
    done = subprocess.run([sys.executable, "-S", "-c", load], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_make_alone_lists_every_target_with_a_line() -> None:
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = dict(re.findall(r"^  make ([\w-]+) +(\S.*)$", done.stdout, re.MULTILINE))
    phony = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
    assert set(listed) == set(phony)
    assert {"setup", "up", "down", "status", "demo", "check", "test", "test-fast", "bench", "soak", "clean"} <= set(
        listed
    )


@pytest.mark.parametrize(
    ("problems", "words"),
    [
        (lambda: checks.tool_problems(("no-such-tool",)), ["no-such-tool is missing", "apt-get install no-such-tool"]),
        (lambda: checks.disk_problems(Path("/"), 1e9), ["GB of disk are free", "1000000000.0 GB are needed"]),
        (lambda: checks.memory_problems(1e9), ["GB of memory are free", "1000000000.0 GB are needed"]),
    ],
)
def test_what_a_machine_lacks_is_one_clear_line(problems, words: list[str]) -> None:  # type: ignore[no-untyped-def]
    (line,) = problems()
    assert [word for word in words if word not in line] == []
    assert "\n" not in line


def test_this_machine_passes_its_own_checks() -> None:
    assert checks.python_problems() + checks.tool_problems(("sh",)) + checks.processor_problems() == []


def test_a_venv_is_current_only_with_the_right_stamp_and_a_working_python(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    assert not venvs._is_current(venv, "a")
    (venv / venvs.STAMP).write_text("a")
    assert not venvs._is_current(venv, "a"), "its python does not run"
    (venv / "bin" / "python").symlink_to(sys.executable)
    assert venvs._is_current(venv, "a")
    assert not venvs._is_current(venv, "b")


def test_a_missing_cpu_build_of_torch_is_one_line_that_names_pips_variables(tmp_path: Path) -> None:
    no_index = tmp_path / "python"
    no_index.write_text(
        '#!/bin/sh\ncase "$*" in *"pip install"*) echo "ERROR: No matching distribution found for torch" >&2;; esac\n'
        "exit 1\n"
    )
    no_index.chmod(0o755)
    with pytest.raises(venvs.SetupFailed) as failure:
        venvs._install_torch(no_index, "9+cpu")
    assert "\n" not in str(failure.value)
    assert "PIP_EXTRA_INDEX_URL" in str(failure.value)
    assert "PIP_FIND_LINKS" in str(failure.value)


def test_a_shim_calls_the_program_of_the_compute_venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(venvs, "CONTROL", tmp_path / "control")
    monkeypatch.setattr(venvs, "COMPUTE", tmp_path / "com pute")
    (tmp_path / "control" / "bin").mkdir(parents=True)
    (tmp_path / "com pute" / "bin").mkdir(parents=True)
    program = tmp_path / "com pute" / "bin" / "trainer"
    program.write_text('#!/bin/sh\necho "$# $1"\nexit 12\n')
    program.chmod(0o755)
    venvs._write_shim("trainer")
    done = subprocess.run([tmp_path / "control" / "bin" / "trainer", "a b", "c"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (12, "2 a b\n")
