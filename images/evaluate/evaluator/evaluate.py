"""The job `evaluate`: one release answers the whole exam, in the form it is served in.

In:  inputs dataset (the data stage's folder) and release (a model folder); options url and release_id.
Out: answers.parquet, and the figures as the manifest's facts. A kill loses no answer; a second run asks the rest.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence

from evaluator.answers import FILE, Answers, facts
from evaluator.exam import HELDOUT, Item, exam
from evaluator.ledger import Ledger
from evaluator.output import keep
from evaluator.server import Server
from refit import log
from refit.errors import BadInput, Preempted
from refit.fingerprint import evaluation_fingerprint
from refit.job import Job, JobRun
from refit.manifest import Manifest
from refit.release import Release
from refit.store import join, store_for

KIND = "evaluation"
PATIENCE_SECONDS = 120.0
HEARTBEAT_SECONDS = 1.0


def evaluate(run: JobRun) -> Manifest:
    """Ask, score, and say what came out.

    Raises:
        BadInput: there is no such dataset or model, or the job does not say which server to ask.
        ServerUnavailable: the server is away for longer than `patience_seconds`, or serves another release.
        Preempted: stopped from outside; the answers so far are kept.
    """
    job, spec = run.job, run.spec.evaluate
    began = time.monotonic()
    name, digests = identity(job)
    ledger = Ledger(run, name)
    items = exam(store_for(job.inputs["dataset"]).local(join(job.inputs["dataset"], HELDOUT)), spec)
    waiting = [item for item in items if item.key not in ledger.answers]
    kept = len(items) - len(waiting)
    log.event("exam", items=len(items), kept=kept, release=release_id(job))
    if waiting:
        asyncio.run(_ask_all(run, waiting, ledger, total=len(items)))
    answers = Answers.of(items, ledger.answers, spec)
    return Manifest(
        kind=KIND,
        fingerprint=name,
        inputs=digests,
        files=(keep(run, FILE, answers.parquet()),),
        facts={
            "release": release_id(job),
            "model_digest": digests["release"],
            "pipeline": job.pipeline,
            "team": job.team,
            "owner": job.owner,
            "sampling": spec.sampling.model_dump(),
            **facts(answers, spec.confidence),
            "asked": len(waiting),
            "kept": kept,
            "seconds": round(time.monotonic() - began, 3),
        },
    )


def identity(job: Job) -> tuple[str, dict[str, str]]:
    """The evaluation's fingerprint, and the content digests of its inputs."""
    for role in ("dataset", "release"):
        if role not in job.inputs:
            raise BadInput(f"{job.uri}: inputs.{role} is missing; an evaluation needs a dataset and a release.")
    dataset = store_for(job.inputs["dataset"]).manifest(job.inputs["dataset"])
    if dataset is None:
        raise BadInput(f"{job.inputs['dataset']}: no manifest.json there; run `corpus prepare` first.")
    model = store_for(job.inputs["release"]).require(job.inputs["release"], "model")
    digests = {"dataset": dataset.content_digest(), "release": model.content_digest()}
    return evaluation_fingerprint(job.spec.evaluate, dataset=digests["dataset"], release=release_id(job)), digests


def release_id(job: Job) -> str:
    """The release that is examined: the option, or the model in the serving profile of the spec."""
    given = job.options.get("release_id")
    if given:
        return str(given)
    uri = job.inputs["release"]
    manifest = store_for(uri).require(uri, "model")
    return Release.of(job.pipeline, manifest, uri, job.spec.serve, team=job.team, owner=job.owner).id


async def _ask_all(run: JobRun, waiting: Sequence[Item], ledger: Ledger, *, total: int) -> None:
    """Ask with a fixed number of requests in flight; the first failure ends all, the answers until then are kept."""
    job, spec = run.job, run.spec.evaluate
    url = job.options.get("url")
    if not url:
        raise BadInput(f"{job.uri}: options.url is missing; it names the server to ask, as http://127.0.0.1:8000.")
    patience = float(job.options.get("patience_seconds", PATIENCE_SECONDS))
    queue = iter(waiting)

    async def heartbeat() -> None:
        # Also while nothing comes back: waiting for a server is being alive.
        while True:
            run.progress("ask", len(ledger.answers), total)
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def worker(server: Server) -> None:
        for item in queue:
            ledger.add(await server.ask(item))

    async def all_of_it() -> None:
        pulse = asyncio.create_task(heartbeat())
        try:
            async with Server(
                str(url), pipeline=job.pipeline, release=release_id(job), sampling=spec.sampling,
                concurrency=spec.concurrency, patience=patience,
            ) as server, asyncio.TaskGroup() as group:  # fmt: skip
                await server.verify()
                for _ in range(min(spec.concurrency, len(waiting))):
                    group.create_task(worker(server))
        finally:
            pulse.cancel()

    task = asyncio.ensure_future(all_of_it())
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await task
    except asyncio.CancelledError as error:
        raise Preempted(f"stopped with {len(ledger.answers)} of {total} answers; they are kept.") from error
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None  # all workers fail for the same reason: the server
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        ledger.upload()
        run.progress("ask", len(ledger.answers), total)
