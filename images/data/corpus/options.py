"""Options of a command that are settings of the spec: default, bounds and meaning are the spec's, and nobody else's."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from refit.errors import BadInput

Fields = Mapping[str, str]
"""Options, without their dashes, by the name of the field that each is."""


def add(parser: argparse.ArgumentParser, model: type[BaseModel], fields: Fields, where: str) -> None:
    """Add an option for each field of a part of the spec; `where` is that part's place in it."""
    for option, field in fields.items():
        default = model.model_fields[field].default
        parser.add_argument(f"--{option}", metavar="N", default=default, help=f"{where}.{field} [{default}]")


def values(arguments: argparse.Namespace, model: type[BaseModel], fields: Fields) -> dict[str, Any]:
    """What was given, by field.

    Raises:
        BadInput: a value that the spec would not take; names the option.
    """
    found = {}
    for option, field in fields.items():
        given = getattr(arguments, option.replace("-", "_"))
        try:
            found[field] = TypeAdapter(model.model_fields[field].rebuild_annotation()).validate_python(given)
        except ValidationError as error:
            raise BadInput(f"--{option} is {given}: {error.errors()[0]['msg']}.") from error
    return found
