"""The data stage as one job: six phases, each answered from its folder where nothing that decides it has changed.

    ingest → clean → dedup → split → mix → pack

What it does not do: choose the sources or the weights (the spec does), ask a model anything, start anything else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corpus import rules, settings, sources
from corpus.quarantine import check_ratio
from corpus.settings import CleanSettings
from corpus.task import QUARANTINE
from corpus.walk import Done, Input, Phase, Walk, manifest_uri
from refit import files, fingerprint
from refit.errors import BadInput
from refit.job import JobRun
from refit.manifest import Manifest
from refit.pipeline import check_sources
from refit.spec import Pipeline
from refit.store import Store, cache_folder, join, store_for

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def _modules_of_rules(chosen: CleanSettings) -> list[str]:
    """Only the rules that are used: a new one changes no name of a line that does not use it."""
    return sorted({step.module for step in rules.build(chosen.rules)})


def _shared(chosen: Any) -> list[str]:
    return ["refit.chat", "refit.packed"]


PHASES = (
    Phase(name="ingest", settings=settings.ingest, libraries=("pyarrow", "xxhash")),
    Phase(name="clean", settings=settings.clean, libraries=("pyarrow",), modules=_modules_of_rules),
    Phase(name="dedup", settings=settings.dedup, libraries=("pyarrow", "numpy")),
    Phase(name="split", settings=settings.split, libraries=("pyarrow", "numpy")),
    Phase(name="mix", settings=settings.mix, libraries=("pyarrow", "numpy")),
    Phase(
        name="pack", settings=settings.pack, modules=_shared, kind="dataset",
        libraries=("pyarrow", "numpy", "tokenizers", "jinja2", "great-expectations"),
    ),
)  # fmt: skip
NAMES = tuple(phase.name for phase in PHASES)


def prepare(run: JobRun) -> Manifest:
    """Run the phases of a job of kind `prepare`; options: `only` (a phase), `force`, `where` (names the spec).

    Raises:
        BadInput: a source or base model is not there or empty; a rule is not known; too many records are bad.
    """
    spec, options = run.spec, run.job.options
    check(spec, str(options.get("where", spec.name)))
    only = options.get("only")
    walk = Walk(
        spec=spec, store=store_for(run.job.store), root=join(run.job.store, "datasets", spec.name),
        force=bool(options.get("force")),
    )  # fmt: skip
    done: list[Done] = []
    for done_phase in _walk(walk, run, str(only) if only else None):
        done.append(done_phase)
        _tolerate(done, spec.data.max_bad_ratio)
    last = done[-1]
    return Manifest(
        kind="prepare", fingerprint=last.manifest.fingerprint, code=last.manifest.code,
        inputs={"dataset": last.manifest.content_digest()},
        outputs={"dataset": last.uri},
        facts={"manifest": manifest_uri(last), "phases": [one.summary() for one in done]},
    )  # fmt: skip


def check(spec: Pipeline, where: str) -> None:
    """What can be known before any work.

    Raises:
        BadInput: a source or the base model is not there or empty.
        BadSpec: a rule or one of its arguments is not known.
    """
    rules.build(spec.data.rules)
    faults = check_sources(spec, where)
    if faults:
        raise BadInput("\n".join(faults))


def _walk(walk: Walk, run: JobRun, only: str | None) -> Iterator[Done]:
    done: dict[str, Done] = {}
    for number, phase in enumerate(PHASES):
        inputs = _inputs(phase.name, walk, done)
        if only and phase.name != only:
            found = walk.find(phase, inputs)
            if found is None:
                raise BadInput(
                    f"--only {only}: its phase before, {phase.name}, has not run with these settings and this data. "
                    "Run all phases first (without --only)."
                )
            done[phase.name] = found
        else:

            def report(records: int, total: int, number: int = number, name: str = phase.name) -> None:
                share = records / total if total else 0.5
                run.progress(name, number + share, len(PHASES), records=records, records_total=total)

            run.progress(phase.name, number, len(PHASES))
            history = [{"fingerprint": one.manifest.fingerprint, **_told(one)} for one in done.values()]
            done[phase.name] = walk.run(phase, inputs, report, history)
        yield done[phase.name]
        if phase.name == only:
            return
    run.progress("done", len(PHASES), len(PHASES))


def _inputs(phase: str, walk: Walk, done: dict[str, Done]) -> dict[str, Input]:
    if phase == "ingest":
        return sources.inputs(walk.spec)
    inputs = {"records": list(done.values())[-1].as_input(walk.store)}
    if phase == "split":
        inputs |= sources.evaluations(walk.spec)
    if phase == "pack":
        inputs["tokenizer"] = tokenizer(walk.spec.train.base)
        for earlier in ("ingest", "clean"):
            inputs[f"quarantine/{earlier}"] = done[earlier].as_input(walk.store)
    return inputs


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


def _tolerate(done: list[Done], limit: float) -> None:
    """Stop as soon as the phases so far have put too many records into quarantine."""
    reasons: Counter[str] = Counter()
    for one in done:
        reasons.update(one.facts.get("reasons", {}))
    worst = max(done, key=lambda one: int(one.facts["quarantined"]))
    check_ratio(int(done[0].facts["records_in"]), reasons, limit, join(worst.uri, QUARANTINE))
