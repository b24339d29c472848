"""One manifest, applied to a cluster on which the chart is installed: everything that a user is promised."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster_jobs import MANIFEST, Job, follow, iterations, ledger, shipped
from tests.support.installation import Installation
from tests.support.kube import Kube, eventually
from tests.support.local_runs import LocalRuns

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def story(installation: Installation, namespace: Kube, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The shipped manifest from `kubectl apply` to the end, undisturbed, with all that was seen on the way."""
    namespace.ok("apply", "--filename", str(MANIFEST))
    job = Job(namespace, shipped())
    job.uid = job.get()["metadata"]["uid"]
    rows: list[str] = []

    def running_row() -> str | None:
        row = namespace.ok("get", "rlj", job.name, "--no-headers").strip()
        if not rows or rows[-1] != row:
            rows.append(row)
        return row if re.search(r"\bRunning\b.*\b4/4\b", row) else None

    row = eventually(running_row, seconds=240, what="a row of a running job", now=job.describe)
    table = namespace.ok("get", "rlj", job.name)
    pods = job.pods()
    group = job.group()
    (cluster,) = job.clusters()
    submitter = f"{cluster['metadata']['name']}-1"
    logs = follow(
        [str(namespace.kubectl), "-n", namespace.namespace, "logs", "-f", f"job/{submitter}"], namespace.kubeconfig
    )
    waited = namespace.run("wait", "--for=condition=Finished", f"rlj/{job.name}", "--timeout=55s")
    for _ in range(5):
        if waited.returncode == 0:
            break
        waited = namespace.run("wait", "--for=condition=Finished", f"rlj/{job.name}", "--timeout=55s")
    assert waited.returncode == 0, job.describe()
    try:
        log, _ = logs.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        logs.kill()
        log, _ = logs.communicate()
    folder = installation.claim_directory(namespace.namespace, "runs") / job.status["runPath"]
    return {
        "job": job,
        "row": row,
        "rows": rows,
        "table": table,
        "pods": pods,
        "group": group,
        "cluster": cluster,
        "submitter": submitter,
        "log": log,
        "status": job.status,
        "folder": folder,
    }


def test_the_job_succeeds_and_says_so(story: dict[str, Any]) -> None:
    job: Job = story["job"]
    status = story["status"]
    assert job.condition("Succeeded", status)["status"] == "True", job.describe()
    assert job.condition("Succeeded", status)["reason"] == "TargetReached"
    assert status["state"] == "Succeeded"
    assert {c["type"]: c["status"] for c in status["conditions"]} == {
        "Suspended": "False",
        "ClusterReady": "False",  # released
        "Progressing": "False",
        "WeightsConsistent": "True",
        "Finished": "True",
        "Succeeded": "True",
    }
    # What faults count is nothing here.
    assert status["attempt"] == 1
    assert status.get("lostAttempts", 0) == 0
    assert status.get("restarts", []) == []

    def ended() -> dict[str, Any] | None:
        found = job.kube.get("job", story["submitter"])
        # SuccessCriteriaMet and FailureTarget come before its pod is counted.
        done = {"Complete", "Failed"} & {c["type"] for c in (found or {}).get("status", {}).get("conditions", ())}
        return found if done else None

    submitter = eventually(ended, seconds=40, what="the submitter's Job has ended")
    assert submitter["status"].get("failed", 0) == 0
    assert submitter["status"]["succeeded"] == 1


def test_get_rlj_shows_state_iteration_return_version_and_consistency(story: dict[str, Any]) -> None:
    header = story["table"].splitlines()[0].split()
    assert header == ["NAME", "STATE", "ITERATION", "RETURN", "VERSION", "CONSISTENT", "AGE"]
    assert re.fullmatch(r"cartpole +Running +\d+ +(\d+(\.\d+)? +)?\d+ +4/4 +\w+", story["row"]), story["rows"]


def test_members_are_where_the_manifest_puts_them(story: dict[str, Any]) -> None:
    nodes: dict[str, list[str]] = {}
    names: dict[str, set[str]] = {}
    for pod in story["pods"]:
        group = pod["metadata"]["labels"].get("ray.io/group", "submitter")
        nodes.setdefault(group, []).append(pod["spec"]["nodeName"])
        names.setdefault(group, set()).add(pod["metadata"]["name"])
    assert nodes["learners"] == ["node1"]
    assert nodes["actors"] == ["node2", "node2"]
    (learner,) = [p for p in story["pods"] if p["metadata"]["labels"].get("ray.io/group") == "learners"]
    assert learner["spec"]["containers"][0]["resources"]["requests"]["nvidia.com/gpu"] == "1"
    members = story["job"].group()["status"]["members"]
    where = {m["name"]: m["pod"] for m in members}
    assert where["train-0"] in names["learners"]
    evals = [where[f"eval-{i}"] for i in range(4)]
    assert set(evals) == names["actors"]
    assert all(evals.count(pod) == 2 for pod in evals)


def test_every_pod_is_restricted_and_only_the_head_has_a_token(story: dict[str, Any]) -> None:
    for pod in story["pods"]:
        security = pod["spec"]["containers"][0]["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"]["drop"] == ["ALL"]
        mounts = [m["mountPath"] for m in pod["spec"]["containers"][0].get("volumeMounts", ())]
        has_token = "/var/run/secrets/kubernetes.io/serviceaccount" in mounts
        assert has_token == (pod["metadata"]["labels"].get("ray.io/node-type") == "head"), pod["metadata"]["name"]


def test_every_version_in_the_ledger_was_proved_by_every_member(story: dict[str, Any]) -> None:
    lines = ledger(story["folder"])
    last = story["status"]["progress"]["iteration"]
    assert [line["version"] for line in lines] == list(range(last + 1))
    for line in lines:
        assert sorted(line["members"]) == [f"eval-{i}" for i in range(4)]
        assert {m["digest"] for m in line["members"].values()} == {line["digest"]}, line
    # The ring in the PolicyGroup, and the sum of it in the job.
    ring = story["job"].group()["status"]["versions"]
    assert [v["version"] for v in ring] == list(range(max(0, last - 31), last + 1))
    assert [v["learnerDigest"] for v in ring] == [line["digest"] for line in lines[-32:]]
    assert story["status"]["weights"] == {
        "version": last,
        "digest": lines[-1]["digest"],
        "consistentMembers": "4/4",
        "lastVerifiedVersion": last,
    }


def test_the_digest_is_that_of_the_checkpoint_and_of_a_run_on_this_machine(
    story: dict[str, Any], local_runs: LocalRuns
) -> None:
    digest = story["status"]["weights"]["digest"]
    checkpoint = story["status"]["checkpoint"]
    assert checkpoint["digest"] == digest
    assert checkpoint["resume"] == "exact"
    folder: Path = story["folder"]
    assert checkpoint["path"].startswith(story["status"]["runPath"])
    stored = folder.parents[1] / checkpoint["path"]
    assert stored.is_dir()
    local = local_runs.of(shipped())
    assert local.digest == digest
    assert [line["digest"] for line in ledger(local.folder)] == [line["digest"] for line in ledger(folder)]
    assert local.verify(folder).returncode == 0  # the run folder on the claim is one like any other


def test_the_log_of_the_submitter_shows_the_training(story: dict[str, Any]) -> None:
    log = story["log"]
    assert "evaluation at iteration 20" in log, log
    assert "succeeded" in log
    assert story["status"]["weights"]["digest"] in log


def test_rest_gives_the_same_numbers_to_those_who_may(story: dict[str, Any], installation: Installation) -> None:
    job: Job = story["job"]
    status = job.status
    namespace = job.kube.namespace
    path = f"/v1/namespaces/{namespace}/rljobs/{job.name}"
    with installation.status_service() as rest:
        seen = rest.get(path, token=installation.token(namespace, "reader", may_read=True))
        assert seen.status == 200, seen.body
        body = json.loads(seen.body)
        for part in ("progress", "weights", "conditions"):
            assert body["status"][part] == status[part] if "status" in body else body[part] == status[part]
        members = rest.get(f"{path}/members", token=installation.token(namespace, "reader", may_read=True))
        assert members.status == 200
        listed = json.loads(members.body)
        digests = {m["digest"] for m in listed["items"] if m["role"] == "Eval"}
        assert digests == {status["weights"]["digest"]}
        without = rest.get(path, token=installation.token(namespace, "stranger", may_read=False))
        assert without.status == 403
        assert "rljobs" in without.body
        assert rest.get(path, token=None).status == 401
        assert rest.get(path, token="nonsense").status == 401


def test_the_cluster_is_released_and_deleting_the_job_leaves_only_the_run_folder(story: dict[str, Any]) -> None:
    job: Job = story["job"]
    eventually(job.is_released, seconds=90, what="the cluster of a finished job is released", now=job.describe)
    assert job.kube.get("job", story["submitter"]), "its log is kept until the job is deleted"
    job.kube.ok("delete", "rljob", job.name, "--timeout=60s")
    eventually(job.is_gone, seconds=90, what="nothing is left", now=lambda: str(job.leftovers()))
    assert ledger(story["folder"])
    assert iterations(story["folder"])
