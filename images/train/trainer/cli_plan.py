"""The commands before a training: `trainer plan` and `trainer preflight`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from refit import job
from refit.errors import BadInput
from refit.spec import Pipeline
from refit.store import join, store_for
from trainer import cli_work as work
from trainer import fleet
from trainer.inputs import folder_of, name_of, supported
from trainer.packs import Packs, learnt
from trainer.stage import HANDLERS

Commands = Any
"""What `add_subparsers` returns; argparse has no public name for it."""


def add(commands: Commands) -> None:
    """Add both."""
    one = commands.add_parser(
        "plan",
        help="say what a training will take, and why",
        description="Without --data packs are assumed to be full; plan.json is written where a place is given. With "
        "--gpus the recipe is chosen for those cards, and nothing is written.",
    )
    work.add(one, data_required=False)
    one.add_argument(
        "--config", metavar="PATH", type=Path, help="a model's config.json, or its folder, instead of train.base"
    )
    fleet.add_options(one)
    one.set_defaults(command=_plan)

    one = commands.add_parser(
        "preflight",
        help="say whether every rank's place is fit for a training: versions, cards, disk, memory, store, clock",
        description="Looks anew each time. Run on each of several machines, the last one with the answers of the "
        "others, it also compares them. Without --data packs are assumed to be full.",
    )
    work.add(one, data_required=False)
    one.add_argument(
        "--with", metavar="FILE", dest="others", nargs="+", type=Path, default=[],
        help="answers of other machines' preflights, to be judged together with this one's",
    )  # fmt: skip
    one.set_defaults(command=_preflight)


def _plan(arguments: argparse.Namespace) -> dict[str, Any]:
    work.quiet()
    elsewhere = fleet.cards_of(arguments)
    if elsewhere or arguments.config:
        if elsewhere and arguments.ranks is not None:
            raise BadInput("--ranks: with --gpus there is one rank for each card; leave it out.")
        if arguments.output:
            raise BadInput("--output: plans for cards or of a config alone are printed, not written; leave it out.")
        return _plan_for(elsewhere, arguments) if elsewhere else _plan_only(arguments)
    if not arguments.data or not (arguments.output or arguments.store):
        return _plan_only(arguments)
    made = work.job_of("plan", arguments, "training/{pipeline}/plan-{fingerprint}-{layout}")
    return job.report(job.run(made, HANDLERS["plan"]), made.output)


def _plan_only(arguments: argparse.Namespace) -> dict[str, Any]:
    from trainer import plan

    made = _planned(arguments, work.spec_of(arguments))
    plan.show(made)
    return made


def _planned(arguments: argparse.Namespace, spec: Pipeline) -> dict[str, Any]:
    from trainer import plan

    supported(spec.train)
    packs = _packs(arguments, spec) or Packs.assumed(spec.data.pack_length, learnt=learnt(spec.train.objective))
    return plan.make(spec.train, _base(spec, arguments), packs)


def _preflight(arguments: argparse.Namespace) -> dict[str, Any]:
    work.quiet()
    from trainer import preflight

    others = [report for file in arguments.others for report in preflight.read_reports(file)]
    spec = work.spec_of(arguments)
    if not (arguments.output or arguments.store):
        raise BadInput(work.NO_PLACE)
    if arguments.output:
        output = work.uri(arguments.output)
    else:  # without a dataset the training has no name yet, and its folder's place must do
        parts = [name_of(spec.train, work.uri(folder_of(arguments.data)), spec.train.base)] if arguments.data else []
        output = join(work.uri(arguments.store), "training", spec.name, *parts)
    return preflight.preflight(spec.train, _planned(arguments, spec), output, others)


def _plan_for(them: fleet.Cards, arguments: argparse.Namespace) -> dict[str, Any]:
    from trainer import proposal
    from trainer.shapes import shape_of

    spec, method = work.spec_of(arguments), fleet.method_of(arguments)
    goal = fleet.goal_of(arguments, spec.train.objective)
    packs = _packs(arguments, spec) or Packs.assumed(spec.data.pack_length, learnt=learnt(goal))
    made = proposal.propose(spec.train, shape_of(_base(spec, arguments)), packs, them, goal=goal, asked=method)
    proposal.show(made)
    return made


def _packs(arguments: argparse.Namespace, spec: Pipeline) -> Packs | None:
    """Those of --data."""
    if not arguments.data:
        return None
    dataset = work.uri(folder_of(arguments.data))
    store_for(dataset).require(dataset, "dataset")
    return Packs.of(store_for(dataset).local(dataset), spec.train)


def _base(spec: Pipeline, arguments: argparse.Namespace) -> Path:
    """Where the model's config is: --config, or the committed folder of train.base."""
    if getattr(arguments, "config", None):
        from trainer.shapes import config_file

        return config_file(arguments.config)
    base = store_for(spec.train.base)
    base.require(spec.train.base, "model")
    return base.local(spec.train.base)
