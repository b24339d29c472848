"""What the pods of a job have in common: the restricted Pod Security profile, resources, where they may run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlightning.api.models import HeadSpec, PoolSpec, ResourcesSpec, RLJobSpec
from rlightning_operator.reconcile.snapshot import OperatorConfig

USER = 10001  # of the trainer image; the claim's files get this group
GPU = "nvidia.com/gpu"
TMP = {"name": "tmp", "mountPath": "/tmp"}

# A dead node's pods are given up after half a minute instead of Kubernetes' five: a job waits for each of its members.
_NODE_TOLERATIONS = [
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    for taint in ("not-ready", "unreachable")
]


def pod_spec(
    spec: RLJobSpec,
    place: HeadSpec | PoolSpec,
    container: dict[str, Any],
    *,
    volumes: Sequence[dict[str, Any]] = (),
    grace_seconds: int = 10,
) -> dict[str, Any]:
    """A pod with one container, restricted Pod Security, a writable ``/tmp`` and no API token.

    Ray ends within seconds of a SIGTERM. KubeRay's init container does not hear one, and holds its pod, and the pod its
    device, for the whole of ``grace_seconds`` if the job is taken back while it starts.
    """
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            # Or a claim with many files is walked through at each start of the head.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **({"imagePullSecrets": [s.to_dict() for s in spec.image_pull_secrets]} if spec.image_pull_secrets else {}),
        **({"nodeSelector": dict(place.node_selector)} if place.node_selector else {}),
        "tolerations": [*(t.to_dict() for t in place.tolerations), *_NODE_TOLERATIONS],
        "containers": [container],
        "volumes": [{"name": TMP["name"], "emptyDir": {}}, *volumes],
    }


def container(
    name: str,
    spec: RLJobSpec,
    config: OperatorConfig,
    resources: dict[str, Any],
    *,
    env: Sequence[dict[str, Any]] = (),
    mounts: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """A container without privileges, whose only writable places are the mounts."""
    return {
        "name": name,
        "image": spec.image or config.trainer_image,
        "imagePullPolicy": spec.image_pull_policy or config.image_pull_policy,
        # HOME: the image's own is on the root file system, which is read-only.
        "env": [variable("HOME", "/tmp"), variable("PYTHONUNBUFFERED", "1"), *env],
        "resources": resources,
        "volumeMounts": [TMP, *mounts],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
        },
    }


def resources(wanted: ResourcesSpec, gpus: int = 0) -> dict[str, Any]:
    """Requests and limits. No limit on the processor: throttling costs more than a neighbour does."""
    devices = {GPU: str(gpus)} if gpus else {}
    memory = {"memory": str(wanted.memory)}
    return {"requests": {"cpu": str(wanted.cpu), **memory, **devices}, "limits": {**memory, **devices}}


def variable(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "value": value}


def from_field(name: str, path: str) -> dict[str, Any]:
    """A variable from the downward API."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
