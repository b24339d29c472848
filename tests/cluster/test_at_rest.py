"""An operator with nothing to do does nothing."""

from __future__ import annotations

import os
import time

import pytest

from tests.support.cluster_jobs import Job, head_only
from tests.support.installation import Installation
from tests.support.kube import Kube

pytestmark = pytest.mark.cluster


def watch_writes(installation: Installation, namespace: Kube, seconds: float) -> None:
    before = installation.writes()
    versions = {o["metadata"]["uid"]: o["metadata"]["resourceVersion"] for o in namespace.all("rljobs,policygroups")}
    time.sleep(seconds)
    after = installation.writes()
    ours = ("rlightning.io/", "ray.io/", "batch/jobs", "rbac.authorization.k8s.io/", "networking.k8s.io/")
    more = {
        what: count - before.get(what, 0)
        for what, count in after.items()
        if count != before.get(what, 0)
        and (what.split()[1].startswith(ours) or what.split()[1] in ("/events/", "/pods/", "/serviceaccounts/"))
    }
    assert more == {}, f"writes in {seconds:g} s at rest: {more}"
    assert versions == {
        o["metadata"]["uid"]: o["metadata"]["resourceVersion"] for o in namespace.all("rljobs,policygroups")
    }


def resident(installation: Installation) -> float:
    """MB resident of the operator's process, from inside its container."""
    pod = installation.operator_pod()["metadata"]["name"]
    status = installation.system.ok("exec", pod, "--", "python3", "-c", "print(open('/proc/1/status').read())")
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def test_no_writes_at_rest_and_little_memory(installation: Installation, namespace: Kube) -> None:
    job = Job(namespace, head_only("resting", suspend=True)).create()
    job.until_condition("Suspended", status="True", seconds=30)
    time.sleep(3)
    watch_writes(installation, namespace, float(os.environ.get("AT_REST_SECONDS", "60")))
    used = resident(installation)
    print(f"operator: {used:.0f} MB resident")
    assert used < 150


@pytest.mark.faults
def test_no_writes_for_five_minutes(installation: Installation, namespace: Kube) -> None:
    job = Job(namespace, head_only("resting", suspend=True)).create()
    job.until_condition("Suspended", status="True", seconds=30)
    time.sleep(3)
    watch_writes(installation, namespace, 300)
