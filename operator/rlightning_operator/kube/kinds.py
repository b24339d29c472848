"""The kinds of object that the operator reads or writes: their paths, and what of them is kept in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlightning.api.models import GROUP, VERSION

Object = dict[str, Any]

JOB_LABEL = f"{GROUP}/job"


@dataclass(frozen=True)
class Kind:
    """One kind of object.

    Attributes:
        group: "" is Kubernetes' core group.
        of_jobs: its objects belong to jobs, by the label ``rlightning.io/job``: others are not even listed.
    """

    name: str
    group: str
    version: str
    plural: str
    namespaced: bool = True
    of_jobs: bool = False

    @property
    def selector(self) -> str:
        """The label selector of lists and watches."""
        return JOB_LABEL if self.of_jobs else ""

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """``/api/v1/namespaces/a/pods/b``; without a namespace, all namespaces."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if namespace is not None and self.namespaced:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part is not None]
        return "/" + "/".join(parts)


RLJOB = Kind("RLJob", GROUP, VERSION, "rljobs")
POLICY_GROUP = Kind("PolicyGroup", GROUP, VERSION, "policygroups")
RAY_CLUSTER = Kind("RayCluster", "ray.io", "v1", "rayclusters", of_jobs=True)
POD = Kind("Pod", "", "v1", "pods", of_jobs=True)
JOB = Kind("Job", "batch", "v1", "jobs", of_jobs=True)
SERVICE_ACCOUNT = Kind("ServiceAccount", "", "v1", "serviceaccounts", of_jobs=True)
ROLE = Kind("Role", "rbac.authorization.k8s.io", "v1", "roles", of_jobs=True)
ROLE_BINDING = Kind("RoleBinding", "rbac.authorization.k8s.io", "v1", "rolebindings", of_jobs=True)
NETWORK_POLICY = Kind("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies", of_jobs=True)
CLAIM = Kind("PersistentVolumeClaim", "", "v1", "persistentvolumeclaims")
NODE = Kind("Node", "", "v1", "nodes", namespaced=False)
EVENT = Kind("Event", "", "v1", "events")
ENDPOINT_SLICE = Kind("EndpointSlice", "discovery.k8s.io", "v1", "endpointslices")

KINDS = {kind.name: kind for kind in list(globals().values()) if isinstance(kind, Kind)}
OTHERS = (SERVICE_ACCOUNT, ROLE, ROLE_BINDING, NETWORK_POLICY)


def trimmed(kind: Kind, obj: Object) -> Object:
    """What is worth memory: everything but bookkeeping; of claims and nodes, which are many, only what is looked at."""
    narrow = _NARROW.get(kind.name)
    if narrow is not None:
        obj = narrow(obj)
    metadata = {name: value for name, value in obj.get("metadata", {}).items() if name != "managedFields"}
    annotations = metadata.get("annotations")
    if annotations and _LAST_APPLIED in annotations:
        metadata["annotations"] = {name: value for name, value in annotations.items() if name != _LAST_APPLIED}
    # Items of a list come without kind and apiVersion.
    api_version = f"{kind.group}/{kind.version}" if kind.group else kind.version
    return {**obj, "apiVersion": api_version, "kind": kind.name, "metadata": metadata}


_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def _claim(obj: Object) -> Object:
    spec = {name: obj.get("spec", {}).get(name) for name in ("accessModes", "storageClassName", "volumeName")}
    spec = {name: value for name, value in spec.items() if value is not None}
    return {"metadata": obj["metadata"], "spec": spec, "status": obj.get("status", {})}


def _node(obj: Object) -> Object:
    metadata = {name: obj["metadata"].get(name) for name in ("name", "uid", "resourceVersion", "labels")}
    spec = {name: value for name, value in obj.get("spec", {}).items() if name in ("taints", "unschedulable")}
    conditions = [
        {name: condition.get(name) for name in ("type", "status", "reason", "message")}  # without the heartbeat
        for condition in obj.get("status", {}).get("conditions", ())
        if condition.get("type") == "Ready"
    ]
    status = {"allocatable": obj.get("status", {}).get("allocatable", {}), "conditions": conditions}
    return {"metadata": metadata, "spec": spec, "status": status}


_NARROW: dict[str, Callable[[Object], Object]] = {"PersistentVolumeClaim": _claim, "Node": _node}
