"""`refit`: the embedded stack and the lines that run on it."""

from __future__ import annotations

import argparse

from refit import cli
from standalone import commands, run
from standalone.demo import command as demo


def parser() -> argparse.ArgumentParser:
    """Every subcommand; each is registered by the module that has it."""
    found = argparse.ArgumentParser(
        prog="refit", description="Retrain language models, prove the new one better, move traffic to it step by step."
    )
    subcommands = found.add_subparsers(metavar="COMMAND")
    commands.register(subcommands)
    run.register(subcommands)
    demo.register(subcommands)
    return found


def main() -> int:
    """The console entry point."""
    return cli.main(parser(), handlers={})
