"""What this rank computes on: a card where the recipe has some (`train.gpus_per_node`), else the processor.

All that differs between the two is here. A process has one device, as torch has one current card; until `choose` it is
the processor, where nothing in this module does more than the line that it stands for.

What is chosen on cards: one for each rank, the one of its number. Small agreements stay with gloo and the host, tensors
on cards go by NCCL. Everything is computed by algorithms that give the same bits again, so that a resume is exact.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from refit.errors import PreflightRefused
from refit.spec import Train
from trainer.batches import Batch

PROCESSOR = torch.device("cpu")

BEFORE_CUDA = {
    # Cards in the order that NVML, and so preflight and the step's record, numbers them in.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    # Without a workspace of its own cuBLAS may add up in another order the next time, and torch refuses to use it.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""Environment variables that count only if they are there before the first call to a card; set ones stay."""

FULL = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Cuda failure 2")
"""How those beside torch's own allocator say that a card's memory is."""

_here = PROCESSOR


def choose(train: Train) -> None:
    """Set this rank's device; before anything is made on it.

    Raises:
        PreflightRefused: the machine has no such card, or its torch cannot use it.
    """
    global _here
    if train.gpus_per_node == 0:
        return
    for name, value in BEFORE_CUDA.items():
        os.environ.setdefault(name, value)
    index = int(os.environ["LOCAL_RANK"])
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= found:
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "processors only"
        raise PreflightRefused(
            f"{socket.gethostname()}: train.gpus_per_node is {train.gpus_per_node}, and torch {torch.__version__} (for "
            f"{built}) finds {found} card(s) here; rank {index} needs one of its own. Use a machine and an image with "
            "as many, or set train.gpus_per_node to 0."
        )
    torch.cuda.set_device(index)
    # Strictly: where it only warns, torch keeps to attention's faster way back, which adds up in any order. NCCL then
    # leaves out reductions inside of switches, for the same reason (pytorch#154880).
    torch.use_deterministic_algorithms(True)
    # It is for who looks for mistakes, and costs a write of all new memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    _here = torch.device("cuda", index)


def here() -> torch.device:
    """This rank's device."""
    return _here


def on_card() -> bool:
    """Whether this rank computes on a card."""
    return _here.type == "cuda"


def backend() -> str:
    """Who carries messages between ranks, by where a tensor lies.

    No device is bound to the group: then barriers, as all that lies in the host's memory, go by gloo, and groups within
    it are made when they are first used (pytorch#153960 is what binding can end in).
    """
    return "cpu:gloo,cuda:nccl" if on_card() else "gloo"


def put(batch: Batch) -> Batch:
    """The batch where it is computed with; it is on its way when this returns, and who uses it waits."""
    if not on_card():
        return batch
    return Batch._make(None if one is None else one.pin_memory().to(_here, non_blocking=True) for one in batch)


def synchronize() -> None:
    """Wait until the device has done all that it was given."""
    if on_card():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Mark:
    """A moment in the device's own course of work; of a card one that lies behind all that it was given before.

    The host hands work to a card and goes on, so its clock says nothing of how long that takes. A part between two
    marks is told as what it held the card up: loading data while the card is busy costs nothing, and shows as that.
    """

    host: float
    card: torch.cuda.Event | None

    def __sub__(self, before: Mark) -> float:
        """Seconds from an earlier mark to this one; both must be reached (`synchronize`)."""
        if self.card is None or before.card is None:
            return self.host - before.host
        return float(before.card.elapsed_time(self.card)) / 1000  # it tells milliseconds


def mark() -> Mark:
    """Now, in the device's course of work."""
    if not on_card():
        return Mark(time.perf_counter(), None)
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return Mark(0.0, event)


def random_state() -> Tensor | None:
    """Where the card's random numbers stand, as bytes; None of a processor, whose are torch's own."""
    return torch.cuda.get_rng_state() if on_card() else None


def set_random_state(state: Tensor) -> None:
    """Go on with the card's random numbers from there; of a processor nothing."""
    if on_card():
        torch.cuda.set_rng_state(state)


def memory() -> dict[str, int]:
    """`device_peak`: the most bytes of the card's memory that tensors have taken so far; nothing of a processor."""
    return {"device_peak": torch.cuda.max_memory_allocated()} if on_card() else {}


def explained(error: RuntimeError, train: Train) -> PreflightRefused | None:
    """What a card's refusal amounts to, for whoever chose the recipe; None where it is no such thing.

    Both would come again: a step's memory follows from its shapes, and they are the same on a resume.
    """
    where = f"{socket.gethostname()} {_here}"
    if isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in FULL):
        return PreflightRefused(f"{where}: the card's memory is too small. {_less(train)}\n{error}")
    if "does not have a deterministic implementation" in str(error):
        return PreflightRefused(
            f"{where}: this model computes in a way that a card cannot repeat to the bit, and a resume would not be "
            f"exact. Train it with train.gpus_per_node 0.\n{error}"
        )
    return None


def _less(train: Train) -> str:
    """What takes less memory of a card than this recipe does, what costs least first."""
    ways = []
    if train.micro_batch > 1:
        ways.append(
            f"train.micro_batch (now {train.micro_batch}; raise train.accumulation by as much, and a step learns the "
            "same)"
        )
    ways.append("data.pack_length")
    others = [
        (not train.checkpoint_activations, "train.checkpoint_activations"),
        (train.zero_stage < 3 and train.ranks > 1 and train.method != "qlora", "a higher train.zero_stage"),
        (train.offload == "none", "train.offload"),
        (train.method == "full", "train.method lora"),
        (train.method == "lora", "train.method qlora"),
    ]
    rest = [name for fits, name in others if fits]
    return f"Lower {' or '.join(ways)}" + (f"; or set {', or '.join(rest)}." if rest else ".")
