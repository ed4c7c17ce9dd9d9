"""What a job's pod looks like: image, environment, cards, queue, place. The rest is KubernetesPodOperator's.

What differs from cluster to cluster (volumes, tolerations, registry secrets) belongs in a pod template file that
REFIT_POD_TEMPLATE names; it is merged below what is said here.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from kubernetes import client as k8s

from operators import nodes
from refit import fingerprint
from refit.job import Job

if TYPE_CHECKING:
    from operators.job import JobOperator

JOB_LABEL, PIPELINE_LABEL, KIND_LABEL, TEAM_LABEL = "refit/job", "refit/pipeline", "refit/kind", "refit/team"
OUTPUT_ANNOTATION = "refit/output"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
TOPOLOGY_ANNOTATION = "kueue.x-k8s.io/podset-preferred-topology"
RACK = "topology.refit/rack"
"""Ranks talk all the time: Kueue is asked to keep a job's pods in one rack if it can."""

GPU = "nvidia.com/gpu"
TRAINING = ("preflight", "trial", "smoke", "train", "early")

STOP_SECONDS = 20
"""How long a job without a checkpoint to write gets to end by itself."""

SHARED_MEMORY = "16Gi"
"""/dev/shm of a training pod: the 64 MiB of a container are too few for NCCL and data loaders."""

SMALL = {"cpu": "1", "memory": "2Gi"}
"""What a job without cards asks for; a pod template may ask for more."""


def image(stage: str) -> str:
    """The image of a stage. REFIT_IMAGES is a pattern, as in `registry.example/refit-{stage}:1.4`."""
    return os.environ.get("REFIT_IMAGES", "refit/{stage}:latest").format(stage=stage)


def grace(job: Job) -> int:
    """Seconds that a job gets between being told to end and being killed: the same that its trainer reckons with."""
    return math.ceil(job.spec.train.checkpoint.grace_seconds) if job.kind in TRAINING else STOP_SECONDS


def namespace() -> str:
    """Where jobs run: REFIT_NAMESPACE."""
    return os.environ.get("REFIT_NAMESPACE") or "refit"


def name_of(output: str, kind: str = "job") -> str:
    """The name of a job's pod (or Job): it follows from the output, so that the API server itself refuses a second."""
    return f"refit-{kind}-{fingerprint.digest(output.rstrip('/'))[:20]}"


def dress(operator: JobOperator, job: Job) -> None:
    """Set what KubernetesPodOperator builds a pod from, for this job."""
    train = job.spec.train
    training = job.kind in TRAINING
    operator.name = name_of(job.output)
    operator.random_name_suffix = False
    operator.pod_template_file = os.environ.get("REFIT_POD_TEMPLATE") or operator.pod_template_file
    operator.labels = {
        **operator.labels, "app.kubernetes.io/name": "refit", "app.kubernetes.io/component": operator.stage,
        JOB_LABEL: name_of(job.output), PIPELINE_LABEL: job.pipeline, KIND_LABEL: job.kind, TEAM_LABEL: job.team,
        **({QUEUE_LABEL: train.queue} if training else {}),
    }  # fmt: skip
    operator.annotations = {
        **operator.annotations, OUTPUT_ANNOTATION: job.output,
        **({TOPOLOGY_ANNOTATION: RACK} if training and train.nodes > 1 else {}),
    }  # fmt: skip
    operator.env_vars = [
        k8s.V1EnvVar(name="REFIT_JOB", value=job.uri),
        k8s.V1EnvVar(name="REFIT_STORE", value=job.store),
        k8s.V1EnvVar(name="REFIT_IMAGE", value=str(operator.image)),  # a preflight compares it over the nodes
        k8s.V1EnvVar(name="PYTHONUNBUFFERED", value="1"),
        *operator.env_vars,
    ]
    cards = {GPU: str(train.gpus_per_node)} if training and train.gpus_per_node else {}
    operator.container_resources = operator.container_resources or k8s.V1ResourceRequirements(
        requests={**SMALL, **cards}, limits=cards or None
    )
    operator.container_security_context = operator.container_security_context or k8s.V1SecurityContext(
        allow_privilege_escalation=False, capabilities=k8s.V1Capabilities(drop=["ALL"])
    )
    avoided = nodes.quarantined() if training else []
    if avoided and not operator.affinity:
        operator.affinity = nodes.elsewhere(avoided)
    operator.automount_service_account_token = False  # a job needs the store, and nothing of the cluster
    # The last lines of a job that could not even write its events become the pod's own reason.
    operator.termination_message_policy = "FallbackToLogsOnError"
    if training:
        operator.termination_grace_period = grace(job)  # to write its checkpoint
        operator.volumes = [*operator.volumes, k8s.V1Volume(name="shm", empty_dir=k8s.V1EmptyDirVolumeSource(
            medium="Memory", size_limit=SHARED_MEMORY))]  # fmt: skip
        operator.volume_mounts = [*operator.volume_mounts, k8s.V1VolumeMount(name="shm", mount_path="/dev/shm")]


def indexed_job(pod: k8s.V1Pod, nodes: int) -> k8s.V1Job:
    """A pod as an Indexed Job of several nodes; each finds the first by name through the headless Service."""
    meta = pod.metadata
    pod.spec.subdomain = meta.name
    pod.spec.containers[0].env.extend(
        [
            k8s.V1EnvVar(name="REFIT_NODES", value=str(nodes)),
            k8s.V1EnvVar(name="REFIT_MASTER", value=f"{meta.name}-0.{meta.name}"),
        ]
    )
    each = k8s.V1ObjectMeta(labels=meta.labels, annotations=meta.annotations)
    return k8s.V1Job(
        api_version="batch/v1",
        kind="Job",
        metadata=k8s.V1ObjectMeta(
            name=meta.name, namespace=meta.namespace, labels=meta.labels, annotations=meta.annotations
        ),
        spec=k8s.V1JobSpec(
            completion_mode="Indexed",
            completions=nodes,
            parallelism=nodes,
            backoff_limit=0,  # one rank gone is all ranks gone: the retry is Airflow's, from the checkpoint
            template=k8s.V1PodTemplateSpec(metadata=each, spec=pod.spec),
        ),
    )


def headless_service(job: k8s.V1Job) -> k8s.V1Service:
    """The names by which a Job's pods find each other, also before they are ready."""
    return k8s.V1Service(
        api_version="v1",
        kind="Service",
        metadata=k8s.V1ObjectMeta(name=job.metadata.name, namespace=job.metadata.namespace, labels=job.metadata.labels),
        spec=k8s.V1ServiceSpec(
            cluster_ip="None", publish_not_ready_addresses=True,
            selector={JOB_LABEL: job.metadata.labels[JOB_LABEL]},
        ),
    )  # fmt: skip
