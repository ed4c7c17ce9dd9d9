"""The board in a real browser: what a person sees, in light and dark, and that data stays text."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")

EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
BOARD: dict[str, Any] = {
    "lines": [
        {
            "name": "tiny", "title": EVIL, "team": EVIL, "owner": EVIL, "description": "", "steps": [0, 5, 20, 100],
            "dag_id": "retrain_tiny", "can_edit": True,
            "serving": {"champion": "c" * 16, "previous": "p" * 16, "challenger": "n" * 16, "weight": 20},
            "rollout": {
                "id": "r", "state": "running", "step": 2, "weight": 20, "candidate": "n" * 16, "why": EVIL,
                "started_at": "2026-11-29T12:00:00Z",
                "steps": [
                    {"step": 0, "share": 0, "verdict": "pass", "why": "54 pairs", "at": None},
                    {"step": 1, "share": 5, "verdict": "pass", "why": "not worse", "at": None},
                    {"step": 2, "share": 20, "verdict": "wait", "why": EVIL, "at": None},
                    {"step": 3, "share": 100, "verdict": None, "why": None, "at": None},
                ],
            },
            "runs": [
                {
                    "pipeline": "tiny", "run_id": "m", "outcome": "promoted", "why": EVIL, "started_at": None,
                    "at": "2026-11-29T12:00:00Z", "verdict": "pass", "newest": 1, "report": "javascript:alert(1)",
                    "candidate": {"score": 0.91, "low": 0.88, "high": 0.94},
                    "champion": {"score": 0.84, "low": 0.8, "high": 0.88},
                    "difference": {"value": 0.07, "low": 0.03, "high": 0.11},
                }
            ],
        }
    ],
    "jobs": [
        {"id": "j", "kind": "train", "pipeline": "tiny", "team": "t", "state": "running", "reason": EVIL, "host": EVIL,
         "attempt": 1, "started_at": None, "ended_at": None, "folder": "", "share": 0.45,
         "progress": "train 45 %, 3 min left"}
    ],
    "devices": [],
    "alerts": [
        {"level": "dangerous", "source": "s", "pipeline": "tiny", "message": EVIL, "at": "2026-11-29T12:00:00Z"}
    ],
    "faults": [EVIL],
    "addresses": {},
}  # fmt: skip


@pytest.fixture
def browse(address: str, tmp_path: Path, app: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Log in, open the board and give back what became of the page; REFIT_SCREENSHOTS keeps pictures of it."""
    from refit_board import app as board

    monkeypatch.setattr(board.data, "board", lambda **_: BOARD)

    def visit(name: str = "ada", *, dark: bool = False) -> str:
        common = [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--window-size=1280,1000", "--virtual-time-budget=6000", f"--user-data-dir={tmp_path / 'profile'}",
            *(["--blink-settings=preferredColorScheme=0"] if dark else []),
        ]  # fmt: skip
        target = f"{address}/login/{name}"
        if keep := os.environ.get("REFIT_SCREENSHOTS"):
            picture = Path(keep) / f"board-{'dark' if dark else 'light'}.png"
            subprocess.run([*common, f"--screenshot={picture}", target], check=True, capture_output=True, timeout=120)
        page = subprocess.run([*common, "--dump-dom", target], check=True, capture_output=True, text=True, timeout=120)
        return page.stdout

    return visit


def test_a_person_sees_split_steps_scores_and_what_runs(browse: Callable[..., str]) -> None:
    page = browse()
    for words in ("champion 80 %", "challenger 20 %", "shadow", "pass: not worse", "91.0 %", "+7.0 (+3.0 to +11.0)",
                  "train 45 %, 3 min left", "Roll back"):  # fmt: skip
        assert words in page, words
    assert re.search(r'aria-label="between \+3\.0 and \+11\.0 points"', page)


def test_what_people_and_models_wrote_stays_text(browse: Callable[..., str]) -> None:
    page = browse()
    assert "<title>Refit: models</title>" in page
    assert page.count("&lt;img src=x onerror=") >= 6
    assert "<img" not in page
    assert "javascript:" not in page


def test_the_page_can_be_read_in_the_dark(browse: Callable[..., str]) -> None:
    assert "champion 80 %" in browse(dark=True)


def test_the_page_s_document_is_what_the_browser_test_shows() -> None:
    """The example above has the shape of the real document, or this whole file proves nothing."""
    from refit_board import data

    real = data.board(readable=lambda _: True, editable=lambda _: True)
    assert set(real) == set(BOARD)
    assert set(real["lines"][0]) == set(BOARD["lines"][0])
