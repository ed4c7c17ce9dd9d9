"""The program `evaluator`: `run` asks a release, `compare` puts two evaluations beside each other.

Both build the job document that REFIT_JOB would name, and run the same code.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from evaluator import compare, evaluate
from evaluator.output import folder_of
from refit import cli
from refit import job as jobs
from refit.errors import BadInput
from refit.store import store_for

HANDLERS: dict[str, jobs.Handler] = {"evaluate": evaluate.evaluate, "compare": compare.compare}


def main(argv: list[str] | None = None) -> int:
    """The entry point; returns the exit code."""
    return cli.main(_parser(), HANDLERS, argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evaluator",
        description="Judge a model in the form it is served in. Without arguments: the job that REFIT_JOB names.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="ask a running server the whole exam",
        description="Ask an OpenAI-compatible server all items of the exam and score its answers. Called again after a "
        "kill it asks only what is missing; called again after success it answers from the manifest.",
    )
    cli.add_spec(run)
    run.add_argument("--data", required=True, metavar="URI", help="the dataset folder, or its manifest.json")
    run.add_argument("--release", required=True, metavar="URI", help="the release's model folder")
    run.add_argument("--url", required=True, help="the server to ask, as http://127.0.0.1:8000")
    run.add_argument("--output", required=True, metavar="URI", help="the exact folder of the evaluation")
    run.add_argument("--release-id", help="the release's id; without it, the model in the spec's serving profile")
    run.add_argument(
        "--patience", type=float, default=evaluate.PATIENCE_SECONDS, metavar="SECONDS",
        help="how long to wait for a server that is away (default: %(default)s)",
    )  # fmt: skip
    run.set_defaults(command=_run)

    against = commands.add_parser(
        "compare",
        help="candidate against champion: a verdict and a report",
        description="Compare two evaluations item by item, put the candidate through the gate, and write report.html. "
        "A verdict of fail or hold still exits 0: it is in the JSON.",
    )
    cli.add_spec(against)
    against.add_argument("--candidate", required=True, metavar="URI", help="the candidate's evaluation")
    against.add_argument("--champion", required=True, metavar="URI", help="the champion's evaluation")
    against.add_argument("--output", required=True, metavar="URI", help="the exact folder of the comparison")
    against.set_defaults(command=_compare)
    return parser


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    options = {"url": arguments.url, "patience_seconds": arguments.patience}
    if arguments.release_id:
        options["release_id"] = arguments.release_id
    job = _job(
        "evaluate", arguments, {"dataset": folder_of(arguments.data), "release": folder_of(arguments.release)}, options
    )
    return _finish(job, evaluate.identity(job)[0])


def _compare(arguments: argparse.Namespace) -> dict[str, Any]:
    inputs = {"candidate": folder_of(arguments.candidate), "champion": folder_of(arguments.champion)}
    job = _job("compare", arguments, inputs, {})
    return _finish(job, compare.identity(job)[0])


def _job(kind: str, arguments: argparse.Namespace, inputs: dict[str, str], options: dict[str, Any]) -> jobs.Job:
    output = folder_of(arguments.output)
    store = os.environ.get("REFIT_STORE") or output.rpartition("/")[0]
    return jobs.Job.build(kind, cli.spec_of(arguments), store=store, output=output, inputs=inputs, options=options)


def _finish(job: jobs.Job, fingerprint: str) -> dict[str, Any]:
    there = store_for(job.output).manifest(job.output)
    if there is not None and there.fingerprint != fingerprint:
        raise BadInput(
            f"{job.output}: holds another {there.kind} ({there.fingerprint}), expected {fingerprint}. "
            "Give a folder of its own, best named by the fingerprint."
        )
    job.save()
    return jobs.report(jobs.run(job, HANDLERS[job.kind]), job.output)
