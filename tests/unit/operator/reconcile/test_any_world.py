"""Whatever happens around the operator, in whatever order, and wherever it dies: what it may never do, and always ends.

Random sequences of events in the model of ``world.py``. After each, the promises that hold at every moment are checked;
at the end the world calms down, and the job has to come to its end and the operator to rest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis
from hypothesis import strategies as st

from rlightning_operator.reconcile.snapshot import KubeRay
from tests.unit.operator.reconcile.world import NAMESPACE, World, digest, job_spec

SECONDS = (1, 4, 20, 61, 130, 200, 1000, 5000)

Event = Callable[[World, int], Any]


def _operator(world: World, n: int) -> None:
    """A round: complete, or dead after some writes; with caches that are current, or behind."""
    lag, dies_after = ((0, None), (0, 0), (0, 1), (0, 2), (0, 5), (1, None), (3, None), (2, 3))[n % 8]
    world.operate(lag=lag, dies_after=dies_after)


def _time(world: World, n: int) -> None:
    world.passes(SECONDS[n % len(SECONDS)])


def _kubelet(world: World, n: int) -> None:
    pods = world.pods()
    world.make_ready(*(pods if n % 2 else pods[: n // 2 + 1]))


def _driver_runs(world: World, n: int) -> None:
    for driver in world.live_drivers():
        world.driver_runs(driver)


def _driver_ends(world: World, n: int) -> None:
    state, reason = (
        ("Lost", "MemberLost"),
        ("Lost", "DeadlineExceeded"),
        ("Failed", "ValueError"),
        ("Stopped", "Asked"),
    )[n % 4]
    for driver in world.live_drivers()[:1]:
        world.driver_ends(driver, state, reason, "Traceback\n  the end")


def _driver_crashes(world: World, n: int) -> None:
    for driver in world.live_drivers():
        driver.ended = True


def _submitter_fails(world: World, n: int) -> None:
    for job, _, _ in list(world.open_jobs())[: 1 + n % 2]:
        world.end_job(job, (1, 3)[n % 2], "ImportError: no module" if n % 3 else "")


def _submitter_deleted(world: World, n: int) -> None:
    for job, _, _ in list(world.open_jobs())[:1]:
        world.remove("Job", job["metadata"]["name"])


def _head_restarts(world: World, n: int) -> None:
    if any("running" in c["state"] for p in world.pods("head") for c in p["status"].get("containerStatuses", ())):
        world.restart_head_container()


def _pod_lost(world: World, n: int) -> None:
    pods = world.pods()
    if pods:
        world.lose_pod(pods[n % len(pods)])


def _pod_leaves(world: World, n: int) -> None:
    """Deleted, and still there for its grace period, or for ever: its node is dead."""
    for pod in world.pods("head" if n % 2 else None)[:1]:
        pod["metadata"]["deletionTimestamp"] = world.job["metadata"]["creationTimestamp"]
        world.touch(pod)


def _pod_fails(world: World, n: int) -> None:
    for pod in world.pods()[:1]:
        pod["status"] = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."}
        world.touch(pod)


def _suspend(world: World, n: int) -> None:
    world.edit(suspend=bool(n % 2))


def _scale(world: World, n: int) -> None:
    group = copy.deepcopy(world.job["spec"]["policyGroup"])
    group["eval"]["replicas"] = 1 + n % 4
    world.edit(policyGroup=group)


def _forbidden_edit(world: World, n: int) -> None:
    """One that the API server's rules miss."""
    if world.status.get("startTime"):
        world.edit(unchecked=True, environment={**world.job["spec"]["environment"], "kwargs": {"x": n % 2}})


def _claim(world: World, n: int) -> None:
    for claim in world.of_kind("PersistentVolumeClaim"):
        claim["status"]["phase"] = ("Pending", "Bound", "Lost")[n % 3]
        world.touch(claim)


def _kuberay(world: World, n: int) -> None:
    world.kuberay = KubeRay(installed=n % 3 != 0)
    if not world.kuberay.installed:
        world.delete_cluster()


def _refusal(world: World, n: int) -> None:
    """The API server does not take some write, or takes them all again."""
    world.refused = f"Job walker-{n} could not be deleted: no" if n % 2 else None


def _upgrade(world: World, n: int) -> None:
    """The operator's default image changes; now and then a status is as an older operator had left it."""
    world.config = replace(world.config, trainer_image=f"example.org/trainer:{n}", ray_version=f"2.{n}.0")
    if n % 3 == 0 and "status" in world.job and "completionTime" not in world.status:
        for name in ("image", "rayVersion"):
            world.job["status"].pop(name, None)


def _cluster_deleted(world: World, n: int) -> None:
    world.delete_cluster()


def _group_deleted(world: World, n: int) -> None:
    world.remove("PolicyGroup", world.name)


def _liar(world: World, n: int) -> None:
    """A driver that reports a member nobody asked for, or one that runs other weights."""
    for driver in world.live_drivers():
        members = [
            {"name": "eval-0", "role": "Eval", "state": "Ready", "version": 1, "digest": digest(7)},
            {"name": f"eval-{n + 4}", "role": "Eval", "state": "Ready"},
        ]
        if driver.report.get("versions"):
            world.report(driver, members=members)


def _leftover(world: World, n: int) -> None:
    """An earlier job's object of the same name, before the garbage collector came by."""
    key = (("ServiceAccount", f"rlj-{world.name}"), ("Role", f"rlj-{world.name}"))[n % 2]
    if key not in world.objects:
        meta = {"name": key[1], "namespace": NAMESPACE}
        world.add({"kind": key[0], "metadata": {**meta, "ownerReferences": [{"kind": "RLJob", "uid": "gone"}]}})


def _collector(world: World, n: int) -> None:
    world.collect()


def _all_goes_well(world: World, n: int) -> None:
    """For a while everything works, so that what goes wrong then finds a driver that trains."""
    for _ in range(1 + n % 5):
        world.operate()
        world.kuberay_acts()
        world.make_ready(*(p for p in world.pods() if not p["metadata"].get("deletionTimestamp")))
        world.submitters_act()
        _driver_runs(world, n)
        world.passes(1 + n)


EVENTS: list[Event] = [
    *([_all_goes_well] * 6),
    *([_operator] * 6),
    *([_kubelet] * 3),
    *([lambda world, n: world.kuberay_acts()] * 3),
    *([lambda world, n: world.submitters_act()] * 3),
    *([_driver_runs] * 3),
    *(_time, _time, _driver_ends, _driver_crashes, _submitter_fails, _submitter_deleted, _head_restarts, _pod_lost),
    *(_pod_leaves, _pod_fails, _suspend, _scale, _forbidden_edit, _claim, _kuberay, _cluster_deleted),
    *(_group_deleted, _liar, _leftover, _collector, _refusal, _upgrade),
]


class Promises:
    """What holds at every moment."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.attempt = 0
        self.group_attempt = 0
        self.end: dict[str, Any] | None = None
        self.transitions: dict[str, tuple[str, str]] = {}
        world.after_each_write = self.check

    def check(self) -> None:
        world, status = self.world, self.world.status
        assert len(world.clusters()) <= 1, "two RayClusters at once"
        attempt = status.get("attempt", 0)
        assert attempt >= self.attempt, "the attempt fell"
        self.attempt = attempt
        group = world.objects.get(("PolicyGroup", world.name))
        if group is not None:
            assert group["spec"]["attempt"] <= attempt, "a driver was told of an attempt that is not stored"
        limit = world.job["spec"].get("runPolicy", {}).get("backoffLimit", 3)
        lost = status.get("lostAttempts", 0)
        assert lost <= limit + ("completionTime" in status), "more attempts than backoffLimit allows"
        assert len(status.get("restarts", [])) <= 10
        writers = [d for d in world.live_drivers() if group is not None and d.attempt == group["spec"]["attempt"]]
        assert len(writers) <= 1, "two drivers of one attempt"
        self._conditions(status)
        self._image(status)
        self._end(status)

    def _image(self, status: dict[str, Any]) -> None:
        """What runs is what the status says."""
        for cluster in self.world.clusters():
            (container,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
            if cluster["metadata"]["name"] == status.get("rayCluster") and "image" in status:
                assert (container["image"], cluster["spec"]["rayVersion"]) == (status["image"], status["rayVersion"])

    def _conditions(self, status: dict[str, Any]) -> None:
        conditions = {c["type"]: c for c in status.get("conditions", [])}
        if status:
            wanted = {"Suspended", "ClusterReady", "Progressing", "WeightsConsistent", "Finished", "Succeeded"}
            assert set(conditions) == wanted
            assert (conditions["Succeeded"]["status"] == "Unknown") == (conditions["Finished"]["status"] == "False")
        for type_, entry in conditions.items():
            now = (entry["status"], entry["lastTransitionTime"])
            before = self.transitions.get(type_)
            assert before is None or before[0] != now[0] or before == now, f"{type_}: another time, the same status"
            assert entry["message"].strip(), f"{type_} says nothing"
            self.transitions[type_] = now

    def _end(self, status: dict[str, Any]) -> None:
        if self.end is not None:
            now = {**status, "observedGeneration": None, "conditions": []}
            assert now == {**self.end, "observedGeneration": None, "conditions": []}, "the end was not the end"
            assert [c["status"] for c in status["conditions"]] == [c["status"] for c in self.end["conditions"]]
        elif "completionTime" in status:
            self.end = copy.deepcopy(status)


def calm(world: World) -> None:
    """Nothing fails any more, nobody changes anything, and drivers get where they want. Nodes that are dead stay so."""
    world.kuberay = KubeRay(installed=True)
    world.refused = None
    world.collect()
    for claim in world.of_kind("PersistentVolumeClaim"):
        claim["status"]["phase"] = "Bound"
        world.touch(claim)
    world.edit(suspend=False)
    world._catch_up()
    for _ in range(60):
        world.operate()
        world.kuberay_acts()
        alive = [pod for pod in world.pods() if not pod["metadata"].get("deletionTimestamp")]
        if alive:
            world.make_ready(*alive)
        world.submitters_act()
        for driver in world.live_drivers():
            world.driver_runs(driver)
            if not driver.ended and driver.iteration >= 4:
                world.driver_ends(driver, "Succeeded", "TotalReached", "1000 steps are done")
        world.passes(7)
        if "completionTime" in world.status:
            break
    assert world.status.get("state") in ("Succeeded", "Failed"), f"no end: {world.status}"
    world.passes(300)
    world.settle()
    assert not world.clusters(), "a RayCluster outlives its job's end"
    writes = len(world.writes)
    world.passes(10**6)
    plan = world.operate()
    assert plan.status == world.status
    assert len(world.writes) == writes, "writes although nothing changed"


@hypothesis.settings(max_examples=100)
@hypothesis.given(
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 23)), max_size=60),
    claim=st.booleans(),
    policy=st.fixed_dictionaries(
        {},
        optional={
            "backoffLimit": st.integers(0, 4),
            "schedulingDeadlineSeconds": st.sampled_from([30, 600]),
            "activeDeadlineSeconds": st.sampled_from([100, 10**15]),
            "progressDeadlineSeconds": st.sampled_from([60, 900]),
        },
    ),
)
def test_promises_hold_in_any_order_of_events_and_every_job_ends(
    events: list[tuple[Event, int]], claim: bool, policy: dict[str, int]
) -> None:
    world = World(job_spec(runPolicy=policy, checkpoints={"claimName": "runs"} if claim else {}))
    promises = Promises(world)
    for event, number in events:
        event(world, number)
        promises.check()
    calm(world)
    promises.check()


@hypothesis.settings(max_examples=60)
@hypothesis.given(events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 23)), max_size=40))
def test_a_second_look_at_the_same_world_writes_nothing(events: list[tuple[Event, int]]) -> None:
    world = World()
    for event, number in events:
        event(world, number)
    world._catch_up()
    for _ in range(6):
        before = list(world.writes)
        plan = world.operate()
        if world.writes == before:
            break
    assert world.writes == before, f"the operator does not come to rest: {world.writes[-8:]}"
    assert plan.status == world.status
    # Nor later, as long as no deadline has passed.
    world.passes(10**6 if plan.requeue_after is None else 0.9 * plan.requeue_after)
    world.operate()
    assert world.writes == before


@hypothesis.settings(max_examples=30)
@hypothesis.given(events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 23)), max_size=30))
def test_a_deleted_job_is_left_alone_and_takes_everything_along(events: list[tuple[Event, int]]) -> None:
    world = World()
    for event, number in events:
        event(world, number)
    writes = len(world.writes)
    world.job["metadata"]["deletionTimestamp"] = world.job["metadata"]["creationTimestamp"]
    world.touch(world.job)
    for _ in range(3):
        world.operate()
    assert len(world.writes) == writes, "a job that is being deleted is written"
    world.remove("RLJob", world.name)
    left = {kind for kind, _ in world.objects}
    assert left == {"PersistentVolumeClaim"}
