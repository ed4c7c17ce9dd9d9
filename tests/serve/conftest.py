"""Releases and lines that the serving tests share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from refit.release import Release
from refit.spec import Serve
from serving.table import Line, Target

Make = Callable[..., Release]


@pytest.fixture
def release() -> Make:
    """A release by one letter: release("a").id is 16 times that letter."""

    def make(letter: str, pipeline: str = "tiny") -> Release:
        return Release(
            id=letter * 16, pipeline=pipeline, digest=letter * 64, model=f"file:///models/{letter}", profile=Serve(),
            team="support", owner="support-ml@example.com",
        )  # fmt: skip

    return make


@pytest.fixture
def line(release: Make) -> Line:
    """Champion a, challenger b with a fifth of all users."""
    return Line(
        pipeline="tiny",
        champion=Target(release=release("a"), url="http://127.0.0.1:9001"),
        challenger=Target(release=release("b"), url="http://127.0.0.1:9002"),
        rollout="tiny-1",
        step=2,
        weight=20,
    )
