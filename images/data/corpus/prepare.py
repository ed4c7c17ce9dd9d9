"""The data stage as one job: nine phases, each answered from its folder where nothing that decides it has changed.

    ingest → clean → tokenize            in shards: on every core, on as many machines as there are
           → sign                        in shards too; needs what all shards of a source share
           → match                       in parts, each over the signatures of all shards
           → dedup → split → mix → pack  over all of them, a shard in memory at a time

What it does not do: choose the sources or the weights (the spec does), ask a model anything, start anything else.
"""

from __future__ import annotations

from collections import Counter

from corpus import course, inputs, rules, sharded, sources, summary
from corpus.course import Course
from corpus.phases import BEFORE, SHARED_OUT
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
    way.deliveries.extracts.clear(spec)
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
    """Make this machine's share of a round's shards, for a later `prepare` to find.

    Options: `share` of `shares`, from 0, and the `round`: `cut`, which only reads objects that lie elsewhere, or one of
    `SHARED_OUT`. A round needs what those before it make, all shares of it; what is missing is made.

    Raises:
        BadInput: a source or base model is not there or empty; a rule is not known.
    """
    spec, options = run.spec, run.job.options
    check(spec, str(options.get("where", spec.name)))
    way, (share, shares) = Course(walk_of(run), run), (int(options["share"]), int(options["shares"]))
    if options["round"] == "cut":
        read = way.deliveries.cut(share, shares, heard=lambda: run.progress("cut", 0, 1))
        return Manifest(kind="share", fingerprint=fingerprint.digest(str(share)), facts={"read": read})
    phases = SHARED_OUT[str(options["round"])]
    shards = way.before(phases[0])[share::shares]
    made: list[Made] = []
    for number, phase in enumerate(phases):
        if number:
            shards = inputs.after(way.walk, BEFORE[phase.name], made, inputs.beside(way.walk, phase, {}))
        sharded.make(way.walk, phase, shards, course.reporter(run, number, phase, len(phases)))
        made = sharded.made(way.walk, phase, shards)
    return Manifest(
        kind="share", fingerprint=fingerprint.digest([one.digest for one in made])[:32],
        facts={"shards": len(made), "records": sum(one.records for one in made)},
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
