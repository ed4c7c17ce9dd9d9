"""Refit in the Airflow UI: one page in the navigation, and the pages that links on tasks lead to."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin
from refit_board.app import PREFIX, app

APPS = [{"app": app, "url_prefix": PREFIX, "name": "Refit"}]
VIEWS = [{"name": "Models", "href": f"{PREFIX}/", "destination": "nav", "url_route": "refit", "nav_top_level": True}]


class RefitPlugin(AirflowPlugin):
    """The board. Airflow does not guard a plugin's app: each of its endpoints asks who you are (`refit_board.app`)."""

    name = "refit"
    fastapi_apps = APPS
    external_views = VIEWS
