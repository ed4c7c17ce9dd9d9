"""What the phases read beside each other's records: a base model's tokenizer, a source's form, and shards as inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

from corpus import sharded, sources
from corpus.phases import CLEAN, SIGN, TOKENIZE
from corpus.settings import MATCH_PARTS
from corpus.sharded import Made, Shard
from corpus.task import Kind, form_file
from corpus.walk import Done, Input, Phase, Walk
from refit import files, fingerprint
from refit.errors import BadInput
from refit.store import Store, cache_folder, join, store_for

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


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
        clean = done[CLEAN.name]
        return lambda source: {f"{kind}_form": form(walk.store, clean, source, kind) for kind in get_args(Kind)}
    more = {"tokenizer": tokenizer(walk.spec.train.base)} if phase is TOKENIZE else sources.score_model(walk.spec)
    return lambda _: more


def parts(walk: Walk, made: Mapping[str, Sequence[Made]], clean: Done) -> list[Shard]:
    """The shards of match: every one reads all of clean and sign, and of clean's own folder the forms."""
    sources = sorted({one.source for one in made[CLEAN.name]})
    forms = fingerprint.digest([form(walk.store, clean, source, "said").digest for source in sources])
    read = {"clean": Input(forms, partial(walk.store.local, clean.uri))}
    for role, phase in (("records", CLEAN), ("signatures", SIGN)):
        for number, one in enumerate(made[phase.name]):
            place = sharded.place(walk, phase, one.name)
            read[f"{role}/{number:06d}"] = Input(one.digest, partial(walk.store.local, place))
    size = sum(one.size for one in made[CLEAN.name])
    return [Shard(source=str(number), size=size, inputs=read) for number in range(MATCH_PARTS)]


def form(store: Store, clean: Done, source: str, kind: Kind) -> Input:
    """The lines that a source's texts share. Clean's manifest has the digest: nothing is read to see that it stayed."""
    path = form_file(source, kind)
    digest = next(file.sha256 for file in clean.manifest.files if file.path == path)
    return Input(digest, partial(store.local, join(clean.uri, path)))


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
