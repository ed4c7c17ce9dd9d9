"""The flat token format: all documents of a set one after the other, before any is cut, repeated or packed.

A set `<name>` is six files beside each other in a folder, all numbers little-endian:

    <name>.tokens.bin    uint16 or uint32 a token: ids (uint16 where the vocabulary has at most 65,536)
    <name>.mask.bin      uint8 a token: its weight in the loss in 255ths; 0 where it is no target
    <name>.offsets.bin   uint64, documents + 1: where each document begins, and where the last one ends
    <name>.ids.bin       16 bytes a document: its sample's id (xxh3_128; records have it in hex)
    <name>.kinds.bin     uint8 a document: 0 conversation, 1 plain text (may be cut), 2 refused (of length 0), 3 pair
    <name>.json          the header, written last: without it the set does not exist

A set of preference pairs is of version 3. Its documents are pairs: both sides behind each other, what is asked with the
chosen answer and with the rejected one, and a seventh file says where the second begins:

    <name>.halves.bin    uint64 a document: tokens of its first side; 0 where it is refused

A refused document has no tokens and keeps its number, so document i is row i of the records it came from.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from refit import files
from refit.errors import BadInput
from refit.packed import WHOLE

VERSION, OF_PAIRS = 2, 3
CONVERSATION, TEXT, REFUSED, PAIR = 0, 1, 2, 3
ID_BYTES = 16
_PARTS = ("tokens", "mask", "offsets", "ids", "kinds")


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a set holds; `vocabulary` is the sha256 of its tokenizer.json."""

    version: int
    documents: int
    tokens: int
    targets: int
    dtype: str
    vocabulary: str
    vocabulary_size: int


@dataclass(frozen=True)
class Flat:
    """A set mapped into memory.

    `tokens` and `mask` have shape (tokens,), `offsets` (documents + 1,), `ids` (documents, 16), `kinds` (documents,),
    and so have `halves`, which are there for pairs only.
    """

    header: Header
    tokens: NDArray[np.unsignedinteger]
    mask: NDArray[np.uint8]
    offsets: NDArray[np.uint64]
    ids: NDArray[np.uint8]
    kinds: NDArray[np.uint8]
    halves: NDArray[np.uint64] | None = None

    def __len__(self) -> int:
        return self.header.documents

    def document(self, number: int) -> tuple[NDArray[np.unsignedinteger], NDArray[np.uint8]]:
        """Tokens and mask of a document, both of its length; views into the files, not copies."""
        if not 0 <= number < len(self):
            raise IndexError(f"document {number} of {len(self)}")
        first, last = int(self.offsets[number]), int(self.offsets[number + 1])
        return self.tokens[first:last], self.mask[first:last]

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, of shape (documents,)."""
        return np.diff(self.offsets.astype(np.int64))


def dtype_of(vocabulary_size: int) -> str:
    """The narrower of uint16 and uint32 that holds every id of a vocabulary."""
    return "uint16" if vocabulary_size <= 1 << 16 else "uint32"


class Writer:
    """Streams a set to disk, a batch of documents at a time; no more than a batch is held.

    The header is written when the block ends without an error, and one of an earlier set is gone from the beginning:
    what a killed writer leaves behind cannot be read.
    """

    header: Header
    """What was written; there once the block has ended."""

    def __init__(
        self, folder: Path, name: str, *, vocabulary: str, vocabulary_size: int, pairs: bool = False
    ) -> None:  # fmt: skip
        self._folder, self._name = folder, name
        self.pairs = pairs
        self._vocabulary, self._size = vocabulary, vocabulary_size
        self._dtype = dtype_of(vocabulary_size)
        self._documents = self._tokens = self._targets = 0
        self._stack = ExitStack()
        self._handles: dict[str, BinaryIO] = {}

    def __enter__(self) -> Self:
        (self._folder / f"{self._name}.json").unlink(missing_ok=True)
        for part in (*_PARTS, *(["halves"] if self.pairs else [])):
            path = self._folder / f"{self._name}.{part}.bin"
            self._handles[part] = self._stack.enter_context(path.open("wb"))
        self._put("offsets", np.zeros(1), "<u8")
        return self

    def append(
        self, tokens: NDArray[np.integer], mask: NDArray[np.integer], lengths: NDArray[np.integer],
        ids: NDArray[np.uint8], kinds: NDArray[np.integer], halves: NDArray[np.integer] | None = None,
    ) -> None:  # fmt: skip
        """Write a batch of n documents.

        Args:
            tokens: ids of all documents, concatenated.
            mask: 0 to 255 for each of them.
            lengths: of each document, of shape (n,); 0 where it is refused, and nowhere else.
            ids: of shape (n, 16).
            kinds: of shape (n,).
            halves: of shape (n,), of a set of pairs.

        Raises:
            ValueError: the arrays contradict each other, or hold what the format cannot.
        """
        self._check(tokens, mask, lengths, ids, kinds)
        if self.pairs:
            self._put("halves", _checked(halves, lengths, kinds), "<u8")
        ends = self._tokens + np.cumsum(lengths, dtype=np.int64)
        self._put("tokens", tokens, f"<{np.dtype(self._dtype).str[1:]}")
        self._put("mask", mask, "u1")
        self._put("offsets", ends, "<u8")
        self._put("ids", ids, "u1")
        self._put("kinds", kinds, "u1")
        self._documents += len(lengths)
        self._tokens += len(tokens)
        self._targets += int(np.count_nonzero(mask))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if kind is not None:
            return
        self.header = Header(
            version=OF_PAIRS if self.pairs else VERSION, documents=self._documents, tokens=self._tokens,
            targets=self._targets, dtype=self._dtype, vocabulary=self._vocabulary, vocabulary_size=self._size,
        )  # fmt: skip
        files.write(self._folder / f"{self._name}.json", json.dumps(asdict(self.header), indent=1).encode())

    def _put(self, part: str, array: NDArray[Any], dtype: str) -> None:
        self._handles[part].write(np.ascontiguousarray(array, dtype=dtype).data)

    def _check(
        self, tokens: NDArray[np.integer], mask: NDArray[np.integer], lengths: NDArray[np.integer],
        ids: NDArray[np.uint8], kinds: NDArray[np.integer],
    ) -> None:  # fmt: skip
        count = len(lengths)
        if not len(tokens) == len(mask) == lengths.sum():
            raise ValueError(f"{len(tokens)} tokens, a mask of {len(mask)}, and lengths that sum to {lengths.sum()}")
        if kinds.shape != (count,) or ids.shape != (count, ID_BYTES):
            raise ValueError(f"{count} lengths, kinds of shape {kinds.shape}, ids of shape {ids.shape}")
        if count and (lengths.min() < 0 or ((lengths == 0) != (kinds == REFUSED)).any()):
            raise ValueError("a document has no tokens where it is refused, and nowhere else")
        known = (REFUSED, PAIR) if self.pairs else (CONVERSATION, TEXT, REFUSED)
        if not np.isin(kinds, known).all():
            raise ValueError(f"documents are of the kinds {np.unique(kinds).tolist()}, here they can be {known}")
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._size:
            raise ValueError(f"token ids from {tokens.min()} to {tokens.max()}, the vocabulary has {self._size}")
        if len(mask) and not 0 <= mask.min() <= mask.max() <= WHOLE:
            raise ValueError(f"a mask from {mask.min()} to {mask.max()}, it is 0 to {WHOLE}")


def _checked(
    halves: NDArray[np.integer] | None, lengths: NDArray[np.integer], kinds: NDArray[np.integer]
) -> NDArray[np.integer]:
    """The halves of pairs: neither side of one is empty."""
    if halves is None or halves.shape != lengths.shape:
        raise ValueError("a set of pairs needs of each document how long its first side is")
    if (np.where(kinds == PAIR, (halves < 1) | (halves >= lengths), halves != 0)).any():
        raise ValueError("a pair has two sides, and a document that was refused has none")
    return halves


def read(folder: Path, name: str) -> Flat:
    """Map a set into memory.

    Raises:
        BadInput: it is not there, of another version, or its files have not the size that the header says.
    """
    path = folder / f"{name}.json"
    header = _header(path)
    count = header.documents
    flat = Flat(
        header,
        tokens=_map(folder / f"{name}.tokens.bin", f"<{np.dtype(header.dtype).str[1:]}", (header.tokens,)),
        mask=_map(folder / f"{name}.mask.bin", "u1", (header.tokens,)),
        offsets=_map(folder / f"{name}.offsets.bin", "<u8", (count + 1,)),
        ids=_map(folder / f"{name}.ids.bin", "u1", (count, ID_BYTES)),
        kinds=_map(folder / f"{name}.kinds.bin", "u1", (count,)),
        halves=_map(folder / f"{name}.halves.bin", "<u8", (count,)) if header.version == OF_PAIRS else None,
    )
    first, last = int(flat.offsets[0]), int(flat.offsets[-1])
    if (first, last) != (0, header.tokens) or (flat.offsets[1:] < flat.offsets[:-1]).any():
        raise BadInput(
            f"{folder / f'{name}.offsets.bin'}: offsets do not rise from 0 to the {header.tokens} tokens of the "
            "header. Write the tokens again."
        )
    return flat


def _header(path: Path) -> Header:
    try:
        header = Header(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"{path}: not a flat token set: {error}. Write the tokens again.") from error
    if header.version not in (VERSION, OF_PAIRS):
        raise BadInput(
            f"{path}: flat format {header.version}, this code reads {VERSION} and {OF_PAIRS}. Write the tokens again."
        )
    if header.dtype != dtype_of(header.vocabulary_size):
        raise BadInput(
            f"{path}: dtype {header.dtype!r} for a vocabulary of {header.vocabulary_size}, expected "
            f"{dtype_of(header.vocabulary_size)}. Write the tokens again."
        )
    return header


def _map(path: Path, dtype: str, shape: tuple[int, ...]) -> Any:
    expected = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    size = path.stat().st_size if path.is_file() else -1
    if size != expected:
        found = "is missing" if size < 0 else f"has {size} bytes"
        raise BadInput(f"{path}: {found}, the header says {expected} bytes. Write the tokens again.")
    if expected == 0:  # nothing can be mapped where there is nothing
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=shape)
