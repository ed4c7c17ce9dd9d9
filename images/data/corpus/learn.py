"""What a record is to training, by `train.objective`: a conversation with answers, a pair of answers, a plain text.

What is none of what is asked for is refused with its reason. A pair becomes one document of two sides, what is asked
with the chosen answer and what is asked with the rejected one, so that whoever moves documents moves both. Only the
last answer is learnt: all before it is asked of both sides alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from corpus.record import REJECTED, TEXT, WEIGHT, Message
from corpus.settings import Learn
from corpus.tokens import Encoded, Encoder
from refit.spec import TokenLimits

NO_PAIR = "no preference pair: there is no rejected answer beside the last one"
NO_REJECTED = "preference: nothing is left of the rejected answer"
NO_TEXT = "no plain text: pretrain learns every token of texts, and this is a conversation"
SAME = "preference: nothing to prefer, both sides are the same tokens"
_SIDES = ("chosen", "rejected")


def encode(
    encoder: Encoder, conversations: Sequence[Sequence[Message]], limits: TokenLimits, learn: Learn
) -> tuple[Encoded, NDArray[np.int64] | None]:  # fmt: skip
    """Conversations as documents; of pairs also how long the first side of each is (0 where it is refused)."""
    if learn == "pairs":
        return _pairs(encoder, conversations, limits)
    wrong = {} if learn == "answers" else {at: NO_TEXT for at, one in enumerate(conversations) if not _is_text(one)}
    return encoder.encode(conversations, limits, refuse=wrong), None


def _pairs(
    encoder: Encoder, conversations: Sequence[Sequence[Message]], limits: TokenLimits
) -> tuple[Encoded, NDArray[np.int64]]:
    none = {at: why for at, one in enumerate(conversations) if (why := _fault(one))}
    both = [side for at, one in enumerate(conversations) for side in ([one, one] if at in none else _sides(one))]
    found = encoder.encode(both, limits, refuse={2 * at + side: why for at, why in none.items() for side in (0, 1)})
    reasons: dict[int, str] = {}
    for number, why in found.refused:
        at, side = divmod(number, 2)
        reasons.setdefault(at, why if at in none else f"{why} (the {_SIDES[side]} side)")
    reasons |= dict.fromkeys(_same(found, reasons), SAME)
    keep = np.ones(len(conversations), np.bool_)
    keep[list(reasons)] = False
    kept = np.repeat(np.repeat(keep, 2), found.lengths)
    lengths = found.lengths.reshape(-1, 2) * keep[:, None]
    encoded = Encoded(found.tokens[kept], found.mask[kept], lengths.sum(axis=1), sorted(reasons.items()))
    return encoded, lengths[:, 0].copy()


def _fault(conversation: Sequence[Message]) -> str | None:
    """Why a conversation is no pair."""
    if _is_text(conversation) or REJECTED not in conversation[-1]:
        return NO_PAIR
    return None if conversation[-1][REJECTED].strip() else NO_REJECTED


def _sides(pair: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """Both conversations of a pair; answers before the last one are read and not learnt."""
    before = [{**message, WEIGHT: 0.0} if message["role"] == "assistant" else message for message in pair[:-1]]
    last = {key: value for key, value in pair[-1].items() if key != REJECTED}
    return [*before, last], [*before, {**last, "content": pair[-1][REJECTED]}]


def _same(found: Encoded, refused: Mapping[int, str]) -> list[int]:
    """Pairs whose sides are the same, token by token."""
    lengths = found.lengths.reshape(-1, 2)
    starts = (np.cumsum(found.lengths) - found.lengths).reshape(-1, 2)
    alike = np.flatnonzero((lengths[:, 0] == lengths[:, 1]) & (lengths[:, 0] > 0)).tolist()
    return [
        at for at in alike
        if at not in refused
        and (found.tokens[starts[at, 0] :][: lengths[at, 0]] == found.tokens[starts[at, 1] :][: lengths[at, 1]]).all()
    ]  # fmt: skip


def _is_text(conversation: Sequence[Message]) -> bool:
    return bool(conversation[0]["role"] == TEXT)
