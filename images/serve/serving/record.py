"""`serving record`: the recorder's loop, and the two addresses at which feedback comes in."""

from __future__ import annotations

from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException

from serving.auth import bearer
from serving.control import threads
from serving.database import Database
from serving.feedback import Feedback, FeedbackSpool
from serving.gateway import Gateway
from serving.recorder import Recorder
from serving.settings import HOST, Settings, port_of

BATCH = 10_000


def record(settings: Settings) -> None:
    """Run the recorder until it is stopped."""
    token = settings.token()
    gateway = Gateway(settings.envoy, settings.admin)
    recorder = Recorder(settings.home, Database(settings.database, "refit-recorder"), gateway)
    with threads(recorder.run):
        application = app(recorder.feedback, token)
        uvicorn.run(application, host=HOST, port=port_of(settings.recorder), log_level="warning", access_log=False)


def app(spool: FeedbackSpool, token: str) -> FastAPI:
    """The application; /v1/health is open, /v1/feedback wants the bearer token."""
    made = FastAPI(title="Refit recorder", docs_url=None, redoc_url=None, openapi_url=None)

    @made.get("/v1/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @made.post("/v1/feedback", status_code=202, dependencies=[Depends(bearer(token))])
    def feedback(events: Feedback | list[Feedback]) -> dict[str, Any]:
        batch = events if isinstance(events, list) else [events]
        if len(batch) > BATCH:
            raise HTTPException(413, f"at most {BATCH} events at a time")
        return {"accepted": spool.add(batch)}

    return made
