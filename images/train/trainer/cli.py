"""The `trainer` program: plan, try, train, look; and bring base models in. Also runs jobs by REFIT_JOB."""

from __future__ import annotations

import argparse
from typing import Any

from refit import cli, job
from refit.errors import BadInput
from refit.job import EVENTS, STATUS, Job, last_word, read_events
from refit.manifest import MANIFEST
from refit.store import join, store_for
from trainer import checkpoints, cli_bases, cli_plan, metrics, prometheus, tried
from trainer import cli_work as work
from trainer.stage import HANDLERS


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand, or the job that REFIT_JOB names."""
    return cli.main(_parser(), HANDLERS, argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trainer", description="The training stage: how the model learns.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    cli_plan.add(commands)
    one = commands.add_parser("smoke", help="a few steps with a save and a restore; answered from the store if known")
    work.add(one)
    one.set_defaults(command=_smoke)

    one = commands.add_parser(
        "overfit",
        help="learn a handful of packs by heart, or say why that cannot be; answered from the store if known",
        description="Finds what no amount of data mends: labels that contradict each other, an empty mask, frozen "
        "weights, a learning rate that is far off. Publishes nothing. train.overfit says how long it may take.",
    )
    work.add(one)
    one.set_defaults(command=_overfit)

    one = commands.add_parser(
        "run",
        help="train to the end; called again after a kill it goes on from the newest complete checkpoint",
        description="Train, and publish the model. The output folder belongs to one training: another data set, base "
        "model or recipe needs another folder.",
    )
    work.add(one, output_required=True)
    one.set_defaults(command=_run)

    one = commands.add_parser("verify", help="check a checkpoint, every file by its hash")
    one.add_argument("checkpoint", metavar="CHECKPOINT", help="address of a step-N folder")
    one.set_defaults(command=_verify)

    one = commands.add_parser("status", help="how far a training is")
    one.add_argument("output", metavar="OUTPUT", help="address of the training's folder")
    one.add_argument("--watch", action="store_true", help="look on until it has ended; Ctrl-C ends only the looking on")
    one.add_argument("--prometheus", action="store_true", help="print the last step's figures as Prometheus reads them")
    one.set_defaults(command=_status)

    one = commands.add_parser(
        "replay",
        help="take a step again that a training gave up, and say where it begins",
        description="Goes on from the checkpoint before the step, with its data and random numbers. `replayed` says "
        "whether it fails again, `first` (by rank) which module's answer was the first that was not finite, `exact` "
        "whether the steps before it gave the same losses; where they did not, look at the machine.",
    )
    one.add_argument("output", metavar="OUTPUT", help="address of the training's folder")
    one.add_argument("--step", metavar="N", type=int, help="a step that was skipped; default: the one that ended it")
    one.set_defaults(command=_replay)

    one = commands.add_parser(
        "export",
        help="publish the model in a checkpoint, as run does at its end, without training further",
        description="What was trained is read from the job.json of the checkpoint's training. For LoRA the adapter is "
        "published as URI-adapter.",
    )
    one.add_argument("checkpoint", metavar="CHECKPOINT", help="address of a step-N folder")
    one.add_argument("--output", metavar="URI", required=True, help="the exact folder of the model")
    one.add_argument("--base", metavar="URI", help="where the base model lies now, if not where the training found it")
    one.add_argument("--data", metavar="URI", help="where the dataset lies now, if not where the training found it")
    one.set_defaults(command=_export)

    cli_bases.add(commands)
    return parser


def _smoke(arguments: argparse.Namespace) -> dict[str, Any]:
    return _part(tried.SMOKE, arguments)


def _overfit(arguments: argparse.Namespace) -> dict[str, Any]:
    train = work.spec_of(arguments).train
    if train.of_pairs:
        raise BadInput(f"train.objective is {train.objective}: pairs are not learnt by heart. Try them by `smoke`.")
    if train.overfit.steps == 0:
        raise BadInput("train.overfit.steps is 0, which leaves it out: give some by --set train.overfit.steps=100.")
    return _part(tried.OVERFIT, arguments)


def _part(part: str, arguments: argparse.Namespace) -> dict[str, Any]:
    made = work.job_of(part, arguments, "training/{pipeline}/{tried}")
    return job.report(job.run(made, HANDLERS[part]), made.output)


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    made = work.job_of("train", arguments, "training/{pipeline}/{fingerprint}")
    manifest = job.run(made, HANDLERS["train"])
    return {
        "manifest": join(made.output, MANIFEST),
        "steps": manifest.facts["steps"],
        "loss": manifest.facts["loss"],
        "model_digest": manifest.facts["model_digest"],
        "resumed_from": manifest.facts["resumed_from"],
        "model": manifest.outputs["model"],
        "adapter": manifest.outputs.get("adapter"),
        "fingerprint": manifest.fingerprint,
    }


def _verify(arguments: argparse.Namespace) -> dict[str, Any]:
    found = checkpoints.verify(work.uri(arguments.checkpoint))
    return {"complete": True, "step": found.step, "checkpoint": found.uri}


def _export(arguments: argparse.Namespace) -> dict[str, Any]:
    from trainer.republish import republish

    return republish(
        work.uri(arguments.checkpoint), work.uri(arguments.output), base=arguments.base and work.uri(arguments.base),
        data=arguments.data and work.uri(arguments.data),
    )  # fmt: skip


def _status(arguments: argparse.Namespace) -> dict[str, Any] | None:
    import json

    output = work.uri(arguments.output)
    if arguments.watch:
        from trainer.follow import follow

        follow(output)
    store = store_for(output)
    if not store.exists(join(output, EVENTS)):
        raise BadInput(f"{output}: no job has run there. Give the exact output folder.")
    events = read_events(store.read(join(output, EVENTS)).decode(errors="replace"))
    status = json.loads(store.read(join(output, STATUS))) if store.exists(join(output, STATUS)) else {}
    if arguments.prometheus:
        record: dict[str, Any] = next(reversed(metrics.Tail(output).read()), {})
        made = Job.load(join(output, "job.json"))
        labels = {"job": made.id, "pipeline": made.pipeline, "team": made.team}
        told = prometheus.render(
            labels, record, heartbeat=float(status.get("heartbeat") or 0), total=made.spec.train.max_steps
        )
        print(told, end="")
        return None
    committed = store.manifest(output) is not None
    last = last_word(events, committed=committed)
    return {
        "output": output,
        "state": last.get("state"),
        "reason": last.get("reason"),
        "attempt": last.get("attempt"),
        "checkpoints": [found.step for found in checkpoints.committed(output)],
        "complete": committed,
        **{key: status.get(key) for key in ("phase", "done", "total", "loss", "tokens_per_second", "seconds_left",
                                            "heartbeat", "resumed_from")},
    }  # fmt: skip


def _replay(arguments: argparse.Namespace) -> dict[str, Any]:
    output = work.uri(arguments.output)
    place = join(output, "replay")
    made = Job.load(join(output, "job.json")).model_copy(
        update={"id": "replay", "kind": "replay", "output": place, "options": {"of": output, "step": arguments.step}}
    )
    store_for(place).remove(place)  # each asking is a trial of its own
    made.save()
    return job.run(made, HANDLERS["replay"]).facts
