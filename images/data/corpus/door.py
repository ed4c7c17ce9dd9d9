"""The door out: what Great Expectations asks of the records before they become a dataset, with its Data Docs.

The row count is always asked: an empty table passes every other question (great_expectations#7432).
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from corpus.settings import PackSettings
from refit.errors import BadRecords

# A dataset's name follows from its content, and its Data Docs are part of it: nothing in them may tell the time.
_CLOCK = re.compile(rb"\?d=\d{8}T\d{6}\.\d+Z|\d{8}T\d{6}\.\d{6}Z(?=</span>)")
_UUID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
Frame = Any  # a pandas DataFrame
INDEX = """<!doctype html><meta charset="utf-8"><title>Data Docs</title>
<style>:root {{ color-scheme: light dark }} body {{ font: 15px/1.8 system-ui, sans-serif; margin: 2rem }}</style>
<h1>Data Docs</h1><p>What Great Expectations asked at the door out of the data stage, by table.</p><ul>{items}</ul>
"""
_NO_TIME = datetime(1970, 1, 1, tzinfo=UTC)


def check(sides: dict[str, pa.Table], settings: PackSettings, docs: Path) -> dict[str, Any]:
    """Ask everything; write the Data Docs.

    Returns:
        How many expectations were asked and met.

    Raises:
        BadRecords: one was not met; names each with what was found.
    """
    pd = _library("pandas")
    frame = pd.concat([_frame(name, table) for name, table in sides.items()], ignore_index=True)
    asked: dict[str, tuple[Frame, list[Any]]] = {"records": (frame, _of_records(settings))}
    if settings.label_key or settings.expect.labels:
        task = frame[~frame["source"].isin(settings.rehearsal)]
        asked["task"] = (task, _of_task(settings))
        labels = task["label"].value_counts().rename_axis("label").reset_index(name="records")
        labels["share"] = labels["records"] / max(1, int(labels["records"].sum()))
        asked["labels"] = (labels, _of_labels(settings))
    results = _ask(asked, docs)
    failed = [text for met, text in results if not met]
    if failed:
        raise BadRecords(
            f"{len(failed)} of {len(results)} expectations at the door out are not met: {'; '.join(failed)}. "
            "Look at the sources, or change data.expect."
        )
    return {"asked": len(results), "met": len(results)}


def _frame(split: str, table: pa.Table) -> Frame:
    frame = table.select(["id", "source", "domain", "label", "prompt_chars", "answer_chars"]).to_pandas()
    frame["split"] = split
    return frame


def _of_records(settings: PackSettings) -> list[Any]:
    expect = _library("great_expectations.expectations")
    sides = ["train", *(["heldout"] if settings.heldout else [])]
    asked = [
        expect.ExpectTableRowCountToBeBetween(min_value=settings.expect.min_records),
        expect.ExpectColumnValuesToBeUnique(column="id"),
        expect.ExpectColumnDistinctValuesToContainSet(column="split", value_set=sides),
        expect.ExpectColumnValuesToBeBetween(column="prompt_chars", min_value=1),
        expect.ExpectColumnValuesToBeBetween(column="answer_chars", min_value=1),
    ]
    asked += [expect.ExpectColumnValuesToNotBeNull(column=name) for name in ("id", "source", "domain", "split")]
    return asked


def _of_task(settings: PackSettings) -> list[Any]:
    """Of the records with a label: all but a rehearsal's."""
    expect = _library("great_expectations.expectations")
    asked = [expect.ExpectTableRowCountToBeBetween(min_value=1)]
    if settings.label_key:
        asked.append(expect.ExpectColumnValuesToNotBeNull(column="label"))
    if settings.expect.labels:
        asked.append(expect.ExpectColumnValuesToBeInSet(column="label", value_set=list(settings.expect.labels)))
    return asked


def _of_labels(settings: PackSettings) -> list[Any]:
    expect = _library("great_expectations.expectations")
    asked = [
        expect.ExpectTableRowCountToBeBetween(min_value=1),
        expect.ExpectColumnMaxToBeBetween(column="share", max_value=settings.expect.max_label_share),
    ]
    if settings.expect.labels:
        asked.append(
            expect.ExpectColumnDistinctValuesToContainSet(column="label", value_set=list(settings.expect.labels))
        )
    return asked


def _ask(asked: dict[str, tuple[Frame, list[Any]]], docs: Path) -> list[tuple[bool, str]]:
    """Run a checkpoint for every table; (met, in words) of every expectation."""
    gx = _library("great_expectations")
    identifier = _library("great_expectations.core.run_identifier").RunIdentifier
    context = gx.get_context(mode="ephemeral")
    bars = _library("great_expectations.data_context.types.base").ProgressBarsConfig
    context.variables.progress_bars = bars(globally=False)
    site = {
        "class_name": "SiteBuilder",
        "show_how_to_buttons": False,
        "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
        "store_backend": {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(docs.absolute())},
    }
    context.add_data_docs_site(site_name="docs", site_config=site)
    source = context.data_sources.add_pandas("corpus")
    results = []
    for name, (frame, expectations) in asked.items():
        batch = source.add_dataframe_asset(name).add_batch_definition_whole_dataframe("all")
        suite = context.suites.add(gx.ExpectationSuite(name=name, expectations=expectations))
        definition = context.validation_definitions.add(gx.ValidationDefinition(name=name, data=batch, suite=suite))
        checkpoint = context.checkpoints.add(
            gx.Checkpoint(
                name=name,
                validation_definitions=[definition],
                actions=[gx.checkpoint.UpdateDataDocsAction(name="docs", site_names=["docs"])],
                result_format="BASIC",
            )
        )
        run = checkpoint.run(batch_parameters={"dataframe": frame}, run_id=identifier(run_name=name, run_time=_NO_TIME))
        for validation in run.run_results.values():
            results += [(bool(result.success), _in_words(name, result)) for result in validation.results]
    _without_time(docs)
    _index(docs)
    return results


def _in_words(table: str, result: Any) -> str:
    """`records: expect_column_values_to_be_in_set (label in ["a"]): found "b"`, and what else there is to say."""
    kwargs = {k: v for k, v in result.expectation_config.kwargs.items() if k not in ("batch_id", "column")}
    column = result.expectation_config.kwargs.get("column", "table")
    found = result.result.get("observed_value")
    if found is None:
        found = list(dict.fromkeys(result.result.get("partial_unexpected_list") or []))[:5]
    wanted = ", ".join(f"{key} {value}" for key, value in kwargs.items())
    what = result.expectation_config.type.removeprefix("expect_").replace("_", " ")
    error = (result.exception_info or {}).get("exception_message")
    return f"{table}.{column}: {what} {wanted}; found {error or found}"


def _without_time(docs: Path) -> None:
    for page in sorted(docs.rglob("*.html")):
        page.write_bytes(_numbered(_CLOCK.sub(b"", page.read_bytes())))


def _index(docs: Path) -> None:
    """The first page as plain links: the library's own draws its table by scripts from elsewhere."""
    items = []
    for page in sorted(docs.glob("validations/**/*.html")):
        address = page.relative_to(docs).as_posix()
        name = address.split("/")[1]
        asked = f'<a href="expectations/{quote(name)}.html">all that was asked</a>'
        items.append(f'<li><a href="{quote(address)}">{escape(name)}: what was found</a>, {asked}</li>')
    (docs / "index.html").write_text(INDEX.format(items="".join(items)), encoding="utf-8")


def _numbered(html: bytes) -> bytes:
    """Random names of a page's elements become n0, n1, …"""
    numbers: dict[bytes, bytes] = {}
    return _UUID.sub(lambda found: numbers.setdefault(found[0], b"n%d" % len(numbers)), html)


def _library(name: str) -> Any:
    """Loaded only where it is used: Great Expectations takes seconds. It is kept quiet, and from calling home."""
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    library = importlib.import_module(name)
    for logger in ("great_expectations", "great_expectations.data_context.types.base"):  # the second sets its own level
        logging.getLogger(logger).setLevel(logging.WARNING)
    return library
