"""A job in a cluster, without the cluster: a real Ray head, a real API server, real submitters and drivers.

What the operator and Kubernetes do is done by the tests: raise the attempt, start submitters, kill processes.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlightning.api.models import RLJob
from rlightning.weights.ledger import Ledger
from tests.support.groups import Group, make_group
from tests.support.jobs import CARTPOLE, job, merged, run
from tests.support.ray_head import ROOT, TOKEN, RayHead

pytestmark = [pytest.mark.ray, pytest.mark.apiserver, pytest.mark.slow, pytest.mark.timeout(1200)]

START_SECONDS = 200  # five processes that import torch, on two cores that others use too

POOLED: dict[str, Any] = {
    "policyGroup": {"train": {"pool": "learners"}, "eval": {"replicas": 2, "pool": "actors"}},
    "pools": [{"name": "learners"}, {"name": "actors", "membersPerReplica": 2}],
}


def custom(policy: str, **changes: Any) -> RLJob:
    """The small CartPole job on pools, with a policy of tests/support/policies.py."""
    base = {k: v for k, v in merged(CARTPOLE, POOLED).items() if k != "policy"}
    chosen = {"custom": {"class": f"tests.support.policies:{policy}", "config": CARTPOLE["policy"]["simplePPO"]}}
    return job(merged(base, {"policy": chosen}), **changes)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rl-", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def head(kube: Any, folder: Path) -> Iterator[RayHead]:
    head = RayHead(folder, {"learners": 1, "actors": 2}, {"KUBECONFIG": kube.kubeconfig})
    yield head
    head.stop()


class Submitter:
    """A submitter process, as in its pod."""

    def __init__(
        self, head: RayHead, folder: Path, submission: str, entrypoint: str, *options: str, token: str = TOKEN
    ) -> None:
        self.log = folder / f"{submission}-{time.monotonic_ns()}.log"
        self.termination = self.log.with_suffix(".termination")
        self.termination.touch()
        self._out = self.log.open("w")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "rlightning.runtime.cluster.submitter", "--address", head.address),
                *("--submission-id", submission, "--entrypoint", entrypoint),
                *("--termination-log", str(self.termination), *options),
            ],
            cwd=ROOT,
            env={**os.environ, "RAY_AUTH_TOKEN": token},
            stdout=self._out,
            stderr=subprocess.STDOUT,
        )

    @property
    def printed(self) -> str:
        return self.log.read_text()

    def wait(self, seconds: float = START_SECONDS) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the submitter did not end within {seconds:g} s:\n{self.printed}") from None
        finally:
            self._out.close()


def driver_command(group: Group, attempt: int, folder: Path) -> str:
    return shlex.join(
        [
            *(sys.executable, "-m", "rlightning.runtime.cluster.driver", "--namespace", group.kube.namespace),
            *("--group", group.name, "--job-uid", group.job_uid, "--attempt", str(attempt)),
            *("--run-dir", str(run_dir(group, folder)), "--report-seconds", "0.5"),
        ]
    )


def run_dir(group: Group, folder: Path) -> Path:
    return folder / "runs" / "team" / f"{group.name}-0a1b2c3d"


def submit(head: RayHead, group: Group, attempt: int, folder: Path) -> Submitter:
    return Submitter(head, folder, f"{group.job_uid}-{attempt}", driver_command(group, attempt, folder))


def eventually(holds: Callable[[], Any], of: Submitter, seconds: float = START_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert of.process.poll() is None, f"the submitter has ended:\n{of.printed}"
        assert time.monotonic() < end, f"it did not come to that in time:\n{of.printed}"
        time.sleep(0.2)


def iteration(group: Group) -> int:
    """Of the attempt that reports; -1 before it trains."""
    status = group.status
    return -1 if "version" not in status else int(status["progress"]["iteration"])


def driver_process(group: Group) -> psutil.Process:
    (found,) = (
        p
        for p in psutil.process_iter(["cmdline"])
        if "rlightning.runtime.cluster.driver" in (p.info["cmdline"] or ()) and group.name in p.info["cmdline"]
    )
    return found


def member_processes(policy: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if f"ray::{policy}" in " ".join(p.info["cmdline"] or ())]


@pytest.mark.faults  # test_faults of the cluster does the like with pods, on every `make test`
def test_killed_again_and_again_a_job_ends_with_the_digest_of_an_undisturbed_one(
    head: RayHead, kube: Any, folder: Path
) -> None:
    of = custom("TakesItsTime", training={"totalEnvSteps": 10_000}, checkpoints={"everyIterations": 2})
    undisturbed, _ = run(job(CARTPOLE, training={"totalEnvSteps": 10_000}), folder / "undisturbed")
    group = make_group(kube, of)

    # The submitter is killed: its successor attaches, and prints the log from its beginning.
    first = submit(head, group, 1, folder)
    eventually(lambda: iteration(group) >= 3 and "ready to train after" in first.printed, first)
    assert "1 train + 2 eval members on Ray" in first.printed, "its log is live"
    pid = driver_process(group).pid
    first.process.kill()
    first.wait()
    second = submit(head, group, 1, folder)
    at = iteration(group)
    eventually(lambda: iteration(group) > at, second)
    assert driver_process(group).pid == pid
    eventually(lambda: "ready to train after" in second.printed, second)
    assert second.printed.count("all pools are there") == 1

    # The driver is killed.
    os.kill(pid, signal.SIGKILL)
    assert second.wait() == 3
    assert "signal 9" in second.termination.read_text()
    assert "outcome" not in group.status
    reached = iteration(group)
    saved = max(int(path.name[5:]) for path in (run_dir(group, folder) / "checkpoints").glob("iter-????????"))
    assert saved > 0 and reached - saved <= 2, "at most a checkpoint's interval is lost"

    # A member is killed in the second attempt, which went on from the last checkpoint.
    group.patch(attempt=2)
    third = submit(head, group, 2, folder)
    eventually(lambda: group.status["attempt"] == 2 and iteration(group) > reached, third)
    eventually(lambda: "iter-" in third.printed, third)  # the log comes behind the report
    assert int(third.printed.split("iter-")[1][:8]) == saved, "resumed from the newest, reported or not"
    victims = member_processes("TakesItsTime")
    assert len(victims) == 3, "those of the first attempt are gone"
    victims[0].kill()
    assert third.wait() == 3
    outcome = group.status["outcome"]
    assert (outcome["state"], outcome["reason"]) == ("Lost", "MemberLost")
    assert "(pod the-pod) was lost during" in outcome["message"]
    assert {m["pod"] for m in group.status["members"]} == {"the-pod"}

    # The third is stopped, at its next iteration's end.
    group.patch(attempt=3)
    fourth = submit(head, group, 3, folder)
    eventually(lambda: group.status["attempt"] == 3 and iteration(group) >= 0, fourth)
    group.patch(state="Stopped")
    assert fourth.wait(60) == 0
    stopped = group.status
    assert (stopped["outcome"]["state"], stopped["outcome"]["reason"]) == ("Stopped", "Interrupted")
    assert stopped["checkpoint"]["iteration"] == stopped["progress"]["iteration"], "nothing is lost"
    assert stopped["checkpoint"]["path"] == f"team/{group.name}-0a1b2c3d/checkpoints/" + "iter-{:08d}".format(
        stopped["checkpoint"]["iteration"]
    )

    # The fourth comes to the end.
    group.patch(attempt=4, state="Running")
    fifth = submit(head, group, 4, folder)
    assert fifth.wait(400) == 0, fifth.printed
    ended = group.status
    assert ended["outcome"]["state"] == "Succeeded"
    assert ended["driver"]["pod"] == "the-pod" and ended["driver"]["podUID"] == "uid-of-the-pod"
    assert ended["versions"][-1]["learnerDigest"] == undisturbed.digest
    assert all(m["digest"] == undisturbed.digest for m in ended["members"])
    assert ended["checkpoint"]["digest"] == undisturbed.digest
    assert "estimatedCompletionTime" not in ended["progress"] and ended["progress"]["percent"] == 100
    records = Ledger.read(run_dir(group, folder) / "ledger.jsonl")
    assert {r.attempt for r in records} == {1, 2, 3, 4} and all(r.consistent for r in records)

    # Whoever starts that attempt once more is told how it ended.
    again = Submitter(head, folder, f"{group.job_uid}-again", driver_command(group, 4, folder))
    assert again.wait() == 0
    assert "was driven by pod the-pod" in again.printed and group.status == ended


def test_an_error_of_the_users_is_final_and_its_tracebacks_end_is_everywhere(
    head: RayHead, kube: Any, folder: Path
) -> None:
    group = make_group(kube, custom("RaisesInTrain"))
    submitter = submit(head, group, 1, folder)
    assert submitter.wait() == 1, submitter.printed
    outcome = group.status["outcome"]
    assert (outcome["state"], outcome["reason"]) == ("Failed", "PolicyError")
    assert outcome["message"].startswith("member train-0 (pod the-pod) raised in train_iteration: ValueError")
    for told in (outcome["message"], submitter.termination.read_text()):
        assert told.rstrip().endswith("ValueError: the user's own mistake") and "policies.py" in told
    last = [line for line in submitter.printed.splitlines() if not line.startswith("submitter:")][-1]
    assert last == "ValueError: the user's own mistake"


def test_a_mistake_in_the_manifest_is_told_before_pools_are_waited_for(head: RayHead, kube: Any, folder: Path) -> None:
    elsewhere = {
        "policyGroup": {"train": {"pool": "moon"}, "eval": {"pool": "moon"}},
        "pools": [{"name": "moon", "membersPerReplica": 2}],
    }
    unknown = make_group(kube, job(merged(CARTPOLE, elsewhere), environment={"id": "CartPoel-v1"}))
    submitter = submit(head, unknown, 1, folder)
    assert submitter.wait() == 1
    outcome = unknown.status["outcome"]
    assert (outcome["state"], outcome["reason"]) == ("Failed", "EnvironmentNotFound")
    assert "CartPoel-v1" in outcome["message"] and "CartPole-v1" in outcome["message"]
    assert "progress" not in unknown.status, "nothing was measured"

    waiting = make_group(kube, job(merged(CARTPOLE, elsewhere)))
    submitter = submit(head, waiting, 1, folder)
    eventually(lambda: "waiting for pool moon (0 of 2 places)" in submitter.printed, submitter)
    waiting.patch(state="Stopped")
    assert submitter.wait(60) == 0
    outcome = waiting.status["outcome"]
    assert (outcome["state"], outcome["reason"]) == ("Stopped", "Interrupted")
    assert "pool moon (0 of 2 places)" in outcome["message"]


def test_a_wrong_token_is_one_sentence(head: RayHead, folder: Path) -> None:
    submitter = Submitter(head, folder, "nobody", "true", token="wrong")
    assert submitter.wait(30) == 3
    (line,) = submitter.printed.splitlines()
    assert "refuses the token (HTTP 403)" in line and "RAY_AUTH_TOKEN" in line
    assert submitter.termination.read_text() in line


def test_a_signal_ends_the_submitter_and_not_the_driver(head: RayHead, folder: Path) -> None:
    first = Submitter(head, folder, "goes-on", "for i in 1 2 3 4 5 6 7 8; do echo line $i; sleep 1; done")
    eventually(lambda: "line 2" in first.printed, first)
    first.process.terminate()
    assert first.wait(5) == 143
    second = Submitter(head, folder, "goes-on", "echo not started again")
    assert second.wait() == 0
    assert [line for line in second.printed.splitlines() if line.startswith("line")] == [
        f"line {i}" for i in range(1, 9)
    ]


def test_a_head_that_is_gone_is_lost_within_the_deadline(head: RayHead, folder: Path) -> None:
    """The last test: it takes the head away."""
    submitter = Submitter(head, folder, "orphan", "echo here; sleep 600", "--unreachable-seconds", "3")
    eventually(lambda: "here" in submitter.printed, submitter)
    head.stop()
    assert submitter.wait(45) == 3
    told = submitter.termination.read_text()
    assert told.startswith("Ray's head was out of reach for ") and "\nhere" in told
