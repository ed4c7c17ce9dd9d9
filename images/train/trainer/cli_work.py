"""What the commands about a training share: its options, the job that they make, and where that lies."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from refit import cli
from refit.errors import BadInput
from refit.fingerprint import layout
from refit.job import EVENTS, Job, read_events
from refit.spec import Pipeline
from refit.store import join, store_for
from trainer import checkpoints, tried
from trainer.inputs import folder_of, name_of

NO_PLACE = "no place for the output: give --output URI or --store URI, or set REFIT_STORE."


def add(parser: argparse.ArgumentParser, *, output_required: bool = False, data_required: bool = True) -> None:
    """Add the options that name a training: spec, data, output, ranks, store."""
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


def spec_of(arguments: argparse.Namespace) -> Pipeline:
    """The spec, with the options laid over it."""
    if arguments.ranks is not None:
        arguments.sets = [*arguments.sets, f"train.ranks={arguments.ranks}"]
    return cli.spec_of(arguments)


def job_of(kind: str, arguments: argparse.Namespace, folder: str) -> Job:
    """The job of a subcommand; `folder` says where below the store its output lies unless one is given.

    Nothing is written: job.json is its handler's, once the output is known to be this job's.
    """
    spec = spec_of(arguments)
    dataset = uri(folder_of(arguments.data))
    fingerprint = name_of(spec.train, dataset, spec.train.base)
    name = folder.format(
        pipeline=spec.name, fingerprint=fingerprint, layout=layout(spec.train),
        tried=f"{kind}-{tried.name(kind, spec.train, fingerprint)}" if kind in (tried.OVERFIT, tried.SMOKE) else "",
    )  # fmt: skip
    if arguments.output:
        output = uri(arguments.output)
        store = uri(arguments.store) if arguments.store else store_of(output)
    elif arguments.store:
        store = uri(arguments.store)
        output = join(store, name)
    else:
        raise BadInput(NO_PLACE)
    done = store_for(output).manifest(output)
    if done is not None and (done.kind, done.fingerprint) != (kind, fingerprint):
        raise BadInput(
            f"{output}: holds the {done.kind} {done.fingerprint}, this would be the {kind} {fingerprint}. Data, base "
            "model or recipe differ: give it an output folder of its own."
        )
    there = next(checkpoints.committed(output), None)
    if kind == "train" and there is not None:  # before anything is written: the launcher asks it again
        checkpoints.refuse_another(there, fingerprint)
    return _built(kind, spec, store=store, output=output, dataset=dataset)


def _built(kind: str, spec: Pipeline, *, store: str, output: str, dataset: str) -> Job:
    before = store_for(output)
    attempt = 1
    if before.exists(join(output, EVENTS)):
        events = read_events(before.read(join(output, EVENTS)).decode(errors="replace"))
        attempt += max((int(record.get("attempt", 0)) for record in events), default=0)
    return Job.build(
        kind, spec, store=store, output=output, inputs={"dataset": dataset, "base": spec.train.base}, attempt=attempt
    )


def quiet() -> None:
    """Keep the libraries' bars and advice out of what people read; to be called before they are imported."""
    for name, value in {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "DS_ACCELERATOR": "cpu"}.items():
        os.environ.setdefault(name, value)


def uri(text: str) -> str:
    """A URI as given, or a path of this machine as one."""
    return text if "://" in text else Path(text).absolute().as_uri()


def store_of(output: str) -> str:
    """The store that an output lies in: above training/<pipeline>/<name>, or else the folder that holds it."""
    parts = output.rstrip("/").split("/")
    return "/".join(parts[:-3] if parts[-3:-2] == ["training"] else parts[:-1])
