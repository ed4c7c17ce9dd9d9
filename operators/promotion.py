"""The promotion stage's operator: MLflow mirrors what the manifests say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowSkipException

from operators import registry, run, tracking
from operators.controller import Controller
from operators.links import MLflowLink
from refit.job import JOB, Job
from refit.manifest import MANIFEST, Manifest
from refit.store import join, store_for

if TYPE_CHECKING:
    from airflow.sdk import Context


def mirror_aliases(pipeline: str, challenger: str | None = None) -> dict[str, str]:
    """Point MLflow's aliases at what the controller says; returns alias → version."""
    line = Controller().pipeline(pipeline)
    champion, previous = (_id(line.get(role)) for role in ("champion", "previous"))
    if challenger in (champion, previous):
        challenger = None
    return registry.set_aliases(pipeline, champion=champion, previous=previous, challenger=challenger)


class RegistryOperator(BaseOperator):
    """Register a release in MLflow with the manifests it comes from, and set the line's aliases.

    A release is registered once, however often this runs. The aliases champion and previous follow the controller,
    which is right about them; challenger is this release until it is one of the two.

    What it does not do: decide anything. MLflow is a mirror.

    Args:
        release: URI of the release's document in the run's folder.
        made_by: role → URI of the manifest of a job that made or judged it.
    """

    template_fields: Sequence[str] = ("release", "made_by")
    operator_extra_links = (MLflowLink(),)
    ui_color = "#f0f7ff"

    def __init__(self, *, release: str, made_by: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.release = release
        self.made_by = dict(made_by or {})
        self.pipeline: str | None = None

    def execute(self, context: Context) -> str:
        if not self.release:
            raise AirflowSkipException("there is no release to register")
        release = run.read_release(self.release)
        self.pipeline = release.pipeline
        registry.register(release, manifests=self._manifests(), training_run=self._training_run())
        aliases = mirror_aliases(release.pipeline, challenger=release.id)
        self.log.info("MLflow's aliases of %s: %s", release.pipeline, aliases)
        return self.release

    def _training_run(self) -> str | None:
        """The run of the training that made the release, with all its steps; None of a model that came without one."""
        place = (self.made_by.get("training") or "").removesuffix("/" + MANIFEST)
        if not place or not store_for(place).exists(join(place, JOB)):
            return None
        return tracking.run_of(Job.load(join(place, JOB)))

    def _manifests(self) -> dict[str, Manifest]:
        found = {}
        for role, uri in self.made_by.items():
            place = (uri or "").removesuffix("/" + MANIFEST)
            manifest = store_for(place).manifest(place) if place else None
            if manifest is not None:
                found[role] = manifest
        return found


def _id(release: Any) -> str | None:
    return release.get("id") if isinstance(release, dict) else None
