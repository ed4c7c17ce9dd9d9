"""How vLLM is started for a release: its command line and environment. Pure.

Every flag that shapes an answer comes from the release's profile, so that the same release answers the same way
wherever it is served. `--generation-config vllm` keeps a model folder from changing sampling defaults; code from a
model folder is never run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from refit.release import Release
from serving import middleware, patience
from serving.settings import HOST

SHUTDOWN_SECONDS = 20
"""vLLM finishes what it has begun for this long; no new request comes, since the gateway left it before."""


def command(python: str, release: Release, model: Path, port: int) -> list[str]:
    """The command line. `model` is the release's model folder on this machine."""
    profile = release.profile
    # The `vllm` program itself dies of a missing distribution name in the CPU wheel.
    return [
        python, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model),
        "--served-model-name", release.pipeline, release.id,
        "--host", HOST,
        "--port", str(port),
        "--middleware", f"{middleware.__name__}.{middleware.Answers.__name__}",
        "--dtype", profile.dtype,
        "--max-model-len", str(profile.max_model_len),
        "--max-num-seqs", str(profile.max_num_seqs),
        "--generation-config", "vllm",
        "--shutdown-timeout", str(SHUTDOWN_SECONDS),
        "--disable-uvicorn-access-log",
        *(["--enforce-eager"] if profile.eager else []),
        "--enable-prefix-caching" if profile.prefix_caching else "--no-enable-prefix-caching",
    ]  # fmt: skip


def environment(release: Release, spool: Path, sockets: Path, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What is added to the stack's environment; `given` may set the number of threads."""
    threads = given.get("REFIT_SERVER_THREADS") or str(len(os.sched_getaffinity(0)))
    return {
        middleware.RELEASE: release.id,
        middleware.SPOOL: str(spool),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Its processes leave sockets behind when they are killed: in a folder that goes with the server.
        "VLLM_RPC_BASE_PATH": str(sockets),
        "VLLM_CPU_KVCACHE_SPACE": str(release.profile.kv_cache_gib),
        # Champion and challenger share the cores: no thread is tied to one, and none spins while it waits.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive",
        "KMP_BLOCKTIME": "0",
        patience.SPIN_SECONDS: given.get(patience.SPIN_SECONDS, "0.005"),
        "TOKENIZERS_PARALLELISM": "false",
        # No password of ours is any business of a model server.
        "PGPASSFILE": "",
        "REFIT_TOKEN_FILE": "",
    }
