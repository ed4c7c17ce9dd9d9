"""Connections to databases by name: `sql://crm` in a spec, the address with its password in the environment.

    REFIT_CONNECTION_CRM=postgresql://reader:secret@db.example/crm

A spec, a manifest, a log and an error know the name alone.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from refit.errors import BadInput

if TYPE_CHECKING:
    from refit.spec import Pipeline

SCHEME = "sql://"
PREFIX = "REFIT_CONNECTION_"
DATABASES = ("postgresql", "sqlite")
"""Those that we know how to forbid every change: a query is run in a transaction that may only read."""


def is_connection(uri: str) -> bool:
    """Whether a source's address names a database."""
    return uri.startswith(SCHEME)


def variable(uri: str) -> str:
    """The environment variable that holds the address of a connection."""
    return PREFIX + uri.removeprefix(SCHEME).upper()


def variables(spec: Pipeline) -> tuple[str, ...]:
    """The variables that the sources of a line need; a job gets these and no other connection's."""
    return tuple(sorted({variable(source.uri) for source in spec.data.sources if is_connection(source.uri)}))


def fault(uri: str) -> str | None:
    """What is wrong with a connection, as far as can be known without calling the database."""
    name = variable(uri)
    given = os.environ.get(name, "").strip()
    if not given:
        return (
            f"the environment variable {name} is not set; it holds the database's URL (postgresql://… or sqlite:///…)."
        )
    if _database(given) not in DATABASES:
        return (
            f"{name} is no URL of {' or '.join(DATABASES)}. Set it to postgresql://USER:PASSWORD@HOST/NAME or the like."
        )
    return None


def url(uri: str) -> str:
    """The address of a connection, password included: for the driver alone.

    Raises:
        BadInput: the variable is not set, or names a database that is not known.
    """
    wrong = fault(uri)
    if wrong:
        raise BadInput(f"{uri}: {wrong}")
    return os.environ[variable(uri)].strip()


def _database(given: str) -> str:
    """`postgresql` of `postgresql+psycopg://…` and of `postgres://…`; empty where there is no URL."""
    try:
        name = urlsplit(given).scheme.partition("+")[0]
    except ValueError:
        return ""
    return "postgresql" if name == "postgres" else name
