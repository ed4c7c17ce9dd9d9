"""What the fields of a spec are made of: bounds that several share, and how one comes to be in the trigger form."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,47}$")]
Uri = Annotated[str, Field(pattern=r"^(file:///|s3://|cache://)\S+$")]
SourceUri = Annotated[str, Field(pattern=r"^((file:///|s3://|cache://)\S+|sql://[a-z][a-z0-9_]{0,47})$")]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Spec(BaseModel):
    """A group of settings: closed (an unknown name is an error), frozen, and free of NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)


def form(default: Any = ..., *, title: str, help: str, unit: str | None = None) -> Any:
    """A field that the trigger form shows."""
    shown: dict[str, Any] = {"form": True, **({"unit": unit} if unit else {})}
    return Field(default, title=title, description=help, json_schema_extra=shown)
