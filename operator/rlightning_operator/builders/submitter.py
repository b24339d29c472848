"""The submitter: a Job that starts the attempt's driver through the Ray Jobs API and prints its log."""

from __future__ import annotations

import shlex

from rlightning.api.models import ResourcesSpec, RLJobSpec
from rlightning_operator.builders import names, pods
from rlightning_operator.builders.names import ATTEMPT_LABEL, DASHBOARD_PORT, RUNS_MOUNT, SUBMITTER_CONTAINER, Identity
from rlightning_operator.reconcile.snapshot import Object, OperatorConfig

# The exit codes that end the Job at once (the driver's own failure; a lost driver). Anything else, say a killed pod,
# gets a new pod, which finds the driver by its submission ID.
FINAL_EXIT_CODES = (1, 3)
BACKOFF_LIMIT = 6


def submitter(identity: Identity, spec: RLJobSpec, cluster: Object, attempt: int, config: OperatorConfig) -> Object:
    """The Job of one cluster and attempt.

    It has two owners: the cluster as its controller, so that Kueue takes it for part of the cluster; and the RLJob, so
    that it and its log outlive the cluster.
    """
    cluster_name = cluster["metadata"]["name"]
    name = names.submitter(cluster_name, attempt)
    labels = identity.labels("submitter") | {ATTEMPT_LABEL: str(attempt)}
    container = pods.container(
        SUBMITTER_CONTAINER,
        spec,
        config,
        pods.resources(ResourcesSpec(cpu="50m", memory="128Mi")),
        env=[
            {
                "name": "RAY_AUTH_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": cluster_name, "key": "auth_token"}},
            }
        ],
    )
    container["command"] = [
        *("python", "-m", "rlightning.runtime.cluster.submitter"),
        *("--address", f"http://{cluster_name}-head-svc.{identity.namespace}.svc:{DASHBOARD_PORT}"),
        *("--submission-id", names.submission(identity.uid, attempt)),
        *("--entrypoint", shlex.join(driver_command(identity, attempt))),
    ]
    # Where a head may run, there the submitter may: a cluster may have no node without a taint.
    pod = pods.pod_spec(spec, spec.head, container, grace_seconds=5) | {"restartPolicy": "Never"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": identity.namespace,
            "labels": labels,
            "ownerReferences": [
                {
                    "apiVersion": "ray.io/v1",
                    "kind": "RayCluster",
                    "name": cluster_name,
                    "uid": cluster["metadata"]["uid"],
                    "controller": True,
                    "blockOwnerDeletion": False,
                },
                identity.owner(controller=False),
            ],
        },
        "spec": {
            "backoffLimit": BACKOFF_LIMIT,
            # Two submitters at once would do no harm, but print two logs.
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": SUBMITTER_CONTAINER,
                            "operator": "In",
                            "values": list(FINAL_EXIT_CODES),
                        },
                    },
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def driver_command(identity: Identity, attempt: int) -> list[str]:
    """What runs in the head pod."""
    return [
        *("python", "-m", "rlightning.runtime.cluster.driver"),
        *("--namespace", identity.namespace),
        *("--group", identity.name),
        *("--job-uid", identity.uid),
        *("--attempt", str(attempt)),
        *("--run-dir", f"{RUNS_MOUNT}/{identity.run_path}"),
    ]
