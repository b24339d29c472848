"""The operator killed, cut off, refused and short of rights: each fault is proven to have happened."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlightning_operator.kube import kinds
from tests.integration.operator.conftest import World, condition, count, job, started
from tests.support.api import Refused, Space
from tests.support.apiproxy import Seen
from tests.support.kube import eventually

pytestmark = pytest.mark.apiserver


def settled(space: Space, world: World) -> bool:
    """Everything is there, and nothing was written for a second."""
    return started(space)() and not world.proxy.writes(time.monotonic() - 1.0)


@pytest.mark.slow
@pytest.mark.timeout(400)  # a dozen starts of the operator, which are slow on a busy machine
def test_an_operator_that_dies_after_each_single_write_gets_there(healthy: World) -> None:
    """SIGKILL in every place between two writes, by turns after a write was done and before the next one arrives."""
    space = Space.make(healthy.api, "mortal")
    operator = healthy.operator()
    space.create(kinds.RLJOB, job())
    done: list[str] = []
    deaths = 0

    def write_number(one: Seen) -> int:
        return len(healthy.proxy.writes(life)) if one.write else 0

    def before(one: Seen) -> tuple[int, dict[str, Any]] | None:
        if deaths % 2 and write_number(one) == 2:
            os.kill(operator.pid, signal.SIGKILL)
            return 500, {}
        return None

    def after(one: Seen) -> None:
        if one.write:
            done.append(f"{one.method} {one.path}")
        if not deaths % 2 and write_number(one) == 1:
            os.kill(operator.pid, signal.SIGKILL)

    healthy.proxy.before, healthy.proxy.after = before, after
    for _ in range(30):
        life = time.monotonic()
        operator.start(ready=False)
        # It lives on only when there is nothing to write any more.
        eventually(
            lambda: operator.ended() or settled(space, healthy),
            seconds=40,
            what="it dies, or the job is whole",
            now=operator.text,
        )
        if not operator.ended():
            break
        deaths += 1
    # Status, account, role, binding, three policies, group, cluster, submitter: ten writes at least, and events.
    assert deaths >= 10, f"{deaths} deaths, {done}"
    assert count(space)[kinds.RAY_CLUSTER.plural] == 1
    assert len([write for write in done if write.startswith("POST") and "rayclusters" in write]) == 1
    status = (space.get(kinds.RLJOB, "cartpole") or {})["status"]
    assert (status["attempt"], status["lostAttempts"]) == (1, 0)
    repeated = [write for write, times in Counter(done).items() if times > 1 and "/status" not in write]
    assert set(repeated) <= {
        "POST /apis/networking.k8s.io/v1/namespaces/mortal/networkpolicies",  # there are three
        "POST /api/v1/namespaces/mortal/events",
    }, "nothing was done twice"
    assert "Traceback" not in operator.text()


def test_what_happens_while_the_api_server_is_away_is_made_up_for(healthy: World) -> None:
    """Connections cut, changes made meanwhile, and every watch told that its past is gone (410)."""
    space = Space.make(healthy.api, "gap")
    operator = healthy.operator()
    operator.start()
    space.create(kinds.RLJOB, job())
    eventually(lambda: settled(space, healthy), seconds=20, what="the job is whole", now=lambda: str(count(space)))
    pid, lines = operator.pid, len(operator.text().splitlines())

    healthy.proxy.down = True
    cut = healthy.proxy.cut()
    assert cut >= 10, "the watches were cut"
    gone = (kinds.SERVICE_ACCOUNT, kinds.ROLE, kinds.ROLE_BINDING)
    for kind in gone:
        space.delete(kind, "rlj-cartpole")
    time.sleep(6)
    assert operator.get("/healthz")[0] == 200, "nothing that a restart would mend"
    assert len(operator.text().splitlines()) - lines < 12, f"no spam while it is away\n{operator.text()}"
    assert count(space)[kinds.SERVICE_ACCOUNT.plural] == 0

    expired: set[str] = set()

    def too_old(one: Seen) -> tuple[int, dict[str, Any]] | None:
        if not one.watch or one.path in expired:
            return None
        expired.add(one.path)
        words = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
        return 200, {"type": "ERROR", "object": words}

    healthy.proxy.before = too_old
    healthy.proxy.down = False
    eventually(started(space), seconds=20, what="what vanished is back", now=lambda: f"{count(space)} {expired}")
    eventually(lambda: len(expired) >= 10, seconds=10, what="every watch was told", now=lambda: str(expired))
    assert operator.pid == pid and operator.ready()
    missed = operator.metric("rlightning_operator_missed_changes_total")
    assert missed >= len(gone), "no watch had told of them: the listings did"
    assert operator.complaints() == []


def test_an_api_server_that_hangs_is_waited_for(healthy: World) -> None:
    space = Space.make(healthy.api, "hang")
    operator = healthy.operator()
    operator.start()
    space.create(kinds.RLJOB, job())
    eventually(lambda: settled(space, healthy), seconds=20, what="the job is whole", now=lambda: str(count(space)))
    pid, server = operator.pid, apiserver_pid(healthy)

    os.kill(server, signal.SIGSTOP)
    try:
        eventually(lambda: process_state(server) == "T", seconds=5, what="it is stopped")
        time.sleep(5)
        assert operator.get("/healthz")[0] == 200
    finally:
        os.kill(server, signal.SIGCONT)
    space.delete(kinds.ROLE, "rlj-cartpole")
    eventually(lambda: space.get(kinds.ROLE, "rlj-cartpole"), seconds=15, what="the role is back")
    assert operator.pid == pid and operator.ready()
    assert operator.complaints() == []


def apiserver_pid(world: World) -> int:
    """Of the kube-apiserver that the world's supervisor started."""
    assert world.server._supervisor is not None
    parent = world.server._supervisor.pid
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if Path(f"/proc/{child}/comm").read_text().startswith("kube-apiserver"):
            return int(child)
    raise AssertionError("no kube-apiserver")


def process_state(pid: int) -> str:
    """R, S, T, …"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_refusals_of_every_kind_delay_and_nothing_else(healthy: World) -> None:
    space = Space.make(healthy.api, "refused")
    operator = healthy.operator()
    operator.start()
    begin = time.monotonic()
    codes = iter((500, 409, 429, 409))
    given: list[int] = []

    def refuse(one: Seen) -> tuple[int, dict[str, Any]] | None:
        # Every other write, so that there is some progress between the refusals.
        if not one.write or "/events" in one.path or len(healthy.proxy.writes(begin)) % 2 == 0:
            return None
        code = next(codes, None)
        if code is None:
            return None
        given.append(code)
        return code, {"kind": "Status", "code": code, "reason": "Conflict" if code == 409 else "", "message": "not now"}

    healthy.proxy.before = refuse
    space.create(kinds.RLJOB, job())
    eventually(
        lambda: settled(space, healthy),
        seconds=30,
        what="the job is whole",
        now=lambda: f"{count(space)} {given} {healthy.proxy.writes(begin)} {operator.text()}",
    )
    assert given == [500, 409, 429, 409]
    assert count(space)[kinds.RAY_CLUSTER.plural] == 1
    assert "Traceback" not in operator.text()
    assert operator.metric("rlightning_operator_errors_total") == 2, "a conflict is none"
    assert operator.complaints() == []


RIGHTS = {
    ("rlightning.io", "rljobs"): "get list watch delete",
    ("rlightning.io", "rljobs/status"): "patch",
    ("rlightning.io", "policygroups"): "get list watch create patch delete",
    ("rlightning.io", "policygroups/status"): "get patch",  # not its own: a driver's, to whom it grants them
    ("ray.io", "rayclusters"): "get list watch create delete",
    ("batch", "jobs"): "get list watch create patch delete",
    ("", "serviceaccounts"): "get list watch create patch delete",
    ("rbac.authorization.k8s.io", "roles"): "get list watch create patch delete",
    ("rbac.authorization.k8s.io", "rolebindings"): "get list watch create patch delete",
    ("networking.k8s.io", "networkpolicies"): "get list watch create patch delete",
    ("", "pods"): "get list watch",
    ("", "persistentvolumeclaims"): "get list watch",
    ("", "events"): "get create patch",
}


def test_rights_in_one_namespace_are_enough_for_its_jobs(healthy: World) -> None:
    """No right on nodes, CustomResourceDefinitions, namespaces, or anything of another namespace."""
    space, other = Space.make(healthy.api, "mine"), Space.make(healthy.api, "theirs")
    space.create(kinds.SERVICE_ACCOUNT, {"metadata": {"name": "operator"}})
    rules = [
        {"apiGroups": [group], "resources": [resource], "verbs": verbs.split()}
        for (group, resource), verbs in RIGHTS.items()
    ]
    space.create(kinds.ROLE, {"metadata": {"name": "operator"}, "rules": rules})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "operator"}
    subjects = [{"kind": "ServiceAccount", "name": "operator", "namespace": "mine"}]
    space.create(kinds.ROLE_BINDING, {"metadata": {"name": "operator"}, "roleRef": role, "subjects": subjects})
    path = kinds.SERVICE_ACCOUNT.path("mine", "operator", "token")
    token = healthy.api.request("POST", path, {"spec": {"expirationSeconds": 3600}})["status"]["token"]

    operator = healthy.operator("--namespaces", "mine", token=token)
    operator.start()
    other.create(kinds.RLJOB, job())
    space.create(kinds.RLJOB, job())
    eventually(
        started(space), seconds=20, what="the job is whole", now=lambda: f"{count(space)}\n{operator.text()}"
    )  # fmt: skip
    eventually(lambda: space.events("cartpole") or None, seconds=5, what="an event")
    time.sleep(4)  # over the time between two looks for the nodes
    log = operator.text()
    assert log.count("nodes are not watched") == 1
    assert "nodes is forbidden" in log
    assert len(log.splitlines()) < 40, log
    assert (other.get(kinds.RLJOB, "cartpole") or {}).get("status") is None
    assert sum(count(other).values()) == 0
    assert operator.complaints() == []


def test_a_name_that_is_taken_is_said_on_the_job(healthy: World) -> None:
    space = Space.make(healthy.api, "taken")
    space.create(kinds.SERVICE_ACCOUNT, {"metadata": {"name": "rlj-cartpole"}})
    operator = healthy.operator()
    operator.start()
    space.create(kinds.RLJOB, job())
    words = eventually(
        lambda: next((text for text in space.events("cartpole") if "ReconcileError" in text), None),
        seconds=10,
        what="an event",
    )
    assert "the ServiceAccount taken/rlj-cartpole is not of this job" in words
    eventually(
        lambda: condition(space, "ClusterReady").get("reason") == "WriteRefused",
        seconds=10,
        what="the condition says it too",
        now=lambda: str(condition(space, "ClusterReady")),
    )
    assert count(space)[kinds.RAY_CLUSTER.plural] == 0, "nothing runs with somebody else's account"
    space.delete(kinds.SERVICE_ACCOUNT, "rlj-cartpole")
    eventually(started(space), seconds=20, what="the job goes on", now=lambda: str(count(space)))


NO_CLUSTERS = {
    "apiVersion": "admissionregistration.k8s.io/v1",
    "kind": "ValidatingAdmissionPolicy",
    "metadata": {"name": "no-ray-clusters"},
    "spec": {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "resourceRules": [
                {
                    "apiGroups": ["ray.io"],
                    "apiVersions": ["v1"],
                    "operations": ["CREATE"],
                    "resources": ["rayclusters"],
                }
            ]
        },
        "validations": [{"expression": "false", "message": "no room for RayClusters before Monday"}],
    },
}


def test_what_admission_refuses_is_said_on_the_job_until_it_is_let_in(healthy: World) -> None:
    space = Space.make(healthy.api, "guarded")
    operator = healthy.operator()
    operator.start()
    folder = "/apis/admissionregistration.k8s.io/v1"
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": "no-ray-clusters"},
        "spec": {
            "policyName": "no-ray-clusters",
            "validationActions": ["Deny"],
            "matchResources": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "guarded"}}},
        },
    }
    healthy.api.request("POST", f"{folder}/validatingadmissionpolicies", NO_CLUSTERS)
    healthy.api.request("POST", f"{folder}/validatingadmissionpolicybindings", binding)

    def denied() -> bool:
        head = {"rayStartParams": {}, "template": {"spec": {"containers": [{"name": "ray"}]}}}
        cluster = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": "probe"}}
        probe = {**cluster, "spec": {"headGroupSpec": head}}
        try:
            healthy.api.request("POST", kinds.RAY_CLUSTER.path("guarded"), probe, query={"dryRun": "All"})
        except Refused as refused:
            return "before Monday" in str(refused)
        return False

    try:
        eventually(denied, seconds=30, what="the policy is in force", every=0.2)
        space.create(kinds.RLJOB, job())
        entry = eventually(
            lambda: (found := condition(space, "ClusterReady")).get("reason") == "WriteRefused" and found,
            seconds=10,
            what="the job says what is refused",
            now=lambda: str(condition(space, "ClusterReady")),
        )
        assert entry["message"].startswith("RayCluster cartpole-")
        assert "no room for RayClusters before Monday" in entry["message"]
        assert condition(space, "Progressing")["reason"] == "WriteRefused"
        since = time.monotonic()
        time.sleep(5)
        tried = [one for one in healthy.proxy.writes(since) if "/events" not in one]
        assert len(tried) <= 8, f"tried less and less often, and the status is not written for it: {tried}"
    finally:
        healthy.api.request("DELETE", f"{folder}/validatingadmissionpolicybindings/no-ray-clusters")
        healthy.api.request("DELETE", f"{folder}/validatingadmissionpolicies/no-ray-clusters")
    eventually(started(space), seconds=60, what="the job goes on", now=lambda: str(count(space)))
    eventually(
        lambda: condition(space, "ClusterReady").get("reason") == "PodsPending",
        seconds=10,
        what="the words go",
        now=lambda: str(condition(space, "ClusterReady")),
    )
