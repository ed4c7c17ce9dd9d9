"""The start of the stack's programs under a running supervisor, in order, and the wait until they work."""

from __future__ import annotations

import json
import subprocess
import time

from operators import pools
from refit import files
from refit.errors import Infrastructure, ServerUnavailable
from refit.proc import Identity, kill_tree, spawn
from standalone import airflow_config, environment, postgres
from standalone.airflow import Airflow
from standalone.home import Home, root
from standalone.migrate import migrate
from standalone.ports import Ports
from standalone.programs import GROUPS, gateway_config_argv, log_file
from standalone.progress import Progress, last_words
from standalone.record import Record
from standalone.status import problem_of
from standalone.supervisor import Supervisor

POLL_SECONDS = 0.3


class Start:
    """One `refit up`, from the running supervisor on."""

    def __init__(
        self, home: Home, record: Record, supervisor: Supervisor, progress: Progress, *, seconds: float
    ) -> None:
        self._home = home
        self._ports: Ports = record.ports
        self._supervisor = supervisor
        self._progress = progress
        self._deadline = time.monotonic() + seconds
        self._ready: set[str] = set()
        ours = environment.variables(home, record.ports, record.socket)
        self._environment = environment.for_programs(home, ours)

    def everything(self, groups: list[str]) -> None:
        """Start what does not run of `groups` and wait until all of it works."""
        if "postgres" in groups:
            self._start("postgres")
            self._wait(["postgres"])
            self._make_databases()
        if "gateway" in groups:
            self._run("gateway-config", gateway_config_argv(self._home, self._ports))
        others = [group for group in groups if group != "airflow"]
        self._start(*(program for group in others for program in GROUPS[group]))
        if "airflow" in groups:  # last: it is the slowest, and the others warm up while its tables are prepared
            self._migrate_airflow()
            self._start(*GROUPS["airflow"])
        self._wait([program for group in groups for program in GROUPS[group]])
        if "airflow" in groups:
            self._make_pools()

    def _start(self, *names: str) -> None:
        for name in names:
            self._supervisor.start(name)

    def _wait(self, names: list[str]) -> None:
        while problems := self._problems(names):
            if time.monotonic() > self._deadline:
                raise ServerUnavailable(
                    "\n".join(
                        f"{name} is not ready: {problem}; {last_words(log_file(self._home, name))}"
                        for name, problem in problems.items()
                    )
                )
            time.sleep(POLL_SECONDS)

    def _problems(self, names: list[str]) -> dict[str, str]:
        """Program → why it does not work yet."""
        problems = {}
        processes = self._supervisor.processes()
        for name in names:
            if name in self._ready:
                continue
            if problem := problem_of(self._home, self._ports, processes[name]):
                problems[name] = problem
            else:
                self._ready.add(name)
                self._progress.say(f"{name} is ready")
        return problems

    def _make_databases(self) -> None:
        postgres.make_databases(self._home, self._ports)
        url = environment.database_url("refit", self._ports)
        for name in migrate(url, passfile=self._home.pgpass):
            self._progress.say(f"applied {name}")

    def _migrate_airflow(self) -> None:
        """Bring Airflow's tables up to its version; once a version and cluster: asking Airflow costs 10 CPU seconds."""
        stamp = self._home.airflow / "migrated.json"
        wanted = {"airflow": airflow_config.version(), "cluster": postgres.cluster_id(self._home)}
        if stamp.exists() and json.loads(stamp.read_text()) == wanted:
            return
        self._progress.say("preparing Airflow's tables")
        self._run("airflow-migrate", [str(root() / ".venv" / "bin" / "airflow"), "db", "migrate"])
        files.write(stamp, json.dumps(wanted).encode())

    def _make_pools(self) -> None:
        with Airflow(self._home) as airflow:
            for name in pools.ensure(airflow.url, airflow.token()):
                self._progress.say(f"made the pool {name}")

    def _run(self, name: str, argv: list[str]) -> None:
        """Run a command to its end, or end it when we are stopped; its output goes to a log file."""
        log = log_file(self._home, name)
        with log.open("ab") as output:
            child = spawn(argv, env=self._environment, cwd=self._home.path, stdout=output)
        identity = Identity.of(child.pid)
        try:
            code = child.wait(max(1.0, self._deadline - time.monotonic()))
        except BaseException as error:
            kill_tree(identity, grace=2)
            child.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise ServerUnavailable(f"{name} did not end in time; {last_words(log)}") from None
            raise
        if code != 0:
            raise Infrastructure(f"{name} failed; {last_words(log)}")
