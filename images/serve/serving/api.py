"""The controller's API: what the DAG, the plugin and the command line ask. The README beside lists the addresses."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, ValidationError

from refit.errors import BadInput, ServerUnavailable, StoreUnavailable
from refit.release import Release
from refit.spec import Rollout as Policy
from serving.auth import bearer
from serving.controller import Controller
from serving.fleet import Fleet
from serving.journal import Journal
from serving.rollout import Plan, Refused, Rollout

Actor = Annotated[str, Header(alias="x-refit-actor")]


class Given(BaseModel):
    """A request's body: a release."""

    model_config = ConfigDict(extra="forbid")

    release: Release


class Asked(BaseModel):
    """A request's body: a rollout."""

    model_config = ConfigDict(extra="forbid")

    id: str
    pipeline: str
    release: Release
    steps: tuple[int, ...]
    policy: Policy
    run_id: str | None = None


class Back(BaseModel):
    """A request's body: why a line goes back, and to which earlier champion (default: the previous one)."""

    model_config = ConfigDict(extra="forbid")

    reason: str = "no reason given"
    to: str | None = None


def app(controller: Controller, fleet: Fleet, journal: Journal, token: str) -> FastAPI:
    """The application. Every address but /v1/health wants the bearer token."""
    made = FastAPI(title="Refit rollout controller", docs_url=None, redoc_url=None, openapi_url=None)
    for error, status in (
        (Refused, 409),
        (LookupError, 404),
        (BadInput, 422),
        (ServerUnavailable, 503),
        (StoreUnavailable, 503),
    ):
        made.add_exception_handler(error, _answer_with(status))

    @made.get("/v1/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    router = APIRouter(prefix="/v1", dependencies=[Depends(bearer(token))])
    _pipelines(router, controller, journal)
    _servers(router, controller, fleet)
    _rollouts(router, controller, journal)
    made.include_router(router)
    return made


def _answer_with(status: int) -> Callable[[Request, Exception], JSONResponse]:
    return lambda request, error: JSONResponse({"detail": str(error)}, status)


def _pipelines(router: APIRouter, controller: Controller, journal: Journal) -> None:
    @router.get("/pipelines")
    def pipelines() -> list[dict[str, Any]]:
        return [line_view(controller, journal, name) for name in sorted(controller.table().lines)]

    @router.get("/pipelines/{pipeline}")
    def pipeline(pipeline: str) -> dict[str, Any]:
        return line_view(controller, journal, pipeline)

    @router.put("/pipelines/{pipeline}/champion", status_code=202)
    def champion(pipeline: str, given: Given, actor: Actor = "api") -> dict[str, Any]:
        if given.release.pipeline != pipeline:
            raise BadInput(f"release {given.release.id} is of {given.release.pipeline}, not of {pipeline}.")
        controller.first_champion(pipeline, given.release, actor)
        return line_view(controller, journal, pipeline)

    @router.post("/pipelines/{pipeline}/rollback", status_code=202)
    def rollback(pipeline: str, back: Back, actor: Actor = "api") -> dict[str, Any]:
        controller.roll_back(pipeline, back.reason, actor, back.to)
        return line_view(controller, journal, pipeline)


def _servers(router: APIRouter, controller: Controller, fleet: Fleet) -> None:
    @router.get("/servers")
    def servers() -> list[dict[str, Any]]:
        return [server_view(fleet, release) for release in fleet.releases()]

    @router.get("/servers/{release}")
    def server(release: str) -> dict[str, Any]:
        return server_view(fleet, release)

    @router.put("/servers/{release}", status_code=202)
    def start(release: str, given: Given) -> dict[str, Any]:
        if given.release.id != release:
            raise BadInput(f"the address names release {release}, the body release {given.release.id}.")
        fleet.want(given.release)
        return server_view(fleet, release)

    @router.delete("/servers/{release}", status_code=202)
    def stop(release: str) -> dict[str, Any]:
        if release in controller.needed():
            raise Refused(f"release {release} is on the routes, or on its way there")
        fleet.retire(release)
        return server_view(fleet, release)


def _rollouts(router: APIRouter, controller: Controller, journal: Journal) -> None:
    def found(rollout: str) -> dict[str, Any]:
        try:
            return rollout_view(controller, journal, controller.rollouts()[rollout])
        except KeyError:
            raise HTTPException(404, f"no rollout {rollout}") from None

    @router.post("/rollouts", status_code=201)
    def start(asked: Asked) -> dict[str, Any]:
        known, champion = controller.rollouts().get(asked.id), controller.table().line(asked.pipeline).champion
        if known is None and champion is None:
            raise Refused(f"{asked.pipeline} has no champion to roll out against")
        against = known.plan.champion if known else champion.release  # type: ignore[union-attr]
        try:
            plan = Plan(
                id=asked.id, pipeline=asked.pipeline, candidate=asked.release, champion=against, steps=asked.steps,
                policy=asked.policy, run_id=asked.run_id,
            )  # fmt: skip
        except ValidationError as error:
            raise BadInput("; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors())) from error
        return rollout_view(controller, journal, controller.start(plan))

    @router.get("/rollouts")
    def rollouts(pipeline: str | None = None) -> list[dict[str, Any]]:
        every = controller.rollouts().values()
        return [
            rollout_view(controller, journal, rollout) for rollout in every if pipeline in (None, rollout.plan.pipeline)
        ]

    @router.get("/rollouts/{rollout}")
    def rollout(rollout: str) -> dict[str, Any]:
        return found(rollout)

    @router.post("/rollouts/{rollout}/steps/{step}")
    def enter(rollout: str, step: int) -> dict[str, Any]:
        controller.enter(rollout, step)
        return found(rollout)

    @router.post("/rollouts/{rollout}/finish")
    def finish(rollout: str) -> dict[str, Any]:
        controller.finish(rollout)
        return found(rollout)


# ----------------------------------------------------------------------------------------------------------- views


def line_view(controller: Controller, journal: Journal, pipeline: str) -> dict[str, Any]:
    """A line as the API tells it."""
    line, running = controller.table().line(pipeline), controller.running(pipeline)
    return {
        "pipeline": pipeline,
        "champion": line.champion.release.model_dump(mode="json") if line.champion else None,
        "previous": line.previous.model_dump(mode="json") if line.previous else None,
        "challenger": line.challenger.release.model_dump(mode="json") if line.challenger else None,
        "weight": line.weight,
        "rollout": rollout_view(controller, journal, running) if running else None,
        "pending": line.pending.model_dump(mode="json") if line.pending else None,
        "standby": line.standby.release.id if line.standby else None,
        "history": [
            {"release": change.champion.id, "reason": change.reason, "actor": change.actor, "at": change.at}
            for change in controller.changes()
            if change.pipeline == pipeline
        ],
        "live": controller.live(),
        "leading": controller.leading,
    }


def server_view(fleet: Fleet, release: str) -> dict[str, Any]:
    """A server as the API tells it."""
    health = fleet.health(release)
    return {"release_id": release, "state": str(health.state), "url": health.url or None, "why": health.why,
            "restarts": health.restarts}  # fmt: skip


def rollout_view(controller: Controller, journal: Journal, rollout: Rollout) -> dict[str, Any]:
    """A rollout as the API tells it."""
    plan, judgement = rollout.plan, controller.judgement(rollout)
    return {
        "id": plan.id, "pipeline": plan.pipeline, "state": str(rollout.state), "step": rollout.step,
        "weight": rollout.weight, "verdict": str(judgement.verdict), "why": judgement.why,
        "measured": judgement.measured, "steps": list(plan.steps), "candidate": plan.candidate.id,
        "champion": plan.champion.id, "run_id": plan.run_id, "finishing": rollout.finishing,
        "seconds_in_step": time.time() - rollout.entered_at if rollout.entered_at and rollout.running else None,
        "started_at": rollout.started_at, "ended_at": rollout.ended_at,
        "journal": [entry.model_dump(mode="json") for entry in journal.entries(plan.id)],
    }  # fmt: skip
