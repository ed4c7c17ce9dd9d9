"""The one canonical record that every delivery becomes, and what makes a conversation one that can be learnt from.

`messages` is JSON: a list of {"role", "content"} with roles system, user, assistant, tool; a call of a tool is content
(`corpus.tools`), further keys (name, weight) are kept. `weight`, from 0 to 1, is what an answer or a text counts in the
loss (none: it counts whole); one of weight 0 is read and not learnt. A plain text for continued pretraining is one
message of the role "text". Of a preference pair the last message is the chosen answer and has the other one's text
under the key "rejected" (`corpus.preference`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

Message = dict[str, Any]

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("line", pa.int64(), nullable=False),
        pa.field("session", pa.string()),
        pa.field("user", pa.string()),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("label", pa.string()),
        pa.field("time", pa.string()),
        pa.field("messages", pa.string(), nullable=False),
    ]
)
TEXT = "text"
GROUP_ROWS, GROUP_BYTES = 8192, 16 << 20
"""A row group has no more rows, and no more text but for its last record: what is read and worked on at a time."""
REJECTED, WEIGHT = "rejected", "weight"


class Bad(ValueError):
    """A record that cannot be used; the message is the reason, its part before a colon the kind of reason."""


class Record(NamedTuple):
    """A row of `SCHEMA`, in its order."""

    id: str
    source: str
    file: str
    line: int
    session: str | None
    user: str | None
    domain: str
    label: str | None
    time: str | None
    messages: bytes


def dump(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """Messages as canonical JSON: UTF-8, no blanks, keys in their order.

    Raises:
        Bad: a lone surrogate, which no UTF-8 can hold, a number of more than 64 bits, or what JSON has no form for.
    """
    try:
        return orjson.dumps(messages)
    except orjson.JSONEncodeError as error:
        raise Bad(_why_not(messages, error)) from error


def _why_not(messages: Sequence[Mapping[str, Any]], error: Exception) -> str:
    try:
        json.dumps(messages, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as found:
        return f"a lone surrogate: {found.object[found.start : found.end]!a}"
    return f"not to be written as JSON: {error}"


def load(text: str | bytes) -> list[Message]:
    """Messages of a record."""
    messages: list[Message] = orjson.loads(text)
    return messages


def prompt(messages: Iterable[Mapping[str, Any]]) -> str:
    """What is asked: everything but the system message and the last answer. A plain text is its own prompt."""
    turns = [message for message in messages if message["role"] != "system"]
    if turns and turns[-1]["role"] == "assistant":
        turns.pop()
    return "\n".join(message["content"] or "" for message in turns)


def answer(messages: Sequence[Mapping[str, Any]]) -> str:
    """The last turn's content."""
    return str(messages[-1]["content"] or "")


def check(messages: Sequence[Mapping[str, Any]]) -> None:
    """Whether a conversation can be learnt from.

    Raises:
        Bad: an unknown role, an order that no template knows, nothing asked, no answer, or none that is to be learnt.
    """
    roles = [message["role"] for message in messages]
    if roles == [TEXT]:
        if not messages[0]["content"].strip():
            raise Bad("the text is empty")
        return
    unknown = next((role for role in roles if role not in ("system", "user", "assistant", "tool")), None)
    if unknown is not None:
        raise Bad(f"unknown role: {unknown}")
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns or turns[-1] != "assistant":
        raise Bad(f"the conversation ends with {turns[-1] if turns else 'nothing'}, not with an answer")
    before = "start"
    for role in turns:
        if before not in _MAY_FOLLOW.get(role, ()):
            raise Bad(f"role order: {role} after {before}")
        before = role
    if not any(message["role"] == "user" and (message["content"] or "").strip() for message in messages):
        raise Bad("nothing is asked: every user turn is empty")
    last = messages[-1]
    if not last["content"].strip():
        raise Bad("the answer is empty")
    if all(message.get(WEIGHT) == 0 for message in messages if message["role"] == "assistant"):
        raise Bad("nothing to learn: every answer has weight 0")


_MAY_FOLLOW = {"user": ("start", "assistant"), "assistant": ("user", "tool"), "tool": ("assistant", "tool")}


def to_table(records: Sequence[Record]) -> pa.Table:
    """Records as an Arrow table."""
    columns = zip(*records, strict=True) if records else [[] for _ in SCHEMA]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.table(arrays, schema=SCHEMA)


def write(path: Path, table: pa.Table) -> None:
    """Write a parquet file whose bytes follow from the table alone."""
    pq.write_table(table, path, compression="zstd")


def writer(path: Path, schema: pa.Schema = SCHEMA) -> pq.ParquetWriter:
    """A parquet file to be written a table at a time; each table becomes a row group."""
    return pq.ParquetWriter(path, schema, compression="zstd")
