"""From files into rows: the tail, the access log, the answers' spool, feedback. Kills and rotations lose nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.exposures import Pairs, exposure, user_hash, user_salt
from serving.feedback import Feedback, FeedbackSpool, rows
from serving.tail import Tail

LINE = {
    "at": "2026-11-29T14:00:00.000Z", "method": "POST", "request_id": "r1", "user": "vera@example.com",
    "pipeline": "tiny", "assigned": "challenger", "rollout": "tiny-1", "step": "2", "challenger": "b" * 16,
    "release": "b" * 16, "status": 200, "flags": "-", "why": "via_upstream", "attempts": 1, "host": "127.0.0.1:9",
    "milliseconds": 120, "first_byte_milliseconds": 100,
}  # fmt: skip


def line(**changes: object) -> bytes:
    return json.dumps({**LINE, **changes}).encode()


# ------------------------------------------------------------------------------------------------------------ tail


def test_a_tail_reads_whole_lines_once(tmp_path: Path) -> None:
    log, state = tmp_path / "log", tmp_path / "state"
    log.write_bytes(b"one\ntwo\nthr")
    tail = Tail(log, state)
    assert tail.read() == [b"one", b"two"]
    assert tail.read() == [b"one", b"two"], "not committed, so it comes again"
    tail.commit()
    assert tail.read() == []
    with log.open("ab") as handle:
        handle.write(b"ee\n")
    assert Tail(log, state).read() == [b"three"], "another process goes on where this one stopped"


def test_a_tail_finishes_the_rotated_file_first(tmp_path: Path) -> None:
    log, rotated = tmp_path / "log", tmp_path / "log.1"
    log.write_bytes(b"one\n")
    tail = Tail(log, tmp_path / "state")
    assert tail.read() == [b"one"]
    tail.commit()
    with log.open("ab") as handle:
        handle.write(b"two\n")
    os.replace(log, rotated)
    log.write_bytes(b"three\n")
    assert tail.read() == [b"two"]
    assert not tail.finished(rotated)
    tail.commit()
    assert tail.finished(rotated)
    assert tail.read() == [b"three"]
    tail.commit()
    assert tail.read() == []


def test_a_file_that_was_written_anew_is_read_from_its_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\ntwo\n")
    tail = Tail(log, tmp_path / "state")
    tail.read()
    tail.commit()
    with log.open("r+b") as handle:
        handle.truncate()
        handle.write(b"new\n")
    assert tail.read() == [b"new"]


@given(actions=st.lists(st.sampled_from(["write", "read", "commit", "kill", "rotate"]), max_size=60))
def test_whatever_happens_every_line_is_read_and_in_order(
    actions: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("tail")
    log, rotated, state = folder / "log", folder / "log.1", folder / "state"
    tail, written, stored, pending = Tail(log, state), 0, list[bytes](), list[bytes]()
    for action in [*actions, *["read", "commit"] * 4]:
        if action == "write":
            with log.open("ab") as handle:
                handle.write(b"%d\n" % written)
            written += 1
        elif action == "read":
            pending = tail.read()
        elif action == "commit" and pending:
            stored += [item for item in pending if item not in stored]  # the key of a row makes a repeat harmless
            tail.commit()
            pending = []
        elif action == "kill":
            tail, pending = Tail(log, state), []
        elif action == "rotate" and log.exists() and tail.finished(rotated):
            os.replace(log, rotated)
    assert stored == [b"%d" % number for number in range(written)]


# -------------------------------------------------------------------------------------------------- exposures, pairs


def test_a_request_becomes_an_exposure_without_the_users_name() -> None:
    row = exposure(line(), b"salt")
    assert row is not None
    assert row["user_hash"] == user_hash("vera@example.com", b"salt")
    assert "vera" not in json.dumps(row)
    assert (row["assigned"], row["served"], row["step"], row["seconds"], row["first_byte"], row["flags"]) == (
        "challenger", "challenger", 2, 0.12, 0.1, "",
    )  # fmt: skip


def test_the_served_side_is_who_answered_and_may_be_nobody() -> None:
    by_champion, by_nobody = exposure(line(release="a" * 16), b""), exposure(line(release=None, status=503), b"")
    assert by_champion is not None
    assert by_nobody is not None
    assert (by_champion["assigned"], by_champion["served"]) == ("challenger", "champion")
    assert (by_nobody["served"], by_nobody["status"]) == (None, 503)


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b"7", line(method="GET"), line(request_id=None), line(step="x")])
def test_what_is_no_request_is_passed_over(garbage: bytes) -> None:
    assert exposure(garbage, b"") is None


def test_the_salt_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    salt = user_salt(tmp_path)
    assert len(salt) == 64
    assert user_salt(tmp_path) == salt
    assert (tmp_path / "secrets" / "user-salt").stat().st_mode & 0o777 == 0o600
    assert user_hash("u", salt) != user_hash("u", b"another")


def spooled(request: str, shadow: bool, answer: str = "x", rollout: str = "r") -> bytes:
    return json.dumps(
        {"request_id": request, "rollout": rollout, "shadow": shadow, "answer": answer, "seconds": 0.1, "status": 200}
    ).encode()


def test_answers_meet_in_any_order_and_only_within_a_rollout() -> None:
    pairs = Pairs()
    assert pairs.add([spooled("1", False, "old"), spooled("2", True, "new"), b"garbage"]) == []
    found = pairs.add(
        [spooled("2", False, "old"), spooled("1", True, "new"), spooled("3", True), spooled("3", False, rollout="s")]
    )
    assert [(pair["request_id"], pair["champion_answer"], pair["candidate_answer"]) for pair in found] == [
        ("2", "old", "new"), ("1", "old", "new"),
    ]  # fmt: skip


def test_halves_that_never_meet_do_not_fill_the_memory() -> None:
    pairs = Pairs(room=10)
    pairs.add([spooled(str(number), True) for number in range(100)])
    assert pairs.add([spooled("5", False)]) == []
    assert len(pairs.add([spooled("99", False)])) == 1


# -------------------------------------------------------------------------------------------------------- feedback


def test_feedback_is_on_disk_before_it_is_acknowledged(tmp_path: Path) -> None:
    spool = FeedbackSpool(tmp_path / "feedback.jsonl")
    assert spool.add([Feedback(request_id="1", resolved=True), Feedback(request_id="2", resolved=False)]) == 2
    with spool.path.open("ab") as handle:
        handle.write(b'{"request_id": "3", "res')  # a kill in the middle of a write
    spool.add([Feedback(request_id="4", resolved=True)])
    found = rows(spool.path.read_bytes().splitlines())
    assert [(row["request_id"], row["resolved"]) for row in found] == [("1", True), ("2", False), ("4", True)]


def test_a_large_spool_makes_room_only_when_the_one_before_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.feedback.FILE_BYTES", 10)
    spool = FeedbackSpool(tmp_path / "feedback.jsonl")
    spool.add([Feedback(request_id="1", resolved=True)])
    spool.rotate()
    assert not spool.path.exists()
    spool.add([Feedback(request_id="2", resolved=True)])
    spool.rotate()
    assert spool.path.exists(), "the first is still there and unread"
