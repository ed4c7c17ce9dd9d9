"""A small real program that follows the job contract, for tests of whatever starts programs.

The fixture `home` installs it under the names of the stages' programs. What it does is told by
`job.options["act"]`: a list of [verb, argument] that is worked through in order.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from refit import cli, errors
from refit.job import JobRun
from refit.manifest import Manifest
from refit.states import State

KINDS = ("prepare", "plan", "preflight", "trial", "smoke", "train", "early", "evaluate", "compare")


def act(run: JobRun) -> Manifest:
    with (run.folder / "starts").open("a") as handle:
        handle.write(f"{os.getpid()}\n")
    facts = dict(run.job.options.get("facts", {}))
    for verb, argument in run.job.options.get("act", []):
        if verb == "progress":
            run.progress("work", argument, 100)
        elif verb == "say":
            print(argument, flush=True)
        elif verb == "event":
            run.event(State.RUNNING, argument)
        elif verb == "steps":  # of a training that goes on after a step, to another
            first, last = argument
            path = run.folder / "metrics.jsonl"
            kept = path.read_text().splitlines(keepends=True)[:first] if path.exists() else []
            told = [{"step": step, "loss": 1 / step, "seconds": 0.5} for step in range(first + 1, last + 1)]
            path.write_text("".join([*kept, *(json.dumps(record) + "\n" for record in told)]))
        elif verb == "wait_for":  # a file: the test's word that it has seen enough
            while not Path(argument).exists():
                time.sleep(0.02)
        elif verb == "leave":  # a child in a session of its own, as torchrun makes them
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            (run.folder / argument).write_text(str(child.pid))
        elif verb == "exit":
            os._exit(argument)
        elif verb == "raise":
            raise getattr(errors, argument)(f"as told: {argument}")
        elif verb == "environment":
            facts["environment"] = sorted(os.environ)
        else:
            raise ValueError(verb)
    outputs = run.job.options.get("outputs", {})
    return Manifest(kind=run.job.kind, fingerprint="f" * 32, facts=facts, outputs=outputs)


if __name__ == "__main__":
    sys.exit(cli.main(argparse.ArgumentParser("program"), dict.fromkeys(KINDS, act)))
