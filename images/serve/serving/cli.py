"""`serving`: the gateway's files, the controller, the recorder, a stand-in for users, and what people ask of them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from refit import cli
from refit.errors import BadInput
from serving.client import ControllerClient
from serving.gateway import Gateway
from serving.settings import HOST, Settings


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return cli.main(_parser(), {}, argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="serving", description=__doc__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    control = commands.add_parser("control", help="run the rollout controller (REFIT_CONTROLLER_URL says where)")
    control.set_defaults(command=_control)

    record = commands.add_parser("record", help="run the recorder: exposures, shadow pairs, feedback → Postgres")
    record.set_defaults(command=_record)

    config = commands.add_parser("gateway-config", help="write Envoy's bootstrap, and routes from the route table")
    config.add_argument("--home", type=Path, required=True, help="REFIT_HOME: files go to HOME/envoy")
    config.add_argument("--port", type=_port, required=True, help="where users come in (127.0.0.1)")
    config.add_argument("--admin-port", type=_port, required=True, help="Envoy's admin address (127.0.0.1)")
    config.set_defaults(command=_gateway_config)

    split = commands.add_parser("split", help="the challenger's share of users, read back from Envoy")
    split.add_argument("pipeline", metavar="PIPELINE")
    split.set_defaults(command=_split)

    status = commands.add_parser("status", help="what serves on every line, and every model server")
    status.set_defaults(command=_status)

    rollback = commands.add_parser(
        "rollback", help="take the running rollout back, or go back to the previous champion"
    )
    rollback.add_argument("pipeline", metavar="PIPELINE")
    rollback.add_argument("--reason", default="asked for on the command line", help="written into the history")
    rollback.set_defaults(command=_rollback)

    _add_replay(commands)
    return parser


def _add_replay(commands: Any) -> None:
    replay = commands.add_parser(
        "replay",
        help="a stand-in for users: replay held-out items through the gateway and say whether they were answered",
        description="A stand-in for users. Sends held-out items through the gateway as many distinct users at a steady "
        "rate, and posts feedback: resolved when the answer's label equals the item's.",
    )
    replay.add_argument("--gateway", help="default: REFIT_GATEWAY_URL")
    replay.add_argument("--recorder", help="default: REFIT_RECORDER_URL")
    replay.add_argument("--pipeline", required=True)
    replay.add_argument("--items", type=Path, required=True, help="a dataset's heldout.parquet")
    replay.add_argument("--users", type=int, default=2000, help="distinct users (default 2000)")
    replay.add_argument("--rate", type=float, default=10.0, help="requests a second (default 10)")
    replay.add_argument("--concurrency", type=int, default=64, help="requests under way at most (default 64)")
    replay.add_argument("--max-tokens", type=int, default=32, help="tokens an answer may have (default 32)")
    replay.add_argument(
        "--label-key", help="where the label is in a JSON answer; default: found in the item's own answer"
    )
    replay.add_argument("--seed", type=int, default=1, help="which user asks what, when")
    replay.add_argument("--stats", type=Path, help="a JSON file with the counts so far, replaced every second")
    until = replay.add_mutually_exclusive_group(required=True)
    until.add_argument("--seconds", type=float, help="how long")
    until.add_argument("--until-file", type=Path, help="until this file is there")
    replay.set_defaults(command=_replay)


def _control(arguments: argparse.Namespace) -> None:
    from serving.control import control  # the web framework is only needed where it serves

    control(Settings.from_environment())


def _record(arguments: argparse.Namespace) -> None:
    from serving.record import record

    record(Settings.from_environment())


def _gateway_config(arguments: argparse.Namespace) -> dict[str, Any]:
    home = arguments.home.absolute()
    gateway = Gateway(home / "envoy", f"http://{HOST}:{arguments.admin_port}")
    path = gateway.prepare(arguments.port, arguments.admin_port, home / "spool")
    return {"bootstrap": str(path), "pipelines": sorted(gateway.table().lines)}


def _split(arguments: argparse.Namespace) -> dict[str, Any]:
    settings = Settings.from_environment()
    weight = Gateway(settings.envoy, settings.admin).split(arguments.pipeline)
    if weight is None:
        raise BadInput(f"the gateway routes no pipeline {arguments.pipeline}; `serving status` lists those it does.")
    return {"pipeline": arguments.pipeline, "weight": weight}


def _status(arguments: argparse.Namespace) -> dict[str, Any]:
    client = ControllerClient(Settings.from_environment())
    pipelines, servers = client.pipelines(), client.servers()
    for line in pipelines:
        serves = line["champion"]["id"] if line["champion"] else "nothing yet"
        print(f"{line['pipeline']}: {serves} serves", file=sys.stderr, end="")
        if line["rollout"]:
            rollout = line["rollout"]
            print(
                f"; {rollout['candidate']} at {line['weight']} % ({rollout['verdict']}: {rollout['why']})",
                file=sys.stderr,
            )
        else:
            print(f"; {line['pending']['reason']} is under way" if line["pending"] else "", file=sys.stderr)
    for server in servers:
        print(f"server {server['release_id']}: {server['state']} {server['url']} {server['why']}", file=sys.stderr)
    return {"pipelines": pipelines, "servers": servers}


def _rollback(arguments: argparse.Namespace) -> dict[str, Any]:
    line = ControllerClient(Settings.from_environment()).roll_back(arguments.pipeline, arguments.reason)
    champion = line["champion"]["id"] if line["champion"] else None
    print(f"{arguments.pipeline}: {champion} serves all users", file=sys.stderr)
    return {"pipeline": arguments.pipeline, "champion": champion, "weight": line["weight"]}


def _replay(arguments: argparse.Namespace) -> dict[str, Any]:
    from serving.replay import replay

    return replay(arguments, Settings.from_environment())


def _port(text: str) -> int:
    port = int(text)
    if not 1 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port")
    return port


if __name__ == "__main__":
    sys.exit(main())
