"""Names, labels and owners of a job's objects: one place, because reconciler, driver, chart and tests rely on them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlightning.api.models import API_VERSION

JOB_LABEL = "rlightning.io/job"
JOB_UID_LABEL = "rlightning.io/job-uid"
COMPONENT_LABEL = "rlightning.io/component"
ATTEMPT_LABEL = "rlightning.io/attempt"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "rlightning"
SPEC_HASH_ANNOTATION = "rlightning.io/spec-hash"
CONTENT_HASH_ANNOTATION = "rlightning.io/content-hash"

HEAD_CONTAINER = "ray-head"
WORKER_CONTAINER = "ray-worker"
SUBMITTER_CONTAINER = "submitter"
RUNS_MOUNT = "/runs"
DASHBOARD_PORT = 8265
METRICS_PORT = 8080  # KubeRay starts Ray with --metrics-export-port=8080

Component = Literal["head", "worker", "submitter"]


@dataclass(frozen=True)
class Identity:
    """Which job an object is made for."""

    name: str
    namespace: str
    uid: str

    @staticmethod
    def of(job: Mapping[str, Any]) -> Identity:
        meta = job["metadata"]
        return Identity(meta["name"], meta["namespace"], meta["uid"])

    @property
    def access(self) -> str:
        """Name of the ServiceAccount, Role and RoleBinding."""
        return f"rlj-{self.name}"

    @property
    def run_path(self) -> str:
        """Folder of the run on the claim. The uid is in it, so that a later job of the same name starts anew."""
        return f"{self.namespace}/{self.name}-{self.uid[:8]}"

    def cluster(self, number: int) -> str:
        """Name of the job's ``number``-th RayCluster.

        Never used twice: KubeRay would adopt the authentication Secret that an earlier cluster of the name left.
        """
        return f"{self.name}-{self.uid[:4]}-{number}"

    def cluster_number(self, cluster: str) -> int | None:
        """The inverse of :meth:`cluster`; None for a name that is not one of this job's."""
        prefix = f"{self.name}-{self.uid[:4]}-"
        rest = cluster.removeprefix(prefix)
        return int(rest) if cluster.startswith(prefix) and rest.isascii() and rest.isdigit() else None

    def labels(self, component: Component | None = None) -> dict[str, str]:
        labels = {JOB_LABEL: self.name, JOB_UID_LABEL: self.uid, MANAGED_BY_LABEL: MANAGED_BY}
        return labels | ({COMPONENT_LABEL: component} if component else {})

    def owner(self, *, controller: bool = True) -> dict[str, Any]:
        """The ownerReference to the RLJob. Nothing blocks its deletion: what is left is collected afterwards."""
        return {
            "apiVersion": API_VERSION,
            "kind": "RLJob",
            "name": self.name,
            "uid": self.uid,
            "controller": controller,
            "blockOwnerDeletion": False,
        }

    def meta(self, name: str, content: object = None) -> dict[str, Any]:
        """Metadata of an object that the RLJob owns; with the hash of its content, where that may be written anew."""
        meta: dict[str, Any] = {
            "name": name,
            "namespace": self.namespace,
            "labels": self.labels(),
            "ownerReferences": [self.owner()],
        }
        if content is not None:
            text = json.dumps(content, sort_keys=True, separators=(",", ":"))
            meta["annotations"] = {CONTENT_HASH_ANNOTATION: hashlib.sha256(text.encode()).hexdigest()}
        return meta


def submitter(cluster: str, attempt: int) -> str:
    """Name of the submitter Job: one for each cluster and attempt."""
    return f"{cluster}-{attempt}"


def submission(uid: str, attempt: int) -> str:
    """Ray's submission ID. A second submitter of the attempt finds the first one's driver by it."""
    return f"{uid}-{attempt}"


def pool_resource(pool: str) -> str:
    """The custom resource that a pool's Ray nodes offer, as many of it as there are places for members."""
    return f"rlightning-pool-{pool}"
