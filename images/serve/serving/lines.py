"""The route table in force: what is meant, and whether Envoy was seen to follow it."""

from __future__ import annotations

import time

from refit import log
from serving.gateway import Gateway
from serving.table import Line

CHECK_SECONDS = 5.0


class Lines:
    """The table of all lines. Changes go through `apply` (who answers) or `remember` (what is to come)."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._checked = 0.0
        self.table = gateway.table()
        self.live = False

    def line(self, pipeline: str) -> Line:
        """A pipeline's line."""
        return self.table.line(pipeline)

    def names(self) -> list[str]:
        """Every pipeline that has a line."""
        return list(self.table.lines)

    def apply(self, line: Line) -> None:
        """Put a line in force and return when Envoy follows it.

        It stays the one to follow also where Envoy does not answer now (ServerUnavailable): `follow` tries again.
        """
        self.table, self.live = self.table.with_line(line), False
        self._write()

    def remember(self, line: Line) -> None:
        """Keep what does not change who answers."""
        table = self.table.with_line(line)
        self._gateway.remember(table)
        self.table = table

    def follow(self) -> None:
        """Have Envoy follow the table, where it does not (a write that was cut short, a file that somebody changed)."""
        if time.monotonic() - self._checked > CHECK_SECONDS or not self.live:
            self._checked = time.monotonic()
            seen = self._gateway.live(self.table)
            if self.live and not seen:
                log.event("gateway", state="does not follow the route table; written again")
            self.live = seen
        if not self.live:
            self._write()
        self._gateway.prune(self.table)

    def _write(self) -> None:
        self._gateway.write(self.table)
        self.live = True
