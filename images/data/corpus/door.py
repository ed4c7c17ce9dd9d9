"""How a door asks: Great Expectations over tables, with its Data Docs. What is asked stands in `corpus.questions`."""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from refit.errors import BadRecords

# A dataset's name follows from its content, and its Data Docs are part of it: nothing in them may tell the time.
_CLOCK = re.compile(rb"\?d=\d{8}T\d{6}\.\d+Z|\d{8}T\d{6}\.\d{6}Z(?=</span>)")
_UUID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
Frame = Any  # a pandas DataFrame
Asked = Mapping[str, tuple[Frame, list[Any]]]
"""By name: a table, and what is asked of it."""
Told = dict[str, Any]
INDEX = """<!doctype html><meta charset="utf-8"><title>Data Docs</title>
<style>:root {{ color-scheme: light dark }} body {{ font: 15px/1.8 system-ui, sans-serif; margin: 2rem }}</style>
<h1>Data Docs</h1><p>What Great Expectations asked at this door of the data stage, by table.</p><ul>{items}</ul>
"""
_NO_TIME = datetime(1970, 1, 1, tzinfo=UTC)


def ask(asked: Asked, docs: Path | None = None) -> Told:
    """Ask everything of every table; write the Data Docs, where they are wanted.

    Returns:
        How many expectations were `asked` and `met`; each in words in `told`, those not met again in `failed`.
    """
    results = _ask(asked, docs)
    failed = [text for met, text in results if not met]
    told = [text for _, text in results]
    return {"asked": len(told), "met": len(told) - len(failed), "told": told, "failed": failed}


def require(told: Told, where: str) -> None:
    """Let nobody through who was not met.

    Raises:
        BadRecords: an expectation was not met; names each with what was found.
    """
    if told["failed"]:
        raise BadRecords(
            f"{len(told['failed'])} of {told['asked']} expectations at the door {where} are not met: "
            f"{'; '.join(told['failed'])}. Look at the sources, or change data.expect."
        )


def _ask(asked: Asked, docs: Path | None) -> list[tuple[bool, str]]:
    """Run a checkpoint for every table; (met, in words) of every expectation."""
    gx = library("great_expectations")
    identifier = library("great_expectations.core.run_identifier").RunIdentifier
    context = gx.get_context(mode="ephemeral")
    bars = library("great_expectations.data_context.types.base").ProgressBarsConfig
    context.variables.progress_bars = bars(globally=False)
    if docs:
        _add_site(context, docs)
    source = context.data_sources.add_pandas("corpus")
    results = []
    for name, (frame, expectations) in asked.items():
        batch = source.add_dataframe_asset(name).add_batch_definition_whole_dataframe("all")
        suite = context.suites.add(gx.ExpectationSuite(name=name, expectations=expectations))
        definition = context.validation_definitions.add(gx.ValidationDefinition(name=name, data=batch, suite=suite))
        checkpoint = context.checkpoints.add(
            gx.Checkpoint(name=name, validation_definitions=[definition], result_format="BASIC")
        )
        run = checkpoint.run(batch_parameters={"dataframe": frame}, run_id=identifier(run_name=name, run_time=_NO_TIME))
        for validation in run.run_results.values():
            results += [(bool(result.success), _in_words(name, result)) for result in validation.results]
    if docs:
        # Once for all tables, not by an action of each checkpoint: the library compiles its templates anew each time,
        # for longer than all the asking takes. Its first page is not wanted, see `_index`.
        context.build_data_docs(site_names=["docs"], build_index=False)
        _without_time(docs)
        _index(docs)
    return results


def _add_site(context: Any, docs: Path) -> None:
    site = {
        "class_name": "SiteBuilder",
        "show_how_to_buttons": False,
        "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
        "store_backend": {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(docs.absolute())},
    }
    context.add_data_docs_site(site_name="docs", site_config=site)


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


def library(name: str) -> Any:
    """Loaded only where it is used: Great Expectations takes seconds. It is kept quiet, and from calling home."""
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    library = importlib.import_module(name)
    for logger in ("great_expectations", "great_expectations.data_context.types.base"):  # the second sets its own level
        logging.getLogger(logger).setLevel(logging.WARNING)
    return library
