"""Personal data: masked by kind, so that a model learns that something stood there and not what."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import NamedTuple

from corpus.rules import Verdict, rule
from refit.errors import BadSpec


class Kind(NamedTuple):
    """A kind of personal data: how it is written, and a check that keeps what only looks like it."""

    mask: str
    pattern: re.Pattern[str]
    holds: Callable[[str], bool]

    def masked(self, text: str) -> str:
        """The text with the mask wherever it holds one."""
        return self.pattern.sub(lambda found: self.mask if self.holds(found[0]) else found[0], text)


@rule
def personal_data(text: str, *, kinds: str = "email,card,cn_id,ip,phone") -> Verdict:
    """Put `<EMAIL>`, `<CARD>`, `<CN_ID>`, `<IP>`, `<PHONE>` in the place of what is one.

    Card numbers must meet their check digit (ISO/IEC 7812), Chinese identity numbers theirs (GB 11643), addresses must
    be of a public network; an order number that is none of these stays. Kinds are tried in the order given, longest
    first: a card number is no telephone number.
    """
    masked = text
    for name in kinds.split(","):
        kind = KINDS.get(name.strip())
        if kind is None:
            raise BadSpec(f"personal_data.kinds: there is no {name.strip()!r}. Known: {', '.join(KINDS)}.")
        masked = kind.masked(masked)
    return masked if masked != text else None


def luhn(text: str) -> bool:
    """Whether a number of 13 to 19 digits ends in its check digit (ISO/IEC 7812)."""
    digits = [int(character) for character in text if character.isdigit()]
    if not 13 <= len(digits) <= 19 or len(set(digits)) == 1:
        return False
    doubled = [digit if place % 2 == 0 else digit * 2 - 9 * (digit > 4) for place, digit in enumerate(digits[::-1])]
    return sum(doubled) % 10 == 0


def chinese_id(text: str) -> bool:
    """Whether a Chinese identity number of 18 places ends in its check character (GB 11643)."""
    weights = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
    check = "10X98765432"[sum(int(digit) * weight for digit, weight in zip(text, weights, strict=False)) % 11]
    return text[17].upper() == check


def _public(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False


def _dialled(text: str) -> bool:
    """A telephone number has 8 to 15 digits (E.164), and is written as one: with a plus, or in groups."""
    digits = sum(character.isdigit() for character in text)
    return 8 <= digits <= 15


KINDS = {
    "email": Kind(
        "<EMAIL>",
        re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[\w-]{1,63}\.)+[A-Za-z]{2,24}(?![\w-])"),
        lambda _: True,
    ),
    "card": Kind(
        "<CARD>",
        re.compile(
            r"(?<![\d.,-])(?:[2-6]\d{12,18}|[2-6]\d{3}([ -])\d{4}\1\d{4}\1\d{4}|3\d{3}([ -])\d{6}\2\d{5})"
            r"(?![\d-]|[.,]\d)"
        ),
        luhn,
    ),
    "cn_id": Kind(
        "<CN_ID>",
        re.compile(r"(?<!\d)[1-9]\d{5}(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])\d{3}[\dXx](?![\dXx])"),
        chinese_id,
    ),
    "ip": Kind("<IP>", re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])"), _public),
    "phone": Kind(
        "<PHONE>",
        re.compile(
            r"(?<![\w+.-])(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{2,4}(?:[ .-]?\d{2,4}){1,4}"
            r"|\([2-9]\d\d\) ?[1-9]\d\d[ .-]\d{4}|[2-9]\d\d[.-][2-9]\d\d[.-]\d{4}|1[3-9]\d{9})(?![\w-])"
        ),
        _dialled,
    ),
}
