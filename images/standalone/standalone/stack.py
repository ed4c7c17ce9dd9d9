"""The embedded stack, up and down.

supervisor keeps the programs alive; we start them in order and wait until each really works. Everything can be run
twice and stopped at any moment: what is there is kept, what is missing is made, and what an accident left behind is
found by its mark and its recorded identity (`refit.proc`) and ended before anything new is started.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from refit import files
from refit.errors import Infrastructure, PreflightRefused
from refit.proc import STACK_TAG, TAG, Identity, alive, kill_tree, spawn
from standalone import airflow_config, checks, environment, postgres
from standalone.home import Home, root
from standalone.ports import Ports, refuse_taken
from standalone.programs import GROUPS, LISTENS, programs, supervisor_config
from standalone.progress import Progress, last_words
from standalone.record import Record, forget_socket, socket_for
from standalone.start import POLL_SECONDS, Start
from standalone.supervisor import Supervisor

STOP_SECONDS = 60.0
"""How long supervisor may take for an orderly stop; PostgreSQL alone is given half of it."""


def up(home: Home, ports: Ports, groups: list[str], *, seconds: float = 600.0) -> float:
    """Start what does not run of `groups` and wait until all of it works; returns the seconds it took.

    Raises:
        PreflightRefused: too little memory or disk, a port that somebody else has, a missing package.
        ServerUnavailable: a program was not ready after `seconds`.
    """
    progress = Progress()
    home.make_folders()
    with _lock(home, progress):
        home.print_new_passwords(home.make_secrets())
        record = _supervised(home, ports, groups, progress)
        with Supervisor(record.socket) as supervisor:
            Start(home, record, supervisor, progress, seconds=seconds).everything(groups)
    progress.say("the stack is up")
    return progress.seconds


def down(home: Home, *, grace: float = 20.0) -> list[Identity]:
    """Stop everything that belongs to the stack, jobs included, and return only when nothing of it is left.

    Jobs get SIGTERM and `grace` seconds to write a checkpoint; the next run goes on from there. Returns what had to be
    ended beside supervisor's own orderly stop.
    """
    progress = Progress()
    if not home.path.exists():  # removed under a running stack, perhaps
        return kill_tree(None, grace=grace, tag=str(home.path), variable=STACK_TAG)
    with _lock(home, progress):
        record = Record.read(home)
        _stop_supervisor(record, progress)
        left = kill_tree(record.supervisor if record else None, grace=grace, tag=str(home.path), variable=STACK_TAG)
        if left:
            progress.say(f"ended {len(left)} more processes (jobs, or what an accident had left)")
        if record is not None:
            forget_socket(record)
            home.record.unlink(missing_ok=True)
    progress.say("the stack is down")
    return left


def _supervised(home: Home, ports: Ports, groups: list[str], progress: Progress) -> Record:
    """A supervisord that answers and has today's configuration: the running one where possible, or a new one."""
    previous = Record.read(home)
    socket = socket_for(previous)
    record = Record(socket, ports, _digest(environment.variables(home, ports, socket)))
    if previous is None or previous.socket != socket:
        # Written down at once: an `up` that is refused below must not lose the socket's new folder.
        replace(record, supervisor=previous.supervisor if previous else None).write(home)
    _write_configuration(home, record)
    if previous is not None and previous.runs():
        if previous.digest == record.digest and _answers(previous):
            with Supervisor(socket) as supervisor:
                for name in supervisor.update():
                    progress.say(f"{name} has new settings and is started again")
                _refuse_taken_ports(ports, groups, running=supervisor.running())
            return previous
        progress.say("the settings changed, or supervisor does not answer: everything is started anew")
        _stop_supervisor(previous, progress)
    identity = previous.supervisor if previous else None
    # Jobs are spared: they run in sessions of their own, and Airflow's next try adopts them.
    if left := kill_tree(identity, tag=str(home.path), variable=STACK_TAG, spare=TAG):
        progress.say(f"ended {len(left)} processes that an accident had left behind")
    _refuse_taken_ports(ports, groups, running=set())
    if problems := checks.memory_problems() + checks.disk_problems(home.path, checks.RUN_DISK_GB):
        raise PreflightRefused("\n".join(problems))
    if postgres.make_cluster(home):
        progress.say("made a new PostgreSQL cluster")
    return _start_supervisor(home, record)


def _start_supervisor(home: Home, record: Record) -> Record:
    record.write(home)
    output = home.logs / "supervisor.out"
    configuration = home.supervisor / "supervisord.conf"
    ours = environment.variables(home, record.ports, record.socket)
    with output.open("ab") as stdout:
        child = spawn(
            [sys.executable, "-m", "supervisor.supervisord", "--nodaemon", "--configuration", configuration],
            env=environment.for_programs(home, ours),
            cwd=home.supervisor,
            stdout=stdout,
        )
    record = replace(record, supervisor=Identity.of(child.pid))
    record.write(home)
    deadline = time.monotonic() + 30
    while not _answers(record):
        if child.poll() is not None or time.monotonic() > deadline:
            raise Infrastructure(f"supervisor did not start; {last_words(output)}")
        time.sleep(POLL_SECONDS)
    return record


def _stop_supervisor(record: Record | None, progress: Progress) -> None:
    """The orderly way, as far as it goes: all programs are asked at once, PostgreSQL last, then supervisor ends."""
    if record is None or record.supervisor is None or not record.runs():
        return
    progress.say("stopping the programs")
    try:
        with Supervisor(record.socket) as supervisor:
            for name in supervisor.running() - {"postgres"}:
                supervisor.stop(name)
            supervisor.shutdown()
    except OSError:
        return  # it does not answer: whoever called ends the tree
    deadline = time.monotonic() + STOP_SECONDS
    while alive(record.supervisor) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _answers(record: Record) -> bool:
    """True when the recorded supervisord, and no other, answers on its socket."""
    try:
        with Supervisor(record.socket) as supervisor:
            return record.supervisor is not None and supervisor.pid() == record.supervisor.pid
    except OSError:
        return False


def _write_configuration(home: Home, record: Record) -> None:
    files.write(home.airflow / "airflow.cfg", airflow_config.render(home, record.ports).encode(), mode=0o600)
    text = supervisor_config(home, record.socket, programs(home, record.ports))
    files.write(home.supervisor / "supervisord.conf", text.encode(), mode=0o600)


def _refuse_taken_ports(ports: Ports, groups: list[str], *, running: set[str]) -> None:
    starting = {program for group in groups for program in GROUPS[group]} - running
    refuse_taken(ports, {port: title for name in starting for port, title in LISTENS.get(name, {}).items()})


def _digest(variables: dict[str, str]) -> str:
    """Of what running programs cannot change any more: their environment, and the packages they were started from.

    Without PATH: it is the caller's, and another terminal is no reason to start everything anew.
    """
    ours = {name: value for name, value in variables.items() if name != "PATH"}
    stamp = root() / ".venv" / ".refit-stamp"
    packages = stamp.read_text() if stamp.exists() else ""
    return hashlib.sha256(json.dumps([ours, packages], sort_keys=True).encode()).hexdigest()


@contextmanager
def _lock(home: Home, progress: Progress) -> Iterator[None]:
    """One `up` or `down` a home at a time; the second waits for the first."""
    with (home.path / "lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say("waiting for another up or down of this home")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
