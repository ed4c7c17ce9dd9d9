"""The `corpus` program: deliveries in, a dataset out. Also runs jobs of kind `prepare` by REFIT_JOB."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from corpus.prepare import NAMES, prepare
from refit import cli, job
from refit.errors import BadInput
from refit.job import Handler, Job
from refit.manifest import MANIFEST
from refit.store import join, store_for

HANDLERS: dict[str, Handler] = {"prepare": prepare}


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
