"""One release answers the exam: what is asked, what comes back, and what a fault costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pyarrow.parquet as pq
import pytest

from evaluator.cli import HANDLERS, main
from evaluator.evaluate import KIND
from evaluator.exam import general_items
from refit.errors import BadInput, ServerUnavailable
from refit.job import Job, run
from refit.manifest import Manifest, damage
from refit.pipeline import load
from refit.spec import Sampling
from refit.store import store_for

from .conftest import LABELS, TINY, Body, Engine, World, publish_dataset, right, rows


def job(world: World, engine: Engine, name: str = "evaluation", *sets: str, **options: Any) -> Job:
    return Job.build(
        "evaluate", load(TINY, ["evaluate.concurrency=4", *sets]), store=world.uri("store"), output=world.uri(name),
        inputs={"dataset": world.dataset, "release": world.model},
        options={"url": engine.url, "release_id": world.release, "patience_seconds": 5, **options},
    )  # fmt: skip


def evaluate(world: World, engine: Engine, name: str = "evaluation", *sets: str, **options: Any) -> Manifest:
    return run(job(world, engine, name, *sets, **options), HANDLERS["evaluate"])


def table(world: World, name: str = "evaluation") -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in pq.read_table(world.folder / name / "answers.parquet").to_pylist()}


def test_every_item_is_asked_once_with_every_sampling_parameter(world: World, engine: Engine):
    facts = evaluate(world, engine).facts
    assert facts["items"] == facts["asked"] == len(engine.asked) == 120
    assert len({json.dumps(body["messages"]) for body in engine.asked}) == 120
    for body in engine.asked:
        assert body.keys() == {*Sampling.model_fields, "n", "stream", "model", "messages"}
        assert (body["temperature"], body["seed"], body["max_tokens"]) == (0.0, 1, 32)


def test_no_more_requests_are_in_flight_than_the_spec_says(world: World, engine: Engine):
    engine.delay = 0.02
    evaluate(world, engine)
    assert engine.most_in_flight == 4


def test_figures_are_counted_right(world: World, engine: Engine):
    def model(body: Body) -> str:
        number = int(body["messages"][-1]["content"].split()[1].rstrip(":"))
        if number < 12:
            return "It is a " + right(body)  # right, and unreadable for the program behind
        if number < 30:
            return json.dumps({"intent": "lunch"})  # readable JSON, not a label
        return right(body) if number % 6 else json.dumps({"intent": "cancel"})  # every refund after 30 becomes cancel

    engine.answer = model
    facts = evaluate(world, engine).facts
    refunds = sum(1 for number in range(30, 120) if number % 6 == 0)
    assert facts["accuracy"]["value"] == pytest.approx((90 - refunds) / 120)
    assert facts["validity"]["value"] == pytest.approx(90 / 120)
    assert facts["accuracy"]["low"] < facts["accuracy"]["value"] < facts["accuracy"]["high"]
    assert facts["confusion"]["refund"] == {"": 2, "lunch": 3, "cancel": 15}
    assert sum(domain["items"] for domain in facts["domains"].values()) == 120
    assert facts["domains"]["mail"]["value"] == pytest.approx(
        sum(1 for n in range(30, 120) if n % 3 == 0 and n % 6) / 40
    )
    row = table(world)["ticket-00000"]
    assert (row["correct"], row["valid"], row["predicted"]) == (False, False, None)
    assert row["answer"] == 'It is a {"intent": "refund"}'
    assert row["tokens"] == 7
    assert row["seconds"] > 0


def test_the_general_set_is_asked_where_the_spec_wants_it(world: World, engine: Engine):
    facts = evaluate(world, engine, "with", "evaluate.general=true").facts
    assert facts["general"]["items"] == len(general_items()) == len(engine.asked) - 120
    assert facts["items"] == 120
    assert set(facts["general"]["domains"]) == {"arithmetic", "facts", "format", "language"}


def test_a_server_of_another_release_is_not_asked(world: World, engine: Engine):
    engine.names = ["tiny", "0123456789abcdef"]
    with pytest.raises(ServerUnavailable, match=r"serves tiny, 0123456789abcdef, not .*" + world.release):
        evaluate(world, engine)
    assert engine.asked == []


def test_a_server_that_is_replaced_half_way_does_not_answer_for_the_old_one(world: World, engine: Engine):
    def swap(body: Body) -> str:
        if len(engine.asked) >= 40:
            engine.names = ["tiny", "0123456789abcdef"]
        return right(body)

    engine.answer = swap
    with pytest.raises(ServerUnavailable, match="does not exist"):
        evaluate(world, engine)
    assert not (world.folder / "evaluation" / "manifest.json").exists()
    assert 40 <= len(engine.asked) < 50


def test_dropped_connections_and_full_queues_are_tried_again(world: World, engine: Engine):
    engine.faults = [None, (503, {"error": "starting"}), (429, {"error": {"message": "busy"}}), None, (500, b"<html>")]
    facts = evaluate(world, engine).facts
    assert engine.faults == []
    assert facts["accuracy"]["value"] == 1.0
    assert len(engine.asked) == 120


def test_a_server_that_restarts_is_waited_for(world: World, engine: Engine):
    engine.stop()
    process = start(world, engine)
    wait_for(lambda: "retry" in (world.folder / "log").read_text())
    status = world.folder / "evaluation" / "status.json"
    before = json.loads(status.read_text())["heartbeat"]
    wait_for(lambda: json.loads(status.read_text())["heartbeat"] > before)  # waiting is not a stall
    engine.start()
    assert process.wait(30) == 0


def test_a_server_that_stays_away_ends_the_run_and_the_next_asks_only_the_rest(world: World, engine: Engine):
    def dies(body: Body) -> str:
        if len(engine.asked) >= 50:
            engine.faults = [None] * 500
        return right(body)

    engine.answer = dies
    with pytest.raises(ServerUnavailable, match="no answer in 1 s"):
        evaluate(world, engine, patience_seconds=1)
    first = len(engine.asked)
    assert 50 <= first < 60
    engine.faults, engine.answer = [], right
    facts = evaluate(world, engine).facts
    assert facts["kept"] == first
    assert len(engine.asked) == 120
    assert facts["accuracy"]["value"] == 1.0


def test_a_kill_loses_no_answer(world: World, engine: Engine):
    engine.delay = 0.02
    process = start(world, engine)
    wait_for(lambda: len(engine.asked) >= 30)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    kept = sum(
        "text" in json.loads(line) for line in (world.folder / "evaluation/asked.jsonl").read_text().splitlines()
    )
    assert kept >= 25
    facts = evaluate(world, engine).facts
    assert facts["kept"] == kept
    assert facts["items"] == 120
    assert len(engine.asked) <= 120 + 4  # only what was in flight is asked again


def test_a_stop_from_outside_says_resume_me(world: World, engine: Engine):
    engine.delay = 0.02
    process = start(world, engine)
    wait_for(lambda: len(engine.asked) >= 20)
    process.terminate()
    assert process.wait(10) == 20
    assert '"suspended"' in (world.folder / "evaluation" / "events.jsonl").read_text()


def test_the_same_exam_is_answered_from_the_manifest_without_a_request(
    world: World, engine: Engine, capsys: pytest.CaptureFixture[str]
):
    arguments = command(world, engine)
    assert main(arguments) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    engine.stop()
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == first
    assert len(engine.asked) == 120


def test_a_folder_of_another_exam_is_bad_input(world: World, engine: Engine, capsys: pytest.CaptureFixture[str]):
    assert main(command(world, engine)) == 0
    capsys.readouterr()
    assert main([*command(world, engine), "--set", "evaluate.max_items=50"]) == 10
    assert "holds another evaluation" in capsys.readouterr().err


def test_the_gate_does_not_ask_again_and_sampling_does(world: World, engine: Engine):
    names = {
        name: evaluate(world, engine, name, *sets).fingerprint
        for name, sets in {
            "a": ["evaluate.gate.min_gain=0.5"],
            "b": ["evaluate.concurrency=2"],
            "c": ["evaluate.sampling.temperature=0.7"],
        }.items()
    }
    assert names["a"] == names["b"] != names["c"]


def test_answers_of_another_exam_in_the_folder_do_not_count(world: World, engine: Engine):
    wrong = {"set": "business", "id": "ticket-00001", "text": "", "seconds": 1.0, "tokens": 0, "finish": "stop"}
    folder = world.folder / "evaluation"
    folder.mkdir()
    (folder / "asked.jsonl").write_text('{"exam": "another"}\n' + json.dumps(wrong) + '\n{"torn')
    assert evaluate(world, engine).facts["accuracy"]["value"] == 1.0
    assert len(engine.asked) == 120


def test_what_the_server_refuses_counts_as_wrong_with_its_reason(world: World, engine: Engine):
    engine.faults = [(400, {"error": {"message": "maximum context length is 256 tokens"}})]
    facts = evaluate(world, engine).facts
    assert facts["refused"] == 1
    assert facts["accuracy"]["value"] == pytest.approx(119 / 120)
    [refused] = [row for row in table(world).values() if row["refused"]]
    assert "context length" in refused["refused"]


def test_nonsense_instead_of_a_completion_is_the_servers_fault(world: World, engine: Engine):
    engine.faults = [(200, {"choices": []})]
    with pytest.raises(ServerUnavailable, match="not a completion"):
        evaluate(world, engine)


def test_odd_characters_come_through(world: World, engine: Engine):
    engine.answer = lambda body: "half a \ud83d pair, a\u2028line, 中文"
    evaluate(world, engine)
    assert table(world)["ticket-00000"]["answer"] == "half a ? pair, a\u2028line, 中文"


def test_a_missing_dataset_or_model_is_said_before_anything_is_asked(world: World, engine: Engine):
    def inputs(dataset: str, release: str) -> Job:
        return job(world, engine).model_copy(update={"inputs": {"dataset": dataset, "release": release}})

    with pytest.raises(BadInput, match=r"nowhere: no manifest\.json there"):
        run(inputs(world.uri("nowhere"), world.model), HANDLERS["evaluate"])
    with pytest.raises(BadInput, match="holds a dataset, expected a model"):
        run(inputs(world.dataset, world.dataset), HANDLERS["evaluate"])
    assert engine.asked == []


def test_a_job_document_runs_the_same_code(world: World, engine: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REFIT_JOB", job(world, engine).save())
    assert main([]) == 0
    manifest = store_for(world.uri("evaluation")).require(world.uri("evaluation"), "evaluation")
    assert manifest.facts["release"] == world.release
    status = json.loads((world.folder / "evaluation" / "status.json").read_text())
    assert (status["phase"], status["done"], status["total"]) == ("ask", 120, 120)


def test_more_data_moves_the_name(world: World, engine: Engine):
    larger = World(world.folder, world.spec, publish_dataset(world.uri("larger"), rows(150)), world.model)
    assert evaluate(larger, engine, "second").fingerprint != evaluate(world, engine).fingerprint


def test_labels_of_the_fixture_are_those_of_the_line(world: World):
    assert world.spec.evaluate.labels == LABELS


def command(world: World, engine: Engine) -> list[str]:
    return [
        "run", str(TINY), "--data", f"{world.dataset}/manifest.json", "--release", world.model, "--url", engine.url,
        "--output", world.uri("evaluation"), "--release-id", world.release, "--set", "evaluate.concurrency=4",
    ]  # fmt: skip


def start(world: World, engine: Engine) -> subprocess.Popen[bytes]:
    with (world.folder / "log").open("wb") as log:
        program = [sys.executable, "-c", "import sys; from evaluator.cli import main; sys.exit(main())"]
        return subprocess.Popen([*program, *command(world, engine)], stdout=subprocess.DEVNULL, stderr=log)


def wait_for(condition: Any, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------------------------------- S3


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
    for name, value in (("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    import boto3

    boto3.client("s3").create_bucket(Bucket="exam")
    yield "s3://exam"
    server.stop()


def test_on_s3_a_pod_that_died_is_followed_by_one_that_asks_the_rest(
    world: World, engine: Engine, bucket: str, monkeypatch: pytest.MonkeyPatch
):
    """The second pod has an empty disk: what was asked must come back from the store."""

    def pod(name: str, **options: Any) -> Manifest:
        (world.folder / name).mkdir()
        monkeypatch.setenv("REFIT_CACHE", str(world.folder / name))
        document = job(world, engine, **options).model_copy(update={"output": f"{bucket}/evaluations/one"})
        return run(document, HANDLERS["evaluate"])

    def dies(body: Body) -> str:
        if len(engine.asked) >= 50:
            engine.faults = [None] * 500
        return right(body)

    engine.answer = dies
    with pytest.raises(ServerUnavailable):
        pod("first", patience_seconds=1)
    first = len(engine.asked)
    engine.faults, engine.answer = [], right
    manifest = pod("second")
    assert (manifest.facts["kept"], len(engine.asked)) == (first, 120)
    store = store_for(bucket)
    folder = store.require(f"{bucket}/evaluations/one", KIND)
    assert damage(store.local(f"{bucket}/evaluations/one"), folder) == []
