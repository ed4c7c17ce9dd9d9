"""Cleaning rules: small, pure functions of one text. A file here is a rule; nothing else has to know it.

A rule takes the text of one turn and keyword arguments with defaults, and returns

    None          keep the text as it is
    str           keep this text instead
    Drop("why")   put the whole record into quarantine

Its name in a spec is its function's name, its arguments are the function's keywords:

    rules: [control_characters, {name: length, args: {max_chars: 4000}}]

A rule that takes long may have a sieve beside it (`sieve_of`): a function of many texts at once that tells which of
them the rule would keep as they are, so that only the others are looked at one by one.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from refit.errors import BadSpec
from refit.spec import Rule

if TYPE_CHECKING:
    from corpus.shingles import Texts


@dataclass(frozen=True)
class Drop:
    """The record goes, and this is why. `withheld`: what it says must not be shown anywhere, not even in quarantine."""

    why: str
    withheld: bool = False


Verdict = Drop | str | None
Function = TypeVar("Function", bound=Callable[..., Verdict])

Sieve = TypeVar("Sieve", bound=Callable[..., NDArray[np.bool_]])

_RULES: dict[str, Callable[..., Verdict]] = {}
_SIEVES: dict[str, Callable[..., NDArray[np.bool_]]] = {}


def rule(function: Function) -> Function:
    """Make a function a rule of its name."""
    first, *others = inspect.signature(function).parameters.values()
    if first.name != "text" or any(p.kind is not p.KEYWORD_ONLY or p.default is p.empty for p in others):
        raise TypeError(f"rule {function.__name__}: expected (text, *, argument=default, …)")
    _RULES[function.__name__] = function
    return function


def sieve_of(function: Callable[..., Verdict]) -> Callable[[Sieve], Sieve]:
    """Make a function the sieve of a rule: (texts: `shingles.Texts`, and the rule's arguments) -> a flag a text.

    True says that the rule surely returns None; False promises nothing.
    """

    def register(sieve: Sieve) -> Sieve:
        arguments = set(inspect.signature(function).parameters) - {"text"}
        if set(inspect.signature(sieve).parameters) != {"texts", *arguments}:
            raise TypeError(f"sieve of {function.__name__}: expected (texts, *, {', '.join(sorted(arguments))})")
        _SIEVES[function.__name__] = sieve
        return sieve

    return register


@dataclass(frozen=True)
class Step:
    """A rule with its arguments, ready to be applied; `module` holds its code.

    `clear` tells of many texts which ones `apply` surely keeps, where the rule has a sieve for that.
    `libraries` are the packages of which another version may judge otherwise: its module's `LIBRARIES`.
    """

    name: str
    module: str
    apply: Callable[[str], Verdict]
    clear: Callable[[Texts], NDArray[np.bool_]] | None = None
    libraries: tuple[str, ...] = ()


def build(rules: Iterable[Rule]) -> list[Step]:
    """The rules of a spec, in its order.

    Raises:
        BadSpec: a rule or an argument that is not known, or a value of another type than the argument's default.
    """
    known = _known()
    steps = []
    for index, wanted in enumerate(rules):
        where = f"data.rules[{index}]"
        if wanted.name not in known:
            raise BadSpec(f"{where}.name is {wanted.name!r}: no such rule.{_nearest(wanted.name, known)}")
        function = known[wanted.name]
        defaults = {name: p.default for name, p in inspect.signature(function).parameters.items() if name != "text"}
        for name, value in wanted.args.items():
            if name not in defaults:
                raise BadSpec(f"{where}.args.{name}: {wanted.name} has no such argument.{_nearest(name, defaults)}")
            if not _fits(value, defaults[name]):
                expected = type(defaults[name]).__name__
                raise BadSpec(f"{where}.args.{name} is {value!r}: expected {expected}, as in {defaults[name]!r}.")
        sieve = _SIEVES.get(wanted.name)
        steps.append(
            Step(
                wanted.name, function.__module__, partial(function, **wanted.args),
                clear=partial(sieve, **{**defaults, **wanted.args}) if sieve else None,
                libraries=getattr(sys.modules[function.__module__], "LIBRARIES", ()),
            )
        )  # fmt: skip
    return steps


@cache
def _known() -> dict[str, Callable[..., Verdict]]:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(_RULES.items()))


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(default)


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {near[0]}? Known: {', '.join(names)}." if near else f" Known: {', '.join(names)}."
