"""The board in an API server of its own: Airflow's real auth manager and tokens, no scheduler."""

from __future__ import annotations

import os
import tempfile

# Before anything imports Airflow: it makes its home where it is first imported.
os.environ.setdefault("AIRFLOW_HOME", tempfile.mkdtemp(prefix="refit-test-airflow-"))
os.environ.setdefault("AIRFLOW__CORE__LOAD_EXAMPLES", "False")
os.environ["AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS"] = "ada:admin,vera:viewer"
os.environ["AIRFLOW__API_AUTH__JWT_SECRET"] = (
    "a secret of the tests, long enough for HS512 and for nobody else to know it"
)

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def app() -> Iterator[Any]:
    """The plugin as Airflow mounts it, and a door that logs somebody in as Airflow's own does: with a cookie."""
    from airflow import settings
    from airflow.api_fastapi.app import init_auth_manager
    from airflow.models.revoked_token import RevokedToken
    from fastapi import FastAPI
    from fastapi.responses import RedirectResponse

    sys.path.insert(0, str(ROOT / "plugins"))
    import plugin

    RevokedToken.__table__.create(settings.engine, checkfirst=True)  # where a token's end is looked up
    made = FastAPI()
    made.state.auth_manager = init_auth_manager(made)
    for mounted in plugin.RefitPlugin.fastapi_apps:
        made.mount(mounted["url_prefix"], mounted["app"])

    @made.get("/login/{name}")
    def login(name: str, to: str = "/refit/") -> RedirectResponse:
        answer = RedirectResponse(to)
        answer.set_cookie("_token", token_of(name), samesite="lax")
        return answer

    yield made
    sys.path.remove(str(ROOT / "plugins"))


def token_of(name: str) -> str:
    from airflow.api_fastapi.app import get_auth_manager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

    role = {"ada": "admin", "vera": "viewer"}[name]
    return str(get_auth_manager().generate_jwt(SimpleAuthManagerUser(username=name, role=role)))


@pytest.fixture(scope="session")
def server(app: Any) -> Iterator[Any]:
    """The app, asked without a network."""
    from fastapi.testclient import TestClient

    with TestClient(app) as client:
        yield client


@pytest.fixture
def as_user(app: Any) -> Callable[[str], dict[str, str]]:
    """The headers of somebody who has logged in."""
    return lambda name: {"authorization": f"Bearer {token_of(name)}"}


@pytest.fixture
def address(app: Any) -> Iterator[str]:
    """The app on a port of its own, for a browser."""
    import uvicorn

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        runner = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=runner.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        runner.should_exit = True
        thread.join(timeout=10)
