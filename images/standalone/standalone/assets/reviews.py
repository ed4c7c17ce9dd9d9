"""Sentences that people rated, for the `review_sentiment` line: shop reviews, film reviews and tweets.

Source: Hutto and Gilbert 2014 (VADER), ground truth files of the package vaderSentiment 0.5 (MIT). Twenty people rated
each sentence from -4 to 4; the mean becomes a label: positive from 0.5, negative from -0.5, neutral between.
"""

from __future__ import annotations

import csv
import html
import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

PACKAGE = "vaderSentiment==0.5"
ARCHIVE = "additional_resources/hutto_ICWSM_2014.tar.gz"
BAND = 0.5


class Rated(NamedTuple):
    """A sentence with its mean rating; sentences of one review share the session."""

    session: str
    rating: float
    text: str

    @property
    def answer(self) -> str:
        """The label as the line's JSON answer."""
        label = "positive" if self.rating >= BAND else "negative" if self.rating <= -BAND else "neutral"
        return json.dumps({"sentiment": label})


def deliveries(source: Path) -> dict[str, bytes]:
    """The files as three departments deliver them, from the package's source archive: alpaca, messages, csv."""
    archive = _inner(source)
    shop = [
        {"instruction": row.text, "input": "", "output": row.answer, "session": f"shop-{row.session.split('_')[0]}"}
        for row in _rated(archive, "amazonReviewSnippets")
    ]
    film = [
        {"messages": [{"role": "user", "content": row.text}, {"role": "assistant", "content": row.answer}]}
        for row in _rated(archive, "movieReviewSnippets")
    ]
    tweets = io.StringIO()
    table = csv.writer(tweets)
    table.writerow(["tweet", "answer"])
    table.writerows((html.unescape(row.text), row.answer) for row in _rated(archive, "tweets"))
    return {
        "shop.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in shop).encode(),
        "film.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in film).encode(),
        "tweets.csv": tweets.getvalue().encode(),
    }


def _inner(source: Path) -> bytes:
    with zipfile.ZipFile(source) as package:
        name = next(name for name in package.namelist() if name.endswith(ARCHIVE))
        return package.read(name)


def _rated(archive: bytes, name: str) -> list[Rated]:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as files:
        member = files.extractfile(f"hutto_ICWSM_2014/{name}_GroundTruth.txt")
        if member is None:
            raise FileNotFoundError(name)
        text = member.read().decode("utf-8", errors="replace")
    rows = [line.rstrip("\r").split("\t", 2) for line in text.split("\n") if line.count("\t") >= 2]
    return [Rated(session, float(rating), sentence.strip()) for session, rating, sentence in rows]
