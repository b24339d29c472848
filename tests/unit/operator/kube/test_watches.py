"""What keeps the cache true: the watches of what may be missing, and the listings behind kopf's back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from rlightning_operator.kube import kinds, optional
from rlightning_operator.kube.cache import Cache
from rlightning_operator.kube.optional import OptionalWatch
from rlightning_operator.kube.relist import Relister
from tests.unit.operator.kube.server import Answer, Asked, owned, serving, status, until

KEY = ("team", "cartpole")


def listing(*items: dict[str, Any], at: int = 10) -> Answer:
    """The answer to a list."""
    return 200, {"metadata": {"resourceVersion": str(at)}, "items": list(items)}


def test_a_kind_that_arrives_is_watched_from_then_on_and_one_that_leaves_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(optional, "MISSING_SECONDS", 0.02)
    served = False
    told: list[int] = []
    seen: list[str] = []

    async def answer(asked: Asked) -> Answer:
        if not served:
            return status(404, "NotFound", "the server could not find the requested resource")
        if "watch" in asked.query:
            await asyncio.sleep(0.05)
            return 200, {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "11"}}}
        return listing(owned("RayCluster", "c-1", 5))

    async def scenario() -> None:
        nonlocal served
        cache = Cache()
        async with serving(answer) as (client, server):
            watch = OptionalWatch(
                client,
                cache,
                kinds.RAY_CLUSTER,
                None,
                lambda _, obj: seen.append(obj["metadata"]["name"]),
                lambda _, refusal: told.append(refusal.code if refusal else 0),
            )
            task = asyncio.create_task(watch.run())
            await watch.looked.wait()
            await until(lambda: len(server.asked) > 5)
            assert told == [404]
            served = True
            await until(lambda: seen == ["c-1"])
            assert told[1:] == [0]
            served = False
            await until(lambda: len(told) == 3)
            assert seen == ["c-1", "c-1"], "its jobs are looked at again"
            assert cache.of_job(kinds.RAY_CLUSTER, KEY) == ()
            served = True
            await until(lambda: len(cache.of_job(kinds.RAY_CLUSTER, KEY)) == 1)
            task.cancel()

    with caplog.at_level("WARNING"):
        asyncio.run(scenario())
    assert len([record for record in caplog.records if "not watched" in record.message]) == 2, "one line each time"


def test_a_missing_right_is_said_in_the_servers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "MISSING_SECONDS", 0.02)
    told: list[str] = []

    async def scenario() -> None:
        async with serving(lambda _: status(403, "Forbidden", 'nodes is forbidden: User "x"')) as (client, server):
            watch = OptionalWatch(
                client, Cache(), kinds.NODE, None, lambda *_: None, lambda _, refusal: told.append(str(refusal))
            )
            task = asyncio.create_task(watch.run())
            await until(lambda: len(server.asked) > 3)
            task.cancel()

    asyncio.run(scenario())
    assert told == ['GET /api/v1/nodes: nodes is forbidden: User "x" (403 Forbidden)']


def test_an_expired_watch_lists_anew_and_notices_what_vanished() -> None:
    lists = iter([listing(owned("RayCluster", "c-1", 5)), listing(at=20)])
    seen: list[str] = []

    async def answer(asked: Asked) -> Answer:
        if "watch" in asked.query:
            if asked.query["resourceVersion"] == "20":
                await asyncio.sleep(5)
            return 200, {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}
        return next(lists)

    async def scenario() -> None:
        cache = Cache()
        async with serving(answer) as (client, _):
            watch = OptionalWatch(
                client,
                cache,
                kinds.RAY_CLUSTER,
                None,
                lambda _, obj: seen.append(obj["metadata"]["name"]),
                lambda *_: None,
            )
            task = asyncio.create_task(watch.run())
            await until(lambda: seen == ["c-1", "c-1"])
            assert cache.of_job(kinds.RAY_CLUSTER, KEY) == ()
            task.cancel()

    asyncio.run(scenario())


def relisting(answer: Callable[[Asked], Answer], cache: Cache) -> tuple[Relister, list[str]]:
    """A relister of pods after one listing, and what it told of."""
    seen: list[str] = []

    async def scenario() -> Relister:
        async with serving(answer) as (client, _):
            relister = Relister(client, cache, [kinds.POD], None, lambda _, obj: seen.append(obj["metadata"]["name"]))
            await relister.relist()
            return relister

    return asyncio.run(scenario()), seen


def test_what_vanished_during_a_gap_is_noticed() -> None:
    cache = Cache()
    cache.put(kinds.POD, owned("Pod", "ghost", 3))
    _, seen = relisting(lambda _: listing(), cache)
    assert seen == ["ghost"]
    assert cache.of_job(kinds.POD, KEY) == ()


def test_a_watch_that_does_not_bring_what_a_listing_found_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    relister, seen = relisting(lambda _: listing(owned("Pod", "head", 8)), Cache())
    assert seen == ["head"]
    assert relister.late == [], "it has two minutes and a half"
    later = time.monotonic() + 151
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert relister.late == ["pods"]
    relister.delivered(kinds.POD, owned("Pod", "head", 7))
    assert relister.late == ["pods"], "that was an older one"
    relister.delivered(kinds.POD, owned("Pod", "head", 8))
    assert relister.late == []


def test_a_watch_owes_nothing_for_an_object_that_is_gone_by_now(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache()
    relister, _ = relisting(lambda _: listing(owned("Pod", "head", 8)), cache)
    cache.remove(kinds.POD, "Pod-head-uid")
    later = time.monotonic() + 151
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert relister.late == []


def test_an_etcd_that_was_restored_from_a_backup_is_believed() -> None:
    cache = Cache()
    cache.put(kinds.POD, owned("Pod", "head", 5000, status={"phase": "Running"}))
    relisting(lambda _: listing(owned("Pod", "head", 70, status={"phase": "Pending"}), at=100), cache)
    (pod,) = cache.of_job(kinds.POD, KEY)
    assert pod["status"] == {"phase": "Pending"}
