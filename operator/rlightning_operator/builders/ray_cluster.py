"""The RayCluster: a head, where the driver runs, and one worker group for each pool, where the members live.

KubeRay adds the command, the ports' services, ``/dev/shm`` and the authentication token; what it makes of these
fields is in its ``controllers/ray/common/pod.go``.
"""

from __future__ import annotations

import json
from typing import Any

from rlightning.api.models import PoolSpec, RLJobSpec
from rlightning.api.resolve import spec_hash
from rlightning_operator.builders import pods
from rlightning_operator.builders.names import (
    COMPONENT_LABEL,
    DASHBOARD_PORT,
    HEAD_CONTAINER,
    METRICS_PORT,
    RUNS_MOUNT,
    SPEC_HASH_ANNOTATION,
    WORKER_CONTAINER,
    Component,
    Identity,
    pool_resource,
)
from rlightning_operator.reconcile.snapshot import Object, OperatorConfig


def ray_cluster(identity: Identity, spec: RLJobSpec, name: str, config: OperatorConfig) -> Object:
    """The RayCluster ``name``. Its size is fixed: replicas = minReplicas = maxReplicas."""
    meta = identity.meta(name)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {**meta, "annotations": {SPEC_HASH_ANNOTATION: spec_hash(spec)}},
        "spec": {
            "rayVersion": config.ray_version,
            # "token" in full: with an empty mode KubeRay makes the Secret and lets everybody in.
            "authOptions": {"mode": "token"},
            "headGroupSpec": {
                "rayStartParams": {"dashboard-host": "0.0.0.0"},
                "template": _template(identity, "head", _head(identity, spec, config)),
            },
            "workerGroupSpecs": [_worker_group(identity, spec, pool, config) for pool in spec.pools],
        },
    }


def _head(identity: Identity, spec: RLJobSpec, config: OperatorConfig) -> dict[str, Any]:
    """The head's pod: the only one with the job's token, and the only one that mounts the claim."""
    ray = pods.container(
        HEAD_CONTAINER,
        spec,
        config,
        pods.resources(spec.head.resources),
        env=[
            *_ray_environment(spec),
            pods.from_field("RLIGHTNING_POD_NAME", "metadata.name"),
            pods.from_field("RLIGHTNING_POD_UID", "metadata.uid"),
        ],
        mounts=[{"name": "runs", "mountPath": RUNS_MOUNT}],
    )
    # KubeRay copies these into the head's service, and looks there for one named "dashboard".
    ray["ports"] = [
        {"name": "gcs", "containerPort": 6379},
        {"name": "dashboard", "containerPort": DASHBOARD_PORT},
        {"name": "client", "containerPort": 10001},
        {"name": "metrics", "containerPort": METRICS_PORT},
    ]
    claim = spec.checkpoints.claim_name
    runs = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
    pod = pods.pod_spec(spec, spec.head, ray, volumes=[{"name": "runs", **runs}])
    return pod | {"serviceAccountName": identity.access, "automountServiceAccountToken": True}


def _worker_group(identity: Identity, spec: RLJobSpec, pool: PoolSpec, config: OperatorConfig) -> dict[str, Any]:
    ray = pods.container(
        WORKER_CONTAINER,
        spec,
        config,
        pods.resources(pool.resources, pool.gpus_per_replica),
        env=_ray_environment(spec),
    )
    places = json.dumps({pool_resource(pool.name): pool.members_per_replica})
    return {
        "groupName": pool.name,
        "replicas": pool.replicas,
        "minReplicas": pool.replicas,
        "maxReplicas": pool.replicas,
        # Quoted twice: KubeRay pastes the value into a shell's command line as it is.
        "rayStartParams": {"resources": json.dumps(places)},
        "template": _template(identity, "worker", pods.pod_spec(spec, pool, ray)),
    }


def _template(identity: Identity, component: Component, pod: dict[str, Any]) -> dict[str, Any]:
    # KubeRay puts its own app.kubernetes.io/name and created-by beside these.
    return {"metadata": {"labels": identity.labels() | {COMPONENT_LABEL: component}}, "spec": pod}


def _ray_environment(spec: RLJobSpec) -> list[dict[str, Any]]:
    threads = str(spec.training.threads)
    return [
        pods.variable("RAY_USAGE_STATS_ENABLED", "0"),
        # Ray's coming default: without it every Ray process without a device warns.
        pods.variable("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"),
        # A node that starts on a busy machine, or reads its image for the first time, takes longer than Ray's 30 s; it
        # would exit, and be started again, which makes the machine busier.
        pods.variable("RAY_raylet_start_wait_time_s", "120"),
        # How long a worker waits for a head that is gone before it exits and joins the next one (Ray: 60 s). Nothing
        # is lost by leaving early: without its head the attempt is over.
        pods.variable("RAY_gcs_rpc_server_reconnect_timeout_s", "20"),
        # Part of the numerics key. Ray would choose a number of its own where this is not set.
        *(pods.variable(f"{library}_NUM_THREADS", threads) for library in ("OMP", "MKL", "OPENBLAS")),
    ]
