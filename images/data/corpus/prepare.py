"""The data stage as one job: eight phases, each answered from its folder where nothing that decides it has changed.

    ingest → clean → tokenize            in shards: on every core, on as many machines as there are
           → sign                        in shards too, on every core; needs what all shards of a source share
           → dedup → split → mix → pack  over all of them, a shard in memory at a time

What it does not do: choose the sources or the weights (the spec does), ask a model anything, start anything else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from corpus import door, rules, settings, sharded, sources, summary
from corpus.quarantine import check_ratio, check_sources
from corpus.settings import CleanSettings, IngestSettings
from corpus.sharded import Made, Shard
from corpus.task import LINES, QUARANTINE, Report, form_file, silent
from corpus.walk import Done, Input, Phase, Walk, manifest_uri
from refit import files, fingerprint, pipeline
from refit.errors import BadInput
from refit.job import JobRun
from refit.manifest import Manifest
from refit.spec import Pipeline
from refit.states import State
from refit.store import Store, cache_folder, join, store_for

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def _modules_of_rules(chosen: CleanSettings) -> list[str]:
    """Only the rules that are used: a new one changes no name of a line that does not use it."""
    return sorted({step.module for step in rules.build(chosen.rules)})


def _libraries_of_rules(chosen: CleanSettings) -> list[str]:
    return [name for step in rules.build(chosen.rules) for name in step.libraries]


def _shared(chosen: Any) -> list[str]:
    return ["refit.chat", "refit.packed"]


INGEST, CLEAN, TOKENIZE, SIGN, DEDUP, SPLIT, MIX, PACK = PHASES = (
    Phase(
        name="ingest", settings=settings.ingest, of_source=IngestSettings.of_source,
        libraries=("pyarrow", "xxhash", "charset-normalizer"),
    ),
    Phase(
        name="clean", settings=settings.clean, libraries=("pyarrow", "numpy", "xxhash"), modules=_modules_of_rules,
        more_libraries=_libraries_of_rules, merges=LINES,
    ),
    Phase(
        name="tokenize", settings=settings.tokenize, modules=_shared,
        libraries=("pyarrow", "numpy", "tokenizers", "gigatoken", "jinja2"),
    ),
    Phase(name="sign", settings=settings.sign, libraries=("pyarrow", "numpy")),
    Phase(name="dedup", settings=settings.dedup, libraries=("pyarrow", "numpy")),
    Phase(name="split", settings=settings.split, libraries=("pyarrow", "numpy", "charset-normalizer")),
    Phase(name="mix", settings=settings.mix, libraries=("pyarrow", "numpy")),
    Phase(
        name="pack", settings=settings.pack, modules=_shared, kind="dataset",
        libraries=("pyarrow", "numpy", "tokenizers", "jinja2", "great-expectations"),
    ),
)  # fmt: skip
DOORS = {
    phase.name: Phase(
        name="doors", settings=partial(settings.door, after=phase.name), kind="door",
        libraries=("pyarrow", "great-expectations"),
    )
    for phase in (CLEAN, DEDUP, SPLIT)
}  # fmt: skip
IN_SHARDS = (INGEST, CLEAN, TOKENIZE, SIGN)
SHARED_OUT = (INGEST, CLEAN, TOKENIZE)
_BEFORE = {"clean": INGEST, "tokenize": CLEAN, "sign": CLEAN}
NAMES = tuple(phase.name for phase in PHASES)


def prepare(run: JobRun) -> Manifest:
    """Run the phases of a job of kind `prepare`; options: `only` (a phase), `force`, `where` (names the spec).

    Raises:
        BadInput: a source or base model is not there or empty; a rule is not known; too many records are bad.
    """
    spec, options = run.spec, run.job.options
    check(spec, str(options.get("where", spec.name)))
    only = options.get("only")
    course = Course(walk_of(run), run, str(only) if only else None)
    try:
        for _ in course.phases():
            done = list(course.done.values())
            _tell(run, done)
            given = [(source.name, source.format) for source in spec.data.sources]
            check_sources(given, done[0].facts, join(done[0].uri, QUARANTINE))
            _tolerate(done, spec.data.max_bad_ratio)
            course.pass_door()
    finally:  # above all where the run is refused
        page = summary.page(spec.name, list(course.done.values()), course.doors, run.job.output)
        run.put(summary.NAME, page.encode())
    last = done[-1]
    return Manifest(
        kind="prepare", fingerprint=last.manifest.fingerprint, code=last.manifest.code,
        inputs={"dataset": last.manifest.content_digest()},
        outputs={"dataset": last.uri},
        facts={
            "manifest": manifest_uri(last), "phases": [one.summary() for one in done],
            "doors": {name: one.uri for name, one in course.doors.items()},
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
        if before := _BEFORE.get(phase.name):
            shards = after(walk, before, made[before.name], beside(walk, phase, {}))
        sharded.make(walk, phase, shards, _reporter(run, number, phase, len(SHARED_OUT)))
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


def after(walk: Walk, before: Phase, made: Sequence[Made], more: Callable[[str], Mapping[str, Input]]) -> list[Shard]:
    """The shards of a phase, one for each that `before` made; `more` gives what a source's read beside records."""
    shards = []
    for one in made:
        records = Input(one.digest, partial(walk.store.local, sharded.place(walk, before, one.name)))
        shards.append(Shard(source=one.source, size=one.size, inputs={"records": records, **more(one.source)}))
    return shards


def beside(walk: Walk, phase: Phase, done: Mapping[str, Done]) -> Callable[[str], Mapping[str, Input]]:
    """What the shards of a source read in a phase beside its records; `done` are the phases before."""
    if phase is SIGN:
        return lambda source: {"form": form(walk.store, done[CLEAN.name], source)}
    more = {"tokenizer": tokenizer(walk.spec.train.base)} if phase is TOKENIZE else sources.score_model(walk.spec)
    return lambda _: more


def form(store: Store, clean: Done, source: str) -> Input:
    """The lines that a source's texts share. Clean's manifest has the digest: nothing is read to see that it stayed."""
    path = form_file(source, "said")
    digest = next(file.sha256 for file in clean.manifest.files if file.path == path)
    return Input(digest, partial(store.local, join(clean.uri, path)))


def _reporter(run: JobRun, number: int, phase: Phase, of: int) -> Report:
    def report(done: int, total: int) -> None:
        share = done / total if total else 0.5
        run.progress(phase.name, number + share, of, records=done, records_total=total)

    return report


@dataclass
class Course:
    """The phases in their order, and what has come of them so far."""

    walk: Walk
    run: JobRun
    only: str | None

    def __post_init__(self) -> None:
        self.done: dict[str, Done] = {}
        self.made: dict[str, list[Made]] = {}
        self.doors: dict[str, Done] = {}

    def phases(self) -> Iterator[Done]:
        """Run each, or answer it; with `only`, answer what is before that one and run it alone."""
        for number, phase in enumerate(PHASES):
            self.run.progress(phase.name, number, len(PHASES))
            report = _reporter(self.run, number, phase, len(PHASES))
            if phase in IN_SHARDS:
                self._in_shards(phase, report)
            else:
                self._whole(phase, report)
            yield self.done[phase.name]
            if phase.name == self.only:
                return
        self.run.progress("done", len(PHASES), len(PHASES))

    def pass_door(self) -> None:
        """Ask what there is to ask of the last phase, before the next one begins.

        Raises:
            BadRecords: an expectation is not met.
        """
        name = list(self.done)[-1]
        asking = DOORS.get(name)
        if asking is None or self.only not in (None, name):
            return
        phase = next(one for one in PHASES if one.name == name)
        role = "records" if phase is CLEAN else "rows"
        shards = self._folders({"records": CLEAN} if phase is CLEAN else {})
        inputs = {role: self._input(phase)}
        passed = self.walk.find(asking, inputs)
        # One that was not passed is asked again: what failed may have been the asking.
        again = passed is not None and bool(passed.facts["expectations"]["failed"])
        self.doors[name] = replace(self.walk, force=again or self.walk.force).run(asking, inputs, silent, [], shards)
        door.require(self.doors[name].facts["expectations"], f"after {name}")

    def _in_shards(self, phase: Phase, report: Report) -> None:
        shards = self._shards(phase)
        if self.only in (None, phase.name):
            found = sharded.run(self.walk, phase, shards, report, self._history())
        else:
            found = sharded.find(self.walk, phase, shards) or self._missing(phase)
        self.done[phase.name], self.made[phase.name] = found

    def _whole(self, phase: Phase, report: Report) -> None:
        inputs = self._inputs(phase)
        if self.only in (None, phase.name):
            self.done[phase.name] = self.walk.run(phase, inputs, report, self._history(), self._parts(phase))
        else:
            self.done[phase.name] = self.walk.find(phase, inputs) or self._missing(phase)

    def _missing(self, phase: Phase) -> Any:
        raise BadInput(
            f"--only {self.only}: its phase before, {phase.name}, has not run with these settings and this data. "
            "Run all phases first (without --only)."
        )

    def _history(self) -> list[dict[str, Any]]:
        return [{"fingerprint": one.manifest.fingerprint, **_told(one)} for one in self.done.values()]

    def _shards(self, phase: Phase) -> list[Shard]:
        before = _BEFORE.get(phase.name)
        if before is None:
            return list(sources.shards(self.walk.spec, heard=lambda: self.run.progress(phase.name, 0, len(PHASES))))
        return after(self.walk, before, self.made[before.name], beside(self.walk, phase, self.done))

    def _inputs(self, phase: Phase) -> dict[str, Input]:
        inputs = {"records": self._input(CLEAN)}
        if phase is DEDUP:
            inputs["signatures"] = self._input(SIGN)
        else:
            inputs["rows"] = self._input(PHASES[PHASES.index(phase) - 1])
        if phase is SPLIT:
            inputs |= sources.evaluations(self.walk.spec)
        if phase is MIX:
            del inputs["records"]
        if phase is PACK:
            inputs["tokenizer"] = tokenizer(self.walk.spec.train.base)
            inputs["tokens"] = self._input(TOKENIZE)
            inputs["ingested"] = self._input(INGEST)
        return inputs

    def _input(self, phase: Phase) -> Input:
        found = self.done[phase.name].as_input(self.walk.store)
        if phase not in IN_SHARDS:
            return found
        # By what the shards hold: their names change with the code that made them.
        return Input(fingerprint.digest([one.digest for one in self.made[phase.name]]), found.fetch)

    def _parts(self, phase: Phase) -> dict[str, Callable[[], Sequence[Path]]]:
        """The inputs of a phase that are in shards."""
        wanted = {} if phase is MIX else {"records": CLEAN}
        if phase is DEDUP:
            wanted["signatures"] = SIGN
        if phase is PACK:
            wanted["tokens"] = TOKENIZE
        return self._folders(wanted)

    def _folders(self, wanted: Mapping[str, Phase]) -> dict[str, Callable[[], Sequence[Path]]]:
        return {role: partial(sharded.folders, self.walk, of, self.made[of.name]) for role, of in wanted.items()}


def tokenizer(base: str) -> Input:
    """The tokenizer files of a base model: they count, and are fetched, without its weights."""
    store = store_for(base)
    manifest = store.require(base, "model")
    wanted = {file.path: file.sha256 for file in manifest.files if file.path in TOKENIZER}
    if "tokenizer.json" not in wanted:
        raise BadInput(f"train.base is {base!r}: it has no tokenizer.json. Import the model with its fast tokenizer.")
    digest = fingerprint.digest(wanted)
    return Input(digest, lambda: _fetched(store, base, sorted(wanted), digest))


def _fetched(store: Store, base: str, names: list[str], digest: str) -> Path:
    folder = cache_folder() / "tokenizers" / digest[:32]
    for name in names:
        if not (folder / name).is_file():
            files.write(folder / name, store.read(join(base, name)))
    return folder


def _told(done: Done) -> dict[str, Any]:
    """What a phase told, short: its counts and what is its own, without what follows from the spec."""
    return {"name": done.phase} | {k: v for k, v in done.facts.items() if k not in ("settings", "before", "versions")}


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
