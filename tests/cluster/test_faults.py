"""Killed while it trains: whatever dies, the job ends Succeeded with the digest of the undisturbed run.

Each test records the iteration of the kill, the identity (uid or pid) before and after, and a counter that is 0 in the
undisturbed run of ``test_end_to_end``; so a kill that missed fails the test.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster_jobs import Job, Start, iterations, long_job
from tests.support.installation import Installation
from tests.support.kube import Kube, eventually
from tests.support.local_runs import LocalRun, LocalRuns

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

STARTED = 240
"""Seconds for a job to be on its way."""


@pytest.fixture(scope="module")
def undisturbed(local_runs: LocalRuns) -> LocalRun:
    """The same job on this machine; test_end_to_end shows that a cluster ends with the same digest."""
    return local_runs.of(long_job("long"))


@dataclass
class Kill:
    """One kill, proved."""

    what: str
    iteration: int
    before: str
    after: str

    def check(self, last: int) -> None:
        print(f"{self.what} killed at iteration {self.iteration} of {last}: {self.before} -> {self.after}")
        assert 2 <= self.iteration <= last - 2, self
        assert self.before != self.after, self


def progressed(job: Job, beyond: int, seconds: float = 240) -> int:
    """Wait until training has gone on by some iterations, so that the next kill is one of its own."""
    return job.until_iteration(beyond, seconds=seconds)


def trains_in(job: Job, attempt: int) -> None:
    """Wait until the driver of that attempt has reported an iteration of its own."""

    def look() -> bool:
        report = job.group().get("status", {})
        # The first report of an attempt says where it begins, and only a later one has a speed.
        return report.get("attempt") == attempt and "stepsPerSecond" in report.get("progress", {})

    eventually(look, seconds=240, what=f"{job.name}: an iteration in attempt {attempt}", now=job.describe)


def kill_pod(kube: Kube, pod: dict[str, Any]) -> str:
    """Delete a pod at once, as if its machine had lost power."""
    kube.ok("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force", "--wait=false")
    return str(pod["metadata"]["uid"])


def kill_operator(installation: Installation, job: Job) -> Kill:
    before = installation.operator_pod()["metadata"]["uid"]
    kill = Kill("operator pod", job.iteration, before, "")
    kill_pod(installation.system, installation.operator_pod())

    def other() -> str | None:
        uid = str(installation.operator_pod()["metadata"]["uid"])
        return uid if uid != before else None

    kill.after = eventually(other, seconds=120, what="another operator pod")
    return kill


def kill_submitter(job: Job) -> Kill:
    (pod,) = [p for p in job.pods(component="submitter") if p["status"].get("phase") == "Running"]
    kill = Kill("submitter pod", job.iteration, kill_pod(job.kube, pod), "")

    def other() -> str | None:
        pods = [p for p in job.pods(component="submitter") if p["status"].get("phase") == "Running"]
        return str(pods[0]["metadata"]["uid"]) if pods and pods[0]["metadata"]["uid"] != kill.before else None

    kill.after = eventually(other, seconds=120, what="another submitter pod", now=job.describe)
    return kill


def kill_worker(job: Job, pool: str) -> Kill:
    pods = job.workers(pool)
    kill = Kill(f"pod of pool {pool}", job.iteration, kill_pod(job.kube, pods[0]), "")
    known = {p["metadata"]["uid"] for p in pods}

    def other() -> str | None:
        return next((str(p["metadata"]["uid"]) for p in job.workers(pool) if p["metadata"]["uid"] not in known), None)

    kill.after = eventually(other, seconds=120, what=f"another pod of pool {pool}", now=job.describe)
    return kill


def kill_head(job: Job) -> Kill:
    head = job.head()
    kill = Kill("head pod", job.iteration, kill_pod(job.kube, head), "")

    def other() -> str | None:
        uid = str(job.head()["metadata"]["uid"])
        return uid if uid != kill.before else None

    kill.after = eventually(other, seconds=180, what="another head pod", now=job.describe)
    return kill


def kill_driver(job: Job) -> Kill:
    pid = job.driver_pid()
    kill = Kill("driver process", job.iteration, f"attempt {job.status['attempt']} pid {pid}", "")
    job.exec_head("python3", "-c", f"import os; os.kill({pid}, 9)")
    job.until(lambda s: s["attempt"] > 1, seconds=120, what="another attempt")
    job.until(
        lambda s: job.group()["status"]["attempt"] == s["attempt"], seconds=180, what="a report of another driver"
    )
    kill.after = f"attempt {job.status['attempt']} pid {job.driver_pid()}"
    return kill


def ends_undisturbed(job: Job, kills: list[Kill], undisturbed: LocalRun, restarts: list[str]) -> dict[str, Any]:
    """The job succeeds with the digest of the undisturbed run, restarted for these reasons.

    In one RayCluster, unless it was suspended: then in one more.
    """
    suspensions = restarts.count("Suspended")
    lost = len(restarts) - suspensions
    clusters = {c["metadata"]["name"] for c in job.clusters()}
    status = job.succeeded(seconds=420)
    for kill in kills:
        kill.check(undisturbed.iterations)
    assert status["weights"]["digest"] == undisturbed.digest, job.describe()
    assert status["weights"]["consistentMembers"] == "4/4"
    assert status["progress"]["iteration"] == undisturbed.iterations
    assert [r["reason"] for r in status.get("restarts", ())] == restarts, status.get("restarts")
    assert status.get("lostAttempts", 0) == lost, "a suspension is no fault"
    assert status["attempt"] == 1 + len(restarts)
    assert status["rayCluster"].endswith(f"-{1 + suspensions}"), "no further RayCluster was needed"
    assert clusters <= {status["rayCluster"]}
    return status


def suspend_and_resume(job: Job, folder: Path, last: int) -> None:
    """The cluster goes, at most one iteration is lost, and the next attempt trains on a new one."""
    first = job.status["rayCluster"]
    job.kube.merge("rljob", job.name, {"spec": {"suspend": True}})
    suspended = job.until_condition("Suspended", status="True", seconds=120)
    eventually(job.is_released, seconds=90, what="the cluster is gone", now=job.describe_leftovers)
    status = job.status
    assert status["state"] == "Suspended"
    assert status["rayCluster"] == first
    stopped_at = status["checkpoint"]["iteration"]
    print(f"suspended at iteration {stopped_at} of {last}")
    assert re.search(rf"\b{stopped_at}\b", suspended["message"]), suspended
    assert 2 <= stopped_at <= last - 2
    done = [line["iteration"] for line in iterations(folder)]
    assert done[-1] - stopped_at <= 1, "at most one iteration is lost"
    job.kube.merge("rljob", job.name, {"spec": {"suspend": False}})
    job.until_condition("Suspended", status="False", seconds=60)
    trains_in(job, status["attempt"] + 1)
    after = [line["iteration"] for line in iterations(folder) if line.get("attempt") == status["attempt"] + 1]
    assert stopped_at <= after[0] <= stopped_at + 1, "it goes on where it stopped"


def test_operator_submitter_eval_pod_head_and_a_suspension_in_one_run(
    start: Start, installation: Installation, namespace: Kube, undisturbed: LocalRun
) -> None:
    job = start(long_job("long"))
    progressed(job, 2, seconds=STARTED)
    kills = [kill_operator(installation, job)]
    kills.append(kill_submitter(job))
    # Neither of these disturbs the training: it is still the first attempt, and the successor of the submitter
    # followed the same Ray job.
    progressed(job, kills[1].iteration + 1)
    assert job.status["attempt"] == 1
    eventually(
        lambda: (found := namespace.get("job", f"{job.status['rayCluster']}-1")) and found["status"].get("failed") == 1,
        seconds=30,
        what="the counter of the killed submitter",
        now=job.describe,
    )
    kills.append(kill_worker(job, "actors"))
    job.until(lambda s: s["attempt"] == 2, seconds=120, what="a second attempt after the eval pod's death")
    trains_in(job, 2)
    kills.append(kill_head(job))
    job.until(lambda s: s["attempt"] == 3, seconds=180, what="a third attempt after the head's death")
    assert {c["metadata"]["name"] for c in job.clusters()} == {job.status["rayCluster"]}
    assert job.status["rayCluster"].endswith("-1"), "no second RayCluster was needed for any of these"
    trains_in(job, 3)
    folder = installation.claim_directory(namespace.namespace, "runs") / job.status["runPath"]
    suspend_and_resume(job, folder, undisturbed.iterations)
    ends_undisturbed(job, kills, undisturbed, ["MemberLost", "HeadLost", "Suspended"])
    attempts = [line["attempt"] for line in iterations(folder) if "attempt" in line]
    assert set(attempts) == {1, 2, 3, 4}


@pytest.mark.faults
def test_the_driver_process(start: Start, installation: Installation, namespace: Kube, undisturbed: LocalRun) -> None:
    job = start(long_job("driver"))
    progressed(job, 5, seconds=STARTED)
    kills = [kill_driver(job)]
    ends_undisturbed(job, kills, undisturbed, ["DriverLost"])


@pytest.mark.faults
def test_the_train_pod(start: Start, installation: Installation, namespace: Kube, undisturbed: LocalRun) -> None:
    job = start(long_job("train"))
    progressed(job, 5, seconds=STARTED)
    kills = [kill_worker(job, "learners")]
    job.until(lambda s: s["attempt"] == 2, seconds=120, what="a second attempt")
    ends_undisturbed(job, kills, undisturbed, ["MemberLost"])


@pytest.mark.faults
@pytest.mark.parametrize("part", ["operator", "submitter", "eval", "head"])
def test_each_part_alone(
    start: Start, installation: Installation, namespace: Kube, undisturbed: LocalRun, part: str
) -> None:
    job = start(long_job(f"alone-{part}"))
    progressed(job, 5, seconds=STARTED)
    restarts: list[str] = []
    if part == "operator":
        kill = kill_operator(installation, job)
    elif part == "submitter":
        kill = kill_submitter(job)
    elif part == "eval":
        kill, restarts = kill_worker(job, "actors"), ["MemberLost"]
    else:
        kill, restarts = kill_head(job), ["HeadLost"]
    ends_undisturbed(job, [kill], undisturbed, restarts)


@pytest.mark.faults
def test_suspend_then_resume(start: Start, installation: Installation, namespace: Kube, undisturbed: LocalRun) -> None:
    job = start(long_job("pause"))
    progressed(job, 5, seconds=STARTED)
    folder = installation.claim_directory(namespace.namespace, "runs") / job.status["runPath"]
    suspend_and_resume(job, folder, undisturbed.iterations)
    ends_undisturbed(job, [], undisturbed, ["Suspended"])
    again = [line["iteration"] for line in iterations(folder)]
    assert len(again) - len(set(again)) <= 1, "at most one iteration was done twice"
