"""The table of phases: what each reads of the spec, whose versions it depends on, and which of them are in shards."""

from __future__ import annotations

from functools import partial
from typing import Any

from corpus import rules, settings
from corpus.settings import CleanSettings, IngestSettings, MatchSettings
from corpus.task import LINES
from corpus.walk import Phase


def _modules_of_rules(chosen: CleanSettings) -> list[str]:
    """Only the rules that are used: a new one changes no name of a line that does not use it."""
    return sorted({step.module for step in rules.build(chosen.rules)})


def _libraries_of_rules(chosen: CleanSettings) -> list[str]:
    return [name for step in rules.build(chosen.rules) for name in step.libraries]


def _shared(chosen: Any) -> list[str]:
    return ["refit.chat", "refit.domains", "refit.packed"]


INGEST, CLEAN, TOKENIZE, SIGN, MATCH, DEDUP, SPLIT, MIX, PACK = PHASES = (
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
    Phase(
        name="match", settings=settings.match, of_source=MatchSettings.of_part, libraries=("pyarrow", "numpy"),
        wide=True,
    ),
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
IN_SHARDS = (INGEST, CLEAN, TOKENIZE, SIGN, MATCH)
SHARED_OUT = {"records": (INGEST, CLEAN, TOKENIZE), "sign": (SIGN,), "match": (MATCH,)}
"""The phases in shards as machines share them out, in rounds: a round needs all shards of the one before."""
BEFORE = {"clean": INGEST, "tokenize": CLEAN, "sign": CLEAN}
"""Whose shards a phase in shards reads, one each; ingest reads the sources, match all shards of clean and sign."""
NAMES = tuple(phase.name for phase in PHASES)
