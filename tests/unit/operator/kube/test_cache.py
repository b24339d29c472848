"""The cache: newest wins, gone stays gone, whatever order news come in."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rlightning_operator.kube import kinds
from rlightning_operator.kube.cache import Cache
from rlightning_operator.reconcile.snapshot import KubeRay, OperatorConfig
from tests.unit.operator.kube.server import job, owned

KEY = ("team", "cartpole")
NOW = datetime(2026, 11, 29, tzinfo=UTC)


def test_an_older_event_does_not_undo_our_own_write() -> None:
    cache = Cache()
    assert cache.put(kinds.RLJOB, job(5, status={"state": "Pending"}))
    assert cache.put(kinds.RLJOB, job(9, status={"state": "Running"})), "the answer to our own write"
    assert not cache.put(kinds.RLJOB, job(7, status={"state": "Pending"})), "an event that was under way"
    assert not cache.put(kinds.RLJOB, job(9, status={"state": "Running"})), "the event of our own write"
    stored = cache.job(KEY)
    assert stored is not None
    assert stored["status"] == {"state": "Running"}


def test_versions_are_compared_as_numbers() -> None:
    cache = Cache()
    cache.put(kinds.RLJOB, job(9, status={"state": "Pending"}))
    assert cache.put(kinds.RLJOB, job(10, status={"state": "Running"}))


def test_a_new_version_with_nothing_new_in_it_is_stored_but_is_no_news() -> None:
    cache = Cache()
    cache.put(kinds.RLJOB, job(1))
    assert not cache.put(kinds.RLJOB, job(2))
    stored = cache.job(KEY)
    assert stored is not None
    assert stored["metadata"]["resourceVersion"] == "2", "or every later write would be refused"


def test_a_late_answer_does_not_bring_back_what_was_deleted() -> None:
    cache = Cache()
    pod = owned("Pod", "head", 3)
    cache.put(kinds.POD, pod)
    cache.remove(kinds.POD, pod["metadata"]["uid"])
    assert not cache.put(kinds.POD, owned("Pod", "head", 8))
    assert cache.replace(kinds.POD, None, [pod], "4") == []
    assert cache.of_job(kinds.POD, KEY) == ()


def test_an_object_whose_label_is_taken_off_and_put_back_is_seen_again() -> None:
    """A watch that selects by label tells of the first as a deletion, of the second as a creation."""
    cache = Cache()
    cache.put(kinds.POD, owned("Pod", "head", 3))
    uid = owned("Pod", "head", 3)["metadata"]["uid"]
    assert cache.remove(kinds.POD, uid, 7) is not None
    assert not cache.put(kinds.POD, owned("Pod", "head", 7)), "a late answer from before"
    assert cache.put(kinds.POD, owned("Pod", "head", 9))
    assert cache.remove(kinds.POD, uid, 8) is None, "a late deletion"
    assert [pod["metadata"]["name"] for pod in cache.of_job(kinds.POD, KEY)] == ["head"]


def test_after_etcd_came_from_a_backup_what_was_gone_is_there_again() -> None:
    cache = Cache()
    cache.put(kinds.POD, owned("Pod", "head", 300))
    cache.remove(kinds.POD, owned("Pod", "head", 300)["metadata"]["uid"], 500)
    cache.start_over(kinds.POD)
    assert cache.put(kinds.POD, owned("Pod", "head", 300))


def test_a_listing_removes_what_it_lacks_but_not_what_was_made_after_it() -> None:
    cache = Cache()
    cache.put(kinds.POD, owned("Pod", "old", 3))
    cache.put(kinds.POD, owned("Pod", "new", 12))
    cache.put(kinds.POD, {**owned("Pod", "elsewhere", 3), "metadata": _elsewhere()})
    changed = cache.replace(kinds.POD, "team", [owned("Pod", "other", 6)], "10")
    assert sorted(pod["metadata"]["name"] for pod in changed) == ["old", "other"]
    assert [pod["metadata"]["name"] for pod in cache.of_job(kinds.POD, KEY)] == ["new", "other"]
    assert len(list(cache.all(kinds.POD))) == 3, "other namespaces are left alone"


def test_a_namespace_that_cannot_be_listed_does_not_touch_the_others() -> None:
    cache = Cache()
    here = owned("RayCluster", "mine", 3)
    there = {**here, "metadata": {**here["metadata"], "namespace": "other", "uid": "other-uid"}}
    cache.put(kinds.RLJOB, job(1))
    for one in (here, there):
        cache.put(kinds.RAY_CLUSTER, one)
    cache.kuberay = {"team": KubeRay(installed=True), "other": KubeRay(installed=False, message="forbidden")}
    assert [obj["metadata"]["uid"] for obj in cache.clear(kinds.RAY_CLUSTER, "other")] == ["other-uid"]
    snapshot = cache.snapshot(KEY, OperatorConfig(), NOW)
    assert snapshot is not None
    assert [c["metadata"]["name"] for c in snapshot.clusters] == ["mine"]
    assert snapshot.kuberay.installed


def _elsewhere() -> dict[str, Any]:
    return {**owned("Pod", "elsewhere", 3)["metadata"], "namespace": "elsewhere"}


@given(st.permutations(range(1, 7)), st.integers(0, 5))
def test_the_order_of_news_does_not_matter(order: list[int], relist_after: int) -> None:
    cache = Cache()
    for step, version in enumerate(order):
        cache.put(kinds.RLJOB, job(version, status={"iteration": version}))
        if step == relist_after:
            cache.replace(kinds.RLJOB, None, [job(4, status={"iteration": 4})], "4")
    stored = cache.job(KEY)
    assert stored is not None
    assert stored["status"] == {"iteration": 6}
    assert len(list(cache.all(kinds.RLJOB))) == 1


def test_a_snapshot_holds_all_objects_of_the_job_and_no_others() -> None:
    cache = Cache()
    cache.put(kinds.RLJOB, job(spec={"checkpoints": {"claimName": "runs"}}))
    cache.put(kinds.RAY_CLUSTER, owned("RayCluster", "c-1"))
    cache.put(kinds.JOB, owned("Job", "c-1-1"))
    cache.put(kinds.POD, owned("Pod", "head"))
    for kind in kinds.OTHERS:
        cache.put(kind, owned(kind.name, "rlj-cartpole"))
    group = owned("PolicyGroup", "cartpole")
    del group["metadata"]["labels"]
    cache.put(kinds.POLICY_GROUP, group)
    stranger = owned("Pod", "stranger")
    stranger["metadata"]["labels"] = {"rlightning.io/job": "hopper"}
    cache.put(kinds.POD, stranger)
    claim = {"metadata": {"namespace": "team", "name": "runs", "uid": "u", "resourceVersion": "1"}, "status": {}}
    cache.put(kinds.CLAIM, claim)

    snapshot = cache.snapshot(KEY, OperatorConfig(), NOW)

    assert snapshot is not None
    assert [cluster["metadata"]["name"] for cluster in snapshot.clusters] == ["c-1"]
    assert [submitter["metadata"]["name"] for submitter in snapshot.submitters] == ["c-1-1"]
    assert [pod["metadata"]["name"] for pod in snapshot.pods] == ["head"]
    assert [other["kind"] for other in snapshot.others] == ["ServiceAccount", "Role", "RoleBinding", "NetworkPolicy"]
    assert snapshot.group is not None, "by its name, whatever its labels"
    assert snapshot.claim is not None
    assert snapshot.nodes is None, "no right to read them yet"
    assert cache.users(claim) == {KEY}
    assert cache.snapshot(("team", "hopper"), OperatorConfig(), NOW) is None


def test_memory_is_not_spent_on_bookkeeping() -> None:
    cache = Cache()
    pod = owned("Pod", "head")
    pod["metadata"] |= {
        "managedFields": [{"manager": "kubelet"}],
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "kept": "1"},
    }
    cache.put(kinds.POD, pod)
    (stored,) = cache.of_job(kinds.POD, KEY)
    assert "managedFields" not in stored["metadata"]
    assert stored["metadata"]["annotations"] == {"kept": "1"}
    assert (stored["apiVersion"], stored["kind"]) == ("v1", "Pod"), "items of lists come without"

    node: dict[str, Any] = {
        "metadata": {
            "name": "n1",
            "uid": "n",
            "resourceVersion": "1",
            "labels": {"zone": "a"},
            "annotations": {"x": "y"},
        },
        "spec": {"taints": [{"key": "gpu"}], "podCIDR": "10.0.0.0/24"},
        "status": {
            "allocatable": {"cpu": "8"},
            "images": [{"names": ["a"]}],
            "conditions": [
                {"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-11-29T18:00:00Z"},
                {"type": "DiskPressure", "status": "False"},
            ],
        },
    }
    cache.put(kinds.NODE, node)
    (kept,) = cache.all(kinds.NODE)
    assert kept["spec"] == {"taints": [{"key": "gpu"}]}
    assert kept["status"]["conditions"] == [{"type": "Ready", "status": "True", "reason": None, "message": None}]
    assert "images" not in kept["status"]
    node["metadata"]["resourceVersion"] = "2"
    node["status"]["conditions"][0]["lastHeartbeatTime"] = "2026-11-29T18:05:00Z"
    assert not cache.put(kinds.NODE, node), "a heartbeat is no news"


def test_the_index_is_empty_again_in_the_end() -> None:
    cache = Cache()
    cache.put(kinds.RLJOB, job())
    cache.put(kinds.POD, owned("Pod", "head"))
    cache.clear(kinds.POD)
    cache.remove(kinds.RLJOB, "job-uid")
    assert cache.jobs() == set()
    assert cache._of_job == {}
