"""Every reason of ClusterReady, with the sentence that a user reads."""

from __future__ import annotations

from typing import Any

import pytest

from rlightning_operator.reconcile.snapshot import KubeRay
from tests.unit.operator.reconcile.world import World, job_spec

RC = "walker-0000-1"


@pytest.fixture
def world() -> World:
    """RayCluster and pods are made; no pod is scheduled yet."""
    world = World()
    world.settle()
    return world


def said(world: World) -> tuple[str, str, str]:
    world.settle()
    entry = world.condition("ClusterReady")
    return entry["status"], entry["reason"], entry["message"]


def unscheduled(world: World, pod: dict[str, Any], message: str) -> None:
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    pod["status"] = {"phase": "Pending", "conditions": [scheduled]}
    world.touch(pod)


def waiting(world: World, pod: dict[str, Any], reason: str, message: str = "", init: bool = False, **more: Any) -> None:
    key = "initContainerStatuses" if init else "containerStatuses"
    name = "wait-gcs-ready" if init else pod["spec"]["containers"][0]["name"]
    state = {"waiting": {"reason": reason, "message": message}}
    pod["spec"]["nodeName"] = "node1"
    pod["status"] = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "False"}],
        key: [{"name": name, "restartCount": 0, "state": state, "image": "trainer:test", **more}],
    }
    world.touch(pod)


def node(name: str, ready: str = "True", **allocatable: str) -> dict[str, Any]:
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": {}},
        "spec": {},
        "status": {
            "allocatable": {"cpu": "8", "memory": "32Gi", **allocatable},
            "conditions": [{"type": "Ready", "status": ready, "message": "Kubelet stopped posting node status."}],
        },
    }


def test_all_pods_ready(world: World) -> None:
    world.make_ready()
    assert said(world) == ("True", "AllPodsReady", f"The head and all 3 workers of RayCluster {RC} are ready.")
    assert world.status["pools"] == [
        {"name": "learners", "wanted": 1, "ready": 1},
        {"name": "actors", "wanted": 2, "ready": 2},
    ]


def test_without_pools_the_head_is_all() -> None:
    world = World(job_spec(pools=[], policyGroup={"eval": {"replicas": 2}}))
    world.settle()
    world.make_ready()
    assert said(world) == ("True", "AllPodsReady", "The head is ready.")
    assert world.status["pools"] == []


def test_the_cluster_is_being_created() -> None:
    world = World()
    world.operate()
    entry = world.condition("ClusterReady")
    assert (entry["reason"], entry["message"]) == ("PodsPending", f"RayCluster {RC} is being created.")
    assert world.status["state"] == "Pending"


def test_unschedulable_for_ever_says_what_the_largest_node_has(world: World) -> None:
    world.nodes = (node("node1", **{"nvidia.com/gpu": "1"}), node("node2"))
    (pod,) = world.pods("learners")
    for container in pod["spec"]["containers"]:
        container["resources"]["limits"]["nvidia.com/gpu"] = container["resources"]["requests"]["nvidia.com/gpu"] = "4"
    unscheduled(
        world,
        pod,
        "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. preemption: 0/2 nodes are available: 2 No preemption.",
    )
    name = pod["metadata"]["name"]
    assert said(world) == (
        "False",
        "Unschedulable",
        f"1 of 1 pods of pool learners: Pod {name} finds no node: 0/2 nodes are available: 2 Insufficient "
        "nvidia.com/gpu. Never as it is: it asks for 4 nvidia.com/gpu, and the largest node that it may run on has 1. "
        "Ask for less, or add a node.",
    )
    assert world.status["state"] == "Pending"
    learners, actors = world.status["pools"]
    assert (learners["ready"], learners["reason"]) == (0, "Unschedulable")
    assert actors["reason"] == "PodsStarting"


def test_unschedulable_now_names_the_node_that_is_busy(world: World) -> None:
    world.nodes = (node("node1", **{"nvidia.com/gpu": "1"}), node("node2"))
    (pod,) = world.pods("learners")
    unscheduled(world, pod, "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")
    assert "Busy now: it would fit node1 when that is emptier" in said(world)[2]


def test_without_a_right_to_read_nodes_the_schedulers_words_stand_alone(world: World) -> None:
    (pod,) = world.pods("learners")
    unscheduled(world, pod, "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")
    assert said(world)[2].endswith("finds no node: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")


def test_an_image_that_does_not_exist_in_the_kubelets_words_which_stand_still(world: World) -> None:
    image = "trainer:test"
    detail = f'failed to pull and unpack image "{image}": not found'
    for pod in world.pods():
        waiting(world, pod, "ErrImagePull", detail, init=pod is not world.head)
    first = said(world)
    head = world.head["metadata"]["name"]
    assert first == (
        "False",
        "ImagePull",
        f"Pod {head} cannot pull image {image}: {detail}. Credentials go into spec.imagePullSecrets; another "
        "spec.image needs a new job.",
    )
    # Then the kubelet backs off, and says it in other words, or in none.
    writes = len(world.writes)
    for message in (f'Back-off pulling image "{image}": ErrImagePull: {detail}', f'Back-off pulling image "{image}"'):
        for pod in world.pods():
            waiting(world, pod, "ImagePullBackOff", message, init=pod is not world.head)
        assert said(world) == first
    assert world.writes[writes:].count("status") <= 1  # pools[].message


def test_a_claim_that_is_not_there(world: World) -> None:
    world.remove("PersistentVolumeClaim", "runs")
    assert said(world) == (
        "False",
        "ClaimNotFound",
        "PersistentVolumeClaim runs (spec.checkpoints.claimName) does not exist in namespace team. Create it; the job "
        "goes on by itself then.",
    )


def test_a_claim_without_a_volume(world: World) -> None:
    claim = world.objects["PersistentVolumeClaim", "runs"]
    claim["status"]["phase"], claim["spec"] = "Pending", {"storageClassName": "fast"}
    world.touch(claim)
    assert said(world)[1] == "HeadNotReady"  # it may only wait for its first consumer
    unscheduled(world, world.head, "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims.")
    status, reason, message = said(world)
    assert (status, reason) == ("False", "ClaimUnbound")
    assert message == (
        "PersistentVolumeClaim runs (spec.checkpoints.claimName) is not bound (phase Pending): there is no volume of "
        "StorageClass fast yet. `kubectl describe pvc runs` says why; create a volume, or name another claim. The "
        "scheduler: 0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims."
    )


def test_a_pending_claim_is_not_blamed_for_a_node_that_is_full(world: World) -> None:
    claim = world.objects["PersistentVolumeClaim", "runs"]
    claim["status"]["phase"] = "Pending"
    world.touch(claim)
    unscheduled(world, world.head, "0/2 nodes are available: 2 Insufficient memory.")
    assert said(world)[1] == "Unschedulable"


def test_kuberay_missing_and_then_installed() -> None:
    world = World()
    world.kuberay = KubeRay(installed=False)
    text = (
        "KubeRay is not installed: the API server does not serve rayclusters.ray.io. Install KubeRay 1.6 or later; the "
        "job goes on by itself then."
    )
    assert said(world) == ("False", "KubeRayMissing", text)
    assert world.status["state"] == "Pending"
    assert "startTime" not in world.status
    assert world.writes == ["status"]
    world.kuberay = KubeRay(installed=True)
    world.settle()
    assert world.status["rayCluster"] == RC
    assert world.clusters()


def test_an_operator_that_may_not_look_for_kuberay_does_not_say_that_it_is_missing() -> None:
    world = World()
    world.kuberay = KubeRay(installed=False, message="rayclusters.ray.io is forbidden")
    text = (
        "The operator cannot look for RayClusters: rayclusters.ray.io is forbidden. Give its account that right (the "
        "chart does, with rbac.create), or install KubeRay 1.6 or later; the job goes on by itself then."
    )
    assert said(world) == ("False", "KubeRayMissing", text)


def test_kuberay_that_does_nothing() -> None:
    world = World()
    world.operate()
    plan = world.operate()
    assert plan.requeue_after == pytest.approx(15, abs=0.1)
    world.passes(15)
    world.operate()
    entry = world.condition("ClusterReady")
    assert entry["reason"] == "KubeRayNotResponding"
    assert entry["message"].startswith(
        f"KubeRay has done nothing about RayCluster {RC} for 15 s: it has neither pods nor status. Is KubeRay's "
        "operator running? `kubectl get pods"
    )


def test_pods_that_quota_or_admission_refuse() -> None:
    world = World()
    world.operate()
    world.operate()
    (cluster,) = world.clusters()
    words = 'pods "walker-head" is forbidden: exceeded quota: small, requested: memory=4Gi'
    cluster["status"] = {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": words}]}
    world.touch(cluster)
    world.operate()
    entry = world.condition("ClusterReady")
    assert entry["reason"] == "PodsRefused"
    assert entry["message"] == f"KubeRay could not create the pods of RayCluster {RC}: {words}"


def test_the_head_is_what_workers_wait_for(world: World) -> None:
    for pod in world.pods("actors"):
        pod["status"] = {
            "phase": "Pending",
            "conditions": [{"type": "PodScheduled", "status": "True"}],
            "initContainerStatuses": [{"name": "wait-gcs-ready", "state": {"running": {}}}],
        }
        world.touch(pod)
    waiting(world, world.head, "ContainerCreating")
    name = world.head["metadata"]["name"]
    assert said(world) == (
        "False",
        "HeadNotReady",
        f"Pod {name} is starting on node node1: ContainerCreating. If that lasts, `kubectl describe pod {name}` shows "
        "the kubelet's events.",
    )
    assert world.status["state"] == "Starting"


def test_workers_that_start(world: World) -> None:
    world.make_ready(world.head)
    status, reason, message = said(world)
    assert (status, reason) == ("False", "PodsStarting")
    assert message.startswith("1 of 1 pods of pool learners: Pod walker-0000-1-learners-")
    assert message.endswith(" is starting.")
    assert [pool["reason"] for pool in world.status["pools"]] == ["PodsStarting", "PodsStarting"]


def test_a_worker_that_is_being_replaced(world: World) -> None:
    world.make_ready()
    world.settle()
    world.lose_pod(world.pods("actors")[0])
    world.operate()
    entry = world.condition("ClusterReady")
    assert (entry["reason"], entry["message"]) == (
        "PodsPending",
        "KubeRay has to make 1 of 2 pods of pool actors, which does not exist yet.",
    )


def test_a_pod_that_leaves_is_no_news_once_its_successor_is_there(world: World) -> None:
    world.make_ready()
    leaving = world.pods("actors")[0]
    leaving["metadata"]["deletionTimestamp"] = "2026-11-29T12:00:30Z"
    world.touch(leaving)
    status, reason, message = said(world)
    assert (status, reason) == ("False", "PodsPending")
    assert message == f"1 of 2 pods of pool actors: Pod {leaving['metadata']['name']} is being deleted."
    world.add({**leaving, "metadata": {**leaving["metadata"], "name": "successor", "deletionTimestamp": None}})
    successor = world.objects["Pod", "successor"]
    waiting(world, successor, "ContainerCreating")
    assert said(world)[2].startswith("1 of 2 pods of pool actors: Pod successor is starting")
    world.make_ready(successor)
    assert said(world)[0] == "True"
    assert world.status["pools"][1] == {"name": "actors", "wanted": 2, "ready": 2}


def test_a_container_that_keeps_dying_in_its_own_words(world: World) -> None:
    world.make_ready()
    pod = world.pods("actors")[0]
    last = {"terminated": {"exitCode": 1, "reason": "Error", "message": "ray: cannot write /tmp/ray"}}
    back_off = "back-off 40s restarting failed container"
    waiting(world, pod, "CrashLoopBackOff", back_off, lastState=last)
    name = pod["metadata"]["name"]
    first = said(world)
    assert first == (
        "False",
        "PodFailed",
        f"1 of 2 pods of pool actors: Pod {name}, container ray-worker: ended with exit code 1: ray: cannot write "
        "/tmp/ray.",
    )
    # It is tried again: the sentence stays, with the container's words and not with the growing back-off.
    status = pod["status"]["containerStatuses"][0]
    status["state"], status["restartCount"] = {"running": {"startedAt": "2026-11-29T12:10:00Z"}}, 3
    world.touch(pod)
    assert said(world) == first


def test_a_container_that_cannot_be_made(world: World) -> None:
    waiting(world, world.head, "CreateContainerConfigError", 'secret "walker-0000-1" not found')
    _, reason, message = said(world)
    assert reason == "PodFailed"
    assert message.endswith('container ray-head: CreateContainerConfigError: secret "walker-0000-1" not found.')


def test_an_evicted_pod_is_told_of_until_kuberay_replaces_it(world: World) -> None:
    world.make_ready()
    pod = world.pods("actors")[0]
    pod["status"] = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    world.touch(pod)
    world.operate()
    entry = world.condition("ClusterReady")
    assert entry["reason"] == "PodFailed"
    assert entry["message"].endswith("has ended: Evicted: The node was low on resource: memory.")


def test_a_node_that_is_lost(world: World) -> None:
    world.make_ready()
    world.nodes = (node("node1", ready="Unknown"), node("node2"))
    for pod in world.pods():
        if pod is not world.pods("actors")[0]:
            pod["spec"]["nodeName"] = "node2"
            world.touch(pod)
    _, reason, message = said(world)
    assert reason == "NodeLost"
    assert "Node node1 of pod walker-0000-1-actors" in message
    assert message.endswith("is not Ready: Kubelet stopped posting node status.")


def test_what_somebody_must_mend_is_told_before_what_passes(world: World) -> None:
    """One pod each: starting, unschedulable, image missing."""
    learner, (first, _) = world.pods("learners")[0], world.pods("actors")
    unscheduled(world, learner, "0/2 nodes are available.")
    assert said(world)[1] == "Unschedulable"
    waiting(world, first, "InvalidImageName", "couldn't parse image")
    assert said(world)[1] == "ImagePull"


def test_somebody_elses_pods_do_not_count(world: World) -> None:
    world.make_ready()
    for pod in world.pods():
        pod["metadata"]["ownerReferences"] = [{"kind": "RayCluster", "uid": "another"}]
        world.touch(pod)
    world.operate()
    assert world.condition("ClusterReady")["status"] == "False"


def test_what_the_api_server_refuses_is_said_with_its_words() -> None:
    """A quota, say, that leaves no room for a RayCluster."""
    world = World()
    world.refused = "RayCluster walker-0000-1 could not be created: exceeded quota: small"
    world.operate()
    assert said_now(world, "ClusterReady") == ("False", "WriteRefused", f"{world.refused}. It is tried again.")
    assert said_now(world, "Progressing")[1] == "WriteRefused"
    assert world.status["state"] == "Pending"
    world.refused = None
    world.settle()
    assert said_now(world, "ClusterReady")[1] == "HeadNotReady"
    world.train()
    world.refused = "NetworkPolicy rlj-walker could not be changed: denied by webhook"
    world.operate()
    entry = said_now(world, "Progressing")
    assert entry[:2] == ("True", "Training"), "what runs is not disturbed"
    assert entry[2].endswith(f"{world.refused}. It is tried again.")


def said_now(world: World, type_: str) -> tuple[str, str, str]:
    entry = world.condition(type_)
    return entry["status"], entry["reason"], entry["message"]
