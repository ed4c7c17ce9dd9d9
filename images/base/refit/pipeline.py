"""A pipeline file, the form's values and `--set` become one checked spec; what is wrong is said by name."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from refit import connections
from refit.errors import BadSpec
from refit.spec import Pipeline
from refit.store import matching, store_for


def load(path: str | Path, sets: Iterable[str] = (), overrides: Mapping[str, Any] | None = None) -> Pipeline:
    """The spec of a pipeline file, with `--set a.b=value` strings and nested `overrides` laid over it.

    Raises:
        BadSpec: every fault at once, each with the file, the field's dotted name, the value, and what is expected.
    """
    path = Path(path)
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadSpec(
            f"{path}: cannot be read: {error}. Give a pipeline file, as in dags/pipelines/tiny.yaml."
        ) from error
    except yaml.YAMLError as error:
        raise BadSpec(f"{path}: not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(document, dict):
        raise BadSpec(f"{path}: expected a mapping of settings, found {type(document).__name__}.")
    document = merge(document, overrides or {})
    for text in sets:
        document = merge(document, parse_set(text))
    return validate(document, str(path))


def validate(document: Mapping[str, Any], where: str) -> Pipeline:
    """The spec of a document; `where` names it in messages."""
    try:
        return Pipeline.model_validate(document)
    except ValidationError as error:
        raise BadSpec("\n".join(f"{where}: {line}" for line in explain(error))) from error


def parse_set(text: str) -> dict[str, Any]:
    """`train.max_steps=60` as a nested mapping; the value is read as YAML."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not all(name.split(".")):
        raise BadSpec(f"--set {text!r}: expected NAME=VALUE with a dotted name, as in train.max_steps=60.")
    try:
        parsed: Any = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise BadSpec(f"--set {text!r}: the value is not valid YAML: {' '.join(str(error).split())}.") from error
    return nest({name.strip(): parsed})


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names become nested mappings."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise BadSpec(f"{name}: {parent} is set to a value and to a group at once.")
        place[last] = value
    return nested


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings are merged, everything else (lists too) is replaced."""
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        merged[name] = merge(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged


def explain(error: ValidationError) -> list[str]:
    """One sentence a fault: the dotted name, the value, what is expected, and the nearest name for a typo."""
    lines = []
    for fault in error.errors(include_url=False):
        name = dotted(fault["loc"])
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            lines.append(f"{name} is not a setting.{_nearest(fault['loc'])}")
        elif fault["type"] == "missing":
            lines.append(f"{name} is missing.")
        elif isinstance(fault["input"], dict | list | tuple) or not name:
            lines.append(f"{name + ': ' if name else ''}{message}.")
        else:
            lines.append(f"{name} is {_shown(fault['input'])}: {message[0].lower()}{message[1:]}.")
    return lines


def _shown(value: Any) -> str:
    """A value as it was given; a password in an address, which belongs into the environment, is not repeated."""
    return re.sub(r"(://[^/@\s]*:)[^\s]*@", r"\1***@", repr(value))


def dotted(location: Iterable[str | int]) -> str:
    """('data', 'sources', 1, 'weight') as data.sources[1].weight."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _nearest(location: tuple[str | int, ...]) -> str:
    known = fields_at(location[:-1])
    near = difflib.get_close_matches(str(location[-1]), known, n=1)
    if near:
        return f" Did you mean {near[0]}?"
    return f" Known here: {', '.join(known)}." if known else ""


def fields_at(location: Iterable[str | int]) -> list[str]:
    """The setting names of the group at a place in the spec; empty where there is no group."""
    group = group_at([part for part in location if isinstance(part, str)])
    return sorted(group.model_fields) if group else []


def group_at(location: Sequence[str]) -> type[BaseModel] | None:
    """The spec class at a place ("data", "sources"), None where there is a plain value."""
    group: type[BaseModel] = Pipeline
    for name in location:
        field = group.model_fields.get(name)
        inner = _model_in(field.annotation) if field else None
        if inner is None:
            return None
        group = inner
    return group


def check_sources(pipeline: Pipeline, where: str) -> list[str]:
    """What a schema cannot say: a source or base model that is not there, or holds nothing. Empty when all is well."""
    faults = []
    for index, source in enumerate(pipeline.data.sources):
        fault = _source_fault(source.uri)
        if fault:
            faults.append(f"{where}: data.sources[{index}].uri is {source.uri!r}: {fault}")
    for index, uri in enumerate(pipeline.data.decontaminate.against):
        fault = _source_fault(uri)
        if fault:
            faults.append(f"{where}: data.decontaminate.against[{index}] is {uri!r}: {fault}")
    if store_for(pipeline.train.base).manifest(pipeline.train.base) is None:
        faults.append(
            f"{where}: train.base is {pipeline.train.base!r}: no model with a manifest.json there. "
            "For the demo's models run `make setup`; for others `trainer import FOLDER URI`."
        )
    return faults


GLANCE = 64 << 10
"""How much of a source is looked at before a run; the data stage reads the rest. In bytes."""


def _source_fault(uri: str) -> str | None:
    if connections.is_connection(uri):
        return connections.fault(uri)
    store = store_for(uri)
    found = matching(uri)
    if not found:
        return "no file matches the pattern. Check the address, or deliver the data."
    for place in found:
        if store.children(place):
            continue
        if not store.exists(place):
            return "there is no such file or folder. Check the address, or deliver the data."
        if not store.read(place, first=GLANCE).strip():
            name = "the file" if found == [uri] else place.rsplit("/", 1)[-1]
            return f"{name} has 0 rows. Deliver the data, or remove the source."
    return None


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    origin = typing.get_origin(annotation)
    if origin in (tuple, list, typing.Union, types.UnionType, typing.Annotated):
        for part in typing.get_args(annotation):
            found = _model_in(part)
            if found:
                return found
    return None
