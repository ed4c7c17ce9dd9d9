"""What one rank finds where it would run: `python -m trainer.reports RANK OUTPUT [COPIES]` prints one JSON object.

Light on purpose: no torch unless there are GPUs, nothing is computed. What is found is judged elsewhere (`judge`), for
a mismatch is only seen when all ranks' reports lie side by side.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from refit.errors import RefitError, StoreUnavailable
from refit.fingerprint import code_digest
from refit.manifest import MANIFEST, Manifest
from refit.store import FileStore, join, store_for
from trainer import checkpoints, gpus
from trainer.gpus import Cards
from trainer.machine import memory_bytes
from trainer.rank import tie_to_launcher

PACKAGES = ("torch", "deepspeed", "transformers", "peft", "bitsandbytes", "tokenizers", "safetensors", "numpy")
IMAGE = "REFIT_IMAGE"
"""The environment variable with the image (by digest) that this process runs in; whoever starts the pod sets it."""

STORE_SECONDS = 1.0
"""Times of a store are given in whole seconds at worst (S3)."""

_PASSING = frozenset({408, 429})
"""Answers of the 400s that may be another one later: a timeout, and too many at once."""


class Store(BaseModel):
    """How writing, reading back and removing went.

    `fault` is what went wrong; `away` says that the store did not answer, which may pass. `ahead` is by how many
    seconds our clock is ahead of the store's (negative: behind).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    fault: str | None = None
    away: bool = False
    ahead: float | None = None


class Report(BaseModel):
    """What a rank found. Sizes are in bytes. A rank that gave no report is one with `silent`, the reason."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    rank: int
    silent: str | None = None
    versions: dict[str, str] = {}
    image: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    cards: Cards = Cards()
    usable_gpus: int | None = None
    disk_folder: str = ""
    disk_free: int = 0
    memory_free: int = 0
    store: Store = Store()


def look(rank: int, output: str, copies: str | None = None) -> Report:
    """This rank's report on a training that would write to `output`, and copies of its checkpoints to `copies`."""
    folder = disk_folder(output)
    cards = gpus.look()
    cuda, nccl, usable = _torch() if cards.gpus else (None, None, None)
    return Report(
        host=socket.gethostname(), rank=rank, versions=versions(), image=os.environ.get(IMAGE), cuda=cuda, nccl=nccl,
        cards=cards, usable_gpus=usable, disk_folder=str(folder), disk_free=shutil.disk_usage(folder).free,
        memory_free=memory_bytes(), store=try_stores(output, copies, rank),
    )  # fmt: skip


def versions() -> dict[str, str]:
    """Of Python, of what shapes a model, and the digest of our own source."""
    found = {"python": ".".join(map(str, sys.version_info[:3])), "trainer": code_digest("trainer.work")[:12]}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def disk_folder(output: str) -> Path:
    """The folder of this machine in which checkpoints are written: the output's, or what there is of it so far.

    Elsewhere than on a disk they are written to the folder for temporary files and go up from there.
    """
    store = store_for(output)
    if not isinstance(store, FileStore):
        return Path(tempfile.gettempdir())
    folder = store.path(checkpoints.folder(output))
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def try_stores(output: str, copies: str | None, rank: int) -> Store:
    """`try_store` where the training would write, and, if that answers, where its copies would go."""
    found = try_store(output, rank)
    also = try_store(copies, rank) if copies and not found.away else Store()
    if also.fault is None:
        return found
    faults = [*([found.fault] if found.fault else []), f"train.checkpoint.copy_to, {copies}: {also.fault}"]
    return Store(fault="; ".join(faults), away=also.away and found.fault is None, ahead=found.ahead)


def try_store(output: str, rank: int) -> Store:
    """Commit a small folder below `output` as a checkpoint is committed, read it back, take it away."""
    uri = join(output, f"preflight-{socket.gethostname()}-{rank}-{secrets.token_hex(4)}")
    said = secrets.token_bytes(1024)
    try:
        store = store_for(output)
        began = time.time()
        with store.publish(uri) as draft:
            (draft.path / "probe").write_bytes(said)
            draft.commit(Manifest(kind="preflight", fingerprint=secrets.token_hex(16)))
        ended = time.time()
        try:
            written = store.modified(join(uri, MANIFEST))
            if store.read(join(uri, "probe")) != said:
                return Store(fault="what was read back is not what was written")
        finally:
            store.remove(uri)
    except (OSError, RefitError) as error:
        return Store(fault=f"{type(error).__name__}: {error}", away=_away(error))
    return Store(ahead=ahead(began, ended, written))


def _away(error: BaseException | None) -> bool:
    """Whether a store gave no answer. One that said no (no such bucket, no right) will say it again."""
    if not isinstance(error, StoreUnavailable):
        return False
    under: BaseException | None = error
    while under is not None:
        response = getattr(under, "response", None)  # of boto's errors, which need not be installed here
        if isinstance(response, dict):
            status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            return not 400 <= status < 500 or status in _PASSING
        under = under.__cause__ or under.__context__
    return True


def ahead(began: float, ended: float, written: float) -> float:
    """By how much our clock is ahead of the store's, which says `written` of what we wrote from `began` to `ended`."""
    if written < began - STORE_SECONDS:
        return began - written
    return min(0.0, ended - written)


def _torch() -> tuple[str | None, str | None, int]:
    """CUDA and NCCL as torch was built with them, and the GPUs that it can use."""
    import torch

    if not torch.cuda.is_available():
        return torch.version.cuda, None, 0
    nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return torch.version.cuda, ".".join(map(str, nccl)), torch.cuda.device_count()


def main() -> int:
    """Look, and print the report."""
    tie_to_launcher()
    print(look(int(sys.argv[1]), *sys.argv[2:]).model_dump_json(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
