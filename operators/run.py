"""What the tasks of a run do beside starting jobs: resolve the spec, name the releases. The files are `refit.runs`'."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from operators.controller import Controller
from refit import runs
from refit.errors import BadInput, BadSpec
from refit.form import apply_form
from refit.manifest import MANIFEST
from refit.pipeline import check_sources, validate
from refit.release import Release
from refit.runs import CANDIDATE, CHAMPION, FIRST_CHAMPION, SPEC
from refit.spec import Pipeline
from refit.store import join, store_for


def store_uri() -> str:
    """Where everything lives: REFIT_STORE."""
    uri = os.environ.get("REFIT_STORE")
    if not uri:
        raise BadInput("REFIT_STORE is not set: it names the store, as in file:///var/refit/store or s3://bucket.")
    return uri


def folder(pipeline: str, run_id: str) -> str:
    """The run's folder in this store."""
    return runs.folder(store_uri(), pipeline, run_id)


def check(path: str | Path, values: Mapping[str, Any], run_id: str) -> str:
    """Resolve a pipeline file with the form's values, and look at what a schema cannot see.

    Returns:
        The URI of the resolved spec.

    Raises:
        BadSpec: every fault at once, a line each.
    """
    spec = resolve(path, values)
    faults = check_sources(spec, Path(path).name)
    if faults:
        raise BadSpec("\n".join(faults))
    return write(spec, join(folder(spec.name, run_id), SPEC))


def resolve(path: str | Path, values: Mapping[str, Any]) -> Pipeline:
    """The spec of a pipeline file with the form's values laid over it."""
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadSpec(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise BadSpec(f"{path}: expected a mapping of settings, found {type(document).__name__}.")
    return validate(apply_form(document, values), Path(path).name)


def write(document: Pipeline | Release | Mapping[str, Any], uri: str) -> str:
    """Put a document into the run's folder; returns its URI."""
    text = (
        json.dumps(document, indent=1, default=str)
        if isinstance(document, Mapping)
        else document.model_dump_json(indent=1)
    )
    store_for(uri).write(uri, text.encode())
    return uri


def read_spec(uri: str) -> Pipeline:
    """The resolved spec of a run."""
    return Pipeline.model_validate_json(_read(uri, "resolved spec"))


def read_release(uri: str) -> Release:
    """A release that a run wrote down."""
    return Release.model_validate_json(_read(uri, "release"))


def read_beside(uri: str, name: str) -> Release | None:
    """The release of that name in the same run's folder as `uri`; None where the run has none yet."""
    place = join(uri.rsplit("/", 1)[0], name)
    return read_release(place) if store_for(place).exists(place) else None


def output_named(uri: str, role: str) -> str:
    """The committed folder that is meant: the output of that name of the job whose manifest is given, or the folder."""
    place = uri.removesuffix("/" + MANIFEST)
    manifest = store_for(place).manifest(place)
    return manifest.outputs.get(role, place) if manifest is not None else place


def name_candidate(spec_uri: str, trained: str) -> str:
    """Write down the release that a training made: its model, served as the spec says. Returns the document's URI."""
    spec = read_spec(spec_uri)
    return _name(spec, output_named(trained, "model"), join(spec_uri.rsplit("/", 1)[0], CANDIDATE))


def name_first_champion(spec_uri: str, trained: str | None) -> str:
    """Write down what there is to beat before the first run: a briefly trained model, or the base model as it is."""
    spec = read_spec(spec_uri)
    model = output_named(trained, "model") if trained else spec.train.base
    return _name(spec, model, join(spec_uri.rsplit("/", 1)[0], FIRST_CHAMPION))


def name_champion(spec_uri: str) -> str:
    """Write down the release that users get now: what this run has to beat, whatever happens beside it."""
    spec = read_spec(spec_uri)
    champion = Controller().champion(spec.name)
    if champion is None:
        raise BadInput(f"{spec.name} has no champion; clear the tasks of first_champion.")
    return write(champion, join(spec_uri.rsplit("/", 1)[0], CHAMPION))


def _name(spec: Pipeline, model: str, place: str) -> str:
    manifest = store_for(model).require(model, "model")
    return write(Release.of(spec.name, manifest, model, spec.serve, team=spec.team, owner=spec.owner), place)


def _read(uri: str, what: str) -> bytes:
    try:
        return store_for(uri).read(uri)
    except FileNotFoundError as error:
        raise BadInput(f"{uri}: there is no {what}; clear the run's first task to write it anew.") from error
