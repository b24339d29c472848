"""How attempts are lost, what is said of it, and what follows: another attempt, on which RayCluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlightning_operator.reconcile.objects import format_time
from rlightning_operator.reconcile.plan import reconcile
from tests.unit.operator.reconcile.world import Driver, World, job_spec

RC1, RC2 = "walker-0000-1", "walker-0000-2"


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def driver(world: World) -> Driver:
    return world.train()


def last_restart(world: World) -> dict[str, Any]:
    world.settle()
    restart: dict[str, Any] = world.status["restarts"][-1]
    return restart


def expect_attempt(world: World, attempt: int, cluster: str, lost: int) -> None:
    """Status, PolicyGroup, submitter and RayCluster all say the same."""
    world.settle()
    assert (world.status["attempt"], world.status["rayCluster"], world.status["lostAttempts"]) == (
        attempt,
        cluster,
        lost,
    )
    assert (world.group["spec"]["attempt"], world.group["spec"]["state"]) == (attempt, "Running")
    assert [c["metadata"]["name"] for c in world.clusters()] == [cluster]
    assert ("Job", f"{cluster}-{attempt}") in world.objects


def test_the_driver_says_that_a_member_was_lost(world: World, driver: Driver) -> None:
    world.driver_ends(driver, "Lost", "MemberLost", "eval-2 on pod walker-actors-1: the actor died")
    assert last_restart(world) == {
        "attempt": 1,
        "time": format_time(world.now),
        "reason": "MemberLost",
        "message": "eval-2 on pod walker-actors-1: the actor died",
    }
    expect_attempt(world, 2, RC1, lost=1)
    progressing = world.condition("Progressing")
    assert "Attempt 1 ended with MemberLost: eval-2 on pod walker-actors-1: the actor died" in progressing["message"]


EVICTED = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "EvictionByEvictionAPI",
    "message": "Eviction API: evicting",
}


def test_an_evicted_worker_does_not_count(world: World, driver: Driver) -> None:
    pod = world.pods("actors")[0]
    pod["status"].setdefault("conditions", []).append(EVICTED)
    world.touch(pod)
    world.driver_ends(driver, "Lost", "MemberLost", "eval-2 is gone")
    restart = last_restart(world)
    assert restart["reason"] == "Evicted"
    assert restart["message"] == f"Pod {pod['metadata']['name']} was evicted. eval-2 is gone."
    expect_attempt(world, 2, RC1, lost=0)


def test_an_evicted_head_does_not_count(world: World, driver: Driver) -> None:
    head = world.head
    head["status"].setdefault("conditions", []).append(EVICTED)
    world.touch(head)
    restart = last_restart(world)
    assert restart["reason"] == "Evicted"
    assert restart["message"].endswith("is evicted: Eviction API: evicting.")
    assert (world.status["attempt"], world.status["lostAttempts"]) == (2, 0)


def test_a_submitter_that_ends_without_an_outcome_after_giving_the_watch_its_time(world: World, driver: Driver) -> None:
    driver.ended = True
    (job,) = world.of_kind("Job")
    world.end_job(job, 3, "the Ray job is gone: 404")
    plan = world.operate()
    assert world.status["attempt"] == 1
    assert plan.requeue_after == pytest.approx(5, abs=0.1)
    world.passes(5)
    restart = last_restart(world)
    assert restart["reason"] == "DriverLost"
    assert restart["message"].startswith(
        "The driver has ended and said nothing of it: its submitter, pod walker-0000-1-1"
    )
    assert restart["message"].endswith("ended with exit code 3: the Ray job is gone: 404.")
    expect_attempt(world, 2, RC1, lost=1)


def test_an_outcome_that_arrives_within_that_time_counts(world: World, driver: Driver) -> None:
    (job,) = world.of_kind("Job")
    world.end_job(job, 0)
    world.operate()
    world.passes(4)
    world.driver_ends(driver, "Succeeded", "TotalReached", "done")
    world.settle()
    assert world.status["state"] == "Succeeded"


def test_a_submitter_without_a_pod_left_speaks_through_its_job(world: World, driver: Driver) -> None:
    driver.ended = True
    (job,) = world.of_kind("Job")
    world.end_job(job, 1)
    world.passes(6)
    assert last_restart(world)["message"] == (
        "The driver has ended and said nothing of it: its submitter, Job walker-0000-1-1, failed (PodFailurePolicy): "
        "Container submitter failed with exit code 1."
    )


def test_a_head_pod_that_is_gone_keeps_the_cluster_if_it_comes_back_in_time(world: World, driver: Driver) -> None:
    world.lose_pod(world.head)
    restart = last_restart(world)
    assert (restart["reason"], restart["message"]) == (
        "HeadLost",
        f"Head pod {driver.pod}, where the driver ran, is gone.",
    )
    world.passes(66)
    world.make_ready()
    world.submitters_act()
    world.passes(100)
    expect_attempt(world, 2, RC1, lost=1)
    assert [d.attempt for d in world.live_drivers()] == [2]


def test_a_head_that_stays_away_costs_the_cluster_but_counts_once(world: World, driver: Driver) -> None:
    world.lose_pod(world.head)
    world.settle()
    plan = world.operate()
    assert plan.requeue_after == pytest.approx(120, abs=1)
    world.passes(119)
    world.settle()
    assert world.status["rayCluster"] == RC1
    world.passes(1)
    restart = last_restart(world)
    assert (restart["attempt"], restart["reason"], restart["message"]) == (
        2,
        "HeadNotBack",
        f"The head of RayCluster {RC1} was not ready within 120 s after attempt 1.",
    )
    expect_attempt(world, 3, RC2, lost=1)
    world.passes(1000)  # a new cluster has all the time that schedulingDeadlineSeconds gives
    expect_attempt(world, 3, RC2, lost=1)


def test_a_head_container_that_was_started_again_is_noticed_in_the_same_pod(world: World, driver: Driver) -> None:
    world.restart_head_container(137, "OOMKilled")
    restart = last_restart(world)
    assert restart["reason"] == "HeadLost"
    assert restart["message"].startswith(
        f"Container ray-head of head pod {driver.pod} was started again at 2026-11-29T"
    )
    assert restart["message"].endswith("; before, it ended with exit code 137 (OOMKilled).")
    expect_attempt(world, 2, RC1, lost=1)
    world.make_ready()
    world.submitters_act()
    world.passes(60)
    expect_attempt(world, 2, RC1, lost=1)  # the new driver is younger than its container


def test_a_head_container_that_is_down(world: World, driver: Driver) -> None:
    status = world.head["status"]["containerStatuses"][0]
    status["state"] = {"terminated": {"exitCode": 1, "reason": "Error", "message": "raylet died"}}
    world.touch(world.head)
    assert last_restart(world)["message"] == (
        f"Container ray-head of head pod {driver.pod} ended with exit code 1: raylet died."
    )


def test_an_evicted_head(world: World, driver: Driver) -> None:
    world.head["status"] = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."}
    world.touch(world.head)
    assert last_restart(world)["message"] == f"Head pod {driver.pod} has ended: Evicted: The node was low on memory."


def test_a_head_that_is_leaving_is_not_lost_until_it_is_gone(world: World, driver: Driver) -> None:
    """And no driver is started on it."""
    world.head["metadata"]["deletionTimestamp"] = format_time(world.now)
    world.touch(world.head)
    world.settle()
    assert world.status["attempt"] == 1
    world.driver_ends(driver, "Lost", "MemberLost", "its pod is shut down")
    world.settle()
    assert world.status["attempt"] == 2
    assert ("Job", f"{RC1}-2") not in world.objects
    world.lose_pod(world.head)
    expect_attempt(world, 2, RC1, lost=1)


def test_a_head_on_a_dead_node_costs_the_cluster_at_once(world: World, driver: Driver) -> None:
    """The pod stays as long as the node does, and KubeRay makes no second head."""
    world.head["metadata"]["deletionTimestamp"] = format_time(world.now)
    world.touch(world.head)
    plan = world.operate()
    assert plan.requeue_after == pytest.approx(15, abs=0.1)
    world.passes(15)
    restart = last_restart(world)
    assert restart["reason"] == "NodeLost"
    assert restart["message"].endswith("and is not: node node1 does not answer.")
    expect_attempt(world, 2, RC2, lost=1)


def test_a_cluster_that_somebody_deleted(world: World, driver: Driver) -> None:
    world.delete_cluster()
    restart = last_restart(world)
    assert (restart["reason"], restart["message"]) == (
        "RayClusterDeleted",
        f"RayCluster {RC1} was deleted, and not by the operator.",
    )
    expect_attempt(world, 2, RC2, lost=1)


def test_a_cluster_that_somebody_is_deleting(world: World, driver: Driver) -> None:
    (cluster,) = world.clusters()
    cluster["metadata"]["deletionTimestamp"] = format_time(world.now)
    world.touch(cluster)
    assert last_restart(world)["reason"] == "RayClusterDeleted"
    expect_attempt(world, 2, RC2, lost=1)


def test_a_lost_attempt_whose_cluster_is_gone_too_needs_another(world: World, driver: Driver) -> None:
    world.driver_ends(driver, "Lost", "MemberLost", "eval-0 died")
    world.delete_cluster()
    assert last_restart(world)["reason"] == "MemberLost"
    expect_attempt(world, 2, RC2, lost=1)


def test_an_outcome_counts_more_than_a_head_that_is_gone(world: World, driver: Driver) -> None:
    world.driver_ends(driver, "Succeeded", "TotalReached", "done")
    world.lose_pod(world.head)
    world.settle()
    assert (world.status["state"], world.status["attempt"]) == ("Succeeded", 1)


def test_no_progress_although_all_is_ready_costs_the_cluster(world: World, driver: Driver) -> None:
    plan = world.operate()
    assert plan.requeue_after == pytest.approx(900, abs=1)
    world.passes(880)
    world.settle()
    assert world.status["attempt"] == 1
    # A driver that hangs may go on reporting: what counts is a new iteration.
    last = world.status["progress"]["lastReportTime"]
    world.report(driver, progress={**driver.report["progress"], "lastReportTime": format_time(world.now)})
    world.settle()
    assert world.status["progress"]["lastReportTime"] == last
    world.passes(25)
    restart = last_restart(world)
    assert (restart["reason"], restart["message"]) == (
        "NoProgress",
        "No iteration was reported for spec.runPolicy.progressDeadlineSeconds (900 s), with all pods ready.",
    )
    expect_attempt(world, 2, RC2, lost=1)


def test_an_api_server_that_was_away_is_no_silence_of_the_drivers(world: World, driver: Driver) -> None:
    world.passes(5000)  # it was away, and drivers trained on; then the operator hears it again before them
    world.answers_since = world.now
    assert world.operate().requeue_after == pytest.approx(60, abs=1)
    world.passes(40)
    world.driver_runs(driver)
    world.settle()
    world.passes(880)
    expect_attempt(world, 1, RC1, lost=0)


def test_a_driver_that_is_silent_once_the_api_server_is_back_stands_still(world: World, driver: Driver) -> None:
    world.passes(5000)
    world.answers_since = world.now
    world.passes(59)
    expect_attempt(world, 1, RC1, lost=0)
    world.passes(2)
    assert last_restart(world)["reason"] == "NoProgress"


def test_progress_is_not_expected_while_a_pod_is_missing(world: World, driver: Driver) -> None:
    pod = world.pods("actors")[0]
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.touch(pod)
    world.settle()
    world.passes(5000)
    expect_attempt(world, 1, RC1, lost=0)


def submitter_runs(world: World) -> dict[str, Any]:
    """Everything is ready, and the submitter's container was started; no driver has said anything."""
    world.settle()
    world.make_ready()
    world.settle()
    ((job, _, _),) = world.open_jobs()
    return world.submitter_pod(job, {"running": {"startedAt": format_time(world.now)}}, phase="Running")


def test_a_driver_that_never_reports_is_given_the_same_time(world: World) -> None:
    submitter_runs(world)
    world.passes(901)
    assert last_restart(world)["reason"] == "NoProgress"


def test_a_submitter_that_finds_no_room_is_no_fault_of_the_cluster(world: World) -> None:
    pod = submitter_runs(world)
    pod["status"]["containerStatuses"] = []
    pod["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes."}
    ]
    world.touch(pod)
    world.settle()
    world.passes(5000)
    expect_attempt(world, 1, RC1, lost=0)
    progressing = world.condition("Progressing")
    assert progressing["reason"] == "SubmitterPending"
    assert "0/2 nodes." in progressing["message"]


def test_a_report_that_somebody_deleted_was_no_silence(world: World) -> None:
    submitter_runs(world)
    driver = world.train()
    for _ in range(100):
        world.passes(10)
        world.driver_runs(driver)
    world.settle()
    world.remove("PolicyGroup", world.name)
    world.settle()
    assert world.group["spec"]["attempt"] == 1
    expect_attempt(world, 1, RC1, lost=0)
    world.passes(901)
    assert last_restart(world)["reason"] == "NoProgress"


def test_a_report_that_cannot_be_read_is_no_silence(world: World, driver: Driver) -> None:
    world.group["status"]["version"] = "of a newer kind"
    world.touch(world.group)
    world.settle()
    world.passes(5000)
    expect_attempt(world, 1, RC1, lost=0)


def test_workers_on_a_dead_node_cost_the_cluster_once_the_driver_has_said_what_it_lost(
    world: World, driver: Driver
) -> None:
    """Their pods stay as long as the node does, and KubeRay makes none in their place."""
    lost = world.pods("actors")[0]
    lost["metadata"]["deletionTimestamp"] = format_time(world.now)
    lost["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.touch(lost)
    world.passes(100)
    world.driver_runs(driver)
    expect_attempt(world, 1, RC1, lost=0)
    world.driver_ends(driver, "Lost", "MemberLost", "eval-0 did not answer")
    restart = last_restart(world)
    assert (restart["reason"], restart["message"].partition(" was ")[2]) == (
        "NodeLost",
        f"to be gone at {lost['metadata']['deletionTimestamp'][11:19]} and is not: node node1 does not answer.",
    )
    assert [r["reason"] for r in world.status["restarts"]] == ["MemberLost", "NodeLost"]
    expect_attempt(world, 3, RC2, lost=1)


def test_a_pod_that_takes_long_to_end_is_waited_for(world: World, driver: Driver) -> None:
    world.driver_ends(driver, "Lost", "MemberLost", "eval-0 did not answer")
    world.settle()
    slow = world.pods("actors")[0]
    slow["metadata"]["deletionTimestamp"] = format_time(world.now)
    slow["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.touch(slow)
    world.settle()
    world.passes(59)
    expect_attempt(world, 2, RC1, lost=1)
    world.lose_pod(slow)
    world.settle()
    world.passes(5000)
    expect_attempt(world, 2, RC1, lost=1)


@pytest.mark.parametrize(
    "change", [{"imagePullSecrets": [{"name": "registry"}]}, {"imagePullPolicy": "Always"}], ids=["secrets", "policy"]
)
def test_what_the_image_is_pulled_with_may_be_mended_until_the_driver_runs(change: dict[str, Any]) -> None:
    world = World()
    world.settle()
    world.edit(**change)
    restart = last_restart(world)
    (field,) = change
    assert (restart["reason"], restart["message"]) == (
        "SpecChanged",
        f"spec.{field} was changed before the driver started: the pods are made anew.",
    )
    expect_attempt(world, 2, RC2, lost=0)
    pod = world.head["spec"]
    assert {**pod, **pod["containers"][0]}[field] == change[field]
    world.make_ready()
    world.settle()
    world.submitters_act()
    world.settle()
    world.edit(imagePullSecrets=[{"name": "other"}])
    expect_attempt(world, 2, RC2, lost=0)


def test_one_attempt_more_than_backoff_limit_is_the_end() -> None:
    world = World(job_spec(runPolicy={"backoffLimit": 1}))
    world.driver_ends(world.train(), "Lost", "MemberLost", "eval-0 died")
    world.settle()
    world.submitters_act()
    (driver,) = world.live_drivers()
    world.driver_ends(driver, "Lost", "DeadlineExceeded", "eval-1 was late")
    world.submitters_act()
    world.settle()
    assert (world.status["state"], world.status["attempt"], world.status["lostAttempts"]) == ("Failed", 2, 2)
    succeeded = world.condition("Succeeded")
    assert (succeeded["status"], succeeded["reason"], succeeded["message"]) == (
        "False",
        "BackoffLimitExceeded",
        "2 attempts were lost, and spec.runPolicy.backoffLimit is 1. The last one, attempt 2, ended with "
        "DeadlineExceeded: eval-1 was late",
    )
    assert not world.clusters()


def test_reports_of_an_earlier_attempt_change_nothing(world: World, driver: Driver) -> None:
    world.driver_ends(driver, "Lost", "MemberLost", "")
    world.settle()
    before = dict(world.status)
    status = world.group["status"]
    status["outcome"] = {"state": "Failed", "reason": "TooLate", "message": ""}
    status["progress"] = {"iteration": 99, "envSteps": 99, "metrics": []}
    world.touch(world.group)
    world.settle()
    assert world.status == before


def test_what_is_left_of_past_attempts_goes_after_a_while(world: World, driver: Driver) -> None:
    """A submitter whose cluster is gone would wait for its head for ever."""
    world.delete_cluster()
    world.settle()
    assert ("Job", f"{RC1}-1") in world.objects
    world.passes(180)
    world.settle()
    assert ("Job", f"{RC1}-1") not in world.objects
    assert ("Job", f"{RC2}-2") in world.objects


def test_logs_of_the_last_ten_submitters_are_kept(world: World) -> None:
    world.edit(runPolicy={"backoffLimit": 100})
    for _ in range(14):
        world.settle()
        world.make_ready()
        world.settle()
        world.submitters_act()
        (driver,) = world.live_drivers()
        world.driver_ends(driver, "Lost", "MemberLost", "")
        world.passes(3)
        world.submitters_act()
    world.settle()
    ended = sorted(int(job["metadata"]["name"].rpartition("-")[2]) for job in world.of_kind("Job"))
    assert ended == [*range(5, 15), 15]
    assert len(world.status["restarts"]) == 10


def test_a_status_that_somebody_put_back_does_not_bring_an_old_attempt_back(world: World, driver: Driver) -> None:
    world.driver_ends(driver, "Lost", "MemberLost", "")
    world.settle()
    assert world.status["attempt"] == 2
    world.job["status"]["attempt"] = 1
    world.touch(world.job)
    world.settle()
    assert world.status["restarts"][-1]["reason"] == "StatusLost"
    expect_attempt(world, 3, RC2, lost=1)


def test_a_status_that_somebody_wiped_starts_above_what_drivers_know(world: World, driver: Driver) -> None:
    del world.job["status"]
    world.touch(world.job)
    world.settle()
    assert (world.status["attempt"], world.status["rayCluster"], world.status["shards"]) == (2, RC2, 4)


def test_a_pod_that_was_not_seen_yet_is_not_lost(world: World, driver: Driver) -> None:
    """The report of the second head's driver comes before the second head does, through another watch."""
    pods_before = world.snapshot().pods
    world.lose_pod(world.head)
    world.settle()
    world.make_ready()
    world.settle()
    world.submitters_act()
    for pods in (pods_before, ()):
        plan = reconcile(replace(world.snapshot(), pods=pods))
        assert plan.status["attempt"] == 2
    world.passes(10)
    assert reconcile(replace(world.snapshot(), pods=pods_before)).status["attempt"] == 2  # that head is older
    assert reconcile(replace(world.snapshot(), pods=())).status["attempt"] == 3
