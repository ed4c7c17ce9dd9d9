"""Where chat templates run: in the environment that they are written for, with loop controls, in a sandbox."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import cache

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment


@cache
def compiled(source: str) -> jinja2.Template:
    """A template, ready to render."""
    return environment().from_string(source)


@cache
def environment() -> ImmutableSandboxedEnvironment:
    """The one environment of all templates."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
    made.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
    return made
