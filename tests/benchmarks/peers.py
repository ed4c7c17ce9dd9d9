"""Near dedup as other libraries do it: `python peers.py NAME FILE COUNT`, in a venv that has them.

Each reads the first COUNT rows of a jsonl file, signs 5-grams of words with 112 permutations, proposes pairs by 14
bands of 8, and connects them. None verifies a pair; ours does. Prints one JSON object.
"""

from __future__ import annotations

import itertools
import json
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


PEERS: dict[str, Callable[[Path, int], int]] = {
    "datasketch": with_datasketch,
    "rensa": with_rensa,
    "daft": with_daft,
}


def main() -> None:
    """Run one of them."""
    name, file, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    PEERS[name](file, min(count, 500))  # what is loaded or compiled at first use is nobody's speed
    started = time.perf_counter()
    clusters = PEERS[name](file, count)
    print(json.dumps({"documents": count, "clusters": clusters, "seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    main()
