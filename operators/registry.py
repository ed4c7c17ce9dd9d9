"""MLflow, the mirror: one registered model a line, one version a release, and the aliases that people look for.

Nothing here decides. A folder's manifest is right about what a release is, the controller about what is live; this
writes both down where people browse models. Everything can be repeated: a release is found by its id, never doubled.

What MLflow 3 accepts as the source of a version decides how the weights get there:

- a store on S3: the source is the model's own folder; nothing is copied.
- a store on this disk: the server refuses any path outside of the folder of a run, symbolic links included, so the
  run's folder lies in our store and holds the model's files as hard links; no byte is copied here either.
- a local model and a server that keeps its artifacts elsewhere: the files are uploaded.

mlflow takes seconds to import: it is, inside the functions, and Airflow is not.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from refit import log
from refit.errors import BadInput, ServerUnavailable
from refit.manifest import Manifest
from refit.release import Release
from refit.store import FileStore, join, store_for

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion

CHAMPION, PREVIOUS, CHALLENGER = "champion", "previous", "challenger"
RELEASE = "refit.release"
TRAINING_RUN = "refit.training.run"
"""The tag that names the run with the curves of the training (`tracking`)."""


@dataclass(frozen=True, kw_only=True)
class Registered:
    """A version of a line's model: which release it is, and where MLflow and the store keep it."""

    version: str
    release: str
    digest: str
    model: str
    source: str
    run: str


def register(
    release: Release, manifests: Mapping[str, Manifest] | None = None, training_run: str | None = None
) -> Registered:
    """The version of a release; made at the first call, completed (tags, manifests, scores) at later ones.

    Args:
        release: what to register, under its line's name.
        manifests: what made and judged it, by role (dataset, training, evaluation, comparison).
        training_run: the run of its training, which has the curves.

    Raises:
        BadInput: the model's folder is not there, or no MLflow is named.
        ServerUnavailable: MLflow does not answer, or refuses.
    """
    model = store_for(release.model).require(release.model, "model")
    if model.content_digest() != release.digest:
        raise BadInput(f"{release.model}: holds {model.content_digest()[:16]}, the release says {release.digest[:16]}.")
    known = {"model": model, **(manifests or {})}
    tags = tags_of(release, known) | ({TRAINING_RUN: training_run} if training_run else {})
    with connected() as client:
        _create_model(client, release)
        run = _run_of(client, release)
        version = _version_of(client, release.pipeline, release.id)
        if version is None:
            source = _source(client, run, release)
            version = client.create_model_version(release.pipeline, source, run_id=run.info.run_id, tags=tags)
            log.event("registered", pipeline=release.pipeline, release=release.id, version=version.version)
        for name, value in tags.items():
            if version.tags.get(name) != value:
                client.set_model_version_tag(release.pipeline, version.version, name, value)
            client.set_tag(run.info.run_id, name, value)
        for name, score in scores_of(known).items():
            client.log_metric(run.info.run_id, name, score)
        documents = {role: json.loads(manifest.model_dump_json()) for role, manifest in known.items()}
        for role, document in {"release": release.model_dump(mode="json"), **documents}.items():
            client.log_dict(run.info.run_id, document, f"manifests/{role}.json")
        if run.info.status != "FINISHED":
            client.set_terminated(run.info.run_id)
        return _registered(version)


def set_aliases(
    pipeline: str, *, champion: str | None = None, previous: str | None = None, challenger: str | None = None
) -> dict[str, str]:
    """Point the line's aliases at releases by id; returns alias → version.

    None, and a release that was never registered, take the alias away: a wrong one is worse than none.
    """
    placed: dict[str, str] = {}
    with connected() as client:
        for alias, release in ((CHAMPION, champion), (PREVIOUS, previous), (CHALLENGER, challenger)):
            version = _version_of(client, pipeline, release) if release else None
            now = _version_by_alias(client, pipeline, alias)
            if version is not None:
                placed[alias] = str(version.version)
                if now is None or now.version != version.version:
                    client.set_registered_model_alias(pipeline, alias, version.version)
            elif now is not None:
                client.delete_registered_model_alias(pipeline, alias)
            if release and version is None:
                log.event("alias", pipeline=pipeline, alias=alias, release=release, trouble="never registered")
    return placed


def model_of(pipeline: str, alias: str) -> Registered | None:
    """What an alias of a line points at; None where it points at nothing."""
    with connected() as client:
        version = _version_by_alias(client, pipeline, alias)
        return _registered(version) if version is not None else None


def tags_of(release: Release, manifests: Mapping[str, Manifest]) -> dict[str, str]:
    """What a version says about itself, so that a person finds it without reading a manifest."""
    tags = {
        RELEASE: release.id, "refit.digest": release.digest, "refit.model": release.model, "refit.team": release.team,
        "refit.owner": release.owner,
    }  # fmt: skip
    for role, manifest in manifests.items():
        tags[f"refit.{role}.fingerprint"] = manifest.fingerprint
        if "dataset" in manifest.inputs:
            tags["refit.dataset"] = manifest.inputs["dataset"]
        if "warm_start" in manifest.inputs:
            tags["refit.warm_start"] = manifest.inputs["warm_start"]
        if "adapter" in manifest.outputs:
            tags["refit.adapter"] = manifest.outputs["adapter"]
        if manifest.code:
            tags[f"refit.{role}.code"] = manifest.code
    comparison = _comparison(manifests)
    if comparison:
        tags |= {
            "refit.verdict": str(comparison.get("verdict")),
            "refit.forced": str(bool(comparison.get("forced"))).lower(),
            "refit.report": str(comparison.get("report", "")),
        }
    return tags | {f"refit.{name}": f"{score:.4f}" for name, score in scores_of(manifests).items()}


def scores_of(manifests: Mapping[str, Manifest]) -> dict[str, float]:
    """The figures of the comparison, those that were measured."""
    facts = _comparison(manifests)
    found = {
        "score": facts.get("candidate", {}).get("score"),
        "score_low": facts.get("candidate", {}).get("low"),
        "score_high": facts.get("candidate", {}).get("high"),
        "difference": facts.get("difference", {}).get("value"),
        "difference_low": facts.get("difference", {}).get("low"),
        "difference_high": facts.get("difference", {}).get("high"),
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def _comparison(manifests: Mapping[str, Manifest]) -> dict[str, Any]:
    return next((manifest.facts for manifest in manifests.values() if manifest.kind == "comparison"), {})


@contextmanager
def connected() -> Iterator[MlflowClient]:
    """A client of the MLflow that the environment names.

    Raises:
        BadInput: it names none.
        ServerUnavailable: MLflow does not answer, or refuses.
    """
    address = os.environ.get("MLFLOW_TRACKING_URI")
    if not address:
        raise BadInput("MLFLOW_TRACKING_URI is not set; it names the MLflow server, as http://127.0.0.1:5000.")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        yield MlflowClient(tracking_uri=address, registry_uri=address)
    except MlflowException as error:
        raise ServerUnavailable(f"{address}: MLflow: {error}") from error


def _create_model(client: MlflowClient, release: Release) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(
            release.pipeline, tags={"refit.team": release.team, "refit.owner": release.owner}
        )
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def experiment_of(client: MlflowClient, pipeline: str) -> str:
    """The experiment of a line, made where there is none."""
    experiment = client.get_experiment_by_name(pipeline)
    if experiment:
        return str(experiment.experiment_id)
    store = os.environ.get("REFIT_STORE", "")
    place = join(store, "mlflow", pipeline) if urlsplit(store).scheme == "file" else None
    return str(client.create_experiment(pipeline, place))


def _run_of(client: MlflowClient, release: Release) -> Run:
    """The release's own run: a version needs one, and a try that died half-way left one."""
    number = experiment_of(client, release.pipeline)
    found = client.search_runs([number], f"tags.`{RELEASE}` = '{release.id}'", max_results=1)
    return found[0] if found else client.create_run(number, tags={RELEASE: release.id}, run_name=release.id)


def _source(client: MlflowClient, run: Run, release: Release) -> str:
    """Where the version's files are, as MLflow accepts it; put there if need be."""
    store = store_for(release.model)
    if not isinstance(store, FileStore):
        return release.model
    folder, root = store.local(release.model), urlsplit(run.info.artifact_uri)
    if root.scheme not in ("", "file"):
        client.log_artifacts(run.info.run_id, str(folder), "model")
        return f"runs:/{run.info.run_id}/model"
    target = store.path(run.info.artifact_uri) / "model"
    _link(folder, target)
    return target.as_uri()


def _link(folder: Path, target: Path) -> None:
    """A folder with the same files: all of them, or no folder. Both sides are only ever read."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".model-", dir=target.parent))
    try:
        shutil.copytree(folder, draft, copy_function=_link_or_copy, dirs_exist_ok=True)
        draft.chmod(0o755)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copy2(source, target)


def _version_of(client: MlflowClient, pipeline: str, release: str) -> ModelVersion | None:
    found = client.search_model_versions(f"name = '{pipeline}' and tags.`{RELEASE}` = '{release}'", max_results=1)
    return found[0] if found else None


def _version_by_alias(client: MlflowClient, pipeline: str, alias: str) -> ModelVersion | None:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(pipeline, alias)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def _registered(version: ModelVersion) -> Registered:
    tags = version.tags
    return Registered(
        version=str(version.version), release=tags.get(RELEASE, ""), digest=tags.get("refit.digest", ""),
        model=tags.get("refit.model", ""), source=version.source or "", run=version.run_id or "",
    )  # fmt: skip
