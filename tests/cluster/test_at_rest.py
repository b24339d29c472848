"""An operator with nothing to do does nothing."""

from __future__ import annotations

import os
import time

import pytest

from tests.support.cluster_jobs import Start, head_only, long_job, shipped
from tests.support.installation import SYSTEM, Installation
from tests.support.kube import Kube
from tests.support.local_runs import LocalRuns

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


# TokenReview and SubjectAccessReview are questions, though they are asked by POST.
QUESTIONS = ("create tokenreviews", "create subjectaccessreviews")


def watch_writes(installation: Installation, namespace: Kube, seconds: float) -> None:
    """By the API server's own record of who writes what."""

    def writes() -> list[str]:
        mine = installation.cluster.writes_of(f"{SYSTEM}:{installation.operator_pod()['spec']['serviceAccountName']}")
        return [write for write in mine if not write.startswith(QUESTIONS)]

    before = writes()
    assert any(namespace.namespace in write for write in before), "the record shows how the job came about"
    versions = {o["metadata"]["uid"]: o["metadata"]["resourceVersion"] for o in namespace.all("rljobs,policygroups")}
    time.sleep(seconds)
    assert writes()[len(before) :] == [], f"writes in {seconds:g} s at rest"
    assert versions == {
        o["metadata"]["uid"]: o["metadata"]["resourceVersion"] for o in namespace.all("rljobs,policygroups")
    }


def resident(installation: Installation) -> float:
    """MB resident of the operator's process, from inside its container."""
    pod = installation.operator_pod()["metadata"]["name"]
    status = installation.system.ok("exec", pod, "--", "python3", "-c", "print(open('/proc/1/status').read())")
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def test_no_writes_at_rest_and_little_memory(
    start: Start, installation: Installation, namespace: Kube, local_runs: LocalRuns
) -> None:
    # The cluster rests, so this machine may compute what the tests after this one compare with.
    for manifest in (long_job("long"), shipped()):
        local_runs.begin(manifest)
    job = start(head_only("resting", suspend=True))
    job.until_condition("Suspended", status="True", seconds=30)
    time.sleep(3)
    watch_writes(installation, namespace, float(os.environ.get("AT_REST_SECONDS", "60")))
    local_runs.settle()
    used = resident(installation)
    print(f"operator: {used:.0f} MB resident")
    assert used < 150


@pytest.mark.faults
def test_no_writes_for_five_minutes(start: Start, installation: Installation, namespace: Kube) -> None:
    job = start(head_only("resting", suspend=True))
    job.until_condition("Suspended", status="True", seconds=30)
    time.sleep(3)
    watch_writes(installation, namespace, 300)
