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

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def server() -> Iterator[Any]:
    """The plugin as Airflow mounts it."""
    from airflow import settings
    from airflow.api_fastapi.app import init_auth_manager
    from airflow.models.revoked_token import RevokedToken
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    sys.path.insert(0, str(ROOT / "plugins"))
    import plugin

    RevokedToken.__table__.create(settings.engine, checkfirst=True)  # where a token's end is looked up
    app = FastAPI()
    app.state.auth_manager = init_auth_manager(app)
    for mounted in plugin.RefitPlugin.fastapi_apps:
        app.mount(mounted["url_prefix"], mounted["app"])
    with TestClient(app) as client:
        yield client
    sys.path.remove(str(ROOT / "plugins"))


@pytest.fixture
def as_user(server: Any) -> Callable[[str], dict[str, str]]:
    """The headers of somebody who has logged in."""
    from airflow.api_fastapi.app import get_auth_manager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

    def headers(name: str) -> dict[str, str]:
        role = {"ada": "admin", "vera": "viewer"}[name]
        token = get_auth_manager().generate_jwt(SimpleAuthManagerUser(username=name, role=role))
        return {"authorization": f"Bearer {token}"}

    return headers
