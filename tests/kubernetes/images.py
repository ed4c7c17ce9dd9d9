"""Prints which images exist, for a test bed without a registry: this checkout's own programs under the images' names.

python tests/kubernetes/images.py > images.json
"""

from __future__ import annotations

import json
from pathlib import Path

PROGRAMS = {"data": "corpus", "train": "trainer", "evaluate": "evaluator"}


def images(root: Path) -> dict[str, dict[str, object]]:
    """Image pattern → how a container of it starts."""
    return {
        f"refit/{stage}:*": {"entrypoint": [str(root / ".venv" / "bin" / program)], "workdir": "/tmp"}
        for stage, program in PROGRAMS.items()
    }


if __name__ == "__main__":
    print(json.dumps(images(Path(__file__).resolve().parents[2]), indent=1))
