"""Champion, challenger and users for real: Envoy, PostgreSQL, supervisor, the controller, the recorder, the replayer.

Only the models are small: `tests/serve/stub_vllm.py` takes vLLM's command line and answers as well as it is told.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from refit.manifest import Manifest
from refit.release import Release
from refit.spec import Serve
from refit.store import FileStore
from standalone.environment import database_url
from standalone.home import Home
from standalone.ports import HOST, free_ports

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv" / "bin"
STUB = ROOT / "tests" / "serve" / "stub_vllm.py"
INTENTS = ["refund", "delivery", "password", "invoice"]
POLICY = {
    "shadow_pairs": 10, "min_events": 12, "min_seconds": 1, "deadline_minutes": 2, "margin": 0.1, "stale_seconds": 20,
    "max_latency_ratio": 20, "keep_warm_minutes": 60,
}  # fmt: skip


class Stack:
    """One home with Envoy, PostgreSQL, controller and recorder, asked as the DAG asks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home, self.ports = folder, Home(folder / "home"), free_ports()
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STUB}" "$@"\n')
        python.chmod(0o755)
        self.environment = {
            **os.environ, **self.ports.variables(), "REFIT_HOME": str(self.home.path),
            "REFIT_COMPUTE_PYTHON": str(python),
        }  # fmt: skip
        self.items = folder / "heldout.parquet"
        write_items(self.items)
        self.replays: list[subprocess.Popen[bytes]] = []

    def refit(self, *arguments: str) -> None:
        done = subprocess.run([BIN / "refit", *arguments], env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def serving(self, *arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [BIN / "serving", *arguments], env=self.addresses(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    def addresses(self) -> dict[str, str]:
        return {
            **self.environment,
            "REFIT_GATEWAY_URL": f"http://{HOST}:{self.ports.gateway}",
            "REFIT_GATEWAY_ADMIN_URL": f"http://{HOST}:{self.ports.gateway_admin}",
            "REFIT_CONTROLLER_URL": f"http://{HOST}:{self.ports.controller}",
            "REFIT_RECORDER_URL": f"http://{HOST}:{self.ports.recorder}",
            "REFIT_TOKEN_FILE": str(self.home.token),
        }

    def ask(self, method: str, path: str, expect: int | None = None, **more: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.home.token.read_text().strip()}"}
        answer = httpx.request(
            method, f"http://{HOST}:{self.ports.controller}{path}", headers=headers, timeout=60, trust_env=False, **more
        )
        assert expect in (None, answer.status_code), answer.text
        return answer.json()

    def sql(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(database_url("refit", self.ports), passfile=str(self.home.pgpass)) as connection:
            return connection.execute(statement.encode(), values).fetchall()

    def pid(self, program: str) -> int:
        done = subprocess.run(
            [BIN / "supervisorctl", "-c", self.home.supervisor / "supervisord.conf", "pid", program],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return int(done.stdout)

    def release(self, pipeline: str, accuracy: float, *, seconds: float = 0.005, error_rate: float = 0.0) -> Release:
        uri = (self.folder / "models" / uuid.uuid4().hex).as_uri()
        with FileStore().publish(uri) as draft:
            (draft.path / "model.safetensors").write_bytes(uuid.uuid4().bytes)
            behaviour = {"accuracy": accuracy, "seconds": seconds, "error_rate": error_rate}
            (draft.path / "behaviour.json").write_text(json.dumps(behaviour))
            manifest = draft.commit(Manifest(kind="model", fingerprint="test"))
        return Release.of(pipeline, manifest, uri, Serve(), team="support", owner="a@example.com")

    def champion(self, pipeline: str, accuracy: float) -> Release:
        """A line with a champion that serves."""
        release = self.release(pipeline, accuracy)
        body = {"release": release.model_dump(mode="json")}
        self.ask("PUT", f"/v1/pipelines/{pipeline}/champion", 202, json=body)
        assert until(lambda: self.line(pipeline)["champion"] is not None, 60), self.line(pipeline)
        return release

    def line(self, pipeline: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", f"/v1/pipelines/{pipeline}", 200)
        return found

    def rollout(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", f"/v1/rollouts/{name}", 200)
        return found

    def start(self, name: str, release: Release, **policy: object) -> None:
        body = {
            "id": name, "pipeline": release.pipeline, "release": release.model_dump(mode="json"),
            "steps": [0, 5, 20, 50, 100], "policy": {**POLICY, **policy}, "run_id": "manual__1",
        }  # fmt: skip
        self.ask("POST", "/v1/rollouts", 201, json=body)

    def reach(self, name: str, step: int, seconds: float = 120) -> dict[str, Any]:
        """Go on, as the DAG does, until a step is live; fails where the rollout ends before."""
        for number in range(self.rollout(name)["step"] + 1, step + 1):
            assert until(lambda: self.rollout(name)["verdict"] != "wait", seconds), self.rollout(name)
            self.ask("POST", f"/v1/rollouts/{name}/steps/{number}", 200)
            assert until(lambda: self.rollout(name)["seconds_in_step"] is not None, 30), self.rollout(name)
        return self.rollout(name)

    def ended(self, name: str, seconds: float = 120) -> dict[str, Any]:
        assert until(lambda: self.rollout(name)["state"] != "running", seconds), self.rollout(name)
        return self.rollout(name)

    def users(self, pipeline: str, rate: float = 40) -> Replay:
        return Replay(self, pipeline, rate)


class Replay:
    """The replayer, running until it is told to stop."""

    def __init__(self, stack: Stack, pipeline: str, rate: float) -> None:
        self.until, self.stats_file = (stack.folder / f"{uuid.uuid4().hex}.{end}" for end in ("stop", "json"))
        self.process = subprocess.Popen(
            [
                BIN / "serving", "replay", "--pipeline", pipeline, "--items", stack.items, "--rate", str(rate),
                "--until-file", self.until, "--stats", self.stats_file, "--seed", str(uuid.uuid4().int % 1000),
            ],
            env=stack.addresses(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def so_far(self) -> dict[str, Any]:
        if not self.stats_file.exists():
            return {"total": 0, "ok": 0}
        found: dict[str, Any] = json.loads(self.stats_file.read_text())
        return found

    def stop(self) -> dict[str, Any]:
        self.until.touch()
        out, _ = self.process.communicate(timeout=60)
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found


def write_items(path: Path) -> None:
    rows = [(f"Ticket {number}: {INTENTS[number % 4]}", INTENTS[number % 4]) for number in range(400)]
    table = {
        "id": [str(number) for number in range(len(rows))],
        "user": ["" for _ in rows],
        "domain": ["mail" for _ in rows],
        "label": [label for _, label in rows],
        "messages": [json.dumps([{"role": "user", "content": text}]) for text, _ in rows],
        "answer": [json.dumps({"intent": label}) for _, label in rows],
    }
    pq.write_table(pa.table(table), path)


def until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)
    return condition()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("serving"))
    try:
        stack.refit("up", "--only", "gateway,controller,recorder")
        yield stack
    finally:
        stack.refit("down", "--grace", "2")


def test_a_better_model_goes_all_the_way_and_users_notice_nothing(stack: Stack) -> None:
    old, new = stack.champion("better", 0.6), stack.release("better", 0.97)
    with stack.users("better") as users:
        stack.start("better-1", new)
        stack.start("better-1", new)  # asked twice is asked once
        shares = []
        for step in (1, 2, 3, 4):
            stack.reach("better-1", step)
            shares.append(stack.serving("split", "better")["weight"])
        assert until(lambda: stack.rollout("better-1")["verdict"] == "pass", 120), stack.rollout("better-1")
        done = stack.ask("POST", "/v1/rollouts/better-1/finish", 200)
        assert users.so_far()["total"] > 100
        stats = users.stop()

    assert shares == [5, 20, 50, 100]
    assert done["state"] == "finished"
    assert (stats["failed"], stats["failed_on_killed"], stats["feedback_lost"]) == (0, 0, 0)
    assert set(stats["by_release"]) == {old.id, new.id}
    line = stack.line("better")
    assert (line["champion"]["id"], line["previous"]["id"], line["weight"]) == (new.id, old.id, 0)

    # What Postgres tells is what the journal tells, once each.
    actions = [entry["action"] for entry in stack.rollout("better-1")["journal"]]
    assert actions[0] == "started"
    assert actions[-2:] == ["finishing", "finished"]
    assert until(lambda: len(journal(stack, "better-1")) == len(actions), 20)
    assert [row[0] for row in journal(stack, "better-1")] == actions
    history = stack.sql(
        "SELECT champion, previous, rollout FROM champions WHERE pipeline = %s ORDER BY sequence", "better"
    )
    assert history == [(old.id, None, None), (new.id, old.id, "better-1")]
    # Every request was recorded once, every feedback too, and no user by their own name.
    assert until(lambda: stack.sql(EXPOSURES, "better")[0][0] == stats["total"], 20)
    assert stack.sql(
        "SELECT count(*) FROM feedback JOIN exposures USING (request_id) WHERE pipeline = %s", "better"
    ) == [(stats["feedback"],)]
    assert stack.sql("SELECT count(*) FROM exposures WHERE user_hash LIKE 'user-%%'") == [(0,)]

    # And back again: the one before is still warm.
    assert stack.serving("rollback", "better", "--reason", "a test")["champion"] == old.id
    assert stack.line("better")["previous"]["id"] == new.id


EXPOSURES = "SELECT count(*) FROM exposures WHERE pipeline = %s"


def journal(stack: Stack, rollout: str) -> list[tuple[Any, ...]]:
    return stack.sql("SELECT action, weight FROM rollout_journal WHERE rollout = %s ORDER BY sequence", rollout)


def test_a_user_stays_on_their_side_and_nobody_moves_back(stack: Stack) -> None:
    release = stack.champion("sticky", 0.9)
    new = stack.release("sticky", 0.95)
    stack.start("sticky-1", new, shadow_pairs=0)
    gateway = httpx.Client(base_url=f"http://{HOST}:{stack.ports.gateway}", trust_env=False)

    def challengers() -> set[int]:
        found = set()
        body = {"model": "sticky", "messages": [{"role": "user", "content": "Ticket 1: refund"}]}
        for user in range(300):
            answer = gateway.post("/sticky/v1/chat/completions", json=body, headers={"x-user-id": f"u{user}"})
            assert answer.status_code == 200
            if answer.headers["x-refit-release"] == new.id:
                found.add(user)
        return found

    stack.reach("sticky-1", 1)
    at_5 = challengers()
    assert 2 <= len(at_5) <= 35
    assert challengers() == at_5
    nobody = gateway.post("/sticky/v1/chat/completions", json={"model": "sticky", "messages": [{"content": "x: y"}]})
    assert nobody.headers["x-refit-release"] == release.id
    stack.ask("POST", "/v1/pipelines/sticky/rollback", 202, json={"reason": "seen enough"})
    assert stack.serving("split", "sticky")["weight"] == 0
    assert challengers() == set()
    assert stack.rollout("sticky-1")["why"] == "rolled back by api: seen enough"


def test_a_worse_model_is_taken_back_by_itself(stack: Stack) -> None:
    old, new = stack.champion("worse", 0.95), stack.release("worse", 0.2)
    with stack.users("worse") as users:
        stack.start("worse-1", new)
        stack.reach("worse-1", 1)
        ended = stack.ended("worse-1")
        assert stack.serving("split", "worse")["weight"] == 0
        stats = users.stop()
    assert ended["state"] == "rolled_back"
    assert "worse off" in ended["why"]
    assert ended["measured"]["difference"]["high"] < 0
    assert stats["failed"] == 0
    assert stack.line("worse")["champion"]["id"] == old.id
    stack.ask("POST", "/v1/rollouts/worse-1/steps/2", 409)
    assert until(lambda: bool(stack.sql("SELECT 1 FROM alerts WHERE level = 'dangerous' AND pipeline = 'worse'")), 10)


def test_a_killed_challenger_costs_users_nothing(stack: Stack) -> None:
    stack.champion("killed", 0.9)
    new = stack.release("killed", 0.9, seconds=0.05)
    with stack.users("killed", rate=60) as users:
        stack.start("killed-1", new, shadow_pairs=0)
        stack.reach("killed-1", 1)
        # Half of all users, so that many requests are under way when it dies.
        stack.ask("POST", "/v1/pipelines/killed/rollback", 202, json={"reason": "again, larger"})
        body = {"id": "killed-2", "pipeline": "killed", "release": new.model_dump(mode="json"), "steps": [0, 50, 100],
                "policy": {**POLICY, "shadow_pairs": 0}}  # fmt: skip
        stack.ask("POST", "/v1/rollouts", 201, json=body)
        stack.reach("killed-2", 1)
        before = users.so_far()["total"]
        assert until(lambda: users.so_far()["total"] > before + 100, 30)
        os.kill(stack.pid(f"server-{new.id}"), signal.SIGKILL)
        after = users.so_far()["total"]
        assert until(lambda: users.so_far()["total"] > after + 200, 60)
        stats = users.stop()
    assert (stats["failed"], stats["failed_on_killed"]) == (0, 0), stats["failures"]
    assert until(lambda: stack.sql(FAILOVERS, "killed-2")[0][0] > 0, 10)


FAILOVERS = "SELECT count(*) FROM exposures WHERE rollout = %s AND assigned = 'challenger' AND served = 'champion'"


def test_a_killed_gateway_and_a_killed_controller_are_survived(stack: Stack) -> None:
    stack.champion("kills", 0.6)
    new = stack.release("kills", 0.97)
    with stack.users("kills") as users:
        stack.start("kills-1", new)
        stack.reach("kills-1", 1)
        for program in ("gateway", "controller", "recorder"):
            os.kill(stack.pid(program), signal.SIGKILL)
            assert until(lambda: answers(stack), 60)
            assert stack.rollout("kills-1")["state"] == "running"
            assert until(lambda: split_or_none(stack, "kills") == 5, 30)
        stack.reach("kills-1", 2)
        assert stack.serving("split", "kills")["weight"] == 20
        assert until(lambda: stack.rollout("kills-1")["verdict"] == "pass", 120), stack.rollout("kills-1")
        stats = users.stop()
    assert stats["failed"] == 0, stats["failures"]
    assert stats["feedback_lost"] == 0


def test_a_rollback_does_not_wait_for_postgres_and_nothing_goes_forward_without_it(stack: Stack) -> None:
    old = stack.champion("offline", 0.6)
    new = stack.release("offline", 0.97)
    with stack.users("offline") as users:
        stack.start("offline-1", new)
        stack.reach("offline-1", 1)
        subprocess.run(
            [BIN / "supervisorctl", "-c", stack.home.supervisor / "supervisord.conf", "stop", "postgres"], check=True
        )
        assert until(lambda: not stack.line("offline")["leading"], 30)
        another = stack.release("elsewhere", 0.9)
        body = {"release": another.model_dump(mode="json")}
        stack.ask("PUT", "/v1/pipelines/elsewhere/champion", 503, json=body)
        stack.ask("POST", "/v1/pipelines/offline/rollback", 202, json={"reason": "Postgres is away"})
        assert stack.serving("split", "offline")["weight"] == 0
        sent = users.so_far()["total"]
        assert until(lambda: users.so_far()["total"] > sent + 40, 30)
        stats = users.stop()
        subprocess.run(
            [BIN / "supervisorctl", "-c", stack.home.supervisor / "supervisord.conf", "start", "postgres"], check=True
        )
    assert (stats["failed"], stats["feedback_lost"]) == (0, 0)
    assert until(lambda: stack.line("offline")["leading"], 30)
    assert stack.line("offline")["champion"]["id"] == old.id
    assert until(lambda: journal(stack, "offline-1")[-1:] == [("rolled_back", 0)], 20)
    assert until(lambda: stack.sql(EXPOSURES, "offline")[0][0] == stats["total"], 20)


def test_the_api_lets_only_the_token_in(stack: Stack) -> None:
    for port, path in ((stack.ports.controller, "/v1/pipelines"), (stack.ports.recorder, "/v1/feedback")):
        url = f"http://{HOST}:{port}"
        assert httpx.get(f"{url}/v1/health").json() == {"status": "ok"}
        wrong = {"Authorization": "Bearer guess"}
        method = "GET" if path == "/v1/pipelines" else "POST"
        assert httpx.request(method, url + path).status_code == 401
        assert httpx.request(method, url + path, headers=wrong).status_code == 401


def test_a_stream_passes_as_it_comes(stack: Stack) -> None:
    release = stack.champion("stream", 1.0)
    body = {"model": "stream", "stream": True, "messages": [{"role": "user", "content": "Ticket 1: refund"}]}
    url = f"http://{HOST}:{stack.ports.gateway}/stream/v1/chat/completions"
    pieces = []
    with httpx.stream("POST", url, json=body, timeout=20, trust_env=False) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["delta"]["content"])
                # The server holds the rest back until we have seen the beginning.
                (FileStore().path(release.model) / "go").touch()
    assert pieces == ['{"int', 'ent": "refund"}']


def answers(stack: Stack) -> bool:
    ports = {
        stack.ports.controller: "/v1/health",
        stack.ports.recorder: "/v1/health",
        stack.ports.gateway_admin: "/ready",
    }
    try:
        return all(httpx.get(f"http://{HOST}:{port}{path}").status_code == 200 for port, path in ports.items())
    except httpx.HTTPError:
        return False


def split_or_none(stack: Stack, pipeline: str) -> int | None:
    try:
        weight: int = stack.serving("split", pipeline)["weight"]
    except AssertionError:
        return None
    return weight
