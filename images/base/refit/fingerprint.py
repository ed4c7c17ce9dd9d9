"""Names that follow from content: the same work has the same name, on any machine, at any time.

A name is sha256 over what decides the bytes of an output: the phase, its code (or a declared recipe version), its
canonical spec, and the content digests of its inputs. Never a time, a path, a URI, a pickle.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

RECIPE_VERSION = {
    # Raised when a change in code may change the bytes of a training or evaluation output. Not the source's digest:
    # a hot-fix must not move the checkpoint folder of a run that is six days old.
    "train": "3",
    "evaluate": "1",
    "compare": "1",
}


def canonical(value: Any) -> str:
    """JSON with sorted keys and no blanks; pydantic models by their fields. NaN is refused: it equals nothing."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, tuple | set | frozenset):
        return sorted(value) if isinstance(value, set | frozenset) else list(value)
    raise TypeError(f"{type(value).__name__} has no canonical form")


def digest(value: Any) -> str:
    """sha256 of the canonical JSON, in hex."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def fingerprint(phase: str, code: str, spec: Any, inputs: Mapping[str, str]) -> str:
    """The name of an output: 32 hex characters.

    Args:
        phase: what is done ("dedup", "train").
        code: what stands for the code: `code_digest` in data phases, `RECIPE_VERSION` elsewhere.
        spec: the part of the spec that this phase reads, and no more.
        inputs: content digest of every input, by role.
    """
    return digest({"phase": phase, "code": code, "spec": spec, "inputs": dict(inputs)})[:32]


def training_fingerprint(train: BaseModel, *, dataset: str, base: str, warm_start: str | None = None) -> str:
    """The name of a training output; `dataset`, `base` and `warm_start` (where there is one) are content digests.

    The operator computes it to find the folder, the trainer to check that the folder is its own.
    """
    if (warm_start is None) != (getattr(train, "warm_start", None) is None):
        raise ValueError("a training with train.warm_start is named by that checkpoint's content, and only such a one")
    begun = {"warm_start": warm_start} if warm_start is not None else {}
    return fingerprint("train", RECIPE_VERSION["train"], _recipe(train), {"dataset": dataset, "base": base, **begun})


def recipe_digest(train: BaseModel) -> str:
    """What of a training's name is its spec alone, without data and base model: 32 hex characters."""
    return digest(_recipe(train))[:32]


def _recipe(train: BaseModel) -> dict[str, Any]:
    """What of a training's spec decides what comes out."""
    fields = type(train).model_fields
    as_before = {name for name in getattr(train, "came_later", ()) if getattr(train, name) == fields[name].default}
    return train.model_dump(mode="json", exclude=as_before | set(getattr(train, "not_in_fingerprint", ())))


def layout(train: BaseModel) -> str:
    """How a training's work is shared out and saved (ranks, offload, engine, …), as 12 hex characters.

    The training's own name leaves it out, for it changes nothing of what comes out; what was planned or tried with one
    layout says nothing of another.
    """
    names = set(getattr(train, "not_in_fingerprint", ())) - set(getattr(train, "not_in_layout", ()))
    return digest(train.model_dump(mode="json", include=names))[:12]


def evaluation_fingerprint(evaluate: BaseModel, *, dataset: str, release: str) -> str:
    """The name of an evaluation: one release's answers to one exam. `dataset` is a content digest, `release` an id.

    The gate is not in it: what is asked of a candidate can change without asking the models again.
    """
    spec = evaluate.model_dump(mode="json", exclude=set(getattr(evaluate, "not_in_fingerprint", ())))
    return fingerprint("evaluate", RECIPE_VERSION["evaluate"], spec, {"dataset": dataset, "release": release})


def comparison_fingerprint(evaluate: BaseModel, *, candidate: str, champion: str) -> str:
    """The name of a comparison; both are content digests of evaluations. The gate decides the verdict, so it is in."""
    spec = evaluate.model_dump(mode="json", exclude={"concurrency"})
    return fingerprint("compare", RECIPE_VERSION["compare"], spec, {"candidate": candidate, "champion": champion})


PIECE = 1 << 20
"""Bytes of a file that are hashed at once."""


def file_digest(path: Path, heard: Callable[[], None] = lambda: None) -> str:
    """sha256 of a file's bytes, in hex; `heard` is called with every piece, for a large file takes minutes."""
    found, piece = hashlib.sha256(), memoryview(bytearray(PIECE))
    with path.open("rb", buffering=0) as handle:
        while size := handle.readinto(piece):
            found.update(piece[:size])
            heard()
    return found.hexdigest()


@cache
def code_digest(module: str) -> str:
    """Digest of a module's source and of what it imports from its own package, comments and layout aside."""
    package = module.partition(".")[0]
    seen: dict[str, str] = {}
    _collect(module, package, seen)
    return digest(seen)


def _collect(module: str, package: str, seen: dict[str, str]) -> None:
    if module in seen:
        return
    source = _source(module)
    if source is None:
        raise ModuleNotFoundError(f"no source for module {module}")
    tree = ast.parse(source.read_text(encoding="utf-8"))
    imported = [name for node in ast.walk(tree) for name in _imports(node, module, source.name == "__init__.py")]
    _strip_docstrings(tree)
    seen[module] = hashlib.sha256(ast.dump(tree).encode()).hexdigest()
    for name in imported:
        if name.partition(".")[0] == package and _source(name):
            _collect(name, package, seen)


def _imports(node: ast.AST, module: str, is_package: bool) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        if node.level:
            parts = module.split(".")
            anchor = parts[: len(parts) - node.level + (1 if is_package else 0)]
            base = ".".join([*anchor, node.module] if node.module else anchor)
        else:
            base = node.module or ""
        return [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return []


def _source(module: str) -> Path | None:
    """The file of a module, found beside its package and never by importing it: what is named need not be loaded."""
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin)
    if not rest:
        return root
    place = root.parent.joinpath(*rest)
    return next((file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()), None)


def _strip_docstrings(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:] or [ast.Pass()]
