"""The board's endpoints: who may, what they show, and that data never becomes code."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

AsUser = Callable[[str], dict[str, str]]
PAGES = ["/refit/", "/refit/static/board.js", "/refit/static/board.css", "/refit/api/board", "/refit/store/"]
RELEASES = {role: {"id": f"{role}-id"} for role in ("champion", "previous")}


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """A controller that serves one line, and remembers what it was asked."""
    asked: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, {**RELEASES, "challenger": None, "weight": 0, "rollout": None})

        def do_POST(self) -> None:
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))
            if "nothing_before" in self.path:
                self.answer(409, {"detail": "there is no previous champion"})
            else:
                self.answer(200, {"champion": RELEASES["previous"]})

        def answer(self, status: int, document: Any) -> None:
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    controller = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=controller.serve_forever, daemon=True).start()
    (tmp_path / "token").write_text("t")
    monkeypatch.setenv("REFIT_CONTROLLER_URL", f"http://127.0.0.1:{controller.server_port}")
    monkeypatch.setenv("REFIT_TOKEN_FILE", str(tmp_path / "token"))
    yield asked
    controller.shutdown()
    controller.server_close()


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    store = tmp_path / "store"
    (store / "evaluations/tiny/abc").mkdir(parents=True)
    monkeypatch.setenv("REFIT_STORE", store.as_uri())
    monkeypatch.setenv("REFIT_CONTROLLER_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("REFIT_DATABASE_URL", raising=False)
    monkeypatch.delenv("REFIT_PIPELINES", raising=False)
    return store


@pytest.mark.parametrize("path", PAGES)
def test_nobody_sees_anything_without_logging_in(server: Any, as_user: AsUser, path: str) -> None:
    assert server.get(path).status_code == 401
    assert server.get(path, headers={"authorization": "Bearer nonsense"}).status_code in (401, 403)
    assert server.get(path, headers=as_user("vera")).status_code == 200


def test_the_board_shows_every_line_and_says_what_is_away(server: Any, as_user: AsUser) -> None:
    board = server.get("/refit/api/board", headers=as_user("vera")).json()
    assert {line["name"] for line in board["lines"]} == {"tiny", "review_sentiment"}
    assert any("controller does not answer" in fault for fault in board["faults"])


def test_the_board_shows_what_serves(server: Any, as_user: AsUser, house: Any) -> None:
    (line,) = [
        line
        for line in server.get("/refit/api/board", headers=as_user("vera")).json()["lines"]
        if line["name"] == "tiny"
    ]
    assert line["serving"] == {"champion": "champion-id", "previous": "previous-id", "challenger": None, "weight": 0}


def test_a_broken_file_hides_no_other_line(
    server: Any, as_user: AsUser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pipelines"
    folder.mkdir()
    (folder / "good.yaml").write_text((Path(__file__).resolve().parents[2] / "dags/pipelines/tiny.yaml").read_text())
    (folder / "bad.yaml").write_text("name: [")
    monkeypatch.setenv("REFIT_PIPELINES", str(folder))
    board = server.get("/refit/api/board", headers=as_user("vera")).json()
    assert [line["name"] for line in board["lines"]] == ["tiny"]
    assert any("bad.yaml" in fault for fault in board["faults"])


def test_who_may_edit_rolls_back_under_their_own_name(server: Any, as_user: AsUser, house: list[Any]) -> None:
    wish = {"reason": "answers are rude"}
    path = "/refit/api/lines/tiny/rollback"
    assert server.post(path, json=wish).status_code == 401
    assert server.post(path, json=wish, headers=as_user("vera")).status_code == 403
    assert house == []
    assert server.post(path, json=wish, headers=as_user("ada")).status_code == 200
    ((asked, body),) = house
    assert asked == "/v1/pipelines/tiny/rollback"
    assert body["reason"].startswith("answers are rude (by ada")


def test_a_rollback_asks_for_a_reason_and_for_json(server: Any, as_user: AsUser, house: list[Any]) -> None:
    path = "/refit/api/lines/tiny/rollback"
    assert server.post(path, json={"reason": ""}, headers=as_user("ada")).status_code == 422
    form = {**as_user("ada"), "content-type": "text/plain"}
    assert server.post(path, content=b'{"reason": "from elsewhere"}', headers=form).status_code in (415, 422)
    assert house == []


def test_the_controller_s_no_reaches_the_person(server: Any, as_user: AsUser, house: list[Any]) -> None:
    path = "/refit/api/lines/nothing_before/rollback"
    answer = server.post(path, json={"reason": "a test"}, headers=as_user("ada"))
    assert answer.status_code == 409
    assert "no previous champion" in answer.json()["detail"]


def test_a_report_is_shown_sealed(server: Any, as_user: AsUser, place: Path) -> None:
    (place / "evaluations/tiny/abc/report.html").write_text("<script>alert(1)</script>")
    answer = server.get("/refit/store/evaluations/tiny/abc/report.html", headers=as_user("vera"))
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "sandbox" in policy
    assert "allow-scripts" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_folder_is_listed_and_its_names_are_text(server: Any, as_user: AsUser, place: Path) -> None:
    (place / "evaluations/tiny/abc/<img src=x onerror=alert(1)>.json").write_text("{}")
    answer = server.get("/refit/store/evaluations/tiny/abc/", headers=as_user("vera"))
    assert "<img" not in answer.text
    assert "&lt;img" in answer.text


@pytest.mark.parametrize("path", ["../secret.txt", "%2e%2e/secret.txt", "evaluations/..%2f..%2f..%2fsecret.txt",
                                  "evaluations/%00", ".hidden.txt", "evaluations/tiny/abc/weights.bin"])  # fmt: skip
def test_nothing_outside_of_the_store_and_nothing_hidden_is_shown(
    server: Any, as_user: AsUser, place: Path, path: str
) -> None:
    (place.parent / "secret.txt").write_text("secret")
    (place / ".hidden.txt").write_text("secret")
    (place / "evaluations/tiny/abc/weights.bin").write_text("secret")
    answer = server.get(f"/refit/store/{path}", headers=as_user("ada"))
    assert answer.status_code == 404
    assert "secret" not in answer.text


def test_the_page_s_script_never_parses_html(server: Any) -> None:
    page = Path(__file__).resolve().parents[2] / "plugins/refit_board/page"
    for script in page.glob("*.js"):
        text = script.read_text()
        for way in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "http://cdn",
        ):
            assert way not in text, f"{script.name} uses {way}"


def test_the_page_loads_nothing_from_elsewhere(server: Any, as_user: AsUser) -> None:
    answer = server.get("/refit/", headers=as_user("vera"))
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "//" not in answer.text.replace("<!doctype html>", "")
