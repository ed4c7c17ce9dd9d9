"""What preflight refuses: every kind of mismatch and lack, on cards and on nodes that are not here."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from conftest import House

from refit.errors import BadInput, PreflightRefused, StoreUnavailable
from refit.manifest import Manifest
from refit.spec import Train
from refit.store import FileStore, store_for
from trainer import checkpoints, gpus, machine, preflight, reports
from trainer.gpus import Cards, Gpu
from trainer.judge import Fault, Need, judge
from trainer.reports import Report, Store

GIB = 1 << 30
NEED = Need(ranks=2, gpus=2, disk=40 * GIB, disk_for="4 checkpoints", memory_per_rank=10 * GIB)
CARD = Gpu(name="NVIDIA H200", memory=140 * GIB, ecc_errors=0, remap_failed=False, remap_pending=False)
GOOD = Report(
    host="a", rank=0, versions={"python": "3.11.4", "torch": "2.13.0", "trainer": "0123"}, image="refit@sha256:1",
    cuda="13.0", nccl="2.29.2", cards=Cards(driver="580.10", gpus=(CARD, CARD)), usable_gpus=2, disk_folder="/out",
    disk_free=50 * GIB, memory_free=30 * GIB, store=Store(ahead=0.0),
)  # fmt: skip


def nodes(**changes: Any) -> list[Report]:
    """Two nodes of two ranks each; the changes are to rank 1 of node b."""
    reports = [GOOD.model_copy(update={"host": host, "rank": rank}) for host in "ab" for rank in (0, 1)]
    return [*reports[:3], reports[3].model_copy(update=changes)]


def faults(reports: list[Report], need: Need = NEED) -> list[tuple[str, Fault]]:
    return [(check.name, fault) for check in judge(reports, need) for fault in check.faults]


def both(change: Any) -> list[Report]:
    """Two nodes, of which the second has `change` on both ranks."""
    return [report.model_copy(update=change) if report.host == "b" else report for report in nodes()]


def test_two_equal_nodes_with_room_are_fit() -> None:
    assert faults(nodes()) == []
    assert [check.name for check in judge(nodes(), NEED)] == [
        "ranks", "versions", "drivers", "gpus", "disk", "memory", "store", "clock",
    ]  # fmt: skip


@pytest.mark.parametrize(("changes", "check", "where", "found", "wanted"), [
    pytest.param({"versions": {**GOOD.versions, "torch": "2.12.1"}}, "versions", "b rank 1", "2.12.1", "2.13.0",
                 id="another torch"),
    pytest.param({"versions": {"python": "3.11.4", "trainer": "0123"}}, "versions", "b rank 1", "none", "2.13.0",
                 id="no torch"),
    pytest.param({"versions": {**GOOD.versions, "trainer": "4567"}}, "versions", "b rank 1", "4567", "0123",
                 id="another source"),
    pytest.param({"image": "refit@sha256:2"}, "versions", "b rank 1", "refit@sha256:2", "refit@sha256:1",
                 id="another image"),
    pytest.param({"cuda": "12.8"}, "drivers", "b rank 1", "12.8", "13.0", id="another CUDA"),
    pytest.param({"nccl": "2.27.0"}, "drivers", "b rank 1", "2.27.0", "2.29.2", id="another NCCL"),
    pytest.param({"disk_free": 39 * GIB}, "disk", "b", "39.00 GiB", "40.00 GiB (4 checkpoints)", id="no disk"),
    pytest.param({"memory_free": 19 * GIB}, "memory", "b", "19.00 GiB", "20.00 GiB", id="no memory"),
    pytest.param({"store": Store(fault="PermissionError: no")}, "store", "b rank 1", "PermissionError: no",
                 "written", id="no right to write"),
    pytest.param({"store": Store(ahead=7.25)}, "clock", "b rank 1", "7.2 s ahead", "at most 5 s", id="a fast clock"),
    pytest.param({"store": Store(ahead=-60.0)}, "clock", "b rank 1", "60.0 s behind", "at most 5 s", id="a slow clock"),
    pytest.param({"silent": "ended by -9: Killed"}, "ranks", "b rank 1", "ended by -9: Killed", "one", id="silence"),
])  # fmt: skip
def test_a_fault_says_where_what_was_found_what_was_wanted_and_what_to_do(
    changes: dict[str, Any], check: str, where: str, found: str, wanted: str
) -> None:
    ((name, fault),) = faults(nodes(**changes))
    assert (name, fault.where) == (check, where)
    assert found in fault.found
    assert wanted in fault.wanted
    assert fault.do.endswith(".")
    assert str(fault).startswith(f"{where}: {fault.what} is {fault.found}; wanted: ")


@pytest.mark.parametrize(("cards", "check", "where", "found"), [
    pytest.param(Cards(driver="575.1", gpus=(CARD, CARD)), "drivers", "b ranks 0, 1", "575.1", id="another driver"),
    pytest.param(Cards(driver="580.10", gpus=(CARD, CARD.model_copy(update={"name": "NVIDIA H100"}))), "drivers",
                 "b ranks 0, 1", "1 x NVIDIA H100 of 140.00 GiB, 1 x NVIDIA H200 of 140.00 GiB", id="mixed cards"),
    pytest.param(Cards(driver="580.10", gpus=(CARD, CARD.model_copy(update={"ecc_errors": 3}))), "gpus", "b GPU 1", "3",
                 id="memory errors"),
    pytest.param(Cards(driver="580.10", gpus=(CARD.model_copy(update={"remap_failed": True}), CARD)), "gpus", "b GPU 0",
                 "failed", id="a card to replace"),
    pytest.param(Cards(driver="580.10", gpus=(CARD, CARD.model_copy(update={"remap_pending": True}))), "gpus",
                 "b GPU 1", "pending", id="a card to reset"),
])  # fmt: skip
def test_cards_that_differ_or_are_ill_are_named(cards: Cards, check: str, where: str, found: str) -> None:
    ((name, fault),) = faults(both({"cards": cards}))
    assert (name, fault.where, fault.found) == (check, where, found)


def test_cards_are_wanted_only_where_the_spec_asks_for_them() -> None:
    without = [report.model_copy(update={"cards": Cards(), "usable_gpus": None}) for report in nodes()]
    assert faults(without, Need(**{**vars(NEED), "gpus": 0})) == []
    assert [fault.found for _, fault in faults(without)] == ["0", "0"], "one a node"
    unusable = [report.model_copy(update={"usable_gpus": 0}) for report in nodes()]
    assert {fault.what for _, fault in faults(unusable)} == {"the number of GPUs that torch can use"}
    broken = [report.model_copy(update={"cards": Cards(fault="NVML: nvmlInit gave error 18")}) for report in nodes()]
    said = [fault.found for _, fault in faults(broken) if "answer" in fault.what]
    assert said == ["NVML: nvmlInit gave error 18"] * 2


def test_a_card_that_cannot_hold_weights_and_optimizer_is_named_where_it_is_used() -> None:
    small = Cards(driver="580.10", gpus=(CARD, CARD.model_copy(update={"memory": 22 * GIB})))
    reports = [report.model_copy(update={"cards": small}) for report in nodes()]
    need = {**vars(NEED), "memory_per_card": 30 * GIB}
    assert [(fault.where, fault.found) for _, fault in faults(reports, Need(**need))] == [
        ("a GPU 1", "22.00 GiB"), ("b GPU 1", "22.00 GiB"),
    ]  # fmt: skip
    assert faults(reports, Need(**{**need, "gpus": 1})) == [], "the second one is left alone"


def test_clocks_near_the_stores_may_still_be_far_from_each_other() -> None:
    reports = [
        report.model_copy(update={"store": Store(ahead=4.0 if report.host == "a" else -4.0)}) for report in nodes()
    ]
    ((_, fault),) = faults(reports)
    assert (fault.where, fault.found) == ("a rank 0", "8.0 s ahead of the one of b rank 0")


def test_a_node_with_too_few_ranks_is_named() -> None:
    ((name, fault),) = faults(nodes()[:3])
    assert (name, fault.where, fault.found, fault.wanted) == ("ranks", "b", "1", "2")


def test_all_faults_are_said_at_once() -> None:
    found = faults(nodes(cuda="12.8", disk_free=0, memory_free=0, store=Store(fault="no", ahead=9.0)))
    assert [name for name, _ in found] == ["drivers", "disk", "memory", "store", "clock"]
    with pytest.raises(PreflightRefused) as refused:
        preflight.refuse(judge(nodes(cuda="12.8", disk_free=0), NEED))
    assert len(str(refused.value).splitlines()) == 2


def test_only_a_store_that_does_not_answer_is_tried_again() -> None:
    away = {"store": Store(fault="StoreUnavailable: no route", away=True)}
    with pytest.raises(StoreUnavailable):
        preflight.refuse(judge(nodes(**away), NEED))
    with pytest.raises(PreflightRefused):
        preflight.refuse(judge(nodes(**away, disk_free=0), NEED))


@pytest.mark.parametrize(("began", "ended", "written", "expected"), [
    (100.0, 100.5, 100.2, 0.0), (100.9, 101.1, 100.0, 0.0), (100.0, 100.5, 90.0, 10.0), (100.0, 100.5, 130.5, -30.0),
])  # fmt: skip
def test_a_clock_is_off_by_what_lies_outside_the_time_of_the_write(
    began: float, ended: float, written: float, expected: float
) -> None:
    assert reports.ahead(began, ended, written) == pytest.approx(expected)


def test_the_write_test_leaves_nothing_behind(tmp_path: Path) -> None:
    found = reports.try_store((tmp_path / "out").as_uri(), 0)
    assert (found.fault, found.ahead) == (None, 0.0)
    assert list((tmp_path / "out").iterdir()) == []


def test_the_store_of_the_copies_is_written_to_as_well(tmp_path: Path) -> None:
    """A training that could not copy told so at its first save, hours later, and had no second copy."""
    (tmp_path / "file").write_text("in the way")
    good, bad = (tmp_path / "good").as_uri(), (tmp_path / "file" / "copies").as_uri()
    assert reports.try_stores(good, good, 0).fault is reports.try_stores(good, None, 0).fault is None
    assert list((tmp_path / "good").iterdir()) == []
    found = reports.try_stores(good, bad, 0)
    assert str(found.fault).startswith(f"train.checkpoint.copy_to, {bad}: NotADirectoryError")
    assert (found.away, found.ahead) == (False, 0.0)
    assert str(reports.try_stores(bad, bad, 0).fault).count("NotADirectoryError") == 2


def test_where_a_store_may_answer_later_and_the_other_says_nothing_against_it_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    good, bad, away = ((tmp_path / name).as_uri() for name in ("good", "file/copies", "away"))
    publish = FileStore.publish

    def refuse(self: FileStore, uri: str) -> Any:
        if uri.startswith(away):
            raise StoreUnavailable(f"{uri}: no route")
        return publish(self, uri)

    monkeypatch.setattr(FileStore, "publish", refuse)
    told = {pair: reports.try_stores(*pair, 0) for pair in ((good, away), (bad, away), (away, bad))}
    assert [found.away for found in told.values()] == [True, False, True]
    assert "copy_to" not in str(told[away, bad].fault), "a rank waits for one store that does not answer"


def test_a_store_that_gives_back_something_else_or_nothing_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert "Error" in str(reports.try_store((tmp_path / "file" / "out").as_uri(), 0).fault)
    monkeypatch.setattr(FileStore, "read", lambda self, uri, first=None: b"other")
    assert reports.try_store((tmp_path / "out").as_uri(), 0).fault == "what was read back is not what was written"
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(("status", "away"), [(403, False), (404, False), (503, True), (429, True), (None, True)])
def test_a_store_that_says_no_is_not_taken_for_one_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int | None, away: bool
) -> None:
    def publish(_self: FileStore, uri: str) -> Any:
        cause = RuntimeError("from boto")
        if status is not None:
            cause.response = {"ResponseMetadata": {"HTTPStatusCode": status}}  # type: ignore[attr-defined]
        raise StoreUnavailable(uri) from cause

    monkeypatch.setattr(FileStore, "publish", publish)
    assert reports.try_store(tmp_path.as_uri(), 0).away is away


def test_disk_is_needed_for_the_checkpoints_that_are_not_there_yet_and_the_model(tmp_path: Path) -> None:
    train = Train(base="cache://models/x", ranks=2, accumulation=2)
    plan = {"checkpoint_bytes": 10 * GIB, "parameters": GIB, "bytes_per_rank": {"weights": 3, "runtime": 4}}
    output = (tmp_path / "out").as_uri()
    need = preflight.need_of(train, plan, output)
    assert (need.disk, need.memory_per_rank, need.ranks) == (44 * GIB, 7, 2), "keep_last 3, one being written, a model"
    uri = checkpoints.address(output, 4)
    with store_for(uri).publish(uri) as draft:
        draft.commit(Manifest(kind="checkpoint", fingerprint="f" * 32, facts={"step": 4}))
    assert preflight.need_of(train, plan, output).disk == 34 * GIB


def test_memory_is_what_a_containers_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "GROUP", tmp_path)
    free = machine.memory_bytes()
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 500\n")
    assert machine.memory_bytes() == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory_bytes() > 600
    assert free > 600


class Nvml:
    """NVML as it answers on a machine with one card; `codes` overrides what a call returns."""

    def __init__(self, **codes: int) -> None:
        self.codes = codes

    def __getattr__(self, name: str) -> Any:
        answer = getattr(type(self), f"_{name}", lambda *_: 0)
        return lambda *arguments: self.codes[name] if name in self.codes else answer(self, *arguments)

    def _nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 1
        return 0

    def _nvmlDeviceGetHandleByIndex_v2(self, index: int, card: Any) -> int:
        card._obj.value = 100 + index
        return 0

    def _nvmlDeviceGetHandleByUUID(self, uuid: bytes, card: Any) -> int:
        card._obj.value = {b"GPU-a": 7}[uuid]
        return 0

    def _nvmlSystemGetDriverVersion(self, buffer: ctypes.Array[ctypes.c_char], _size: int) -> int:
        buffer.value = b"580.10"
        return 0

    def _nvmlDeviceGetName(self, _card: Any, buffer: ctypes.Array[ctypes.c_char], _size: int) -> int:
        buffer.value = b"NVIDIA H200"
        return 0

    def _nvmlDeviceGetMemoryInfo(self, _card: Any, memory: Any) -> int:
        memory._obj.total = 140 * GIB
        return 0

    def _nvmlDeviceGetTotalEccErrors(self, _card: Any, kind: int, since: int, errors: Any) -> int:
        assert (kind, since) == (1, 0), "uncorrected, since the driver was loaded"
        errors._obj.value = 2
        return 0

    def _nvmlDeviceGetRemappedRows(self, _card: Any, _corrected: Any, _uncorrected: Any, pending: Any, _: Any) -> int:
        pending._obj.value = 1
        return 0


def test_cards_are_read_from_the_drivers_library() -> None:
    ill = CARD.model_copy(update={"ecc_errors": 2, "remap_pending": True})
    assert gpus.look(Nvml()) == Cards(driver="580.10", gpus=(ill,))
    plain = gpus.look(Nvml(nvmlDeviceGetTotalEccErrors=3, nvmlDeviceGetRemappedRows=3)).gpus[0]
    assert (plain.ecc_errors, plain.remap_failed) == (None, None), "a card that does not tell is not taken for ill"
    assert gpus.look(Nvml(nvmlInit_v2=18)) == Cards(fault="NVML: nvmlInit gave error 18")
    assert "card 0: name" in str(gpus.look(Nvml(nvmlDeviceGetName=15)).fault)


@pytest.mark.parametrize(
    ("shown", "cards"),
    [
        (None, [100, 101, 102, 103]),
        ("2, 0", [102, 100]),
        ("GPU-a,3", [7, 103]),
        ("1,-1,2", [101]),
        ("9,1", []),
        ("", []),
    ],
)
def test_cards_are_those_that_cuda_shows_in_its_order(
    shown: str | None, cards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Four(Nvml):
        asked: ClassVar[list[int]] = []

        def _nvmlDeviceGetCount_v2(self, count: Any) -> int:
            count._obj.value = 4
            return 0

        def _nvmlDeviceGetUtilizationRates(self, card: Any, _rates: Any) -> int:
            self.asked.append(card.value)
            return 0

    if shown is None:
        monkeypatch.delenv(gpus.VISIBLE, raising=False)
    else:
        monkeypatch.setenv(gpus.VISIBLE, shown)
    assert len(gpus.look(Four()).gpus) == len(cards)
    meters = [gpus.Meter.of(index, Four()) for index in range(4)]
    assert [meter is not None for meter in meters] == [index < len(cards) for index in range(4)]
    Four.asked.clear()
    for meter in meters[: len(cards)]:
        meter.read()
    assert Four.asked == cards


def test_what_is_no_answer_of_another_machine_is_refused(tmp_path: Path) -> None:
    for text in ("", "{}", '{"ranks": [{"rank": 0}]}', '["ranks"]'):
        (tmp_path / "other").write_text(text)
        with pytest.raises(BadInput, match="not the answer of a preflight"):
            preflight.read_reports(tmp_path / "other")


@pytest.mark.integration
def test_every_rank_reports_and_another_nodes_answer_is_compared(house: House) -> None:
    ranks = ("--output", house.uri("flight"), "--ranks", "2")
    code, answer, said = house.run("preflight", *ranks)
    assert code == 0, said
    assert answer["ok"]
    assert [report["rank"] for report in answer["ranks"]] == [0, 1]
    assert answer["ranks"][0]["versions"]["torch"]
    assert all(check["ok"] for check in answer["checks"])
    assert "preflight of 2 rank(s)" in said
    assert list((house.root / "flight").iterdir()) == []

    (house.root / "flight-file").write_text("in the way")
    copies = f"train.checkpoint.copy_to={house.uri('flight-file/copies')}"
    code, refused, _ = house.run("preflight", *ranks, sets=(copies,))
    assert code == 11
    assert refused["message"].count("train.checkpoint.copy_to") == 2, "each rank"

    other = house.root / "other.json"
    reports = [Report.model_validate(report) for report in answer["ranks"]]
    theirs = [report.model_copy(update={"host": "b", "image": "another"}).model_dump(mode="json") for report in reports]
    other.write_text(json.dumps({"ranks": theirs}))
    code, answer, _ = house.run("preflight", *ranks, "--with", str(other))
    assert code == 11
    assert "b ranks 0, 1: the image is another; wanted: none" in answer["message"]
