"""The one home of ports."""

from __future__ import annotations

import os
import socket

import pytest

from refit.errors import BadInput, PreflightRefused
from standalone.ports import HOST, Ports, free_ports, is_free, refuse_taken


def test_each_server_has_its_own_default_port_outside_the_range_for_outgoing_connections() -> None:
    ports = [int(port) for port in Ports().variables().values()]
    assert len(set(ports)) == len(ports)
    assert all(1024 < port < 32768 for port in ports)


def test_a_variable_moves_one_port_and_the_variables_read_back() -> None:
    moved = Ports.from_environment({"REFIT_PORT_AIRFLOW": "31000"})
    assert moved.airflow == 31000
    assert moved.mlflow == Ports().mlflow
    assert Ports.from_environment(moved.variables()) == moved


@pytest.mark.parametrize("value", ["", "http", "0", "70000", "-1", "8080.5"])
def test_a_value_that_is_no_port_is_refused_by_name(value: str) -> None:
    with pytest.raises(BadInput, match="REFIT_PORT_MLFLOW is"):
        Ports.from_environment({"REFIT_PORT_MLFLOW": value})


def test_two_servers_must_not_share_a_port() -> None:
    with pytest.raises(BadInput, match="REFIT_PORT_RECORDER and REFIT_PORT_CONTROLLER are both 31000"):
        Ports.from_environment({"REFIT_PORT_CONTROLLER": "31000", "REFIT_PORT_RECORDER": "31000"})


def test_free_ports_are_free_and_distinct() -> None:
    ports = [int(port) for port in free_ports().variables().values()]
    assert len(set(ports)) == len(Ports().variables())
    assert all(is_free(port) for port in ports)


def test_a_taken_port_is_refused_with_its_owner_and_the_variable() -> None:
    ports = free_ports()
    with socket.socket() as taken:
        taken.bind((HOST, ports.gateway))
        taken.listen(1)
        assert not is_free(ports.gateway)
        with pytest.raises(PreflightRefused) as refusal:
            refuse_taken(ports, {"gateway": "the gateway", "mlflow": "MLflow"})
    (line,) = str(refusal.value).splitlines()
    assert f"port {ports.gateway} for the gateway is in use by" in line
    assert f"(pid {os.getpid()})" in line
    assert "set REFIT_PORT_GATEWAY" in line
