"""Files of a job's folder, and addresses that people type."""

from __future__ import annotations

import hashlib

from refit.job import JobRun
from refit.manifest import MANIFEST, File
from refit.store import join


def keep(run: JobRun, name: str, data: bytes) -> File:
    """Write a file of the job's folder, wherever that is; returns its line in the manifest."""
    run.store.write(join(run.job.output, name), data)
    return File(path=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def folder_of(uri: str) -> str:
    """A folder's URI, given it or its manifest's."""
    return uri.removesuffix(f"/{MANIFEST}").rstrip("/")
