"""The route table: the one document that says who serves each pipeline now, and with what share.

`envoy/table.json` holds it; Envoy's files are rendered from it (`routes.py`), and nothing else decides about traffic.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from refit.release import Release


class Target(BaseModel):
    """A release and where it is served."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    release: Release
    url: str


class Pending(BaseModel):
    """A champion to be, whose server is still starting."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    release: Release
    reason: str
    actor: str


class Line(BaseModel):
    """One pipeline's traffic.

    `standby` is a former champion kept warm: it answers when the champion is gone. `challenger` is set as soon as a
    rollout touches traffic; `shadow` mirrors requests to it, `weight` is its share of users in percent.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pipeline: str
    champion: Target | None = None
    standby: Target | None = None
    previous: Release | None = None
    challenger: Target | None = None
    rollout: str = ""
    step: int = 0
    weight: Annotated[int, Field(ge=0, le=100)] = 0
    shadow: bool = False
    pending: Pending | None = None

    @model_validator(mode="after")
    def _no_share_without_a_challenger(self) -> Self:
        if (self.weight or self.shadow) and not (self.challenger and self.champion and self.rollout):
            raise ValueError("a share of traffic needs a champion, a challenger and the rollout's id")
        return self

    def releases(self) -> set[str]:
        """Releases that this line needs a server for."""
        targets = [self.champion, self.standby, self.challenger]
        found = {target.release.id for target in targets if target}
        return found | ({self.pending.release.id} if self.pending else set())

    def without_challenger(self) -> Line:
        """Back to the champion: what a rollback makes of it."""
        return self.model_copy(update={"challenger": None, "rollout": "", "step": 0, "weight": 0, "shadow": False})


class Table(BaseModel):
    """Every pipeline's line, by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lines: dict[str, Line] = {}

    def line(self, pipeline: str) -> Line:
        """A pipeline's line; an empty one where it has none yet."""
        return self.lines.get(pipeline, Line(pipeline=pipeline))

    def with_line(self, line: Line) -> Table:
        """The table with one line replaced."""
        return Table(lines={**self.lines, line.pipeline: line})

    def releases(self) -> set[str]:
        """Releases that need a server."""
        return {release for line in self.lines.values() for release in line.releases()}
