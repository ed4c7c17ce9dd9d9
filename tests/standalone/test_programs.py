"""supervisor's configuration, read back by supervisor's own parser."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from supervisor.options import ServerOptions

from refit.errors import BadInput
from standalone.home import Home
from standalone.ports import HOST, Ports
from standalone.probes import PROBES
from standalone.programs import GROUPS, LISTENS, Program, programs, select, supervisor_config


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "a home with blanks, 100% ours")
    home.make_folders()
    home.make_secrets()
    return home


def parsed(home: Home, all_programs: list[Program]) -> dict[str, Any]:
    """What supervisor itself makes of the text: group → process configuration."""
    path = home.supervisor / "supervisord.conf"
    path.write_text(supervisor_config(home, Path("/tmp/refit-test/supervisor.sock"), all_programs))
    options = ServerOptions()
    options.configfile = str(path)
    options.here = str(path.parent)
    options.process_config(do_usage=False)
    return {group.name: group.process_configs[0] for group in options.process_group_configs}


def test_supervisor_reads_every_program_as_it_was_meant(home: Home) -> None:
    meant = programs(home, Ports())
    found = parsed(home, meant)
    assert set(found) == {program.name for program in meant}
    for program in meant:
        assert shlex.split(found[program.name].command) == program.argv
        assert found[program.name].environment.items() >= program.environment.items()
        assert found[program.name].stdout_logfile == str(home.logs / f"{program.name}.log")


def test_restarts_are_patient_and_nothing_starts_out_of_order(home: Home) -> None:
    for name, process in parsed(home, programs(home, Ports())).items():
        assert process.startretries >= 1_000_000, name
        assert process.autostart is False, name
        assert process.killasgroup is True, name


def test_a_program_that_was_added_at_run_time_is_read_with_the_rest(home: Home) -> None:
    (home.supervisor / "conf.d" / "server-a.conf").write_text("[program:server-a]\ncommand=sleep 1\n")
    found = parsed(home, programs(home, Ports()))
    assert found["server-a"].command == "sleep 1"
    assert found["server-a"].autostart is True


def test_postgres_stops_last_and_fast(home: Home) -> None:
    found = parsed(home, programs(home, Ports()))
    others = [process.priority for name, process in found.items() if name != "postgres"]
    assert found["postgres"].priority < min(others)
    assert found["postgres"].stopsignal == 2  # SIGINT: a fast shutdown


def test_changed_airflow_settings_change_the_sections_of_airflow_only(home: Home) -> None:
    before = {program.name: program for program in programs(home, Ports())}
    after = {program.name: program for program in programs(home, Ports(airflow=31000))}
    assert {name for name in before if before[name] != after[name]} == set(GROUPS["airflow"])


def test_every_program_has_a_group_a_probe_and_listens_here_only(home: Home) -> None:
    names = [program.name for program in programs(home, Ports())]
    assert names == [name for group in GROUPS.values() for name in group]
    assert set(PROBES) == set(names)
    assert set(LISTENS) <= set(names)
    addresses = [word for program in programs(home, Ports()) for word in program.argv if "0.0.0.0" in word]
    assert addresses == []
    assert HOST == "127.0.0.1"


def test_only_brings_what_is_needed_with_it_in_order() -> None:
    assert select(None) == list(GROUPS)
    assert select("airflow") == ["postgres", "airflow"]
    assert select("gateway, mlflow") == ["postgres", "mlflow", "gateway"]
    with pytest.raises(BadInput, match=r"there is no airflw; the programs are postgres, mlflow, airflow"):
        select("airflw")
