"""What is wrong with this machine or set-up, and what to do about it: `refit doctor`."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from typing import Any

from refit.proc import STACK_TAG, find_tagged
from standalone import checks
from standalone.home import PRIVATE_FILE, Home, root
from standalone.ports import Ports, is_free, owner, variable
from standalone.programs import LISTENS
from standalone.record import Record
from standalone.status import status


def examine(home: Home, ports: Ports) -> dict[str, Any]:
    """Run every check; print a line each, and return {"healthy", "problems": {check: [line, …]}}."""
    questions: dict[str, Callable[[], list[str]]] = {
        "python": checks.python_problems,
        "tools": checks.tool_problems,
        "processor": checks.processor_problems,
        "disk": lambda: checks.disk_problems(home.path, checks.RUN_DISK_GB),
        "set-up": _set_up_problems,
        "secrets": lambda: _secret_problems(home),
        "stack": lambda: _stack_problems(home, ports),
    }
    problems = {name: question() for name, question in questions.items()}
    for name, lines in problems.items():
        for line in lines or ["ok"]:
            print(f"{name:<12}{line}", file=sys.stderr)
    return {
        "healthy": not any(problems.values()),
        "problems": {name: lines for name, lines in problems.items() if lines},
    }


def _set_up_problems() -> list[str]:
    """A venv without its stamp was never finished."""
    venvs = [root() / ".venv", root() / ".venv-compute"]
    return [f"{venv} is not complete; run `make setup`." for venv in venvs if not (venv / ".refit-stamp").exists()]


def _secret_problems(home: Home) -> list[str]:
    """Passwords that others can read."""
    if not home.secrets.is_dir():
        return []
    problems = []
    for path in sorted(home.secrets.iterdir()):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & ~PRIVATE_FILE:
            problems.append(f"{path} has mode {mode:04o}; run: chmod 600 {path}")
        if path.stat().st_uid != os.geteuid():
            problems.append(f"{path} belongs to another user; start the stack as the user who made {home.path}.")
    return problems


def _stack_problems(home: Home, ports: Ports) -> list[str]:
    """A stack that runs must work; one that does not must have left nothing, and its ports must be free."""
    record = Record.read(home)
    if record is not None and record.runs():
        programs = status(home)["programs"].items()
        return [f"{name}: {program['why']}; log: {program['log']}" for name, program in programs if program["why"]]
    left = find_tagged(str(home.path), variable=STACK_TAG)
    if left:
        pids = ", ".join(str(identity.pid) for identity in left)
        return [f"supervisor is gone and left pid {pids}; `make up` or `make down` cleans that."]
    problems = checks.memory_problems()
    for fields in LISTENS.values():
        for name, title in fields.items():
            port = getattr(ports, name)
            if not is_free(port):
                problems.append(f"port {port} for {title} is in use by {owner(port)}; set {variable(name)} to another.")
    return problems
