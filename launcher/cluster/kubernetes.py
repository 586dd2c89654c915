"""Kubernetes manifest of a run: one pod per node, which starts `launch --no_ssh` with its own node rank.

PyTorchJob is kubeflow.org/v1 (Training Operator), JobSet is jobset.x-k8s.io/v1alpha2. The output is JSON,
which is valid YAML.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.cluster.join import TOKEN

Object = dict[str, Any]
CONFIG_DIRECTORY, CONFIG_FILE = "/etc/launch", "ds_config.json"
PORT = 29500
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
"""Where Kubernetes stores the index of a pod of an indexed Job."""


@dataclass(frozen=True)
class PodOptions:
    """The options shared by all pods of a run."""

    name: str
    image: str
    nodes: int
    flags: Sequence[str]
    """The flags of `launch`, except for the configuration and the flags that identify the node of a pod."""
    recipe: Sequence[str]
    """The recipe and its flags."""
    gpus: int = 0
    """Devices per pod."""
    config: str | None = None
    """Text of the JSON configuration."""
    namespace: str | None = None
    environment: Mapping[str, str] | None = None
    secrets: Mapping[str, tuple[str, str]] | None = None
    """Variables whose values are stored in a Secret, as (name of the Secret, key)."""
    token_secret: str | None = None
    """A Secret whose key `token` becomes LAUNCHER_TOKEN."""
    shared_memory: str | None = None
    """Size limit of /dev/shm, in Kubernetes notation; None: limited only by the pod's memory."""
    claims: Mapping[str, str] | None = None
    """PersistentVolumeClaim -> mount path."""
    restarts: int = 0
    """How often a failed pod is restarted."""
    run_key: str | None = None
    """Identifies the run, so that a restarted pod recognizes the run's own checkpoints."""
    first_decides: bool = False
    """The run is over when node 0 has ended, regardless of the others."""
    grace_s: float = 0.0
    """Seconds between SIGTERM and the end of a pod, in addition to Kubernetes' own 30 s."""


@dataclass(frozen=True)
class WorkloadKind:
    """A kind of Kubernetes object that starts several pods."""

    build: Callable[[PodOptions], Object]
    node_rank: str
    """The index of a pod, as its arguments refer to it."""
    first: str
    """The DNS name of node 0 in the cluster."""
    container: str
    port: str
    variables: Sequence[Object] = ()


def manifest(kind: str, pods: PodOptions) -> str:
    """Return the text for `kubectl apply -f -`: the configuration, if any, and the run."""
    items = [KINDS[kind].build(pods)]
    if pods.config is not None:
        metadata = _metadata(pods, f"{pods.name}-config")
        data = {CONFIG_FILE: pods.config}
        items.insert(0, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2, ensure_ascii=False)


def _pytorch_job(pods: PodOptions) -> Object:
    def replicas(count: int) -> Object:
        policy = _restart_policy(pods)
        return {
            "replicas": count,
            "restartPolicy": policy,
            "template": {"spec": _pod(KINDS["pytorchjob"], pods)},
        }

    specs = {"Master": replicas(1)} | ({"Worker": replicas(pods.nodes - 1)} if pods.nodes > 1 else {})
    policy = {"cleanPodPolicy": "None", "backoffLimit": pods.restarts}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(pods, pods.name),
        "spec": {"runPolicy": policy, "pytorchReplicaSpecs": specs},
    }


def _job_set(pods: PodOptions) -> Object:
    job = {
        "completionMode": "Indexed",
        "parallelism": pods.nodes,
        "completions": pods.nodes,
        "backoffLimit": pods.restarts,
        "template": {"spec": {**_pod(KINDS["jobset"], pods), "restartPolicy": _restart_policy(pods)}},
    }
    if pods.first_decides:
        job["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(pods, pods.name),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": pods.name},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        },
    }


KINDS = {
    "pytorchjob": WorkloadKind(
        _pytorch_job,
        # The operator numbers the pods in RANK, starting with the master.
        *("$(RANK)", "{name}-master-0", "pytorch", "pytorchjob-port"),
    ),
    "jobset": WorkloadKind(
        _job_set,
        *("$(LAUNCH_NODE)", "{name}-node-0-0.{name}", "launch", "launch"),
        [{"name": "LAUNCH_NODE", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}],
    ),
}


def _metadata(pods: PodOptions, name: str) -> Object:
    return {"name": name} | ({"namespace": pods.namespace} if pods.namespace else {})


def _restart_policy(pods: PodOptions) -> str:
    return "OnFailure" if pods.restarts else "Never"


def _pod(kind: WorkloadKind, pods: PodOptions) -> Object:
    """Return the specification of a pod, without its restart policy."""
    shared = {"medium": "Memory"} | ({"sizeLimit": pods.shared_memory} if pods.shared_memory else {})
    volumes: list[Object] = [{"name": "shm", "emptyDir": shared}]
    mounts: list[Object] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if pods.config is not None:
        volumes.append({"name": "config", "configMap": {"name": f"{pods.name}-config"}})
        mounts.append({"name": "config", "mountPath": CONFIG_DIRECTORY, "readOnly": True})
    for claim, path in (pods.claims or {}).items():
        volumes.append({"name": f"claim-{claim}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"claim-{claim}", "mountPath": path})
    container: Object = {
        "name": kind.container,
        "image": pods.image,
        "command": ["launch"],
        "args": _arguments(kind, pods),
        "env": _variables(kind, pods),
        "ports": [{"name": kind.port, "containerPort": PORT}],
        "volumeMounts": mounts,
    }
    if pods.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(pods.gpus)}}
    grace = {"terminationGracePeriodSeconds": 30 + round(pods.grace_s)} if pods.grace_s else {}
    return {"containers": [container], "volumes": volumes, **grace}


def _arguments(kind: WorkloadKind, pods: PodOptions) -> list[str]:
    place = {
        "--num_nodes": str(pods.nodes),
        "--node_rank": kind.node_rank,
        "--master_addr": kind.first.format(name=pods.name),
        "--master_port": str(PORT),
    }
    config = ["--config", f"{CONFIG_DIRECTORY}/{CONFIG_FILE}"] if pods.config is not None else []
    said = [text for pair in place.items() for text in pair]
    return ["--no_ssh", *said, *map(_plain, pods.flags), *config, *map(_plain, pods.recipe)]


def _variables(kind: WorkloadKind, pods: PodOptions) -> list[Object]:
    found = [*kind.variables]
    if pods.run_key:
        found.append({"name": "LAUNCHER_RUN_KEY", "value": pods.run_key})
    found += [{"name": name, "value": _plain(value)} for name, value in (pods.environment or {}).items()]
    token = {TOKEN: (pods.token_secret, "token")} if pods.token_secret else {}
    for name, (secret, key) in {**(pods.secrets or {}), **token}.items():
        found.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return found


def _plain(text: str) -> str:
    """Escape what Kubernetes would expand: it replaces $(NAME) by a variable and $$ by $."""
    return text.replace("$", "$$")
