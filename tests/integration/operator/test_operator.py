"""The operator process and a job, from an empty API server to a finished run, with the test in the driver's place."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from rlightning_operator.kube import kinds
from rlightning_operator.kube.kinds import Object
from tests.integration.operator.conftest import (
    STARTED,
    Operator,
    World,
    condition,
    count,
    job,
    objects,
    started,
    status_of,
)
from tests.support.api import Refused, Space
from tests.support.kube import eventually

pytestmark = pytest.mark.apiserver

DIGEST = "xxh3-128:" + "a" * 32


def test_a_start_before_the_crds_and_a_job_before_kuberay(world: World) -> None:
    """Nothing is restarted when a CRD comes: it is waited for."""
    impatient = world.operator("--startup-seconds", "0.5")
    impatient.start(ready=False)
    operator = world.operator()
    operator.start(ready=False)
    assert impatient.process is not None
    assert impatient.process.wait(30) == 1
    assert re.search(
        r"ERROR +these CustomResourceDefinitions are missing: rljobs\.rlightning\.io, policygroups\.rlightning\.io; "
        r"install the chart, or its CRDs, first \(waited 0\.5 s\)",
        impatient.text(),
    )
    eventually(lambda: operator.get("/healthz")[0] == 200, seconds=20, what="alive while it waits")
    told = world.operator()
    told.start(ready=False)
    eventually(lambda: "waiting: these Custom" in told.text(), seconds=20, what="another one waits")
    code, seconds = told.stop()
    assert (code, seconds < 4) == (0, True), f"SIGTERM while it waits: ended with {code} after {seconds:.1f} s"
    assert operator.get("/readyz") == (503, "waiting for the API server and the CRDs\n")
    world.install_ours()
    eventually(operator.ready, seconds=20, what="ready once the CRDs are there")

    space = Space.make(world.api, "before-kuberay")
    space.create(kinds.RLJOB, job())
    missing = eventually(
        lambda: condition(space, "ClusterReady") or None, seconds=10, what="the job says what it waits for"
    )
    assert (missing["status"], missing["reason"]) == ("False", "KubeRayMissing")
    time.sleep(4)  # over the time between two looks for the CRD
    lines, pid = len(operator.text().splitlines()), operator.pid

    world.install_kuberay()
    eventually(started(space), seconds=10, what="everything is made", now=lambda: str(count(space)))
    assert operator.ready() and operator.pid == pid
    eventually(lambda: space.events("cartpole") or None, seconds=5, what="an event says that it has started")
    assert operator.complaints() == []
    assert len([line for line in operator.text().splitlines() if "rayclusters are not watched" in line]) == 1
    assert lines < 25, f"no spam while it was missing\n{operator.text()}"
    space.delete(kinds.RLJOB, "cartpole")
    assert operator.stop()[0] == 0


@pytest.mark.slow
def test_a_job_from_its_start_to_its_end(healthy: World) -> None:
    space = Space.make(healthy.api, "whole")
    operator = healthy.operator()
    operator.start()
    space.create(kinds.RLJOB, job())
    eventually(started(space), seconds=10, what="everything is made", now=lambda: str(count(space)))
    (cluster,) = space.all(kinds.RAY_CLUSTER)
    stored = space.get(kinds.RLJOB, "cartpole")
    assert stored is not None
    assert cluster["metadata"]["name"] == stored["status"]["rayCluster"]
    for kind, made in objects(space).items():
        for one in made:
            owners = {owner["uid"] for owner in one["metadata"]["ownerReferences"]}
            assert stored["metadata"]["uid"] in owners, f"{kind.name} would be left behind"

    _puts_back_what_others_delete(space)
    _folds_what_the_driver_reports(space, cluster)
    _does_not_believe_everything(space)
    _stands_still(healthy, space, operator)
    _ends_with_the_outcome(space)

    metadata = (space.get(kinds.RLJOB, "cartpole") or {})["metadata"]
    assert "annotations" not in metadata and "finalizers" not in metadata, "the operator keeps nothing there"
    assert operator.complaints() == []
    code, seconds = operator.stop()
    assert (code, seconds < 4) == (0, True), f"ended with {code} after {seconds:.1f} s"


def _puts_back_what_others_delete(space: Space) -> None:
    gone = (kinds.SERVICE_ACCOUNT, kinds.ROLE, kinds.ROLE_BINDING, kinds.NETWORK_POLICY)
    before = {kind: space.all(kind, "rlightning.io/job")[0]["metadata"] for kind in gone}
    for kind, metadata in before.items():
        space.delete(kind, metadata["name"])
    eventually(started(space), seconds=10, what="they are back", now=lambda: str(count(space)))
    for kind, metadata in before.items():
        back = space.get(kind, metadata["name"])
        assert back is not None and back["metadata"]["uid"] != metadata["uid"], f"{kind.name} was gone"


def _folds_what_the_driver_reports(space: Space, cluster: Object) -> None:
    for component in ("head", "worker"):
        made = space.create(kinds.POD, pod(cluster, component))
        space.merge(kinds.POD, made["metadata"]["name"], running(made), "status")
    provisioned = {
        "type": "RayClusterProvisioned",
        "status": "True",
        "reason": "AllPodRunningAndReadyFirstTime",
        "message": "",
        "lastTransitionTime": now(),
    }
    ready = {"status": {"state": "ready", "conditions": [provisioned]}}
    space.merge(kinds.RAY_CLUSTER, cluster["metadata"]["name"], ready, "status")
    head = space.get(kinds.POD, f"{cluster['metadata']['name']}-head")
    assert head is not None
    report(space, head, 7)
    status = eventually(
        lambda: status_of(space) if status_of(space).get("progress", {}).get("iteration") == 7 else None,
        seconds=10,
        what="progress is folded",
        now=lambda: json.dumps(status_of(space), indent=1),
    )
    assert status["weights"]["version"] == 7
    assert status["evalReplicas"] == 2
    eventually(
        lambda: condition(space, "ClusterReady").get("status") == "True" and status_of(space)["state"] == "Running",
        seconds=10,
        what="it runs",
        now=lambda: json.dumps(status_of(space), indent=1),
    )
    assert condition(space, "WeightsConsistent")["status"] == "True"


def _does_not_believe_everything(space: Space) -> None:
    """Reports that are late, too large, of strangers, or that claim what their own digests do not show."""
    head = space.all(kinds.POD, "ray.io/node-type=head")[0]
    other = DIGEST.replace("a", "b")
    versions = [{"version": 8, "learnerDigest": DIGEST, "verified": 3, "total": 3}]
    believed = {"name": "eval-0", "role": "Eval", "state": "Ready", "version": 8, "digest": DIGEST}

    # Refused by the API server: a lower attempt, a lower version, a list beyond its bound.
    for changes in ({"attempt": 0}, {"version": 6, "versions": []}):
        with pytest.raises(Refused, match=r"cannot go below \(1, 7\)"):
            report(space, head, 7, **changes)
    crowd = [{**believed, "version": 7, "name": f"eval-{i}"} for i in range(273)]
    with pytest.raises(Refused, match=r"status\.members.* must have at most 272 items"):
        report(space, head, 7, members=crowd)
    assert status_of(space)["progress"]["iteration"] == 7

    # verified = total, and one member's own digest says otherwise.
    train = {**believed, "name": "train-0", "role": "Train"}
    report(
        space, head, 8, members=[train, believed, {**believed, "name": "eval-1", "digest": other}], versions=versions
    )
    denied = eventually(
        lambda: c if (c := condition(space, "WeightsConsistent")).get("status") == "False" else None,
        seconds=10,
        what="the wrong digest is seen",
    )
    assert denied["reason"] == "DigestsDiffer" and "eval-1" in denied["message"]
    assert status_of(space)["weights"]["consistentMembers"] == "1/2"

    # A member that nobody asked for: not counted, and said in an event.
    stranger = {**believed, "name": "eval-2", "digest": other}
    report(space, head, 8, members=[train, believed, {**believed, "name": "eval-1"}, stranger], versions=versions)
    agreed = eventually(
        lambda: c if (c := condition(space, "WeightsConsistent")).get("status") == "True" else None,
        seconds=10,
        what="the stranger is not counted",
    )
    assert agreed["reason"] == "DigestsAgree"
    assert status_of(space)["weights"]["consistentMembers"] == "2/2"
    eventually(
        lambda: any("ForeignMember" in event and "eval-2" in event for event in space.events("cartpole")),
        seconds=10,
        what="an event about the stranger",
    )
    report(space, head, 8, versions=versions)


def pod(cluster: Object, component: str) -> Object:
    """A pod of the job as KubeRay would make it, from the RayCluster's own template."""
    spec = cluster["spec"]
    group = spec["headGroupSpec"] if component == "head" else spec["workerGroupSpecs"][0]
    owner = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "name": cluster["metadata"]["name"],
        "uid": cluster["metadata"]["uid"],
        "controller": True,
    }
    return {
        "metadata": {
            "name": f"{cluster['metadata']['name']}-{component}",
            "labels": {
                **group["template"]["metadata"]["labels"],
                "ray.io/cluster": cluster["metadata"]["name"],
                "ray.io/node-type": component,
                "ray.io/group": "headgroup" if component == "head" else group["groupName"],
            },
            "ownerReferences": [owner],
        },
        "spec": {"containers": [{"name": f"ray-{component}", "image": "rlightning-trainer:dev"}]},
    }


def running(made: Object) -> Object:
    """What the kubelet says of a pod that runs."""
    state = {"ready": True, "started": True, "restartCount": 0, "image": "x", "imageID": "x"}
    name = made["spec"]["containers"][0]["name"]
    return {
        "status": {
            "phase": "Running",
            "conditions": [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Initialized", "Ready")],
            "containerStatuses": [{"name": name, **state, "state": {"running": {"startedAt": now()}}}],
        }
    }


def report(space: Space, head: Object, iteration: int, **more: Any) -> None:
    """A PolicyGroup's status as the driver of attempt 1 applies it."""
    members = [
        {"name": name, "role": role, "state": "Ready", "version": iteration, "digest": DIGEST}
        for name, role in (("train-0", "Train"), ("eval-0", "Eval"), ("eval-1", "Eval"))
    ]
    status = {
        "attempt": 1,
        "version": iteration,
        "driver": {"pod": head["metadata"]["name"], "podUID": head["metadata"]["uid"], "startTime": now()},
        "progress": {"iteration": iteration, "envSteps": iteration * 256, "lastReportTime": now()},
        "members": members,
        "versions": [{"version": iteration, "learnerDigest": DIGEST, "verified": 3, "total": 3}],
        **more,
    }
    space.apply(
        kinds.POLICY_GROUP, "cartpole", {"status": status}, manager="rlightning-driver", subresource="status"
    )  # fmt: skip


def now() -> str:
    """As Kubernetes writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _stands_still(world: World, space: Space, operator: Operator) -> None:
    """20 s without a write: seen by the proxy, through which kopf goes too, and by the versions of all objects."""
    eventually(
        lambda: world.proxy.seen() and not world.proxy.writes(time.monotonic() - 2),
        seconds=15,
        what="two quiet seconds",
    )
    versions = _versions(space)
    start = time.monotonic()
    time.sleep(20)
    assert world.proxy.writes(start) == []
    assert _versions(space) == versions
    assert operator.ready()
    assert operator.get("/healthz") == (200, "ok\n")
    resident = operator.resident()
    print(f"\nat rest with one job: {resident:.0f} MB resident, {len(world.proxy.seen(start))} reads in 20 s")
    assert resident < 150
    assert operator.metric("rlightning_operator_jobs") == 1


def _versions(space: Space) -> dict[str, str]:
    kept = (kinds.RLJOB, kinds.POD, kinds.EVENT, *STARTED)
    return {
        one["metadata"]["uid"]: one["metadata"]["resourceVersion"] for kind in kept for one in space.all(kind)
    }  # fmt: skip


def _ends_with_the_outcome(space: Space) -> None:
    head = space.all(kinds.POD, "ray.io/node-type=head")[0]
    checkpoint = {"path": "checkpoints/000042", "iteration": 42, "digest": DIGEST}
    outcome = {"state": "Succeeded", "reason": "TotalEnvStepsReached", "message": "done"}
    report(space, head, 42, outcome=outcome, checkpoint=checkpoint)
    eventually(
        lambda: condition(space, "Finished").get("status") == "True",
        seconds=10,
        what="it is finished",
        now=lambda: json.dumps(status_of(space), indent=1),
    )
    assert condition(space, "Succeeded")["status"] == "True"
    # No Job controller is here, so that the submitter never ends: the cluster waits for it for 20 s.
    eventually(lambda: space.all(kinds.RAY_CLUSTER) == [], seconds=30, what="the cluster is released")
    assert status_of(space)["progress"]["iteration"] == 42
    assert space.get(kinds.POLICY_GROUP, "cartpole") is not None


def test_jobs_that_are_deleted_at_once_leave_no_error(healthy: World) -> None:
    """What was made meanwhile is the garbage collector's, which a bare API server does not have."""
    space = Space.make(healthy.api, "short")
    operator = healthy.operator()
    operator.start()
    hit = 0
    for number, delay in enumerate((0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)):
        name = f"short-{number}"
        space.create(kinds.RLJOB, job(name))
        time.sleep(delay)
        space.delete(kinds.RLJOB, name)
        hit += not started(space, name)()
    assert hit >= 2, "some were deleted before all was made"
    quiet = time.monotonic()
    time.sleep(2)
    assert operator.complaints() == []
    assert healthy.proxy.writes(quiet + 1.0) == [], "nothing is done for a job that is gone"
    assert operator.metric("rlightning_operator_jobs") == 0


def test_a_namespace_that_is_being_deleted_is_no_error(healthy: World) -> None:
    space = Space.make(healthy.api, "ending")
    operator = healthy.operator()
    operator.start()
    # Without its controller the namespace stays Terminating: nothing can be made in it, and the job is there still.
    space.create(kinds.RLJOB, job())
    healthy.api.request("DELETE", "/api/v1/namespaces/ending")
    with pytest.raises(Refused, match="because it is being terminated"):
        space.create(kinds.SERVICE_ACCOUNT, {"metadata": {"name": "x"}})
    ending = time.monotonic()
    for account in space.all(kinds.SERVICE_ACCOUNT):
        space.delete(kinds.SERVICE_ACCOUNT, account["metadata"]["name"])
    space.merge(kinds.RLJOB, "cartpole", {"metadata": {"annotations": {"touched": "1"}}})
    refused = "POST /api/v1/namespaces/ending/"
    eventually(
        lambda: any(write.startswith(refused) for write in healthy.proxy.writes(ending)), seconds=10, what="it tried"
    )  # fmt: skip
    time.sleep(1)
    assert operator.complaints() == []
    assert operator.get("/healthz")[0] == 200
