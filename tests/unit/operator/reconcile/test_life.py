"""A job's life when nothing is lost: start, end, suspend, changes, deadlines."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from rlightning_operator.reconcile.objects import format_time
from rlightning_operator.reconcile.plan import reconcile
from rlightning_operator.reconcile.snapshot import Delete, KubeRay
from tests.unit.operator.reconcile.world import NAMESPACE, World, digest, job_spec

RC1, RC2 = "walker-0000-1", "walker-0000-2"


@pytest.fixture
def world() -> World:
    return World()


def reason(world: World, type_: str) -> tuple[str, str]:
    entry = world.condition(type_)
    return entry["status"], entry["reason"]


def evals(world: World, replicas: int) -> None:
    group = copy.deepcopy(world.job["spec"]["policyGroup"])
    group["eval"]["replicas"] = replicas
    world.edit(policyGroup=group)


# --------------------------------------------------------------------------------------------------------------- start


def test_the_first_round_stores_the_attempt_before_it_makes_anything(world: World) -> None:
    plan = world.operate(dies_after=1)
    assert world.writes == ["status"]
    assert (world.status["attempt"], world.status["rayCluster"], world.status["shards"]) == (1, RC1, 4)
    assert world.status["startTime"] == format_time(world.now)
    assert world.status["runPath"] == f"team/walker-{world.job_uid[:8]}"
    assert [note.reason for note in plan.notes] == ["Started"]
    world.operate()
    assert world.writes[1:] == [
        "create ServiceAccount rlj-walker",
        "create Role rlj-walker",
        "create RoleBinding rlj-walker",
        "create NetworkPolicy rlj-walker-cluster",
        "create NetworkPolicy rlj-walker-head",
        "create NetworkPolicy rlj-walker-submitter",
        "create PolicyGroup walker",
        f"create RayCluster {RC1}",
    ]
    world.operate()  # the submitter needs the cluster's uid
    assert world.writes[-1] == f"create Job {RC1}-1"


def test_all_conditions_are_there_from_the_first_round(world: World) -> None:
    world.operate()
    assert {c["type"]: c["status"] for c in world.status["conditions"]} == {
        "Suspended": "False",
        "ClusterReady": "False",
        "Progressing": "False",
        "WeightsConsistent": "Unknown",
        "Finished": "False",
        "Succeeded": "Unknown",
    }
    assert all(c["observedGeneration"] == 1 for c in world.status["conditions"])


def test_the_states_from_pending_to_running(world: World) -> None:
    seen = []

    def look() -> None:
        world.settle()
        seen.append((world.status["state"], *reason(world, "Progressing")))

    world.operate()
    seen.append((world.status["state"], *reason(world, "Progressing")))
    look()
    world.make_ready()
    look()
    (job,) = world.of_kind("Job")
    pod = world.submitter_pod(job, {"waiting": {"reason": "ContainerCreating"}})
    look()
    pod["status"]["containerStatuses"][0]["state"] = {"running": {}}
    world.touch(pod)
    look()
    world.submitters_act()
    look()
    world.driver_runs(world.live_drivers()[0])
    look()
    assert seen == [
        ("Pending", "False", "WaitingForCluster"),
        ("Starting", "False", "WaitingForCluster"),
        ("Starting", "False", "SubmitterPending"),
        ("Starting", "False", "SubmitterPending"),
        ("Starting", "False", "DriverStarting"),
        ("Starting", "True", "MembersStarting"),
        ("Running", "True", "Training"),
    ]


def test_the_report_is_folded(world: World) -> None:
    driver = world.train(iterations=2)
    status = world.status
    assert status["progress"] == driver.report["progress"]
    assert status["weights"] == {
        "version": 2,
        "digest": digest(2),
        "consistentMembers": "4/4",
        "lastVerifiedVersion": 2,
    }
    assert status["checkpoint"] == driver.report["checkpoint"]
    assert status["evalReplicas"] == 4


def test_without_a_claim_the_status_says_that_nothing_is_kept() -> None:
    world = World(job_spec(checkpoints={}))
    world.train()
    assert "runPath" not in world.status
    assert "no checkpoint outlives the head pod" in world.condition("Progressing")["message"]
    assert [(n.type, n.reason) for n in world.notes][:2] == [("Normal", "Started"), ("Warning", "NoCheckpoints")]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"environment": {"id": "CartPole-v1", "numEnvs": 9}},
            "spec.environment.numEnvs: must be a multiple of policyGroup.eval.replicas, 4: without shards each eval "
            "member is one (value 9); change one of the two, or set environment.shards.",
        ),
        (
            {"pools": [{"name": "head"}]},
            "spec.pools[0].name: is reserved for Ray's head pod (value 'head'); choose another name.",
        ),
        ({"seed": "7"}, "spec.seed: Input should be a valid integer (value '7'). Correct it"),
    ],
)
def test_a_spec_that_cannot_be_used_ends_the_job_with_field_value_and_remedy(change: dict[str, Any], text: str) -> None:
    world = World(job_spec(**change))
    world.settle()
    succeeded = world.condition("Succeeded")
    assert (succeeded["status"], succeeded["reason"]) == ("False", "InvalidSpec")
    assert succeeded["message"].startswith(text)
    assert world.status["state"] == "Failed"
    assert world.writes == ["status"]


def test_names_that_an_earlier_job_still_holds_are_waited_for(world: World) -> None:
    meta = {"name": "walker", "namespace": NAMESPACE, "ownerReferences": [{"kind": "RLJob", "uid": "old-uid"}]}
    world.add({"kind": "PolicyGroup", "metadata": meta, "spec": {"attempt": 7}})
    world.settle()
    assert world.writes == ["status"]
    entry = world.condition("ClusterReady")
    assert (entry["reason"], entry["message"]) == (
        "LeftoverObjects",
        "PolicyGroup walker is left of an earlier RLJob of this name (uid old-uid). The job starts when Kubernetes has "
        "collected it; if that takes minutes: `kubectl delete policygroup walker`.",
    )
    assert "startTime" not in world.status
    world.collect()
    world.settle()
    assert (world.status["attempt"], world.group["spec"]["attempt"]) == (1, 1)


def test_a_job_keeps_the_image_that_it_began_with() -> None:
    """Whatever default an operator has that was upgraded meanwhile: an attempt resumes to the bit only on the same."""
    world = World()
    driver = world.train()
    began = (world.config.trainer_image, world.config.ray_version)
    assert (world.status["image"], world.status["rayVersion"]) == began
    world.config = replace(world.config, trainer_image="example.org/trainer:next", ray_version="9.9.9")
    world.edit(suspend=True)
    world.settle()
    world.driver_runs(driver)
    world.submitters_act()
    world.settle()
    world.edit(suspend=False)
    world.settle()
    (cluster,) = world.clusters()
    assert cluster["metadata"]["name"] == RC2
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert (head["image"], cluster["spec"]["rayVersion"]) == began
    assert (world.status["image"], world.status["rayVersion"]) == began


def test_an_image_that_nothing_was_trained_with_is_not_kept(world: World) -> None:
    """A default with a mistake in it, say, that an upgrade corrects: suspend and resume is enough."""
    world.settle()
    world.config = replace(world.config, trainer_image="example.org/trainer:right", ray_version="9.9.9")
    world.settle()
    assert world.status["image"] != "example.org/trainer:right", "the cluster is as it was made"
    world.edit(suspend=True)
    world.settle()
    world.edit(suspend=False)
    world.settle()
    assert (world.status["image"], world.status["rayVersion"]) == ("example.org/trainer:right", "9.9.9")
    (cluster,) = world.clusters()
    assert cluster["spec"]["rayVersion"] == "9.9.9"


def test_the_image_of_a_job_that_an_older_operator_began_is_that_of_its_cluster(world: World) -> None:
    world.train()
    before = world.status["image"]
    for name in ("image", "rayVersion"):
        del world.job["status"][name]
    world.config = replace(world.config, trainer_image="example.org/trainer:next", ray_version="9.9.9")
    world.settle()
    assert world.status["image"] == before
    assert world.status["rayVersion"] != "9.9.9"


def test_a_refused_deletion_is_said_of_a_job_that_needs_no_cluster(world: World) -> None:
    driver = world.train()
    world.edit(suspend=True)
    world.settle()
    world.driver_runs(driver)
    world.submitters_act()
    world.settle()
    needs_none = "A suspended job needs no RayCluster."
    assert world.condition("ClusterReady")["message"] == needs_none
    world.refused = f"RayCluster {RC1} could not be deleted: denied by webhook"
    world.operate()
    assert world.condition("ClusterReady")["message"] == f"{needs_none} {world.refused}. It is tried again."
    world.refused = None
    world.edit(suspend=False)
    driver = world.train()
    world.driver_ends(driver, "Succeeded", "TotalReached")
    world.settle()
    needs_none = "The job has finished and needs no RayCluster."
    assert world.condition("ClusterReady")["message"] == needs_none
    world.refused = f"RayCluster {RC2} could not be deleted: denied by webhook"
    world.settle()
    assert world.condition("ClusterReady")["message"] == f"{needs_none} {world.refused}. It is tried again."


def test_names_that_somebody_else_holds(world: World) -> None:
    world.add({"kind": "ServiceAccount", "metadata": {"name": "rlj-walker", "namespace": NAMESPACE}})
    world.settle()
    entry = world.condition("ClusterReady")
    assert (entry["reason"], entry["message"]) == (
        "NameTaken",
        "ServiceAccount rlj-walker is there already and belongs to no RLJob. Delete it, or give the job another name.",
    )


# ----------------------------------------------------------------------------------------------------------------- end


def test_success_releases_the_cluster_and_keeps_the_record(world: World) -> None:
    driver = world.train()
    world.driver_ends(driver, "Succeeded", "TotalReached", "1000 steps are done")
    world.operate()
    assert world.clusters(), "its submitter prints the end of the log"
    world.settle()
    assert (world.status["state"], world.status["completionTime"]) == ("Succeeded", format_time(world.now))
    assert reason(world, "Finished") == ("True", "TotalReached")
    assert reason(world, "Succeeded") == ("True", "TotalReached")
    assert reason(world, "WeightsConsistent") == ("True", "DigestsAgree")
    assert world.status["weights"]["consistentMembers"] == "4/4"
    kinds = {kind for kind, _ in world.objects}
    assert {"PolicyGroup", "Job"} <= kinds
    assert not {"RayCluster", "Pod"} & kinds


def test_a_submitter_that_does_not_end_holds_the_cluster_for_seconds_only(world: World) -> None:
    world.driver_ends(world.train(), "Succeeded", "TotalReached", "done")
    world.operate()
    plan = world.operate()
    assert world.clusters()
    assert plan.requeue_after == pytest.approx(20, abs=0.1)
    world.passes(20)
    world.operate()
    assert not world.clusters()


def test_a_policy_that_raises_is_final_and_the_end_of_its_traceback_is_in_the_conditions(world: World) -> None:
    driver = world.train()
    message = "train-0 on pod walker-learners-1: Traceback …\n  File policy.py, line 3, in train\nValueError: no"
    world.driver_ends(driver, "Failed", "ValueError", message)
    world.submitters_act()
    world.settle()
    assert (world.status["state"], world.status["attempt"]) == ("Failed", 1)
    for type_, status in (("Finished", "True"), ("Succeeded", "False")):
        entry = world.condition(type_)
        assert (entry["status"], entry["reason"], entry["message"]) == (status, "ValueError", message)
    assert not world.clusters()
    assert world.notes[-1].type == "Warning"


def test_a_cluster_that_could_not_be_deleted_is_deleted_later(world: World) -> None:
    driver = world.train()
    world.driver_ends(driver, "Succeeded", "TotalReached", "")
    world.submitters_leave()
    world.operate(dies_after=1)
    assert world.clusters()
    world.settle()
    assert not world.clusters()


def test_a_submitter_that_has_printed_all_lets_the_cluster_go(world: World) -> None:
    world.driver_ends(world.train(), "Failed", "ValueError", "")
    world.operate()
    world.submitters_leave()
    world.operate()
    assert not world.clusters()


def test_terminal_stays_terminal_and_its_generation_follows(world: World) -> None:
    world.driver_ends(world.train(), "Succeeded", "TotalReached", "done")
    world.settle()
    before = copy.deepcopy(world.status)
    world.edit(suspend=True, unchecked=True, seed=99)
    world.settle()
    assert world.status["observedGeneration"] == 2
    assert [(c["status"], c["lastTransitionTime"]) for c in world.status["conditions"]] == [
        (c["status"], c["lastTransitionTime"]) for c in before["conditions"]
    ]
    assert world.status["completionTime"] == before["completionTime"]


def test_a_job_past_its_time_to_live_is_deleted_and_not_before() -> None:
    world = World(job_spec(runPolicy={"ttlSecondsAfterFinished": 60}))
    world.driver_ends(world.train(), "Succeeded", "TotalReached", "done")
    world.submitters_act()
    world.settle()
    plan = world.operate()
    assert plan.requeue_after == pytest.approx(60, abs=0.1)
    world.passes(60)
    assert reconcile(world.snapshot()).actions == (Delete("RLJob", "walker", world.job_uid),)


# ------------------------------------------------------------------------------------------------------------- suspend


def test_created_suspended_makes_nothing_until_it_is_resumed() -> None:
    world = World(job_spec(suspend=True))
    world.settle()
    assert world.writes == ["status"]
    assert (world.status["state"], reason(world, "Suspended")) == ("Suspended", ("True", "Suspended"))
    assert "attempt" not in world.status
    world.passes(1000)
    world.edit(suspend=False)
    world.settle()
    assert (world.status["attempt"], world.status["rayCluster"]) == (1, RC1)
    assert world.status["startTime"] == format_time(world.now)


def test_suspend_lets_the_driver_save_then_the_cluster_goes_and_resume_goes_on(world: World) -> None:
    driver = world.train(iterations=3)
    world.edit(suspend=True)
    world.settle()
    assert (world.status["state"], reason(world, "Suspended")) == ("Suspending", ("Unknown", "Suspending"))
    assert world.group["spec"]["state"] == "Stopped"
    assert world.clusters()
    world.driver_runs(driver)
    world.submitters_act()
    world.settle()
    assert (world.status["state"], reason(world, "Suspended")) == ("Suspended", ("True", "Suspended"))
    assert world.condition("Suspended")["message"] == (
        "The driver saved and stopped. When spec.suspend is false again, it goes on from iteration 3 (checkpoint "
        "checkpoints/3)."
    )
    assert not world.clusters()
    assert reason(world, "ClusterReady") == ("False", "Suspended")
    world.passes(3600)
    world.settle()
    world.edit(suspend=False)
    world.settle()
    assert (world.status["attempt"], world.status["rayCluster"], world.status["lostAttempts"]) == (2, RC2, 0)
    assert (world.group["spec"]["attempt"], world.group["spec"]["state"]) == (2, "Running")
    assert world.status["restarts"][-1]["reason"] == "Suspended"
    assert reason(world, "Suspended") == ("False", "NotSuspended")


def test_a_cluster_that_left_no_trace_still_had_its_name(world: World) -> None:
    world.operate()
    world.edit(suspend=True)
    world.settle()
    world.edit(suspend=False)
    world.settle()
    assert (world.status["attempt"], world.status["rayCluster"]) == (2, RC2)


def test_a_driver_may_save_while_clusters_cannot_be_read(world: World) -> None:
    driver = world.train(iterations=3)
    world.kuberay = KubeRay(installed=False, message="rayclusters.ray.io is forbidden")
    world.edit(suspend=True)
    world.settle()
    assert (world.status["state"], reason(world, "Suspended")) == ("Suspending", ("Unknown", "Suspending"))
    world.driver_runs(driver)
    world.settle()
    assert world.condition("Suspended")["message"].startswith("The driver saved and stopped.")


def test_a_driver_that_does_not_save_in_time_is_not_waited_for_longer(world: World) -> None:
    world.train(iterations=3)
    world.edit(suspend=True)
    world.settle()
    world.passes(30)
    plan = world.operate()
    assert plan.requeue_after == pytest.approx(30, abs=0.1)
    assert world.clusters()
    world.passes(30)
    world.settle()
    assert not world.clusters()
    assert "did not stop within spec.checkpoints.drainSeconds (60 s)" in world.condition("Suspended")["message"]
    assert "goes on from iteration 3" in world.condition("Suspended")["message"]


def test_without_a_driver_there_is_nothing_to_wait_for(world: World) -> None:
    world.settle()
    world.edit(suspend=True)
    world.settle()
    assert world.status["state"] == "Suspended"
    assert not world.clusters()
    assert world.condition("Suspended")["message"] == (
        "No driver was running. When spec.suspend is false again, it starts from zero: no checkpoint was saved yet."
    )


def test_a_driver_that_is_lost_while_it_drains_is_not_waited_for_and_not_counted(world: World) -> None:
    world.train()
    world.edit(suspend=True)
    world.settle()
    world.lose_pod(world.head)
    world.settle()
    assert (world.status["state"], world.status["lostAttempts"]) == ("Suspended", 0)


def test_without_a_claim_a_suspended_job_starts_from_zero() -> None:
    world = World(job_spec(checkpoints={}))
    driver = world.train()
    world.edit(suspend=True)
    world.settle()
    world.driver_runs(driver)
    world.settle()
    assert "it starts from zero: no claim is named" in world.condition("Suspended")["message"]


def test_a_job_that_ends_while_it_is_suspended_has_ended(world: World) -> None:
    driver = world.train()
    world.edit(suspend=True)
    world.settle()
    world.driver_ends(driver, "Succeeded", "TotalReached", "done")
    world.settle()
    assert world.status["state"] == "Succeeded"


def test_suspend_taken_back_while_the_driver_saves(world: World) -> None:
    driver = world.train()
    world.edit(suspend=True)
    world.settle()
    world.edit(suspend=False)
    world.driver_ends(driver, "Stopped", "Interrupted", "stopped after iteration 3, as asked")
    world.settle()
    assert (world.status["attempt"], world.status["rayCluster"], world.status["lostAttempts"]) == (2, RC1, 0)
    restart = world.status["restarts"][-1]
    assert (restart["reason"], restart["message"]) == (
        "Stopped",
        "The driver has stopped. Stopped after iteration 3, as asked.",
    )


# ------------------------------------------------------------------------------------------------------------- changes


def test_fewer_eval_members_are_a_new_attempt_on_the_same_cluster_after_a_graceful_stop(world: World) -> None:
    driver = world.train()
    evals(world, 2)
    world.settle()
    assert (world.group["spec"]["state"], world.group["spec"]["attempt"]) == ("Stopped", 1)
    assert reason(world, "Progressing") == ("True", "SpecChanged")
    world.driver_runs(driver)
    world.settle()
    assert (world.status["attempt"], world.status["rayCluster"], world.status["lostAttempts"]) == (2, RC1, 0)
    spec = world.group["spec"]
    assert (spec["state"], spec["attempt"], spec["evalReplicas"]) == ("Running", 2, 2)
    assert spec["training"]["policyGroup"]["eval"]["replicas"] == 2
    assert spec["training"]["environment"]["shards"] == 4  # as at the first start
    assert world.status["restarts"][-1]["reason"] == "SpecChanged"


def test_a_change_that_is_taken_back_lets_the_driver_go_on(world: World) -> None:
    world.train()
    evals(world, 2)
    world.settle()
    evals(world, 4)
    world.settle()
    assert (world.group["spec"]["state"], world.status["attempt"]) == ("Running", 1)


def test_a_change_before_the_driver_starts_needs_no_stop(world: World) -> None:
    world.settle()
    evals(world, 2)
    world.settle()
    assert (world.status["attempt"], world.status["rayCluster"]) == (2, RC1)
    assert world.group["spec"]["evalReplicas"] == 2


@pytest.mark.parametrize("change", [{"runPolicy": {"backoffLimit": 9}}, {"imagePullPolicy": "Always"}])
def test_a_change_that_drivers_do_not_see_restarts_nothing(world: World, change: dict[str, Any]) -> None:
    world.train()
    world.edit(**change)
    world.settle()
    assert (world.status["attempt"], world.group["spec"]["state"]) == (1, "Running")
    assert world.status["observedGeneration"] == 2


def test_a_forbidden_change_that_the_rules_missed_is_ignored_and_said(world: World) -> None:
    driver = world.train()
    world.edit(unchecked=True, environment={"id": "CartPole-v1", "numEnvs": 8, "kwargs": {"x": 1}})
    world.settle()
    text = "spec.environment was changed after the start and is ignored; put the old value back, or start a new job."
    assert (world.status["attempt"], world.group["spec"]["state"]) == (1, "Running")
    assert world.condition("Progressing")["message"].endswith(text)
    assert ("Warning", "SpecChanged", text) in [(n.type, n.reason, n.message) for n in world.notes]
    # Not even a new attempt takes it.
    world.driver_ends(driver, "Lost", "MemberLost", "")
    world.settle()
    assert world.group["spec"]["attempt"] == 2
    assert world.group["spec"]["training"]["environment"]["kwargs"] == {}


# ----------------------------------------------------------------------------------------------------------- deadlines


def test_active_deadline_counts_from_the_last_resume() -> None:
    world = World(job_spec(runPolicy={"activeDeadlineSeconds": 100}))
    world.train()
    world.passes(50)
    world.edit(suspend=True)
    world.settle()
    world.passes(60)
    world.settle()
    world.passes(1000)
    world.edit(suspend=False)
    world.settle()
    world.passes(99)
    world.settle()
    assert world.status["state"] != "Failed"
    world.passes(1)
    world.settle()
    assert reason(world, "Succeeded") == ("False", "DeadlineExceeded")
    assert world.condition("Succeeded")["message"] == (
        "The job was not done within spec.runPolicy.activeDeadlineSeconds (100 s)."
    )
    assert not world.clusters()


def test_scheduling_deadline_says_what_was_waited_for() -> None:
    world = World(job_spec(runPolicy={"schedulingDeadlineSeconds": 300}))
    world.settle()
    for pod in world.pods("learners"):
        scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes."}
        pod["status"]["conditions"] = [scheduled]
        world.touch(pod)
    plan = world.operate()
    assert plan.requeue_after == pytest.approx(300, abs=0.1)
    world.passes(300)
    world.settle()
    entry = world.condition("Finished")
    assert entry["reason"] == "SchedulingDeadlineExceeded"
    assert entry["message"].startswith(
        "The pods were not all ready within spec.runPolicy.schedulingDeadlineSeconds (300 s). Waited for Unschedulable:"
    )


def test_scheduling_deadline_ends_a_job_whose_cluster_is_refused() -> None:
    world = World(job_spec(runPolicy={"schedulingDeadlineSeconds": 300}))
    world.refused = "RayCluster walker-0000-1 could not be created: exceeded quota: small"
    while not world.status.get("startTime"):
        world.operate(dies_after=1)  # the status is written, and nothing else
    world.passes(299)
    world.operate(dies_after=1)
    assert world.condition("Finished")["status"] == "False"
    assert not world.clusters()
    world.passes(2)
    world.operate(dies_after=1)
    entry = world.condition("Finished")
    assert (entry["status"], entry["reason"]) == ("True", "SchedulingDeadlineExceeded")
    assert entry["message"] == (
        "The pods were not all ready within spec.runPolicy.schedulingDeadlineSeconds (300 s). Waited for WriteRefused: "
        "RayCluster walker-0000-1 could not be created: exceeded quota: small. It is tried again."
    )


def test_scheduling_deadline_waits_for_an_operator_that_was_away_before_it_tried() -> None:
    world = World(job_spec(runPolicy={"schedulingDeadlineSeconds": 300}))
    while not world.status.get("startTime"):
        world.operate(dies_after=1)
    assert not world.clusters()
    world.passes(1000)
    world.settle()
    assert world.condition("Finished")["status"] == "False"
    assert world.clusters()


def test_scheduling_deadline_begins_anew_with_an_attempt() -> None:
    """A pod that no member needs was not ready for an hour of training; then a member was lost."""
    world = World(job_spec(runPolicy={"schedulingDeadlineSeconds": 300}))
    driver = world.train()
    pod = world.pods("actors")[0]
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.touch(pod)
    world.settle()
    world.passes(3600)  # one long iteration
    world.settle()
    assert world.condition("Finished")["status"] == "False"
    world.driver_ends(driver, "Lost", "MemberLost", "eval-0 died")
    world.settle()
    assert (world.condition("Finished")["status"], world.status["attempt"]) == ("False", 2)
    world.passes(299)
    world.settle()
    assert world.condition("Finished")["status"] == "False"
    world.passes(2)
    world.settle()
    assert world.condition("Finished")["reason"] == "SchedulingDeadlineExceeded"


def test_scheduling_deadline_is_for_the_submitter_too() -> None:
    world = World(job_spec(runPolicy={"schedulingDeadlineSeconds": 300}))
    world.settle()
    world.passes(200)
    world.make_ready()
    world.settle()
    world.passes(299)
    world.settle()
    assert world.condition("Finished")["status"] == "False"
    world.passes(2)
    world.settle()
    entry = world.condition("Finished")
    assert (entry["reason"], entry["message"]) == (
        "SchedulingDeadlineExceeded",
        "The submitter did not start within spec.runPolicy.schedulingDeadlineSeconds (300 s) after the pods were "
        "ready. Waited for the pod of Job walker-0000-1-1.",
    )


def test_scheduling_deadline_does_not_end_a_job_that_trains() -> None:
    """A pod is not ready for long, and the driver goes on without it."""
    world = World(job_spec(runPolicy={"schedulingDeadlineSeconds": 300}))
    driver = world.train()
    pod = world.pods("actors")[0]
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.touch(pod)
    for _ in range(8):
        world.passes(100)
        world.driver_runs(driver)
        world.settle()
    assert world.status["state"] == "Running"


# ------------------------------------------------------------------------------------------------------------- at rest


def test_at_rest_time_alone_writes_nothing(world: World) -> None:
    world.train()
    writes = len(world.writes)
    for seconds in (1, 10, 100, 700):
        world.passes(seconds)
        world.operate()
    assert len(world.writes) == writes


def test_a_policy_that_an_administrator_changed_is_written_anew_and_one_no_longer_wanted_goes(world: World) -> None:
    world.train()
    config = world.config
    world.config = type(config)(**{**vars(config), "api_server_endpoints": (("10.9.9.9", 443),)})
    world.settle()
    assert world.writes[-1] == "patch NetworkPolicy rlj-walker-head"
    assert "10.9.9.9/32" in json.dumps(world.objects["NetworkPolicy", "rlj-walker-head"]["spec"])
    world.config = type(config)(**{**vars(config), "network_policies": False})
    world.settle()
    assert not world.of_kind("NetworkPolicy")


def test_what_somebody_deleted_is_made_again(world: World) -> None:
    world.train()
    for kind, name in (("Role", "rlj-walker"), ("Job", f"{RC1}-1"), ("NetworkPolicy", "rlj-walker-cluster")):
        world.remove(kind, name)
        world.settle()
        assert (kind, name) in world.objects


def test_a_report_that_cannot_be_read_is_ignored_with_an_event(world: World) -> None:
    world.train()
    before = dict(world.status)
    world.group["status"]["progress"] = {"iteration": -1, "envSteps": 1}
    world.touch(world.group)
    world.settle()
    assert world.notes[-1].reason == "ReportUnreadable"
    assert "status.progress.iteration" in world.notes[-1].message
    assert world.status["progress"] == before["progress"]


def test_the_reconciler_needs_no_client_no_kopf_and_no_tensors() -> None:
    code = (
        "import sys; import rlightning_operator.reconcile.plan; "
        "bad = {'kopf', 'kubernetes', 'aiohttp', 'torch', 'ray', 'numpy', 'gymnasium'} & set(sys.modules); "
        "sys.exit(', '.join(sorted(bad)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ".:operator"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
