"""The trigger form and the `overrides` object, derived from the spec's own types."""

from __future__ import annotations

import copy
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from refit.pipeline import merge, nest
from refit.spec import Pipeline

SECTIONS = {
    "data": "Data",
    "train": "Training",
    "evaluate": "Evaluation",
    "promote": "Promotion",
    "serve": "Rollout",
    "rollout": "Rollout",
}
OVERRIDES = "overrides"


@dataclass(frozen=True, kw_only=True)
class FormField:
    """A field of the form: dotted name, default (the pipeline file's value), and a JSON schema a UI can draw."""

    name: str
    section: str
    default: Any
    schema: dict[str, Any]


def form_fields(pipeline: Pipeline) -> list[FormField]:
    """The fields that people change, in the spec's order, with this line's values as defaults."""
    schema = resolved_schema()
    return [_form_field(schema, pipeline, location) for location in _shown(Pipeline, ())]


def overrides_schema() -> dict[str, Any]:
    """A closed schema for everything else: any setting by its place, nothing required, unknown names refused."""
    schema = copy.deepcopy(resolved_schema())
    _loosen(schema)
    # Identity is the file's, not the form's.
    for fixed in ("name", "team", "owner", "schedule", "on_new_data"):
        schema["properties"].pop(fixed)
    # What a database is asked, too: whoever may start a run need not be one who may read all its tables.
    schema["properties"]["data"]["properties"]["sources"]["items"]["properties"].pop("query")
    return schema


def apply_form(pipeline_document: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A pipeline's document with the form's values laid over it (dotted names, and the `overrides` object last)."""
    flat = {name: value for name, value in values.items() if name != OVERRIDES}
    return merge(merge(pipeline_document, nest(flat)), values.get(OVERRIDES) or {})


def resolved_schema() -> dict[str, Any]:
    """The JSON schema of a pipeline with every reference replaced by what it names."""
    schema = Pipeline.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                target = definitions[node["$ref"].rsplit("/", 1)[-1]]
                return resolve({**target, **{key: value for key, value in node.items() if key != "$ref"}})
            return {key: resolve(value) for key, value in node.items()}
        return [resolve(item) for item in node] if isinstance(node, list) else node

    return typing.cast(dict[str, Any], resolve(schema))


def _shown(group: type[BaseModel], location: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, field in group.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("form"):
            yield (*location, name)
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _shown(field.annotation, (*location, name))


def _form_field(schema: dict[str, Any], pipeline: Pipeline, location: tuple[str, ...]) -> FormField:
    node: dict[str, Any] = schema
    default: Any = pipeline.model_dump(mode="json")
    for name in location:
        node, default = node["properties"][name], default[name]
    node = {key: value for key, value in node.items() if key not in ("form", "default", "prefixItems")}
    unit = node.pop("unit", None)
    if unit:
        node["title"] = f"{node['title']} ({unit})"
    options = node.pop("anyOf", None)
    if options:  # `X | None`: JSON schema's own way to say so, which a form can draw
        kinds = [option for option in options if option.get("type") != "null"]
        node = {**kinds[0], **node, "type": [kinds[0]["type"], "null"]}
    return FormField(name=".".join(location), section=SECTIONS[location[0]], default=default, schema=node)


def _loosen(node: Any) -> None:
    if isinstance(node, dict):
        if node.get("type") == "object" and "properties" in node:
            node.pop("required", None)
        for key in ("default", "form", "unit"):
            if not isinstance(node.get(key), dict) or key == "default":
                node.pop(key, None)
        for value in node.values():
            _loosen(value)
    elif isinstance(node, list):
        for item in node:
            _loosen(item)
