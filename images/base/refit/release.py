"""A release: a model plus the way it is served. What is evaluated, promoted and rolled out is always a release."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from refit import fingerprint
from refit.manifest import Manifest
from refit.spec import Serve


class Release(BaseModel):
    """Identity and address of a release: `model` is the URI of a committed model folder, `digest` its content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    pipeline: str
    digest: str
    model: str
    profile: Serve
    team: str
    owner: str

    @classmethod
    def of(cls, pipeline: str, manifest: Manifest, uri: str, profile: Serve, *, team: str, owner: str) -> Release:
        """The release of a model folder with a serving profile; the id follows from both and from nothing else."""
        digest = manifest.content_digest()
        name = fingerprint.digest({"model": digest, "profile": profile})[:16]
        return cls(id=name, pipeline=pipeline, digest=digest, model=uri, profile=profile, team=team, owner=owner)
