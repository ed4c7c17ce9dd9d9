"""The commands about tokens: `corpus pack` and `corpus export`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from corpus import options
from refit.spec import Data

Commands = Any
"""What `add_subparsers` returns; argparse has no public name for it."""

FIELDS = {"length": "pack_length", "seed": "seed"}


def add(commands: Commands, tokenizer: Callable[[str], Path]) -> None:
    """Add both commands; `tokenizer` fetches the tokenizer of a base model at an address."""
    one = commands.add_parser(
        "pack",
        help="tokenize and pack files, without a pipeline",
        description="Writes documents.* (every token once, the flat format), train.* (packs, what training maps), "
        "quarantine.parquet (what could not be used, and why) and manifest.json.",
    )
    one.add_argument("inputs", metavar="INPUT", nargs="+", type=Path, help="files of any format the data stage reads")
    one.add_argument("--tokenizer", metavar="DIR|URI", required=True, help="a base model: its folder, or its address")
    one.add_argument("--output", metavar="DIR", type=Path, required=True, help="a folder that is not there, or empty")
    options.add(one, Data, FIELDS, "data")
    one.add_argument(
        "--overflow", choices=("refuse", "truncate"), default="refuse",
        help="a conversation longer than a pack: set it aside, or keep its head if an answer is in it [%(default)s]",
    )  # fmt: skip
    one.add_argument(
        "--overflow-text", choices=("split", "drop"), default="split",
        help="a plain text longer than a pack: cut it into even pieces, or set it aside [%(default)s]",
    )  # fmt: skip
    one.set_defaults(command=lambda arguments: _pack(arguments, tokenizer))
    one = commands.add_parser("export", help="write flat documents in another trainer's format")
    one.add_argument("folder", metavar="FLAT_FOLDER", type=Path, help="where the set is, as `corpus pack` writes it")
    one.add_argument("--name", default="documents", help="the set's name [%(default)s]")
    one.add_argument("--megatron", metavar="PREFIX", type=Path, required=True, help="writes PREFIX.bin and PREFIX.idx")
    one.set_defaults(command=_export)


def _pack(arguments: argparse.Namespace, tokenizer: Callable[[str], Path]) -> dict[str, Any]:
    from corpus.pack_files import pack_files
    from corpus.packing import Overflow

    given, settings = arguments.tokenizer, options.values(arguments, Data, FIELDS)
    return pack_files(
        arguments.inputs,
        tokenizer(given) if "://" in given else Path(given),
        arguments.output,
        length=settings["pack_length"],
        seed=settings["seed"],
        overflow=Overflow(arguments.overflow, arguments.overflow_text),
    )


def _export(arguments: argparse.Namespace) -> dict[str, Any]:
    from corpus.megatron import export

    return export(arguments.folder, arguments.name, arguments.megatron)
