"""Carrying out a plan: the order, and what each refusal leads to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlightning_operator.kube import kinds
from rlightning_operator.kube.cache import Cache
from rlightning_operator.kube.client import ApiError
from rlightning_operator.kube.executor import Executor, Gone, NameTaken, Refused, Stale, merge_patch, transitions
from rlightning_operator.reconcile.snapshot import Create, Delete, OperatorConfig, Patch, Plan
from tests.unit.operator.kube.server import Answer, Asked, Server, job, owned, serving, status

KEY = ("team", "cartpole")
STATUS = "PATCH /apis/rlightning.io/v1alpha1/namespaces/team/rljobs/cartpole/status"
ACCOUNT = Create({**owned("ServiceAccount", "rlj-cartpole"), "apiVersion": "v1"})
GROUP = Patch("PolicyGroup", "cartpole", {"spec": {"attempt": 2}}, "merge", "group-uid")


def carry_out(
    plan: Plan, answer: Callable[[Asked], Answer], cache: Cache | None = None
) -> tuple[int | Exception, Server, Cache]:
    """Once, for a job at version 5; returns the number of writes, or the error."""
    cache = cache or Cache()
    cache.put(kinds.RLJOB, job(5))

    async def scenario() -> tuple[int | Exception, Server, Cache]:
        async with serving(answer) as (client, server):
            try:
                return await Executor(client, cache).carry_out(KEY, job(5), plan), server, cache
            except (ApiError, Stale, Gone, Refused) as error:
                return error, server, cache

    return asyncio.run(scenario())


def fine(asked: Asked) -> Answer:
    """A server that accepts everything."""
    if asked.path.endswith("/status"):
        return 200, job(6, status={**asked.body["status"]})
    if asked.method == "POST":
        metadata = {**asked.body["metadata"], "uid": "new-uid", "resourceVersion": "7"}
        return 201, {**asked.body, "metadata": metadata}
    if asked.method == "GET":
        return 200, {"metadata": {"resourceVersion": "6"}, "items": []}
    if asked.method == "DELETE":
        return 200, {"kind": "Status", "status": "Success"}
    return 200, owned("PolicyGroup", "cartpole", 8, uid="group-uid")


def test_status_comes_first_under_a_lock_and_the_actions_follow_in_order() -> None:
    plan = Plan({"attempt": 2}, (GROUP, ACCOUNT, Delete("Job", "old", "old-uid")))
    writes, server, cache = carry_out(plan, fine)
    assert writes == 4
    assert server.writes() == [
        STATUS,
        "PATCH /apis/rlightning.io/v1alpha1/namespaces/team/policygroups/cartpole",
        "POST /api/v1/namespaces/team/serviceaccounts",
        "DELETE /apis/batch/v1/namespaces/team/jobs/old",
    ]
    assert server.asked[0].body == {"metadata": {"resourceVersion": "5"}, "status": {"attempt": 2}}
    assert server.asked[1].body == {"spec": {"attempt": 2}, "metadata": {"uid": "group-uid"}}
    assert server.asked[3].body["preconditions"] == {"uid": "old-uid"}
    assert server.asked[3].body["propagationPolicy"] == "Background"
    stored = cache.job(KEY)
    assert stored is not None
    assert stored["metadata"]["resourceVersion"] == "6", "the next pass starts from our own write"
    assert len(cache.of_job(kinds.SERVICE_ACCOUNT, KEY)) == 1, "and sees what was made"


@pytest.mark.parametrize(
    ("version", "state", "labelled", "news"),
    [(8, None, True, False), (9, "Succeeded", True, True), (8, None, False, False)],
    ids=["as known", "an outcome since", "a pod that lost its label"],
)
def test_before_an_attempt_is_given_up_the_driver_is_looked_for_where_it_reports(
    version: int, state: str | None, labelled: bool, news: bool
) -> None:
    driver = {"pod": "head", "podUID": "head-uid"}
    known = owned("PolicyGroup", "cartpole", 8, uid="group-uid", status={"driver": driver})
    report = {"driver": driver} if state is None else {"driver": driver, "outcome": {"state": state}}
    head = owned("Pod", "head", 4, uid="head-uid")
    cache = Cache()
    cache.put(kinds.RLJOB, job(5))
    cache.put(kinds.POLICY_GROUP, known)
    if labelled:
        cache.put(kinds.POD, head)
    else:
        del head["metadata"]["labels"]

    def answer(asked: Asked) -> Answer:
        if asked.path.endswith("/pods/head"):
            return 200, head
        return 200, owned("PolicyGroup", "cartpole", version, uid="group-uid", status=report)

    async def scenario() -> bool:
        async with serving(answer) as (client, _):
            snapshot = cache.snapshot(KEY, OperatorConfig(), datetime.now(UTC))
            assert snapshot is not None
            return await Executor(client, cache).news_of_driver(KEY, snapshot)

    assert asyncio.run(scenario()) is news
    (group,) = cache.of_job(kinds.POLICY_GROUP, KEY)
    assert group["status"] == report, "the next pass decides from it"


def test_what_was_decided_is_told_even_if_an_action_fails() -> None:
    told: list[str] = []

    async def scenario() -> None:
        async with serving(lambda asked: fine(asked) if asked.path.endswith("/status") else (500, {})) as (client, _):
            plan = Plan({"attempt": 2}, (ACCOUNT,))
            with pytest.raises(Refused):
                await Executor(client, Cache()).carry_out(KEY, job(5), plan, lambda: told.append("stored"))

    asyncio.run(scenario())
    assert told == ["stored"]


def test_nothing_is_asked_when_nothing_is_wanted() -> None:
    writes, server, _ = carry_out(Plan({}), fine)
    assert writes == 0
    assert server.asked == []


def test_after_a_status_that_was_not_stored_nothing_else_is_done() -> None:
    def answer(asked: Asked) -> Answer:
        if asked.method == "GET":
            return 200, job(9, spec={"suspend": True})
        return status(409, "Conflict")

    error, server, cache = carry_out(Plan({"attempt": 2}, (GROUP,)), answer)
    assert isinstance(error, Stale)
    assert server.writes() == [STATUS]
    stored = cache.job(KEY)
    assert stored is not None
    assert stored["spec"] == {"suspend": True}, "the job was read anew: the next pass does not conflict again"


def test_after_an_error_the_rest_of_the_plan_is_left() -> None:
    def answer(asked: Asked) -> Answer:
        return status(403, "Forbidden", "exceeded quota") if asked.method == "POST" else fine(asked)

    error, server, _ = carry_out(Plan({"attempt": 2}, (ACCOUNT, GROUP)), answer)
    assert isinstance(error, Refused)
    assert str(error) == "ServiceAccount rlj-cartpole could not be created: exceeded quota"
    assert len(server.writes()) == 2


def test_a_deleted_job_is_the_end_of_it() -> None:
    error, server, cache = carry_out(
        Plan({"attempt": 2}, (ACCOUNT,)), lambda _: status(404, "NotFound", 'rljobs "cartpole" not found')
    )
    assert isinstance(error, Gone)
    assert server.writes() == [STATUS]
    assert cache.job(KEY) is None


@pytest.mark.parametrize(
    "refusal",
    [
        status(403, "Forbidden", "… because it is being terminated"),
        status(404, "NotFound", 'namespaces "team" not found'),
    ],
)
def test_a_namespace_that_is_being_deleted_is_the_end_of_it(refusal: Answer) -> None:
    error, _, _ = carry_out(Plan({}, (ACCOUNT,)), lambda _: refusal)
    assert isinstance(error, Gone)


def test_what_exists_already_is_looked_at_and_thought_over() -> None:
    def answer(asked: Asked) -> Answer:
        return (
            (200, owned("ServiceAccount", "rlj-cartpole", 3)) if asked.method == "GET" else status(409, "AlreadyExists")
        )

    error, _, cache = carry_out(Plan({}, (ACCOUNT, GROUP)), answer)
    assert isinstance(error, Stale)
    assert len(cache.of_job(kinds.SERVICE_ACCOUNT, KEY)) == 1


def test_a_name_that_is_somebody_elses_is_said() -> None:
    def answer(asked: Asked) -> Answer:
        stranger = {"metadata": {"namespace": "team", "name": "rlj-cartpole", "uid": "x", "resourceVersion": "3"}}
        return (200, stranger) if asked.method == "GET" else status(409, "AlreadyExists")

    error, _, cache = carry_out(Plan({}, (ACCOUNT,)), answer)
    assert isinstance(error, NameTaken)
    assert "ServiceAccount team/rlj-cartpole is not of this job" in str(error)
    assert list(cache.all(kinds.SERVICE_ACCOUNT)) == []


def test_no_second_raycluster_while_the_watch_has_not_brought_the_first() -> None:
    unseen = owned("RayCluster", "cartpole-1", 4)

    def answer(asked: Asked) -> Answer:
        assert asked.query["labelSelector"] == "rlightning.io/job=cartpole"
        return 200, {"metadata": {"resourceVersion": "6"}, "items": [unseen]}

    plan = Plan({}, (Create(owned("RayCluster", "cartpole-2")),))
    error, server, cache = carry_out(plan, answer)
    assert isinstance(error, Stale)
    assert server.writes() == []
    assert [obj["metadata"]["name"] for obj in cache.of_job(kinds.RAY_CLUSTER, KEY)] == ["cartpole-1"]

    # One that is known, as it is here, does not stand in the way: the plan was made in its sight.
    def known(asked: Asked) -> Answer:
        return answer(asked) if asked.method == "GET" else fine(asked)

    writes, _, _ = carry_out(plan, known, cache)
    assert writes == 1


@pytest.mark.parametrize(
    "refusal", [status(404, "NotFound", 'jobs "old" not found'), status(409, "Conflict", "UID in precondition")]
)
def test_deleting_what_is_gone_is_fine(refusal: Answer) -> None:
    cache = Cache()
    cache.put(kinds.JOB, owned("Job", "old", uid="old-uid"))
    plan = Plan({}, (Delete("Job", "old", "old-uid"), ACCOUNT))
    writes, server, _ = carry_out(plan, lambda asked: refusal if asked.method == "DELETE" else fine(asked), cache)
    assert writes == 1, "the account"
    assert len(server.writes()) == 2
    assert cache.of_job(kinds.JOB, KEY) == ()


def test_an_object_that_takes_time_to_go_stays_in_sight() -> None:
    cache = Cache()
    cache.put(kinds.RAY_CLUSTER, owned("RayCluster", "c-1", 3, uid="c-uid"))
    ending = owned("RayCluster", "c-1", 9, uid="c-uid")
    ending["metadata"]["deletionTimestamp"] = "2026-11-29T18:00:00Z"
    carry_out(Plan({}, (Delete("RayCluster", "c-1", "c-uid"),)), lambda _: (200, ending), cache)
    (seen,) = cache.of_job(kinds.RAY_CLUSTER, KEY)
    assert "deletionTimestamp" in seen["metadata"]


def test_a_failed_test_of_a_json_patch_is_a_conflict_and_a_bad_patch_an_error() -> None:
    plan = Plan(
        {}, (Patch("PolicyGroup", "cartpole", [{"op": "test", "path": "/metadata/uid", "value": "u"}], "json", "u"),)
    )

    def patched(seen: dict[str, Any]) -> Callable[[Asked], Answer]:
        return lambda asked: (200, seen) if asked.method == "GET" else status(422, "Invalid", "testing value failed")

    error, _, _ = carry_out(plan, patched(owned("PolicyGroup", "cartpole", 9, uid="another")))
    assert isinstance(error, Stale)
    cache = Cache()
    cache.put(kinds.POLICY_GROUP, owned("PolicyGroup", "cartpole", 9, uid="u"))
    error, _, _ = carry_out(plan, patched(owned("PolicyGroup", "cartpole", 9, uid="u")), cache)
    assert isinstance(error, Refused), "the object is as it was known, so the patch is wrong"


def test_a_field_that_the_server_does_not_keep_is_not_written_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    def answer(asked: Asked) -> Answer:
        return 200, job(6, status={"attempt": 2})  # "future" is pruned

    async def scenario() -> int:
        cache = Cache()
        cache.put(kinds.RLJOB, job(5))
        async with serving(answer) as (client, server):
            executor = Executor(client, cache)
            for _ in range(3):
                current = cache.job(KEY)
                assert current is not None
                await executor.carry_out(KEY, current, Plan({"attempt": 2, "future": 1}))
            return len(server.asked)

    assert asyncio.run(scenario()) == 1
    assert "does not keep these fields of the status: future" in caplog.text


values = st.recursive(
    st.integers(0, 3) | st.text("ab", max_size=2) | st.lists(st.integers(0, 2), min_size=1, max_size=2),
    lambda inner: st.dictionaries(st.text("xyz", min_size=1, max_size=1), inner, min_size=1, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text("xyz", min_size=1, max_size=1), values, max_size=3)


@given(objects, objects)
def test_a_merge_patch_leads_from_one_to_the_other(old: dict[str, Any], new: dict[str, Any]) -> None:
    def apply(target: Any, patch: Any) -> Any:  # RFC 7386, section 2
        if not isinstance(patch, dict):
            return patch
        result = dict(target) if isinstance(target, dict) else {}
        for name, value in patch.items():
            if value is None:
                result.pop(name, None)
            else:
                result[name] = apply(result.get(name), value)
        return result

    patch = merge_patch(old, new)
    assert apply(old, patch) == new
    assert (patch == {}) == (old == new)


def test_empty_lists_are_the_servers_defaults_and_no_difference() -> None:
    assert merge_patch({"restarts": [], "state": "Running"}, {"state": "Running", "pools": []}) == {}
    assert merge_patch({"restarts": [1]}, {}) == {"restarts": None}
    assert merge_patch({}, {"lostAttempts": 0}) == {"lostAttempts": 0}


def test_one_line_for_each_transition_and_none_for_progress() -> None:
    def condition(status: str, reason: str) -> dict[str, str]:
        return {"type": "ClusterReady", "status": status, "reason": reason, "message": "two\nlines"}

    before = {"state": "Starting", "attempt": 1, "conditions": [condition("False", "PodsPending")], "progress": 1}
    after = {
        "state": "Running",
        "attempt": 2,
        "restarts": [{"reason": "HeadLost", "message": "the head pod is gone"}],
        "conditions": [condition("True", "AllPodsReady")],
        "progress": 2,
    }
    assert transitions(before, after) == [
        "state Starting -> Running",
        "attempt 1 -> 2 (HeadLost: the head pod is gone)",
        "ClusterReady=True AllPodsReady: two lines",
    ]
    assert transitions(after, {**after, "progress": 3}) == []
