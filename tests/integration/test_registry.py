"""The mirror against a real MLflow server, in the way that the embedded stack starts it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from operators import registry
from refit.errors import BadInput, ServerUnavailable
from refit.manifest import Manifest
from refit.release import Release
from refit.spec import Serve
from refit.store import store_for
from tests.mlflow_server import Server, running

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("mlflow")) as server:
        yield server


@pytest.fixture
def line(server: Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A line of its own for each test: its name."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    monkeypatch.setenv("REFIT_STORE", f"file://{server.folder}/store")
    return request.node.name.removeprefix("test_")[:40].strip("_")


def release(server: Server, line: str, weights: str = "1") -> Release:
    uri = f"file://{server.folder}/store/models/{line}-{weights}"
    if store_for(uri).manifest(uri) is None:
        with store_for(uri).publish(uri) as draft:
            (draft.path / "model.safetensors").write_text(weights * 1000)
            (draft.path / "config.json").write_text("{}")
            draft.commit(Manifest(kind="model", fingerprint="m"))
    manifest = store_for(uri).require(uri, "model")
    return Release.of(line, manifest, uri, Serve(), team="support", owner="ml@example.com")


def comparison(score: float = 0.84) -> Manifest:
    facts = {
        "verdict": "pass", "forced": False, "report": "file:///x/report.html",
        "candidate": {"release": "r", "score": score, "low": 0.8, "high": 0.88},
        "difference": {"value": 0.3, "low": 0.2, "high": None},
    }  # fmt: skip
    return Manifest(kind="comparison", fingerprint="c" * 32, inputs={"candidate": "a", "champion": "b"}, facts=facts)


TRAINING = Manifest(
    kind="training", fingerprint="t" * 32, code="abc123", inputs={"dataset": "d" * 64, "base": "b"},
    outputs={"adapter": "file:///x/adapter"},
)  # fmt: skip


def client(server: Server) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(server.url, server.url)


def test_a_release_becomes_one_version_with_all_it_comes_from(server: Server, line: str):
    it = release(server, line)
    found = registry.register(it, {"training": TRAINING, "comparison": comparison()})
    version = client(server).get_model_version(line, found.version)
    assert version.tags["refit.release"] == it.id
    assert version.tags["refit.digest"] == it.digest
    assert (version.tags["refit.team"], version.tags["refit.owner"]) == ("support", "ml@example.com")
    assert version.tags["refit.training.fingerprint"] == "t" * 32
    assert version.tags["refit.dataset"] == "d" * 64
    assert version.tags["refit.training.code"] == "abc123"
    assert version.tags["refit.adapter"] == "file:///x/adapter"
    assert (version.tags["refit.score"], version.tags["refit.verdict"]) == ("0.8400", "pass")
    assert version.tags["refit.report"] == "file:///x/report.html"
    assert "refit.difference_high" not in version.tags  # was not measured, so it is not said
    run = client(server).get_run(found.run)
    assert run.data.metrics["score"] == pytest.approx(0.84)
    assert run.info.status == "FINISHED"


def test_the_weights_are_found_through_mlflow_and_not_doubled(server: Server, line: str, tmp_path: Path):
    it = release(server, line)
    registry.register(it, {"training": TRAINING})
    registry.set_aliases(line, challenger=it.id)
    import mlflow

    place = Path(mlflow.artifacts.download_artifacts(f"models:/{line}@challenger", tracking_uri=server.url))
    original = store_for(it.model).local(it.model) / "model.safetensors"
    assert (place / "model.safetensors").read_text() == "1" * 1000
    found = registry.model_of(line, "challenger")
    assert found is not None
    linked = Path(found.source.removeprefix("file://")) / "model.safetensors"
    assert linked.samefile(original)
    run = client(server)
    documents = {item.path for item in run.list_artifacts(found.run, "manifests")}
    assert documents == {"manifests/release.json", "manifests/model.json", "manifests/training.json"}
    text = Path(run.download_artifacts(found.run, "manifests/training.json", str(tmp_path))).read_text()
    assert json.loads(text)["fingerprint"] == "t" * 32


def test_a_second_call_completes_the_version_and_makes_no_other(server: Server, line: str):
    it = release(server, line)
    first = registry.register(it)
    second = registry.register(it, {"comparison": comparison(0.91)})
    assert second.version == first.version
    assert second.run == first.run
    assert len(client(server).search_model_versions(f"name = '{line}'")) == 1
    assert client(server).get_model_version(line, first.version).tags["refit.score"] == "0.9100"


def test_a_try_that_died_before_the_version_leaves_nothing_double(
    server: Server, line: str, monkeypatch: pytest.MonkeyPatch
):
    it = release(server, line)

    def dies(*arguments: Any) -> str:
        raise RuntimeError("killed here")

    with monkeypatch.context() as context:
        context.setattr(registry, "_source", dies)
        with pytest.raises(RuntimeError, match="killed here"):
            registry.register(it)
    assert registry.model_of(line, "challenger") is None
    registry.register(it)
    experiment = client(server).get_experiment_by_name(line)
    assert len(client(server).search_runs([experiment.experiment_id])) == 1
    assert len(client(server).search_model_versions(f"name = '{line}'")) == 1


def test_aliases_follow_and_a_wrong_one_is_taken_away(server: Server, line: str):
    old, new = release(server, line, "1"), release(server, line, "2")
    registry.register(old)
    registry.register(new)
    registry.set_aliases(line, champion=old.id, challenger=new.id)
    assert _aliases(line) == (old.id, None, new.id)
    registry.set_aliases(line, champion=new.id, previous=old.id)
    assert _aliases(line) == (new.id, old.id, None)
    assert registry.set_aliases(line, champion="0" * 16, previous=old.id).keys() == {"previous"}
    assert _aliases(line) == (None, old.id, None)


def test_a_line_that_was_never_registered_has_no_aliases(server: Server, line: str):
    assert registry.model_of(line, "champion") is None
    assert registry.set_aliases(line, champion="0" * 16) == {}


def test_a_server_elsewhere_gets_a_copy(server: Server, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("REFIT_STORE", "s3://bucket/store")
    found = registry.register(release(server, line))
    assert found.source == f"runs:/{found.run}/model"
    place = Path(client(server).download_artifacts(found.run, "model", str(tmp_path)))
    assert (place / "model.safetensors").read_text() == "1" * 1000


def test_a_model_that_is_not_what_the_release_says_is_refused(server: Server, line: str):
    it = release(server, line).model_copy(update={"digest": "f" * 64})
    with pytest.raises(BadInput, match="the release says ffff"):
        registry.register(it)


def test_without_a_server_the_message_says_which(line: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:9"):
        registry.model_of(line, "champion")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(BadInput, match="MLFLOW_TRACKING_URI is not set"):
        registry.model_of(line, "champion")


def _aliases(line: str) -> tuple[str | None, ...]:
    found = (registry.model_of(line, alias) for alias in ("champion", "previous", "challenger"))
    return tuple(it.release if it else None for it in found)


def test_a_version_leads_to_the_run_with_its_training_s_curves(server: Server, line: str):
    """tests/operators/test_tracking.py has the curves."""
    found = registry.register(release(server, line), {"training": TRAINING}, "a" * 32)
    assert client(server).get_model_version(line, found.version).tags[registry.TRAINING_RUN] == "a" * 32
    assert client(server).get_run(found.run).data.tags[registry.TRAINING_RUN] == "a" * 32
