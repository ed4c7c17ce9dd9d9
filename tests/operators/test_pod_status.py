"""A pod's own status, before any log or result, says what became of a job; each kind of end has its own error."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from kubernetes import client as k8s

from operators import pods
from operators.backends import Phase
from operators.backends.kubernetes import STUCK_SECONDS, KubernetesBackend, _standing
from operators.errors import Evicted, ImagePullFailed, OutOfMemory, PodDeleted, Unschedulable
from refit.errors import BadInput, Diverged, Infrastructure, NodeLost, Preempted


def pod(phase: str, *, age: float = 1.0, deleted: bool = False, labels: dict[str, str] | None = None,
        container: k8s.V1ContainerState | None = None, **status: Any) -> k8s.V1Pod:  # fmt: skip
    now = datetime.now(UTC)
    statuses = [
        k8s.V1ContainerStatus(image="i", image_id="", name="base", ready=False, restart_count=0, state=container)
    ]
    return k8s.V1Pod(
        metadata=k8s.V1ObjectMeta(
            name="p", labels=labels, creation_timestamp=now - timedelta(seconds=age),
            deletion_timestamp=now if deleted else None,
        ),
        spec=k8s.V1PodSpec(containers=[], node_name="node-1"),
        status=k8s.V1PodStatus(phase=phase, container_statuses=statuses if container else None, **status),
    )  # fmt: skip


def ended(code: int, reason: str = "Error", message: str | None = None) -> k8s.V1ContainerState:
    return k8s.V1ContainerState(
        terminated=k8s.V1ContainerStateTerminated(exit_code=code, reason=reason, message=message)
    )


def waiting(reason: str) -> k8s.V1ContainerState:
    return k8s.V1ContainerState(waiting=k8s.V1ContainerStateWaiting(reason=reason, message="so it says"))


def condition(kind: str, status: str, **more: str) -> list[k8s.V1PodCondition]:
    return [k8s.V1PodCondition(type=kind, status=status, **more)]


RUNNING = k8s.V1ContainerState(running=k8s.V1ContainerStateRunning())
LONG = STUCK_SECONDS + 1


@pytest.mark.parametrize(
    ("found", "error"),
    [
        (partial(pod, "Failed", container=ended(10, message="line.yaml: weights sum to 0")), BadInput),
        (partial(pod, "Failed", container=ended(12)), Diverged),
        (partial(pod, "Failed", container=ended(20)), Preempted),
        (partial(pod, "Failed", container=ended(1)), Infrastructure),
        (partial(pod, "Failed", container=ended(137)), Infrastructure),
        (partial(pod, "Failed", container=ended(137, "OOMKilled")), OutOfMemory),
        (partial(pod, "Failed", reason="Evicted", message="The node was low on memory"), Evicted),
        (partial(pod, "Running", container=RUNNING,
             conditions=condition("DisruptionTarget", "True", reason="PreemptionByScheduler")), Evicted),
        (partial(pod, "Failed", container=ended(137, "ContainerStatusUnknown")), NodeLost),
        (partial(pod, "Failed", reason="NodeLost"), NodeLost),
        (partial(pod, "Running", container=RUNNING, deleted=True), PodDeleted),
        (partial(pod, "Failed", reason="DeadlineExceeded"), Infrastructure),
        (partial(pod, "Pending", container=waiting("ImagePullBackOff"), age=LONG), ImagePullFailed),
        (partial(pod, "Pending", conditions=condition("PodScheduled", "False", message="0/4 nodes"), age=LONG),
         Unschedulable),
    ],
)  # fmt: skip
def test_every_end_has_its_own_error(found: Callable[[], k8s.V1Pod], error: type[Exception]) -> None:
    standing = _standing(found())
    assert standing.phase is Phase.ENDED
    assert type(standing.fault) is error
    assert standing.why


@pytest.mark.parametrize(
    ("found", "phase"),
    [
        (partial(pod, "Succeeded", container=ended(0, "Completed")), Phase.ENDED),
        (partial(pod, "Running", container=RUNNING), Phase.RUNNING),
        (partial(pod, "Pending"), Phase.WAITING),
        (partial(pod, "Pending", container=waiting("ContainerCreating"), age=LONG), Phase.WAITING),
        (partial(pod, "Pending", container=waiting("ImagePullBackOff")), Phase.WAITING),
        (partial(pod, "Pending", conditions=condition("PodScheduled", "False", message="queued"), age=LONG,
             labels={pods.QUEUE_LABEL: "research"}), Phase.WAITING),
    ],
)  # fmt: skip
def test_what_is_no_fault_is_none(found: Callable[[], k8s.V1Pod], phase: Phase) -> None:
    standing = _standing(found())
    assert standing.phase is phase
    assert standing.fault is None


def test_a_pod_that_finished_and_is_being_deleted_has_finished() -> None:
    """With its grace period over, a finished pod is deleted too: its exit code counts, not its going."""
    assert _standing(pod("Running", container=ended(0, "Completed"), deleted=True)).exit_code == 0


def test_the_last_lines_of_a_pod_are_its_reason() -> None:
    standing = _standing(pod("Failed", container=ended(10, message="a\nline.yaml: weights sum to 0")))
    assert "weights sum to 0" in standing.why


def test_a_pod_s_host_name_leads_to_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Indexed Job's pods have host names of their own; a node's name is what an affinity needs."""
    first, second = pod("Running"), pod("Running")
    first.metadata.name, second.metadata.name = "refit-job-1-0-x7k2p", "refit-job-1-1-9qz4d"
    first.spec.hostname, second.spec.hostname = "refit-job-1-0", "refit-job-1-1"
    second.spec.node_name = "node-2"
    backend = KubernetesBackend()
    monkeypatch.setattr(backend, "_pods", lambda _: [first, second])
    assert backend.node_of("file:///o", "refit-job-1-1") == "node-2"
    assert backend.node_of("file:///o", "refit-job-1-0-x7k2p") == "node-1"
    assert backend.node_of("file:///o", "elsewhere") is None
