"""From a checkpoint to a folder that can be served, without training further.

The checkpoint's files are hashed first; then as many ranks as it needs load it and export as they do at the end of a
training, proof included. At ZeRO 0 that is one rank, whoever saved; above, state is split by rank, and as many are
started as saved it.

What it does not do: hold the training back. Of one that goes on, `keep_last` may throw the checkpoint away meanwhile;
then nothing is published, and a newer one can be exported. A kill leaves a hidden `.export-…` folder beside the output.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from refit import log
from refit.errors import BadInput, NodeLost, from_exit_code
from refit.job import JOB, Job, read_events
from refit.store import FileStore, Heard, join, store_for, unheard
from trainer import card, checkpoints
from trainer.checkpoints import Checkpoint
from trainer.inputs import Inputs, folder_of, locate
from trainer.metrics import METRICS
from trainer.publishing import ADAPTER, MODEL, lay_card, publish
from trainer.ranks import Ranks
from trainer.task import Mode, Task

POLL_SECONDS = 0.2
LAST_WORDS_SECONDS = 5.0


def republish(uri: str, output: str, *, base: str | None = None, data: str | None = None) -> dict[str, Any]:
    """Publish the model in the checkpoint at `uri` as the folder `output`, its adapter as `<output>-adapter`.

    Args:
        base, data: where base model and dataset lie now, if not where the training found them.

    Raises:
        BadInput: the checkpoint is not whole, its training or one of its inputs is not found or another one, or
            something else is at `output`.
        Infrastructure: a rank was lost, or what was written does not answer like what was trained.
    """
    found = checkpoints.verify(uri)
    training = _training_of(found)
    job = _job_of(training, found, output, base=base, data=data)
    facts = _facts(training, job, found)
    _refuse_another(output, found)
    inputs = locate(job)
    if inputs.fingerprint != found.manifest.fingerprint:
        raise BadInput(
            f"{found.uri}: of training {found.manifest.fingerprint}; with this base model and dataset it would be "
            f"{inputs.fingerprint}. Give the ones it was trained with by --base and --data."
        )
    with tempfile.TemporaryDirectory(prefix=".export-", dir=_beside(output)) as folder:
        task = task_of(job, inputs, found, Path(folder))
        result = launch(task)
        facts = {**facts, "checkpoint": found.uri}
        model, digest = publish(task.export / MODEL, "model", inputs, facts, uri=output)
        adapter = None
        if (task.export / ADAPTER).is_dir():
            adapter, _ = publish(task.export / ADAPTER, "adapter", inputs, facts, uri=f"{output.rstrip('/')}-adapter")
        shutil.rmtree(task.export)
    lay_card(model, job, inputs, facts, card.evaluation_of(job, digest))
    log.event("published", model=model, digest=digest)
    return {
        "model": model, "model_digest": digest, "adapter": adapter, "step": found.step, "loss": facts["loss"],
        "fingerprint": inputs.fingerprint, "ranks": task.ranks, **result,
    }  # fmt: skip


def _beside(output: str) -> Path | None:
    """Where there is room for a model: on the disk that it goes to, or else where temporary files are."""
    store = store_for(output)
    if not isinstance(store, FileStore):
        return None
    place = store.path(output).parent
    place.mkdir(parents=True, exist_ok=True)
    return place


def _training_of(checkpoint: Checkpoint) -> str:
    """The output folder that a checkpoint lies in."""
    above, _, name = checkpoint.uri.rpartition("/")
    training, _, folder = above.rpartition("/")
    if folder != "checkpoints" or not store_for(training).exists(join(training, JOB)):
        raise BadInput(
            f"{checkpoint.uri}: no {JOB} two folders above it, which says what was trained. Give a checkpoint where "
            f"its training left it: OUTPUT/checkpoints/{name}."
        )
    return training


def _job_of(training: str, found: Checkpoint, output: str, *, base: str | None, data: str | None) -> Job:
    job = Job.load(join(training, JOB))
    inputs = {**job.inputs, **({"base": base} if base else {}), **({"dataset": folder_of(data)} if data else {})}
    # Another output: a relaunch of the training ends whatever still works on its own.
    return job.model_copy(update={"inputs": inputs, "output": output, "id": f"export-{found.step}"})


def _facts(training: str, job: Job, found: Checkpoint) -> dict[str, Any]:
    """What `trainer run` says of its model, as of the checkpoint's step; loss and tokens None where nobody knows."""
    store, uri = store_for(training), join(training, METRICS)
    records = read_events(store.read(uri).decode(errors="replace")) if store.exists(uri) else []
    past = [record for record in records if record["step"] <= found.step]
    known = bool(past) and past[-1]["step"] == found.step
    return {
        "steps": found.step, "loss": past[-1]["loss"] if known else None,
        "tokens": sum(record["tokens"] for record in past) if known else None, "pipeline": job.pipeline,
    }  # fmt: skip


def _refuse_another(output: str, found: Checkpoint) -> None:
    there = store_for(output).manifest(output)
    if there and (there.fingerprint, there.facts.get("steps")) != (found.manifest.fingerprint, found.step):
        raise BadInput(
            f"{output}: holds the {there.kind} {there.fingerprint}, not what is in {found.uri}. Give another address."
        )


def task_of(job: Job, inputs: Inputs, found: Checkpoint, folder: Path, mode: Mode = "export") -> Task:
    """What ranks that work on a checkpoint are told, in a folder of their own."""
    facts = found.manifest.facts
    train = job.spec.train
    ranks = 1 if train.zero_stage == 0 else int(facts["ranks"])
    if ranks % train.tensor_parallel:  # saved by another layout than the job asks for by now
        ranks = train.tensor_parallel
    log.event(mode, checkpoint=found.uri, ranks=ranks, dtype=facts["dtype"])
    return Task(
        mode=mode, job=job, fingerprint=inputs.fingerprint, dataset=inputs.dataset, base=inputs.base, folder=folder,
        token="", ranks=ranks, dtype=facts["dtype"], rendezvous=folder / "ranks" / "rendezvous", checkpoint=found.uri,
        step=found.step,
    )  # fmt: skip


def launch(task: Task, heard: Heard = unheard) -> dict[str, Any]:
    """Rank 0's result. One launch: an export that fails loses nothing and is called again by whoever wants it.

    `heard` is told, while none of the ranks has been silent for too long, that work goes on.
    """
    with Ranks(task) as ranks:
        while True:
            heard()
            if (result := _listen(ranks, POLL_SECONDS)) is not None:
                return result
            if (hung := ranks.hung()) is not None:
                raise NodeLost(f"rank {hung.number} said nothing for {ranks.patience:.0f} s\n{hung.tail()}")
            lost = next((member for member in ranks.ended() if member.process.returncode != 0), None)
            if lost is not None:
                _listen(ranks, 0)  # its last words may still be on the wire
                raise NodeLost(f"rank {lost.number} ended by {lost.process.returncode}\n{lost.tail()}")


def _listen(ranks: Ranks, timeout: float) -> dict[str, Any] | None:
    for member, message in ranks.messages(timeout):
        kind = message.pop("kind")
        if kind == "error":
            raise from_exit_code(message["exit_code"], message["message"])
        if kind == "result" and member.number == 0:
            ranks.wait(LAST_WORDS_SECONDS)
            return message
    return None
