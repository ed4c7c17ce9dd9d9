"""What waits: for checkpoints, servers, verdicts; with the controller as a real HTTP server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import TaskDeferred
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

from operators import controller as controllers
from operators import run, triggers
from operators.controller import Controller, Refused
from operators.errors import RolledBack, restore
from operators.rollout import RolloutStepOperator
from operators.serving import VllmOperator
from operators.triggers import CheckpointTrigger, RolloutTrigger, ServerTrigger, slow_now
from refit import runs
from refit.errors import BadInput, ServerUnavailable
from refit.manifest import Manifest
from refit.release import Release
from refit.spec import Pipeline, Serve
from refit.store import join, store_for

Fire = Callable[..., dict[str, Any]]


class House:
    """A controller that says what the test tells it to; each path has a list of answers, the last one stays."""

    def __init__(self) -> None:
        self.answers: dict[str, list[tuple[int, Any]]] = {}
        self.asked: list[tuple[str, str, Any]] = []
        house = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                size = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                house.asked.append((self.command, self.path, body))
                if self.headers.get("authorization") != "Bearer secret":
                    status, document = 401, {"detail": "who are you?"}
                else:
                    queue = house.answers.get(f"{self.command} {self.path}") or [(404, {"detail": "not there"})]
                    status, document = queue.pop(0) if len(queue) > 1 else queue[0]
                data = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_DELETE = answer

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def says(self, call: str, *answers: Any) -> None:
        self.answers[call] = [answer if isinstance(answer, tuple) else (200, answer) for answer in answers]


@pytest.fixture
def house(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    made = House()
    token = tmp_path / "token"
    token.write_text("secret\n")
    monkeypatch.setenv("REFIT_CONTROLLER_URL", made.url)
    monkeypatch.setenv("REFIT_TOKEN_FILE", str(token))
    monkeypatch.setattr(controllers, "FIRST_PAUSE", 0.01)
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def release(home: Path) -> Release:
    return Release(id="cafe", pipeline="line", digest="d", model="file:///m", profile=Serve(), team="t", owner="o")


@pytest.fixture
def place(home: Path, release: Release) -> str:
    return run.write(release, join(run.folder("line", "manual__1"), runs.CANDIDATE))


@pytest.fixture
def spec_uri(home: Path, spec: Pipeline) -> str:
    return run.write(spec, join(run.folder("line", "manual__1"), runs.SPEC))


def soon() -> float:
    return time.time() + 60


def test_a_controller_that_is_away_for_a_moment_is_asked_again(house: House) -> None:
    house.says("GET /v1/pipelines/line", (503, {}), (502, {}), {"champion": None})
    assert Controller().champion("line") is None
    assert len(house.asked) == 3


def test_a_controller_that_stays_away_is_an_unavailable_server(house: House) -> None:
    house.says("GET /v1/pipelines/line", (503, {"detail": "starting"}))
    with pytest.raises(ServerUnavailable, match="starting"):
        Controller().pipeline("line")
    assert len(house.asked) == controllers.ATTEMPTS


def test_a_refusal_keeps_the_controller_s_words_and_is_not_repeated(house: House) -> None:
    house.says("POST /v1/rollouts/r/steps/2", (409, {"detail": "step 1 has not passed"}))
    with pytest.raises(Refused, match="step 1 has not passed"):
        Controller().enter_step("r", 2)
    assert len(house.asked) == 1
    with pytest.raises(Refused, match="who are you"):
        Controller(token="wrong").pipeline("line")


def test_a_server_that_users_are_routed_to_is_not_stopped(house: House) -> None:
    house.says("DELETE /v1/servers/cafe", (409, {"detail": "routed"}))
    assert Controller().stop_server("cafe") is False


def test_a_server_is_ready_when_the_controller_says_so_and_not_before(
    house: House, place: str, context: dict[str, Any], fire: Fire
) -> None:
    house.says("PUT /v1/servers/cafe", {"state": "starting"})
    house.says("GET /v1/servers/cafe", {"state": "starting"}, {"state": "ready", "url": "http://h:1"})
    operator = VllmOperator(task_id="serve", release=place)
    with pytest.raises(TaskDeferred) as caught:
        operator.execute(context)
    caught.value.trigger.poll_seconds = 0.05
    assert operator.conclude(context, fire(caught.value.trigger)) == "cafe"


def test_a_server_that_does_not_start_says_why(house: House, fire: Fire) -> None:
    house.says("GET /v1/servers/cafe", {"state": "failed", "why": "no memory"})
    event = fire(ServerTrigger(release_id="cafe", deadline=soon()))
    assert isinstance(restore(event), ServerUnavailable)
    assert "no memory" in event["message"]


def test_the_first_champion_is_awaited_until_it_is_routed(house: House, release: Release, fire: Fire) -> None:
    house.says("GET /v1/servers/cafe", {"state": "ready", "url": "http://h:1"})
    house.says("GET /v1/pipelines/line", {"champion": None}, {"champion": release.model_dump(mode="json")})
    event = fire(ServerTrigger(release_id="cafe", champion_of="line", deadline=soon(), poll_seconds=0.05))
    assert event["status"] == "done"
    assert len([asked for asked in house.asked if asked[1] == "/v1/pipelines/line"]) == 2


def test_stopping_leaves_what_is_needed_for_a_rollback(
    house: House, place: str, release: Release, context: dict[str, Any]
) -> None:
    house.says("GET /v1/pipelines/line", {"previous": release.model_dump(mode="json")})
    VllmOperator(task_id="stop", release=place, action="stop").execute(context)
    assert [method for method, _, _ in house.asked] == ["GET"]
    house.says("GET /v1/pipelines/line", {"challenger": release.model_dump(mode="json"), "rollout": None})
    house.says("DELETE /v1/servers/cafe", {})
    VllmOperator(task_id="stop", release=place, action="stop").execute(context)
    assert house.asked[-1][:2] == ("DELETE", "/v1/servers/cafe")


def rollout(step: int, verdict: str = "wait", state: str = "running", weight: int = 5) -> dict[str, Any]:
    return {"id": "r", "state": state, "step": step, "weight": weight, "verdict": verdict, "why": f"{verdict} it is"}


def entered(operator: RolloutStepOperator, context: dict[str, Any]) -> TaskDeferred:
    with pytest.raises(TaskDeferred) as caught:
        operator.execute(context)
    caught.value.trigger.poll_seconds = 0.05
    return caught.value


def test_a_step_waits_for_its_verdict(house: House, spec_uri: str, context: dict[str, Any], fire: Fire) -> None:
    house.says("POST /v1/rollouts/r/steps/1", rollout(1))
    house.says("GET /v1/rollouts/r", rollout(1), rollout(1, "pass"))
    operator = RolloutStepOperator(task_id="step_1", spec=spec_uri, rollout="r", step=1)
    wait = entered(operator, context)
    assert operator.conclude(context, fire(wait.trigger), **wait.kwargs) == "r"


def test_a_step_that_the_controller_took_back_fails_with_its_reason_and_is_not_retried(
    house: House, spec_uri: str, context: dict[str, Any], fire: Fire
) -> None:
    house.says("POST /v1/rollouts/r/steps/1", rollout(1))
    house.says("GET /v1/rollouts/r", rollout(1, "fail", "rolled_back", 0))
    operator = RolloutStepOperator(task_id="step_1", spec=spec_uri, rollout="r", step=1)
    wait = entered(operator, context)
    with pytest.raises(RolledBack, match="fail it is"):
        operator.conclude(context, fire(wait.trigger), **wait.kwargs)
    assert not RolledBack.retry


def test_a_step_that_was_passed_while_airflow_was_away_is_passed(
    house: House, spec_uri: str, context: dict[str, Any]
) -> None:
    house.says("POST /v1/rollouts/r/steps/1", rollout(1, "pass"))
    assert RolloutStepOperator(task_id="step_1", spec=spec_uri, rollout="r", step=1).execute(context) == "r"


def test_the_last_task_walks_through_the_steps_that_the_form_added(
    house: House, spec_uri: str, context: dict[str, Any]
) -> None:
    for number in (2, 3, 4):
        house.says(f"POST /v1/rollouts/r/steps/{number}", rollout(number, "pass"))
    RolloutStepOperator(task_id="step_2", spec=spec_uri, rollout="r", step=2, walks_on=True).execute(context)
    assert [path for _, path, _ in house.asked] == [f"/v1/rollouts/r/steps/{number}" for number in (2, 3, 4)]


def test_a_verdict_survives_a_controller_that_restarts(house: House, fire: Fire) -> None:
    house.says("GET /v1/rollouts/r", *[(503, {})] * controllers.ATTEMPTS, rollout(1, "pass"))
    event = fire(RolloutTrigger(rollout_id="r", step=1, deadline=soon(), poll_seconds=0.05))
    assert event["rollout"]["verdict"] == "pass"


def test_patience_ends(house: House, fire: Fire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triggers, "PATIENCE", 0.0)
    house.says("GET /v1/rollouts/r", (503, {}))
    assert isinstance(restore(fire(RolloutTrigger(rollout_id="r", step=1, deadline=soon()))), ServerUnavailable)


# ------------------------------------------------------------------------------------------------------- checkpoints


def checkpoint(output: str, step: int, *, complete: bool = True, name: str = "") -> str:
    uri = join(output, "checkpoints", name or f"step-{step}")
    store_for(uri).write(join(uri, "weights"), b"w")
    if complete:
        text = Manifest(kind="checkpoint", fingerprint="f").model_dump_json()
        store_for(uri).write(join(uri, "manifest.json"), text.encode())
    return uri


def watching(output: str, step: int | None, **more: Any) -> CheckpointTrigger:
    beside = {"dag_id": "d", "run_ids": ["r"], "task_ids": ["t"]}
    return CheckpointTrigger(output=output, step=step, beside=beside, deadline=soon(), poll_seconds=0.05, **more)


@pytest.fixture
def training(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(lambda **_: {"r": {"t": "deferred"}}))
    return join((tmp_path / "store").as_uri(), "training/line/f")


def test_a_checkpoint_without_a_manifest_does_not_exist(training: str, fire: Fire) -> None:
    checkpoint(training, 20, complete=False)
    threading.Timer(0.5, lambda: checkpoint(training, 30)).start()
    assert fire(watching(training, 0))["checkpoint"] == join(training, "checkpoints/step-30")


def test_the_first_checkpoint_at_or_after_the_step_counts(training: str, fire: Fire) -> None:
    for step in (40, 9, 100, 20):
        checkpoint(training, step)
    assert fire(watching(training, 30))["checkpoint"] == join(training, "checkpoints/step-40")


def test_a_finished_training_ends_the_wait(training: str, fire: Fire) -> None:
    text = Manifest(kind="training", fingerprint="f").model_dump_json()
    store_for(training).write(join(training, "manifest.json"), text.encode())
    assert fire(watching(training, 1_000))["checkpoint"] == training


def test_who_waits_for_the_end_is_told_of_no_checkpoint(training: str, fire: Fire) -> None:
    checkpoint(training, 20)
    text = Manifest(kind="training", fingerprint="f").model_dump_json().encode()
    threading.Timer(0.5, lambda: store_for(training).write(join(training, "manifest.json"), text)).start()
    assert fire(watching(training, None)) == {"status": "done", "checkpoint": training, "why": "finished"}


def test_only_a_full_checkpoint_counts_where_one_is_asked_for(training: str, fire: Fire) -> None:
    checkpoint(training, 10, name="fast-step-10")
    checkpoint(training, 40)
    assert fire(watching(training, 0))["checkpoint"] == join(training, "checkpoints/fast-step-10")
    assert fire(watching(training, 0, full=True))["checkpoint"] == join(training, "checkpoints/step-40")


def test_a_checkpoint_newer_than_a_known_one_is_waited_for(training: str, fire: Fire) -> None:
    checkpoint(training, 20)
    threading.Timer(0.5, lambda: checkpoint(training, 30)).start()
    assert fire(watching(training, 20 + 1))["checkpoint"] == join(training, "checkpoints/step-30")


def heartbeat(training: str, at: float) -> None:
    store_for(training).write(join(training, "status.json"), json.dumps({"heartbeat": at}).encode())


def test_a_training_without_a_heartbeat_is_a_stall_and_its_newest_checkpoint_is_named(
    training: str, fire: Fire
) -> None:
    for step in (20, 30):
        checkpoint(training, step)
    checkpoint(training, 40, complete=False)
    heartbeat(training, time.time() - 3_600)
    event = fire(watching(training, 1_000, stall_seconds=60))
    assert (event["why"], event["checkpoint"]) == ("stalled", join(training, "checkpoints/step-30"))
    assert event["silent"] > 3_500


def test_a_training_that_lives_or_has_just_been_watched_is_no_stall(training: str) -> None:
    heartbeat(training, time.time())
    assert watching(training, 1_000, stall_seconds=60).look() is None
    heartbeat(training, time.time() - 3_600)
    assert watching(training, 1_000, stall_seconds=60, since=time.time()).look() is None, "it may be starting again"
    assert watching(training, 1_000).look() is None, "nobody asked for stalls"


def test_a_failed_training_ends_the_wait_with_nothing(
    training: str, fire: Fire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(lambda **_: {"r": {"t": "failed"}}))
    assert fire(watching(training, 0)) == {"status": "nothing"}


def test_a_trigger_survives_being_moved_to_another_triggerer() -> None:
    path, fields = watching("file:///o", 3).serialize()
    assert path == "operators.triggers.CheckpointTrigger"
    assert json.loads(json.dumps(fields))["step"] == 3


def test_no_release_is_not_the_champion_s_fault(house: House, spec_uri: str) -> None:
    house.says("GET /v1/pipelines/line", {"champion": None})
    with pytest.raises(BadInput, match="no champion"):
        run.name_champion(spec_uri)


# ------------------------------------------------------------------------------------------------------- slow ranks


def test_the_last_word_on_each_rank_of_this_try_says_whether_it_is_slow() -> None:
    """A triggerer that restarts reads all of them again, also of a rank that has recovered since."""

    def told(sequence: int, rank: int, *, over: bool = False, attempt: int = 2) -> dict[str, Any]:
        return {"sequence": sequence, "attempt": attempt, "slow_rank": {"rank": rank, "over": over}}

    events = [
        told(1, 3, attempt=1), {"sequence": 2, "attempt": 2, "state": "running"}, told(3, 0), told(4, 1), told(5, 2),
        told(6, 0, over=True), told(7, 1, over=True), told(8, 1),
    ]  # fmt: skip
    assert [event["sequence"] for event in slow_now(events, 2)] == [8, 5]
