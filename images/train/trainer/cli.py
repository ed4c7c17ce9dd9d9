"""The `trainer` program: plan, try, train, look; and bring base models in. Also runs jobs by REFIT_JOB."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from refit import cli, job
from refit.errors import BadInput
from refit.job import EVENTS, STATUS, Job, read_events
from refit.manifest import MANIFEST
from refit.spec import Pipeline
from refit.store import join, store_for
from trainer import checkpoints, fleet
from trainer.inputs import folder_of, name_of, supported
from trainer.packs import Packs
from trainer.stage import HANDLERS


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand, or the job that REFIT_JOB names."""
    return cli.main(_parser(), HANDLERS, argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trainer", description="The training stage: how the model learns.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    one = commands.add_parser(
        "plan",
        help="say what a training will take, and why",
        description="Without --data packs are assumed to be full; plan.json is written where a place is given. With "
        "--gpus the recipe is chosen for those cards, and nothing is written.",
    )
    _add_work(one, data_required=False)
    one.add_argument(
        "--config", metavar="PATH", type=Path, help="a model's config.json, or its folder, instead of train.base"
    )
    fleet.add_options(one)
    one.set_defaults(command=lambda arguments: _plan(arguments))

    one = commands.add_parser("smoke", help="a few steps with a save and a restore; answered from the store if known")
    _add_work(one)
    one.set_defaults(command=lambda arguments: _smoke(arguments))

    one = commands.add_parser(
        "run",
        help="train to the end; called again after a kill it goes on from the newest complete checkpoint",
        description="Train, and publish the model. The output folder belongs to one training: another data set, base "
        "model or recipe needs another folder.",
    )
    _add_work(one, output_required=True)
    one.set_defaults(command=lambda arguments: _run(arguments))

    one = commands.add_parser("verify", help="check a checkpoint, every file by its hash")
    one.add_argument("checkpoint", metavar="CHECKPOINT", help="address of a step-N folder")
    one.set_defaults(command=_verify)

    one = commands.add_parser("status", help="how far a training is")
    one.add_argument("output", metavar="OUTPUT", help="address of the training's folder")
    one.set_defaults(command=_status)

    one = commands.add_parser("import", help="bring a Hugging Face folder in as a base model")
    one.add_argument("folder", metavar="FOLDER", type=Path, help="config.json, tokenizer.json, *.safetensors, …")
    one.add_argument("uri", metavar="URI", help="where to, as cache://models/NAME")
    one.set_defaults(command=_import)

    one = commands.add_parser("import-gguf", help="bring a GGUF file in as a base model")
    one.add_argument("file", metavar="FILE", type=Path)
    one.add_argument("uri", metavar="URI", help="where to, as cache://models/NAME")
    one.set_defaults(command=_import_gguf)

    one = commands.add_parser("seed", help="make a tiny untrained base model with a tokenizer of its own")
    one.add_argument("uri", metavar="URI", help="where to, as cache://models/tiny-seed")
    one.add_argument("--corpus", metavar="FILE", nargs="+", type=Path, required=True, help="texts for the tokenizer")
    one.set_defaults(command=_seed)

    one = commands.add_parser(
        "rehearse",
        help="write down a base model's own answers to general prompts, to be mixed into its training",
        description="The output is a source of the role `rehearsal`: a model that trains on a share of its own former "
        "answers keeps what it could before. The same prompts give nearly the same answers on another machine.",
    )
    one.add_argument("base", metavar="BASE", help="address of the base model")
    one.add_argument("output", metavar="FILE", type=Path, help="where to, a .jsonl file")
    one.add_argument("--prompts", metavar="FILE", type=Path, required=True, help="a text file, one prompt a line")
    one.add_argument(
        "--max-tokens", metavar="N", type=int, default=48, help="longer answers are left out [%(default)s]"
    )
    one.set_defaults(command=_rehearse)
    return parser


def _add_work(parser: argparse.ArgumentParser, *, output_required: bool = False, data_required: bool = True) -> None:
    cli.add_spec(parser)
    parser.add_argument(
        "--data", metavar="URI", required=data_required, help="a prepared dataset: its folder or manifest.json"
    )
    parser.add_argument("--output", metavar="URI", required=output_required, help="the exact folder to write to")
    parser.add_argument("--ranks", metavar="N", type=int, help="processes to train with; as --set train.ranks=N")
    parser.add_argument(
        "--store", metavar="URI", default=os.environ.get("REFIT_STORE"),
        help="where models are published; default: $REFIT_STORE, else the store that --output lies in",
    )  # fmt: skip


def _spec(arguments: argparse.Namespace) -> Pipeline:
    if arguments.ranks is not None:
        arguments.sets = [*arguments.sets, f"train.ranks={arguments.ranks}"]
    return cli.spec_of(arguments)


def _job(kind: str, arguments: argparse.Namespace, folder: str) -> Job:
    """The job of a subcommand; `folder` says where below the store its output lies unless one is given."""
    spec = _spec(arguments)
    dataset = _uri(folder_of(arguments.data))
    fingerprint = name_of(spec.train, dataset, spec.train.base)
    name = folder.format(pipeline=spec.name, fingerprint=fingerprint)
    if arguments.output:
        output = _uri(arguments.output)
        store = _uri(arguments.store) if arguments.store else _store_of(output)
    elif arguments.store:
        store = _uri(arguments.store)
        output = join(store, name)
    else:
        raise BadInput("no place for the output: give --output URI or --store URI, or set REFIT_STORE.")
    done = store_for(output).manifest(output)
    if done is not None and (done.kind, done.fingerprint) != (kind, fingerprint):
        raise BadInput(
            f"{output}: holds the {done.kind} {done.fingerprint}, this would be the {kind} {fingerprint}. Data, base "
            "model or recipe differ: give it an output folder of its own."
        )
    return _built(kind, spec, store=store, output=output, dataset=dataset)


def _built(kind: str, spec: Pipeline, *, store: str, output: str, dataset: str) -> Job:
    before = store_for(output)
    attempt = 1
    if before.exists(join(output, EVENTS)):
        events = read_events(before.read(join(output, EVENTS)).decode(errors="replace"))
        attempt += max((int(record.get("attempt", 0)) for record in events), default=0)
    made = Job.build(
        kind, spec, store=store, output=output, inputs={"dataset": dataset, "base": spec.train.base}, attempt=attempt
    )
    if before.manifest(output) is None:
        made.save()
    return made


def _plan(arguments: argparse.Namespace) -> dict[str, Any]:
    _quiet()
    elsewhere = fleet.cards_of(arguments)
    if elsewhere or arguments.config:
        if elsewhere and arguments.ranks is not None:
            raise BadInput("--ranks: with --gpus there is one rank for each card; leave it out.")
        if arguments.output:
            raise BadInput("--output: plans for cards or of a config alone are printed, not written; leave it out.")
        return _plan_for(elsewhere, arguments) if elsewhere else _plan_only(arguments)
    if not arguments.data or not (arguments.output or arguments.store):
        return _plan_only(arguments)
    work = _job("plan", arguments, "training/{pipeline}/plan-{fingerprint}")
    return job.report(job.run(work, HANDLERS["plan"]), work.output)


def _plan_only(arguments: argparse.Namespace) -> dict[str, Any]:
    from trainer import plan

    spec = _spec(arguments)
    supported(spec.train)
    made = plan.make(spec.train, _base(spec, arguments), _packs(arguments) or Packs.assumed(spec.data.pack_length))
    plan.show(made)
    return made


def _plan_for(them: fleet.Cards, arguments: argparse.Namespace) -> dict[str, Any]:
    from trainer import proposal
    from trainer.shapes import shape_of

    spec, goal, method = _spec(arguments), fleet.goal_of(arguments), fleet.method_of(arguments)
    packs = _packs(arguments) or Packs.assumed(spec.data.pack_length, learnt=1.0 if goal == "pretrain" else 0.25)
    made = proposal.propose(spec.train, shape_of(_base(spec, arguments)), packs, them, goal=goal, asked=method)
    proposal.show(made)
    return made


def _packs(arguments: argparse.Namespace) -> Packs | None:
    """Those of --data."""
    if not arguments.data:
        return None
    dataset = _uri(folder_of(arguments.data))
    store_for(dataset).require(dataset, "dataset")
    return Packs.of(store_for(dataset).local(dataset))


def _base(spec: Pipeline, arguments: argparse.Namespace) -> Path:
    """Where the model's config is: --config, or the committed folder of train.base."""
    if arguments.config:
        from trainer.shapes import config_file

        return config_file(arguments.config)
    base = store_for(spec.train.base)
    base.require(spec.train.base, "model")
    return base.local(spec.train.base)


def _smoke(arguments: argparse.Namespace) -> dict[str, Any]:
    work = _job("smoke", arguments, "training/{pipeline}/smoke-{fingerprint}")
    return job.report(job.run(work, HANDLERS["smoke"]), work.output)


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    work = _job("train", arguments, "training/{pipeline}/{fingerprint}")
    manifest = job.run(work, HANDLERS["train"])
    return {
        "manifest": join(work.output, MANIFEST),
        "steps": manifest.facts["steps"],
        "loss": manifest.facts["loss"],
        "model_digest": manifest.facts["model_digest"],
        "resumed_from": manifest.facts["resumed_from"],
        "model": manifest.outputs["model"],
        "adapter": manifest.outputs.get("adapter"),
        "fingerprint": manifest.fingerprint,
    }


def _verify(arguments: argparse.Namespace) -> dict[str, Any]:
    found = checkpoints.verify(_uri(arguments.checkpoint))
    return {"complete": True, "step": found.step, "checkpoint": found.uri}


def _status(arguments: argparse.Namespace) -> dict[str, Any]:
    import json

    output = _uri(arguments.output)
    store = store_for(output)
    if not store.exists(join(output, EVENTS)):
        raise BadInput(f"{output}: no job has run there. Give the exact output folder.")
    events = read_events(store.read(join(output, EVENTS)).decode(errors="replace"))
    status = json.loads(store.read(join(output, STATUS))) if store.exists(join(output, STATUS)) else {}
    last = events[-1] if events else {}
    return {
        "output": output,
        "state": last.get("state"),
        "reason": last.get("reason"),
        "attempt": last.get("attempt"),
        "checkpoints": [found.step for found in checkpoints.committed(output)],
        "complete": store.manifest(output) is not None,
        **{key: status.get(key) for key in ("phase", "done", "total", "loss", "tokens_per_second", "seconds_left",
                                            "heartbeat", "resumed_from")},
    }  # fmt: skip


def _import(arguments: argparse.Namespace) -> dict[str, Any]:
    from trainer.bases import import_folder

    return import_folder(arguments.folder, _uri(arguments.uri))


def _import_gguf(arguments: argparse.Namespace) -> dict[str, Any]:
    _quiet()
    from trainer.gguf import import_gguf

    return import_gguf(arguments.file, _uri(arguments.uri))


def _seed(arguments: argparse.Namespace) -> dict[str, Any]:
    _quiet()
    from trainer.seed import seed

    return seed(_uri(arguments.uri), arguments.corpus)


def _rehearse(arguments: argparse.Namespace) -> dict[str, Any]:
    _quiet()
    from trainer.rehearsal import rehearse

    return rehearse(_uri(arguments.base), arguments.prompts, arguments.output, max_tokens=arguments.max_tokens)


def _quiet() -> None:
    """Keep the libraries' bars and advice out of what people read; to be called before they are imported."""
    for name, value in {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "DS_ACCELERATOR": "cpu"}.items():
        os.environ.setdefault(name, value)


def _uri(text: str) -> str:
    """A URI as given, or a path of this machine as one."""
    return text if "://" in text else Path(text).absolute().as_uri()


def _store_of(output: str) -> str:
    """The store that an output lies in: above training/<pipeline>/<name>, or else the folder that holds it."""
    parts = output.rstrip("/").split("/")
    return "/".join(parts[:-3] if parts[-3:-2] == ["training"] else parts[:-1])
