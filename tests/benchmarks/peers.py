"""The work as other libraries do it: `python peers.py WORK NAME FILE COUNT [TOKENIZER]`, in a venv that has them.

All read the first COUNT rows of a jsonl file and sign 5-grams of words with 112 permutations. `signatures` ends there:
the rows are in memory before the clock starts. `near` proposes pairs by 14 bands of 8 and connects them, from the file
on; no peer verifies a pair, ours does. `prepare` is the whole stage. Prints one JSON object.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NGRAM, PERMUTATIONS, BANDS, ROWS = 5, 112, 14, 8


def rows(file: Path, count: int) -> Iterator[tuple[str, str]]:
    """Id and text of the first rows."""
    with file.open(encoding="utf-8") as handle:
        for line in itertools.islice(handle, count):
            row = json.loads(line)
            yield row["id"], row["text"]


def shingles(text: str) -> list[str]:
    """The n-grams of a text's words."""
    words = text.lower().split()
    return [" ".join(words[at : at + NGRAM]) for at in range(max(1, len(words) - NGRAM + 1))]


class Components:
    """Union-find over names."""

    def __init__(self) -> None:
        self._above: dict[Any, Any] = {}

    def root(self, name: Any) -> Any:
        """The name that stands for a component."""
        above = self._above.setdefault(name, name)
        while above != self._above[above]:
            above = self._above[above]
        return above

    def link(self, left: Any, right: Any) -> None:
        """Make one component of two."""
        self._above[self.root(left)] = self.root(right)

    def count(self) -> int:
        """How many components there are."""
        return sum(name == above for name, above in self._above.items())


def with_datasketch(file: Path, count: int) -> int:
    """datasketch: MinHash and MinHashLSH."""
    from datasketch import MinHash, MinHashLSH

    lsh, found = MinHashLSH(num_perm=PERMUTATIONS, params=(BANDS, ROWS)), Components()
    for name, text in rows(file, count):
        sketch = MinHash(num_perm=PERMUTATIONS)
        sketch.update_batch([gram.encode() for gram in shingles(text)])
        found.root(name)
        for other in lsh.query(sketch):
            found.link(name, other)
        lsh.insert(name, sketch, check_duplication=False)
    return found.count()


def with_rensa(file: Path, count: int) -> int:
    """rensa: RMinHash and RMinHashLSH."""
    from rensa import RMinHash, RMinHashLSH

    lsh, found = RMinHashLSH(threshold=0.8, num_perm=PERMUTATIONS, num_bands=BANDS), Components()
    for number, (_, text) in enumerate(rows(file, count)):
        sketch = RMinHash(num_perm=PERMUTATIONS, seed=1)
        sketch.update(shingles(text))
        found.root(number)
        for other in lsh.query(sketch):
            found.link(number, other)
        lsh.insert(number, sketch)
    return found.count()


def with_daft(file: Path, count: int) -> int:
    """Daft: its minhash expression; bands by sorting."""
    import daft
    import numpy as np

    texts = [text for _, text in rows(file, count)]
    frame = daft.from_pydict({"text": texts})
    signed = frame.select(daft.col("text").minhash(num_hashes=PERMUTATIONS, ngram_size=NGRAM, seed=1)).to_arrow()
    flat = signed.column(0).combine_chunks()
    values = np.asarray(flat.flatten() if hasattr(flat, "flatten") else flat.values).reshape(len(texts), PERMUTATIONS)
    found = Components()
    for number in range(len(texts)):
        found.root(number)
    for band in range(BANDS):
        keys = np.ascontiguousarray(values[:, band * ROWS : (band + 1) * ROWS]).view(f"V{ROWS * values.itemsize}")[:, 0]
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        for number in np.flatnonzero(first[inverse] != np.arange(len(texts))).tolist():
            found.link(number, int(first[inverse[number]]))
    return found.count()


def with_datatrove(file: Path, count: int) -> int:
    """datatrove: the four steps of its MinHash dedup, on every core."""
    from peers_datatrove import near

    return near(file, count, len(os.sched_getaffinity(0)))


def sign_with_datasketch(texts: list[str]) -> int:
    """datasketch: a MinHash a text."""
    from datasketch import MinHash

    for text in texts:
        MinHash(num_perm=PERMUTATIONS).update_batch([gram.encode() for gram in shingles(text)])
    return len(texts)


def sign_with_rensa(texts: list[str]) -> int:
    """rensa: an RMinHash a text."""
    from rensa import RMinHash

    for text in texts:
        RMinHash(num_perm=PERMUTATIONS, seed=1).update(shingles(text))
    return len(texts)


def sign_with_daft(texts: list[str]) -> int:
    """Daft: its minhash expression over a column; it splits the words itself."""
    import daft

    signed = daft.col("text").minhash(num_hashes=PERMUTATIONS, ngram_size=NGRAM, seed=1)
    return int(daft.from_pydict({"text": texts}).select(signed).to_arrow().num_rows)


def signer(sign: Callable[[list[str]], int], file: Path) -> Callable[[int], int]:
    """`sign` on the first texts of a file."""
    texts = [text for _, text in rows(file, sys.maxsize)]
    return lambda count: sign(texts[:count])


def work(kind: str, name: str, file: Path, tokenizer: str) -> Callable[[int], int]:
    """A function of the number of rows."""
    if kind == "signatures":
        return signer(SIGNERS[name], file)
    if kind == "prepare":
        from peers_datatrove import prepare

        return lambda count: prepare(file, count, tokenizer)
    return lambda count: NEAR[name](file, count)


NEAR: dict[str, Callable[[Path, int], int]] = {
    "datasketch": with_datasketch,
    "rensa": with_rensa,
    "daft": with_daft,
    "datatrove": with_datatrove,
}
SIGNERS: dict[str, Callable[[list[str]], int]] = {
    "datasketch": sign_with_datasketch,
    "rensa": sign_with_rensa,
    "daft": sign_with_daft,
}


def main() -> None:
    """Run one of them; the median of three where it takes no longer than some seconds."""
    kind, name, file, count = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    run = work(kind, name, file, sys.argv[5] if len(sys.argv) > 5 else "")
    run(min(count, 500))  # what is loaded or compiled at first use is nobody's speed
    seconds: list[float] = []
    while len(seconds) < 3 and sum(seconds) < 10:
        started = time.perf_counter()
        done = run(count)
        seconds.append(time.perf_counter() - started)
    print(json.dumps({"documents": count, "result": done, "seconds": statistics.median(seconds)}))


if __name__ == "__main__":
    main()
