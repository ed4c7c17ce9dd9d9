"""One structured line an event, on stderr, where people read."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import Any

_context: dict[str, Any] = {}


def bind(**fields: Any) -> None:
    """Fields that every further line of this process carries (the run's id, the rank)."""
    _context.update(fields)


def event(name: str, /, **fields: Any) -> None:
    """Write `time name key=value …`; values with blanks are quoted as JSON."""
    pairs = {**_context, **fields}
    text = " ".join(f"{key}={_show(value)}" for key, value in pairs.items())
    print(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}Z {name} {text}".rstrip(), file=sys.stderr, flush=True)


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return json.dumps(text, ensure_ascii=False) if any(c.isspace() for c in text) or not text else text
