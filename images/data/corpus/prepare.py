"""The data stage as one job: eight phases, each answered from its folder where nothing that decides it has changed.

    ingest → clean → tokenize            in shards: on every core, on as many machines as there are
           → sign                        in shards too, on every core; needs what all shards of a source share
           → dedup → split → mix → pack  over all of them, a shard in memory at a time

What it does not do: choose the sources or the weights (the spec does), ask a model anything, start anything else.
"""

from __future__ import annotations

from collections import Counter

from corpus import course, inputs, rules, sharded, sources, summary
from corpus.course import Course
from corpus.phases import BEFORE, INGEST, SHARED_OUT
from corpus.quarantine import check_ratio, check_sources
from corpus.sharded import Made
from corpus.task import QUARANTINE
from corpus.walk import Done, Walk, manifest_uri
from refit import fingerprint, pipeline
from refit.errors import BadInput
from refit.job import JobRun
from refit.manifest import Manifest
from refit.spec import Pipeline
from refit.states import State
from refit.store import join, store_for


def prepare(run: JobRun) -> Manifest:
    """Run the phases of a job of kind `prepare`; options: `only` (a phase), `force`, `where` (names the spec).

    Raises:
        BadInput: a source or base model is not there or empty; a rule is not known; too many records are bad.
    """
    spec, options = run.spec, run.job.options
    check(spec, str(options.get("where", spec.name)))
    only = options.get("only")
    way = Course(walk_of(run), run, str(only) if only else None)
    try:
        for _ in way.phases():
            done = list(way.done.values())
            _tell(run, done)
            given = [(source.name, source.format) for source in spec.data.sources]
            check_sources(given, done[0].facts, join(done[0].uri, QUARANTINE))
            _tolerate(done, spec.data.max_bad_ratio)
            way.pass_door()
    finally:  # above all where the run is refused
        page = summary.page(spec.name, list(way.done.values()), way.doors, run.job.output)
        run.put(summary.NAME, page.encode())
    last = done[-1]
    return Manifest(
        kind="prepare", fingerprint=last.manifest.fingerprint, code=last.manifest.code,
        inputs={"dataset": last.manifest.content_digest()},
        outputs={"dataset": last.uri},
        facts={
            "manifest": manifest_uri(last), "phases": [one.summary() for one in done],
            "doors": {name: one.uri for name, one in way.doors.items()},
        },
    )  # fmt: skip


def share(run: JobRun) -> Manifest:
    """Make this machine's share of the shards, for a later `prepare` to find; options: `share` of `shares`, from 0.

    Not those of `sign`: only all shards of a source tell its form, and a share has but some. `prepare` makes them.

    Raises:
        BadInput: a source or base model is not there or empty; a rule is not known.
    """
    spec, options = run.spec, run.job.options
    check(spec, str(options.get("where", spec.name)))
    walk = walk_of(run)
    every = list(sources.shards(spec, heard=lambda: run.progress(INGEST.name, 0, len(SHARED_OUT))))
    shards = every[int(options["share"]) :: int(options["shares"])]
    made: dict[str, list[Made]] = {}
    for number, phase in enumerate(SHARED_OUT):
        if before := BEFORE.get(phase.name):
            shards = inputs.after(walk, before, made[before.name], inputs.beside(walk, phase, {}))
        sharded.make(walk, phase, shards, course.reporter(run, number, phase, len(SHARED_OUT)))
        made[phase.name] = sharded.made(walk, phase, shards)
    last = made[SHARED_OUT[-1].name]
    return Manifest(
        kind="share", fingerprint=fingerprint.digest([one.digest for one in last])[:32],
        facts={"shards": len(last), "records": sum(one.records for one in last)},
    )  # fmt: skip


def walk_of(run: JobRun) -> Walk:
    """Where the phases of a job leave their folders."""
    return Walk(
        spec=run.spec, store=store_for(run.job.store), root=join(run.job.store, "datasets", run.spec.name),
        force=bool(run.job.options.get("force")),
    )  # fmt: skip


def check(spec: Pipeline, where: str) -> None:
    """What can be known before any work.

    Raises:
        BadInput: a source or the base model is not there or empty.
        BadSpec: a rule or one of its arguments is not known.
    """
    rules.build(spec.data.rules)
    sources.score_model(spec)
    faults = pipeline.check_sources(spec, where)
    if faults:
        raise BadInput("\n".join(faults))


def _tell(run: JobRun, done: list[Done]) -> None:
    """Say in the events where the bad records are: a run that is refused has no manifest to say it."""
    last = done[-1]
    bad = int(last.facts["quarantined"])
    if bad:
        folders = [one.uri for one in done if one.facts["quarantined"]]
        if last.manifest.kind == "dataset":  # holds those of the phases before it
            folders = [last.uri]
        run.event(State.RUNNING, f"{last.phase} put {bad} records into quarantine", quarantine=folders)


def _tolerate(done: list[Done], limit: float) -> None:
    """Stop as soon as the phases so far have put too many records into quarantine."""
    reasons: Counter[str] = Counter()
    for one in done:
        reasons.update(one.facts.get("reasons", {}))
    worst = max(done, key=lambda one: int(one.facts["quarantined"]))
    check_ratio(int(done[0].facts["records_in"]), reasons, limit, join(worst.uri, QUARANTINE))
