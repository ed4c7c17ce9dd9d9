"""The board's endpoints. Every one asks who you are; what changes something asks for edit rights on the line's DAG."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import DagDetails
from airflow.api_fastapi.core_api.security import GetUserDep
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict, Field

from operators.controller import Controller, Refused
from refit.errors import RefitError, ServerUnavailable
from refit_board import bad_records, data, files

PREFIX = "/refit"
PAGE = Path(__file__).with_name("page")
ASSETS = {"board.css": "text/css", "board.js": "text/javascript", "view.js": "text/javascript",
          "quarantine.js": "text/javascript"}  # fmt: skip

# The page runs its own script and talks to its own server; nothing comes from elsewhere.
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)

app = FastAPI(title="Refit", docs_url=None, redoc_url=None, openapi_url=None)


def may(method: str, line: str, user: Any) -> bool:
    """Whether a user may do this to a line's DAG."""
    details = DagDetails(id=f"retrain_{line}")
    return bool(get_auth_manager().is_authorized_dag(method=method, details=details, user=user))  # type: ignore[arg-type]


def reader(user: GetUserDep) -> Any:
    """Whoever may read DAGs may read the board."""
    if not get_auth_manager().is_authorized_dag(method="GET", user=user):
        raise HTTPException(403, "You may not read DAGs here.")
    return user


Reader = Annotated[Any, Depends(reader)]


class Wish(BaseModel):
    """A person's reason for a rollback; it is kept with the history."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field(min_length=3, max_length=500)


@app.get("/")
def page(user: Reader) -> Response:
    """The page itself."""
    return FileResponse(
        PAGE / "board.html", headers={"content-security-policy": PAGE_POLICY, "cache-control": "no-cache"}
    )


@app.get("/quarantine")
def quarantine(user: Reader) -> Response:
    """The page of bad records."""
    return FileResponse(
        PAGE / "quarantine.html", headers={"content-security-policy": PAGE_POLICY, "cache-control": "no-cache"}
    )


@app.get("/static/{name}")
def asset(name: str, user: Reader) -> Response:
    """Its style and script."""
    if name not in ASSETS:
        raise HTTPException(404, "There is no such file.")
    return FileResponse(PAGE / name, media_type=ASSETS[name], headers={"cache-control": "no-cache"})


@app.get("/api/board")
def board(user: Reader) -> dict[str, Any]:
    """All that the page shows, of the lines that this user may read."""
    return data.board(readable=lambda line: may("GET", line, user), editable=lambda line: may("PUT", line, user))


@app.get("/api/quarantine")
def quarantines(user: Reader) -> list[dict[str, Any]]:
    """The data jobs with bad records, of the lines that this user may read."""
    try:
        return bad_records.jobs(readable=lambda line: may("GET", line, user))
    except bad_records.Away as error:
        raise HTTPException(503, f"History is away: {error}") from error


@app.get("/api/quarantine/{job}")
def quarantine_of(job: str, user: Reader, source: str | None = None, kind: str | None = None) -> dict[str, Any]:
    """A job's bad records; the samples of one source and one kind of reason, where these are named."""
    if "\0" in f"{job}{source}{kind}":  # Postgres takes none
        raise HTTPException(404, "There is no such job.")
    try:
        found = bad_records.job(job, source=source, kind=kind, readable=lambda line: may("GET", line, user))
    except bad_records.Away as error:
        raise HTTPException(503, f"History is away: {error}") from error
    if found is None:
        raise HTTPException(404, "There is no such job with bad records that you may read.")
    return found


@app.post("/api/lines/{line}/rollback")
def roll_back(line: str, wish: Wish, request: Request, user: Reader) -> dict[str, Any]:
    """Put the previous model back, as this user. The controller moves the users first, and writes it down then."""
    # A form on another site cannot send this type; so a person's cookie alone starts nothing.
    if not request.headers.get("content-type", "").startswith("application/json"):
        raise HTTPException(415, "Send JSON.")
    if not may("PUT", line, user):
        raise HTTPException(403, "You may not change this line.")
    try:
        return Controller().roll_back(line, f"{wish.reason} (by {user.get_name()}, from the board)")
    except Refused as error:
        raise HTTPException(error.status, str(error)) from error
    except ServerUnavailable as error:
        raise HTTPException(503, str(error)) from error


@app.get("/store/{path:path}")
def store(path: str, user: Reader) -> Response:
    """A file of the store, or what a folder holds: what links on tasks lead to."""
    try:
        line = files.line_of(path)
        if line is not None and not may("GET", line, user):
            raise HTTPException(403, "You may not read this line.")
        return files.show(path, prefix=f"{PREFIX}/store")
    except FileNotFoundError as error:
        raise HTTPException(404, "There is no such file in the store.") from error
    except RefitError as error:
        raise HTTPException(503, str(error)) from error
