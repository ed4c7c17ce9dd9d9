"""The commands that bring base models in, and that let one speak."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trainer import cli_work as work

Commands = Any
"""What `add_subparsers` returns; argparse has no public name for it."""


def add(commands: Commands) -> None:
    """Add import, import-gguf, seed and rehearse."""
    one = commands.add_parser("import", help="bring a Hugging Face folder in as a base model")
    one.add_argument("folder", metavar="FOLDER", type=Path, help="config.json, tokenizer.json, *.safetensors, …")
    one.add_argument("uri", metavar="URI", help="where to, as cache://models/NAME")
    one.set_defaults(command=_import)

    one = commands.add_parser("import-gguf", help="bring a GGUF file in as a base model")
    one.add_argument("file", metavar="FILE", type=Path)
    one.add_argument("uri", metavar="URI", help="where to, as cache://models/NAME")
    one.set_defaults(command=_import_gguf)

    one = commands.add_parser("seed", help="make a tiny untrained base model with a tokenizer of its own")
    one.add_argument("uri", metavar="URI", help="where to, as cache://models/tiny-seed")
    one.add_argument("--corpus", metavar="FILE", nargs="+", type=Path, required=True, help="texts for the tokenizer")
    one.set_defaults(command=_seed)

    one = commands.add_parser(
        "rehearse",
        help="write down a base model's own answers to general prompts, to be mixed into its training",
        description="The output is a source of the role `rehearsal`: a model that trains on a share of its own former "
        "answers keeps what it could before. The same prompts give nearly the same answers on another machine.",
    )
    one.add_argument("base", metavar="BASE", help="address of the base model")
    one.add_argument("output", metavar="FILE", type=Path, help="where to, a .jsonl file")
    one.add_argument("--prompts", metavar="FILE", type=Path, required=True, help="a text file, one prompt a line")
    one.add_argument(
        "--max-tokens", metavar="N", type=int, default=48, help="longer answers are left out [%(default)s]"
    )
    one.set_defaults(command=_rehearse)


def _import(arguments: argparse.Namespace) -> dict[str, Any]:
    from trainer.bases import import_folder

    return import_folder(arguments.folder, work.uri(arguments.uri))


def _import_gguf(arguments: argparse.Namespace) -> dict[str, Any]:
    work.quiet()
    from trainer.gguf import import_gguf

    return import_gguf(arguments.file, work.uri(arguments.uri))


def _seed(arguments: argparse.Namespace) -> dict[str, Any]:
    work.quiet()
    from trainer.seed import seed

    return seed(work.uri(arguments.uri), arguments.corpus)


def _rehearse(arguments: argparse.Namespace) -> dict[str, Any]:
    work.quiet()
    from trainer.rehearsal import rehearse

    return rehearse(work.uri(arguments.base), arguments.prompts, arguments.output, max_tokens=arguments.max_tokens)
