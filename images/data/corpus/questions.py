"""What is asked of the records at each door, and of which tables.

The row count is always asked: an empty table passes every other question (great_expectations#7432).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from corpus.door import Asked, Frame, library
from corpus.rows import SIDES
from corpus.settings import DoorSettings, PackSettings

COLUMNS = ("source", "file", "line", "domain", "label", "prompt_chars", "answer_chars")


def after_clean(rows: pa.Table, settings: DoorSettings) -> Asked:
    """Is every record one: of a known source, from a place, with something asked and something answered?"""
    expect = _expectations()
    frame = _frame(rows, COLUMNS)
    asked = [
        expect.ExpectTableRowCountToBeBetween(min_value=settings.expect.min_records),
        expect.ExpectTableColumnsToMatchSet(column_set=list(COLUMNS), exact_match=True),
        expect.ExpectColumnValuesToBeInSet(column="source", value_set=list(settings.sources)),
        expect.ExpectColumnValuesToBeBetween(column="line", min_value=1),
        expect.ExpectColumnValuesToBeBetween(column="prompt_chars", min_value=1),
        expect.ExpectColumnValuesToBeBetween(column="answer_chars", min_value=1),
        *(expect.ExpectColumnValuesToNotBeNull(column=name) for name in ("source", "file", "line", "domain")),
    ]
    return {"records": (frame, asked), **_labelled(frame, settings)}


def after_dedup(rows: pa.Table, gone: pa.Table, settings: DoorSettings) -> Asked:
    """Is every record there once, and is a source more than copies of itself?"""
    expect = _expectations()
    went, stayed = _by_source(gone), _by_source(rows)
    names = [name for name in settings.sources if name in went or name in stayed]
    came = [went.get(name, 0) + stayed.get(name, 0) for name in names]
    shares = [went.get(name, 0) / count for name, count in zip(names, came, strict=True)]
    duplicates = library("pandas").DataFrame({"source": names, "records": came, "duplicates": shares})
    return {
        "records": (
            rows.select(["id"]).to_pandas(),
            [
                expect.ExpectTableRowCountToBeBetween(min_value=settings.expect.min_records),
                expect.ExpectColumnValuesToNotBeNull(column="id"),
                expect.ExpectColumnValuesToBeUnique(column="id"),
            ],
        ),
        "sources": (
            duplicates,
            [
                expect.ExpectTableRowCountToBeBetween(min_value=1),
                expect.ExpectColumnValuesToBeBetween(
                    column="duplicates", min_value=0, max_value=settings.expect.max_duplicate_share
                ),
            ],
        ),
    }


def after_split(rows: pa.Table, settings: DoorSettings) -> Asked:
    """Is there something on each side that is asked for, and is nobody's session on two?"""
    expect = _expectations()
    sides = ["train", *(["heldout"] if settings.heldout else [])]
    frame = rows.select(["session", "split"]).to_pandas()
    asked = [
        expect.ExpectTableRowCountToBeBetween(min_value=settings.expect.min_records),
        expect.ExpectColumnValuesToNotBeNull(column="split"),
        expect.ExpectColumnValuesToBeInSet(column="split", value_set=list(SIDES)),
        expect.ExpectColumnDistinctValuesToContainSet(column="split", value_set=sides),
    ]
    known = frame.dropna(subset="session").astype(str)
    if not len(known):
        return {"records": (frame, asked)}
    sessions = known.groupby("session")["split"].nunique().reset_index(name="sides")
    once = [
        expect.ExpectTableRowCountToBeBetween(min_value=1),
        expect.ExpectColumnValuesToBeBetween(column="sides", min_value=1, max_value=1),
    ]
    return {"records": (frame, asked), "sessions": (sessions, once)}


def out(sides: Mapping[str, pa.Table], tokens: Mapping[str, Mapping[str, Any]], settings: PackSettings) -> Asked:
    """Is what training and evaluation will read enough, on every side, and something to learn from?"""
    expect, pd = _expectations(), library("pandas")
    frame = pd.concat([_side(name, table) for name, table in sides.items()], ignore_index=True)
    wanted = ["train", *(["heldout"] if settings.heldout else [])]
    asked = [
        expect.ExpectTableRowCountToBeBetween(min_value=settings.expect.min_records),
        expect.ExpectColumnValuesToBeUnique(column="id"),
        expect.ExpectColumnDistinctValuesToContainSet(column="split", value_set=wanted),
        expect.ExpectColumnValuesToBeBetween(column="prompt_chars", min_value=1),
        expect.ExpectColumnValuesToBeBetween(column="answer_chars", min_value=1),
        *(expect.ExpectColumnValuesToNotBeNull(column=name) for name in ("id", "source", "domain", "split")),
    ]
    counted = pd.DataFrame([{"tokens": tokens["train"]["tokens"], "targets": tokens["train"]["targets"]}])
    tables: Asked = {
        "records": (frame, asked),
        "tokens": (
            counted,
            [
                expect.ExpectTableRowCountToBeBetween(min_value=1),
                expect.ExpectColumnValuesToBeBetween(column="tokens", min_value=settings.expect.min_tokens),
                expect.ExpectColumnValuesToBeBetween(column="targets", min_value=1),
            ],
        ),
    }
    return {**tables, **_labelled(frame, settings), **_shares(frame, settings)}


def _side(split: str, table: pa.Table) -> Frame:
    frame = _frame(table, ("id", "source", "domain", "label", "prompt_chars", "answer_chars"))
    frame["split"] = split
    return frame


def _frame(table: pa.Table, columns: Sequence[str]) -> Frame:
    """Columns without categories: pandas counts those that no row has, too."""
    frame = table.select(columns).to_pandas()
    return frame.astype({name: object for name in frame.columns if str(frame[name].dtype) == "category"})


def _task(frame: Frame, settings: DoorSettings | PackSettings) -> Frame:
    """The records with a label: all but a rehearsal's."""
    return frame[~frame["source"].isin(settings.rehearsal)]


def _labelled(frame: Frame, settings: DoorSettings | PackSettings) -> Asked:
    if not settings.label_key and not settings.expect.labels:
        return {}
    expect = _expectations()
    asked = [expect.ExpectTableRowCountToBeBetween(min_value=1)]
    if settings.label_key:
        asked.append(expect.ExpectColumnValuesToNotBeNull(column="label"))
    if settings.expect.labels:
        asked.append(expect.ExpectColumnValuesToBeInSet(column="label", value_set=list(settings.expect.labels)))
    return {"task": (_task(frame, settings), asked)}


def _shares(frame: Frame, settings: PackSettings) -> Asked:
    if not settings.label_key and not settings.expect.labels:
        return {}
    expect = _expectations()
    labels = _task(frame, settings)["label"].value_counts().rename_axis("label").reset_index(name="records")
    labels["share"] = labels["records"] / max(1, int(labels["records"].sum()))
    asked = [
        expect.ExpectTableRowCountToBeBetween(min_value=1),
        expect.ExpectColumnMaxToBeBetween(column="share", max_value=settings.expect.max_label_share),
    ]
    if settings.expect.labels:
        wanted = list(settings.expect.labels)
        asked.append(expect.ExpectColumnDistinctValuesToContainSet(column="label", value_set=wanted))
    return {"labels": (labels, asked)}


def _by_source(table: pa.Table) -> dict[str, int]:
    counts: Sequence[Mapping[str, Any]] = table.column("source").value_counts().to_pylist()
    return {row["values"]: row["counts"] for row in counts}


def _expectations() -> Any:
    return library("great_expectations.expectations")
