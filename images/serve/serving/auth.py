"""Who may ask: the bearer of the stack's token."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Annotated

from fastapi import Header, HTTPException


def bearer(token: str) -> Callable[[str], None]:
    """A FastAPI dependency that lets only the token's bearer in (401 for everybody else)."""

    def check(authorization: Annotated[str, Header()] = "") -> None:
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), token.encode()):
            raise HTTPException(401, "a bearer token is needed", {"WWW-Authenticate": "Bearer"})

    return check
