"""Refit in the Airflow UI: one page in the navigation, and the pages that links on tasks lead to.

Every task loads its plugins, so this imports next to nothing; the board itself is imported by the API server, at the
first request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from airflow.plugins_manager import AirflowPlugin

from operators import preload

PREFIX = "/refit"


async def board(
    scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
) -> None:
    """The board's application. Airflow does not guard it: each of its endpoints asks who you are."""
    from refit_board.app import app

    await app(scope, receive, send)


APPS = [{"app": board, "url_prefix": PREFIX, "name": "Refit"}]
VIEWS = [{"name": "Models", "href": f"{PREFIX}/", "destination": "nav", "url_route": "refit", "nav_top_level": True}]


LISTENERS: list[Any] = [preload]


class RefitPlugin(AirflowPlugin):
    """The board and its links, and a listener that makes tasks start fast."""

    name = "refit"
    fastapi_apps = APPS
    external_views = VIEWS
    listeners = LISTENERS
