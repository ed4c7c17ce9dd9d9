"""The manners of every program: people read stderr, the last line of stdout is one JSON object."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from refit import job as jobs
from refit.errors import RefitError
from refit.pipeline import load
from refit.spec import Pipeline

Command = Callable[[argparse.Namespace], dict[str, Any] | None]


def main(parser: argparse.ArgumentParser, handlers: Mapping[str, jobs.Handler], argv: list[str] | None = None) -> int:
    """Run a subcommand (`command` default of its subparser), or, with no arguments and REFIT_JOB set, that job.

    Returns:
        The exit code. A RefitError is a message and its own code; anything else is a defect and keeps its traceback.
    """
    arguments = sys.argv[1:] if argv is None else argv
    try:
        if not arguments and os.environ.get("REFIT_JOB"):
            manifest = jobs.run_from_environment(handlers)
            answer: dict[str, Any] | None = {
                "fingerprint": manifest.fingerprint,
                "outputs": manifest.outputs,
                **manifest.facts,
            }
        else:
            parsed = parser.parse_args(arguments)
            command: Command | None = getattr(parsed, "command", None)
            if command is None:
                parser.print_help(sys.stderr)
                return 2
            answer = command(parsed)
    except RefitError as error:
        for line in str(error).splitlines():
            print(f"{parser.prog}: {line}", file=sys.stderr)
        print(json.dumps({"error": type(error).__name__, "message": str(error), "exit_code": error.exit_code}))
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{parser.prog}: stopped; run it again to go on.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 141
    if answer is not None:
        print(json.dumps(answer, ensure_ascii=False, default=str), flush=True)
    return 0


def add_spec(parser: argparse.ArgumentParser) -> None:
    """The SPEC argument and `--set`, the same everywhere."""
    parser.add_argument("spec", metavar="SPEC", help="a pipeline file, as dags/pipelines/tiny.yaml")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="sets",
        help="override a field: train.max_steps=60",
    )


def spec_of(arguments: argparse.Namespace) -> Pipeline:
    """The checked spec that the arguments name."""
    return load(arguments.spec, arguments.sets)
