"""The `corpus` program: deliveries in, a dataset out. Also runs jobs of kind `prepare` and `share` by REFIT_JOB."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from corpus import cli_pack, options
from corpus.inputs import tokenizer
from corpus.phases import NAMES
from corpus.prepare import prepare, share
from refit import cli, files, job
from refit.errors import BadInput
from refit.job import Handler, Job
from refit.manifest import MANIFEST
from refit.spec import Decontaminate, Dedup
from refit.store import join, store_for

DEDUP = {field: field for field in Dedup.model_fields}
DECONTAMINATE = {"ngram": "ngram", "threshold": "threshold", "min-words": "min_words"}
HANDLERS: dict[str, Handler] = {"prepare": prepare, "share": share}


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand, or the job that REFIT_JOB names."""
    return cli.main(_parser(), HANDLERS, argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="corpus", description="The data stage: what the model eats.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    one = commands.add_parser(
        "prepare",
        help="make the dataset of a pipeline file",
        description="Run the phases " + " → ".join(NAMES) + "; what has not changed is answered from the store.",
    )
    cli.add_spec(one)
    one.add_argument("--store", metavar="URI", default=os.environ.get("REFIT_STORE"), help="default: $REFIT_STORE")
    one.add_argument("--only", metavar="PHASE", choices=NAMES, help=f"this phase alone: {', '.join(NAMES)}")
    one.add_argument("--force", action="store_true", help="run phases again although their output is there")
    one.set_defaults(command=_prepare)
    one = commands.add_parser(
        "dedup",
        help="find near duplicates in jsonl files, without a pipeline",
        description="Rows have an id and a text. Writes clusters.parquet (id, cluster; a row alone is a cluster), "
        "kept.parquet (of each cluster the row with the lowest id) and quarantine.parquet (what could not be read).",
    )
    one.add_argument("inputs", metavar="INPUT", nargs="+", type=Path, help="jsonl files, also .gz")
    one.add_argument("--output", metavar="DIR", type=Path, required=True, help="a folder; its files are replaced")
    options.add(one, Dedup, DEDUP, "data.dedup")
    one.set_defaults(command=_dedup)
    one = commands.add_parser(
        "decontaminate",
        help="find rows of training files that hold a row of an evaluation set",
        description="Writes contaminated.parquet (which row holds which evaluation text, and how much of it) and "
        "kept.parquet (the places of the others).",
    )
    one.add_argument("inputs", metavar="INPUT", nargs="+", type=Path, help="files of any format the data stage reads")
    one.add_argument("--against", metavar="EVAL", nargs="+", type=Path, required=True, help="evaluation files")
    one.add_argument("--output", metavar="DIR", type=Path, required=True, help="a folder; its files are replaced")
    options.add(one, Decontaminate, DECONTAMINATE, "data.decontaminate")
    one.set_defaults(command=_decontaminate)
    cli_pack.add(commands, lambda address: tokenizer(address).fetch())
    one = commands.add_parser(
        "fit",
        help="fit a perplexity model and a quality classifier on good and bad samples",
        description="Writes a folder that `data.score.model` names: NumPy arrays and a manifest. A tenth of either "
        "side is held back, and the last line of stdout says how well it is told apart.",
    )
    one.add_argument("--good", metavar="FILE", nargs="+", type=Path, required=True, help="texts to be like")
    one.add_argument("--bad", metavar="FILE", nargs="+", type=Path, required=True, help="texts to be unlike")
    one.add_argument("--output", metavar="DIR|URI", required=True, help="a folder that is not there yet")
    one.add_argument("--max-texts", type=int, default=100_000, help="of a side with more, so many [%(default)s]")
    one.add_argument("--seed", type=int, default=1, help="decides which are held back [%(default)s]")
    one.set_defaults(command=_fit)
    one = commands.add_parser("diff", help="say how the data moved between two datasets")
    one.add_argument("old", metavar="OLD", help="address of a dataset's folder, or of its manifest.json")
    one.add_argument("new", metavar="NEW", help="the same of a later one")
    one.add_argument("--html", metavar="FILE", type=Path, help="also as a page with plots")
    one.set_defaults(command=_diff)
    one = commands.add_parser("inspect", help="show what a folder of the store holds and where it came from")
    one.add_argument("manifest", metavar="MANIFEST", help="address of a folder, or of its manifest.json")
    one.set_defaults(command=_inspect)
    return parser


def _prepare(arguments: argparse.Namespace) -> dict[str, Any]:
    spec = cli.spec_of(arguments)
    if not arguments.store:
        raise BadInput("no store: give --store URI, or set REFIT_STORE.")
    store = _uri(arguments.store)
    run = f"cli-{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
    options = {"only": arguments.only, "force": arguments.force, "where": arguments.spec}
    work = Job.build(
        "prepare", spec, store=store, output=join(store, "jobs", spec.name, run, "prepare"), id=f"prepare-{run}",
        options=options,
    )  # fmt: skip
    work.save()
    manifest = job.run(work, prepare)
    return {
        "manifest": manifest.facts["manifest"],
        "fingerprint": manifest.fingerprint,
        "phases": manifest.facts["phases"],
    }


def _dedup(arguments: argparse.Namespace) -> dict[str, Any]:
    from corpus.dedup_files import dedup_files

    settings = Dedup(**options.values(arguments, Dedup, DEDUP))
    return dedup_files(arguments.inputs, arguments.output, settings)


def _decontaminate(arguments: argparse.Namespace) -> dict[str, Any]:
    from corpus.decontaminate import decontaminate

    settings = options.values(arguments, Decontaminate, DECONTAMINATE)
    return decontaminate(arguments.inputs, arguments.against, arguments.output, **settings)


def _fit(arguments: argparse.Namespace) -> dict[str, Any]:
    from corpus.fit import MIN_TEXTS, fit

    if arguments.max_texts < MIN_TEXTS:
        raise BadInput(f"--max-texts is {arguments.max_texts}: expected at least {MIN_TEXTS}.")
    if not 0 <= arguments.seed < 1 << 32:
        raise BadInput(f"--seed is {arguments.seed}: expected 0 to {(1 << 32) - 1}.")
    return fit(
        arguments.good, arguments.bad, _uri(arguments.output), max_texts=arguments.max_texts, seed=arguments.seed
    )


def _diff(arguments: argparse.Namespace) -> dict[str, Any]:
    from corpus.diff import diff
    from corpus.diff_page import page

    found = diff(_uri(arguments.old), _uri(arguments.new))
    if arguments.html:
        files.write(arguments.html, page(found).encode())
    moved = ", ".join(found["moved"]) or "nothing"
    records = found["records"]
    print(f"moved: {moved}; {records['added']} records came, {records['removed']} went", file=sys.stderr)
    return found


def _inspect(arguments: argparse.Namespace) -> dict[str, Any]:
    uri = _uri(arguments.manifest).removesuffix(f"/{MANIFEST}")
    manifest = store_for(uri).manifest(uri)
    if manifest is None:
        raise BadInput(f"{uri}: no manifest.json there. Give the address of a committed folder.")
    for file in manifest.files:
        if not file.path.startswith("data_docs/"):
            print(f"{file.size:>12}  {file.path}", file=sys.stderr)
    for name, value in manifest.facts.items():
        if name not in ("before", "settings"):
            print(f"{name}: {value}", file=sys.stderr)
    return manifest.model_dump(mode="json", exclude={"files"})


def _uri(text: str) -> str:
    return text if "://" in text else Path(text).absolute().as_uri()
