"""How a training looks from outside: one compact view, from what its folder says. Pure; `watch` gets the data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from refit.progress import duration, share
from refit.states import State

ENDED = frozenset({State.SUCCEEDED, State.FAILED, State.SUSPENDED})
"""States in which no process of the job runs; a suspended or failed one is started again by somebody else."""

QUIET_SECONDS = 30.0
"""A heartbeat that is older than this is remarked upon; a living trainer's comes every `heartbeat_seconds`."""

SPLIT = ("data", "forward", "backward", "communication", "wait", "optimizer", "validation", "save")
"""The parts of a step's time, as the loop names them in its records. A save counts to the step after it."""

SPLIT_STEPS = 20
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What a training's folder says at one moment.

    `records` are the last steps (of metrics.jsonl), `checkpoint` the newest one's step and the time it was made, in
    seconds since 1970. Before the first heartbeat `status` is empty.
    """

    event: dict[str, Any]
    status: dict[str, Any] = field(default_factory=dict)
    records: Sequence[dict[str, Any]] = ()
    checkpoint: tuple[int, float] | None = None

    @property
    def ended(self) -> bool:
        """Whether the job has ended, one way or another."""
        return self.event.get("state") in ENDED


def render(scene: Scene, now: float, width: int = 80) -> list[str]:
    """The view as lines of at most `width` characters; `now` is in seconds since 1970."""
    rows = [
        ("state", _state(scene)), ("step", _step(scene, width)), ("loss", _loss(scene)), ("pace", _pace(scene)),
        ("time %", _split(scene.records)), ("saved", _saved(scene, now)), ("heard", _heard(scene, now)),
    ]  # fmt: skip
    return [f"{name:<6} {text}"[:width] for name, text in rows if text]


def changed(scene: Scene) -> tuple[Any, ...]:
    """What makes a new line worth printing where lines cannot be redrawn."""
    status, event = scene.status, scene.event
    return (
        event.get("state"), event.get("reason"), event.get("attempt"), status.get("phase"), _at(scene),
        scene.checkpoint and scene.checkpoint[0],
    )  # fmt: skip


def line(scene: Scene, now: float) -> str:
    """The view as one line."""
    parts = [_state(scene), _step(scene, 0), _loss(scene, shape=False), _pace(scene)]
    parts += [f"saved {saved}"] if (saved := _saved(scene, now)) else []
    return ", ".join(part.replace("  ", ", ") for part in parts if part)


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The last `width` values as bars between their least and their greatest; what is not finite is a gap."""
    shown = values[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] if math.isfinite(value) else " " for value in shown)


def _state(scene: Scene) -> str:
    event = scene.event
    reason = " ".join(str(event.get("reason", "")).split())
    return f"{event.get('state', 'unknown')} (attempt {event.get('attempt', '?')}): {reason}"


def _at(scene: Scene) -> tuple[int, int]:
    """The step and the total. A record may be ahead of the heartbeat, and behind it (on S3, or after a resume)."""
    done, total = int(scene.status.get("done") or 0), int(scene.status.get("total") or 0)
    if scene.records and scene.status.get("phase") in (None, "train"):
        done = max(done, int(scene.records[-1]["step"]))
    return done, total


def _step(scene: Scene, width: int) -> str:
    done, total = _at(scene)
    part = share({"done": done, "total": total})
    cells = max(0, min(30, width - 50))
    bar = "█" * round(part * cells) + "░" * (cells - round(part * cells))
    left = scene.status.get("seconds_left")
    tell_left = left is not None and not scene.ended and part < 1
    return "  ".join(filter(None, [
        str(scene.status.get("phase", "start")), f"{done:,} of {total:,}", bar, f"{100 * part:.0f} %",
        f"{duration(float(left or 0))} left" if tell_left else "",
    ]))  # fmt: skip


def _loss(scene: Scene, *, shape: bool = True) -> str:
    last: dict[str, Any] = scene.records[-1] if scene.records else {}
    loss = last.get("loss", scene.status.get("loss"))
    if loss is None:
        return ""
    losses = [float(record["loss"]) for record in scene.records if record.get("loss") is not None]
    return "  ".join(filter(None, [
        f"{'' if shape else 'loss '}{float(loss):.4g}", sparkline(losses) if shape else "",
        f"gradient {float(last['grad_norm']):.3g}" if last.get("grad_norm") is not None else "",
        f"rate {float(last['lr']):.3g}" if last.get("lr") is not None else "",
    ]))  # fmt: skip


def _pace(scene: Scene) -> str:
    rate = scene.status.get("tokens_per_second")
    if rate is None:  # a short training may be over before its heartbeat has told
        tokens, seconds = (sum(float(one.get(name, 0)) for one in scene.records) for name in ("tokens", "seconds"))
        rate = tokens / seconds if tokens and seconds else None
    return f"{float(rate):,.0f} tokens/s" if rate is not None else ""


def _split(records: Sequence[dict[str, Any]]) -> str:
    """Where the last steps' time went, in percent."""
    recent = records[-SPLIT_STEPS:]
    parts = {name: sum(float(record.get(name, 0.0)) for record in recent) for name in SPLIT}
    whole = sum(float(record.get(name, 0.0)) for record in recent for name in ("seconds", "validation", "save"))
    whole = max(whole, sum(parts.values()))
    if whole <= 0:
        return ""
    parts["other"] = whole - sum(parts.values())
    told = [f"{name} {100 * spent / whole:.0f}" for name, spent in parts.items() if spent >= 0.005 * whole]
    return ", ".join(told)


def _saved(scene: Scene, now: float) -> str:
    if scene.checkpoint is None:
        return ""
    step, when = scene.checkpoint
    return f"step {step:,}  {duration(max(0.0, now - when))} ago"


def _heard(scene: Scene, now: float) -> str:
    heartbeat = scene.status.get("heartbeat")
    if heartbeat is None:
        return ""
    age = max(0.0, now - float(heartbeat))
    silent = age > QUIET_SECONDS and not scene.ended
    where = f" from {scene.status['host']}" if scene.status.get("host") else ""
    return f"{duration(age)} ago{where}{'; is it still there?' if silent else ''}"
