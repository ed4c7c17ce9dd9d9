"""`refit up | down | status | doctor`."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from typing import Any

from refit.errors import RefitError
from standalone import doctor, stack
from standalone.home import Home
from standalone.ports import Ports
from standalone.programs import GROUPS, select
from standalone.run import recent
from standalone.status import pipeline_status, status, table


def register(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this module's subcommands."""
    up = subcommands.add_parser("up", help="start the embedded stack and wait until it works")
    up.add_argument("--only", metavar="NAMES", help=f"with commas, of: {', '.join(GROUPS)} (and what they need)")
    up.add_argument("--wait", type=float, default=600.0, metavar="SECONDS", help="give up after this long (600)")
    up.set_defaults(command=_up)

    down = subcommands.add_parser("down", help="stop the embedded stack and everything it started")
    down.add_argument(
        "--grace", type=float, default=20.0, metavar="SECONDS", help="time for a job to write a checkpoint (20)"
    )
    down.set_defaults(command=_down)

    show = subcommands.add_parser("status", help="what runs and whether it works; with a pipeline, what serves it")
    show.add_argument("pipeline", nargs="?", metavar="PIPELINE", help="the name of a line, as tiny")
    show.set_defaults(command=_status)

    check = subcommands.add_parser("doctor", help="what is wrong with this machine or set-up, and what to do")
    check.set_defaults(command=_doctor)


def _up(arguments: argparse.Namespace) -> dict[str, Any]:
    home = Home.from_environment()
    seconds = stack.up(home, Ports.from_environment(), select(arguments.only), seconds=arguments.wait)
    document = status(home)
    for line in table(document):
        print(line, file=sys.stderr)
    return {**document, "start_seconds": round(seconds, 1)}


def _down(arguments: argparse.Namespace) -> dict[str, Any]:
    ended = stack.down(Home.from_environment(), grace=arguments.grace)
    return {"running": False, "ended": [identity.pid for identity in ended]}


def _status(arguments: argparse.Namespace) -> dict[str, Any]:
    home = Home.from_environment()
    if arguments.pipeline is not None:
        document = pipeline_status(home, arguments.pipeline)
        with suppress(RefitError):  # what serves is known without Airflow
            document["runs"] = recent(home, arguments.pipeline)
        print(json.dumps(document, indent=1, ensure_ascii=False), file=sys.stderr)
        return document
    document = status(home)
    for line in table(document):
        print(line, file=sys.stderr)
    return document


def _doctor(arguments: argparse.Namespace) -> dict[str, Any]:
    return doctor.examine(Home.from_environment(), Ports.from_environment())
