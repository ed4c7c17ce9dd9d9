"""Jobs as pods; as an Indexed Job with a headless Service when they span nodes.

A pod's name follows from the job's output folder, so the API server itself is the fence between two starters: of two
creations one is refused, and adopts the other's. The connection is the pod's own service account, or KUBECONFIG.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from operators import pods
from operators.backends.base import Backend, Phase, Standing
from operators.errors import Evicted, ImagePullFailed, OutOfMemory, PodDeleted, Unschedulable
from refit.errors import Infrastructure, NodeLost, RefitError, ServerUnavailable, from_exit_code
from refit.job import Job

if TYPE_CHECKING:
    from kubernetes.client import BatchV1Api, CoreV1Api, V1ContainerStatus, V1Pod

GONE_SECONDS = 180.0
"""How long a deleted pod may take to be gone after its grace period."""

STUCK_SECONDS = 600.0
"""How long a pod may wait for an image or for room on a node before that counts as a failure."""

LAST_LINES = 500
BAD_PULLS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})


class KubernetesBackend(Backend):
    """Pods in a cluster, found again by the name that follows from their output."""

    name: ClassVar[str] = "kubernetes"

    def submit(self, job: Job, pod: Callable[[], V1Pod] | None = None) -> bool:
        if self.adopt(job.output):
            return False
        if pod is None:
            raise ValueError("a cluster needs a pod to start a job")
        self._remove(job.output, grace=None)  # an earlier try's, which has ended
        job.save()
        request = pod()
        try:
            if job.kind == "train" and job.spec.train.nodes > 1:
                work = pods.indexed_job(request, job.spec.train.nodes)
                self._create_service(pods.headless_service(work))
                self._batch.create_namespaced_job(self._namespace, work)
            else:
                self._core.create_namespaced_pod(self._namespace, request)
        except self._api_error as error:
            if error.status == 409:
                return False
            raise _typed(error) from error
        return True

    def adopt(self, output: str) -> bool:
        return self.state(output).alive

    def state(self, output: str) -> Standing:
        found = self._pods(output)
        if not found:
            return Standing(Phase.ABSENT, "there is no pod")
        standings = [_standing(pod) for pod in found]
        # One rank gone is all ranks gone; a job runs while all of its pods do, and ends when the last has.
        for phase in (Phase.ENDED, Phase.WAITING, Phase.RUNNING):
            of_phase = [standing for standing in standings if standing.phase is phase]
            worst = next((standing for standing in of_phase if standing.fault is not None), None)
            if worst is not None:
                return worst
            if of_phase and (phase is not Phase.ENDED or len(of_phase) == len(standings)):
                return of_phase[0]
        return standings[0]

    def node_of(self, output: str, host: str) -> str | None:
        # A pod's host name is its own, not its node's; an Indexed Job's pods are called by name and number.
        for pod in self._pods(output):
            if host in (pod.metadata.name, pod.spec.hostname):
                return str(pod.spec.node_name) if pod.spec.node_name else None
        return None

    def logs(self, output: str, cursor: str = "") -> tuple[list[str], str]:
        found = self._pods(output)
        if not found or _waiting(found[0]):
            return [], cursor
        since = (
            max(1, round((datetime.now(UTC) - datetime.fromisoformat(cursor)).total_seconds()) + 2) if cursor else None
        )
        try:
            answer = self._core.read_namespaced_pod_log(
                found[0].metadata.name, self._namespace, container=found[0].spec.containers[0].name, timestamps=True,
                since_seconds=since, tail_lines=LAST_LINES, _preload_content=False,
            )  # fmt: skip
        except self._api_error:
            return [], cursor  # not started, or gone: the standing says which
        lines = []
        for line in answer.data.decode(errors="replace").splitlines():
            at, _, text = line.partition(" ")
            at = at[:26].rstrip("Z") + "+00:00"
            if not cursor or at > cursor:  # `since_seconds` is coarse: what was shown is dropped by its time
                lines.append(text)
                cursor = at
        return lines, cursor

    def end_of_log(self, output: str) -> str:
        return ""  # a new try is a new pod, with a log of its own

    def stop(self, output: str, *, grace: float = 20.0) -> bool:
        running = self.state(output).alive
        self._remove(output, grace=int(grace))
        return running

    @cached_property
    def _core(self) -> CoreV1Api:
        from kubernetes import client

        return client.CoreV1Api(self._connected)

    @cached_property
    def _batch(self) -> BatchV1Api:
        from kubernetes import client

        return client.BatchV1Api(self._connected)

    @cached_property
    def _connected(self) -> Any:
        from kubernetes import client, config

        configuration = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=configuration)
        except config.ConfigException:
            config.load_kube_config(client_configuration=configuration)
        return client.ApiClient(configuration)

    @property
    def _api_error(self) -> Any:
        from kubernetes.client.exceptions import ApiException

        return ApiException

    @property
    def _namespace(self) -> str:
        return pods.namespace()

    def _pods(self, output: str) -> list[V1Pod]:
        selector = f"{pods.JOB_LABEL}={pods.name_of(output)}"
        try:
            found = self._core.list_namespaced_pod(self._namespace, label_selector=selector).items
        except self._api_error as error:
            raise _typed(error) from error
        except OSError as error:
            raise ServerUnavailable(f"the cluster's API server does not answer: {error}") from error
        return sorted(found, key=lambda pod: str(pod.metadata.name))

    def _create_service(self, service: Any) -> None:
        try:
            self._core.create_namespaced_service(self._namespace, service)
        except self._api_error as error:
            if error.status != 409:
                raise

    def _remove(self, output: str, *, grace: int | None) -> None:
        """Delete what is there under this name, and wait until it is gone."""
        name = pods.name_of(output)
        options = {} if grace is None else {"grace_period_seconds": grace}
        deletions: list[Callable[[], Any]] = [
            lambda: self._batch.delete_namespaced_job(
                name, self._namespace, propagation_policy="Foreground", **options
            ),
            lambda: self._core.delete_namespaced_service(name, self._namespace),
            lambda: self._core.delete_namespaced_pod(name, self._namespace, **options),
        ]
        for delete in deletions:
            try:
                delete()
            except self._api_error as error:
                # Not there; or not ours to ask for: a service account may have rights on pods only.
                if error.status not in (403, 404):
                    raise _typed(error) from error
        deadline = time.monotonic() + GONE_SECONDS
        while found := self._pods(output):
            if grace is None:  # somebody else's deletion: as long as it allowed
                grace = max(pod.metadata.deletion_grace_period_seconds or 0 for pod in found)
                deadline += grace
            if time.monotonic() > deadline:
                raise NodeLost(f"pod {name} does not go away; its node may be unreachable")
            time.sleep(0.5)


def _standing(pod: V1Pod) -> Standing:
    """What a pod's own status says, read before any log or result."""
    status = pod.status
    name = pod.metadata.name
    container = (status.container_statuses or [None])[0]
    ended = container.state.terminated if container is not None and container.state else None
    disrupted = _condition(pod, "DisruptionTarget")
    if status.reason == "Evicted" or (disrupted is not None and disrupted.status == "True"):
        why = f"{name}: {status.reason or disrupted.reason}: {status.message or getattr(disrupted, 'message', '')}"
        return Standing(Phase.ENDED, why, None, Evicted(why))
    if status.reason in ("NodeLost", "NodeAffinity", "Terminated") or (
        ended is not None and ended.reason == "ContainerStatusUnknown"
    ):
        why = f"{name}: its node {pod.spec.node_name} is lost"
        return Standing(Phase.ENDED, why, None, NodeLost(why))
    if ended is not None:
        return _ended(name, ended)
    if pod.metadata.deletion_timestamp is not None:
        why = f"{name}: deleted while it ran, or its node {pod.spec.node_name} is unreachable"
        return Standing(Phase.ENDED, why, None, PodDeleted(why))
    if status.phase == "Failed":
        why = f"{name}: {status.reason or 'failed'}: {status.message or 'no reason given'}"
        return Standing(Phase.ENDED, why, None, Infrastructure(why))
    if status.phase == "Pending":
        return _pending(pod, container)
    return Standing(Phase.RUNNING, f"{name} on {pod.spec.node_name}")


def _ended(name: str, ended: Any) -> Standing:
    code = int(ended.exit_code)
    said = (ended.message or "").strip().splitlines()
    why = f"{name}: exit {code}" + (f": {' | '.join(said[-3:])[-600:]}" if said else "")
    if ended.reason == "OOMKilled":
        return Standing(Phase.ENDED, why, code, OutOfMemory(f"{name}: killed for its memory ({why})"))
    if code == 0:
        return Standing(Phase.ENDED, f"{name}: exit 0", 0)
    # 128 + n is a shell's way to say: ended by signal n. Nobody chose it.
    return Standing(Phase.ENDED, why, code, Infrastructure(why) if code > 128 else from_exit_code(code, why))


def _pending(pod: V1Pod, container: V1ContainerStatus | None) -> Standing:
    name = pod.metadata.name
    waited = datetime.now(UTC) - pod.metadata.creation_timestamp
    waiting = container.state.waiting if container is not None and container.state else None
    fault: RefitError | None = None
    why = f"{name}: waits"
    if waiting is not None:
        why = f"{name}: {waiting.reason}: {waiting.message or ''}".rstrip(": ")
        if waiting.reason in BAD_PULLS and waited > timedelta(seconds=STUCK_SECONDS):
            fault = ImagePullFailed(why)
    else:
        scheduled = _condition(pod, "PodScheduled")
        if scheduled is not None and scheduled.status == "False":
            why = f"{name}: {scheduled.message or scheduled.reason}"
            queued = pods.QUEUE_LABEL in (pod.metadata.labels or {})  # in Kueue's queue a pod may wait for days
            if waited > timedelta(seconds=STUCK_SECONDS) and not queued:
                fault = Unschedulable(why)
    return Standing(Phase.ENDED if fault else Phase.WAITING, why, None, fault)


def _waiting(pod: V1Pod) -> bool:
    return bool(pod.status.phase == "Pending")


def _condition(pod: V1Pod, kind: str) -> Any:
    return next((condition for condition in pod.status.conditions or [] if condition.type == kind), None)


def _typed(error: Any) -> RefitError:
    """An error of the API server: what a person must change is bad input, the rest is waited for."""
    from refit.errors import BadInput

    text = f"the cluster says {error.status}: {error.reason}: {str(error.body)[:300]}"
    return BadInput(text) if error.status in (400, 403, 422) else ServerUnavailable(text)
