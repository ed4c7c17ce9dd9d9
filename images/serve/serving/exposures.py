"""What gateway and model servers wrote becomes rows: exposures and shadow pairs. Pure, but for the salt's file."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from refit import files
from serving.routes import CHALLENGER, CHAMPION

WAITING_ANSWERS = 5_000


def user_salt(home: Path) -> bytes:
    """The salt of this house's users, made at first use. With it a user could be recognised; the database has not."""
    path = home / "secrets" / "user-salt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        files.write(path, secrets.token_hex(32).encode(), mode=0o600)
    return path.read_bytes().strip()


def user_hash(user: str, salt: bytes) -> str:
    """A user as the database knows them."""
    return hmac.new(salt, user.encode(), hashlib.sha256).hexdigest()[:32]


def exposure(line: bytes, salt: bytes) -> dict[str, Any] | None:
    """The row of an access log line; None for what is not a user's request (or not whole)."""
    try:
        entry = json.loads(line)
        if entry["method"] != "POST" or not entry["request_id"] or not entry["pipeline"]:
            return None
        first = entry["first_byte_milliseconds"]
        return {
            "request_id": entry["request_id"][:200],
            "pipeline": entry["pipeline"],
            "rollout": entry["rollout"],
            "step": int(entry["step"]) if entry["step"] else None,
            "user_hash": user_hash(entry["user"], salt) if entry["user"] else None,
            "assigned": entry["assigned"] or CHAMPION,
            "served": _served(entry["release"], entry["challenger"]),
            "release": entry["release"],
            "status": int(entry["status"] or 0),
            "flags": "" if entry["flags"] in (None, "-") else entry["flags"],
            "seconds": entry["milliseconds"] / 1000,
            "first_byte": first / 1000 if isinstance(first, int | float) else None,
            "at": entry["at"],
        }
    except (ValueError, KeyError, TypeError):
        return None


def _served(release: str | None, challenger: str | None) -> str | None:
    if not release:
        return None
    return CHALLENGER if release == challenger else CHAMPION


class Pairs:
    """Shadow answers meet the champion's answers to the same requests.

    The mirror drops some under load, so one half may never come: at most `WAITING_ANSWERS` are kept, the oldest go.
    """

    def __init__(self, room: int = WAITING_ANSWERS) -> None:
        self._room = room
        self._waiting: OrderedDict[tuple[str, str, bool], dict[str, Any]] = OrderedDict()

    def add(self, lines: Iterable[bytes]) -> list[dict[str, Any]]:
        """Take spooled answers in; returns the rows of pairs that are complete now."""
        found = []
        for line in lines:
            try:
                entry = json.loads(line)
                rollout, request, shadow = entry["rollout"], entry["request_id"], bool(entry["shadow"])
            except (ValueError, KeyError, TypeError):
                continue
            other = self._waiting.pop((rollout, request, not shadow), None)
            if other is not None:
                found.append(_pair(rollout, request, other if shadow else entry, entry if shadow else other))
            else:
                self._waiting[rollout, request, shadow] = entry
        while len(self._waiting) > self._room:
            self._waiting.popitem(last=False)
        return found


def _pair(rollout: str, request: str, champion: dict[str, Any], candidate: dict[str, Any]) -> dict[str, Any]:
    return {
        "rollout": rollout,
        "request_id": request[:200],
        **{f"champion_{name}": champion.get(name) for name in ("answer", "seconds", "status")},
        **{f"candidate_{name}": candidate.get(name) for name in ("answer", "seconds", "status")},
    }
