"""The cache before the API server's word, and what is asked."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from rlightning_operator.rest.access import Access, Cache
from rlightning_operator.rest.cluster import Cluster, Endpoint
from rlightning_operator.rest.problems import Problem
from rlightning_operator.rest.settings import Settings
from tests.support.api_double import ApiDouble, double, run
from tests.unit.rest.samples import job

ONE = "/v1/namespaces/team-a/rljobs/cartpole"
TOKENS = "/apis/authentication.k8s.io/v1/tokenreviews"
RIGHTS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_page_that_polls_asks_once_about_token_and_right_but_reads_each_time():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        api.store(job())
        for _ in range(5):
            assert (await client.get(ONE)).status_code == 200
        assert (api.calls[TOKENS], api.calls[RIGHTS]) == (1, 1)
        assert sum(n for path, n in api.calls.items() if path.endswith("/cartpole")) == 5

    run(scenario)


def test_many_requests_at_once_ask_once():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        api.store(job())
        answers = await asyncio.gather(*(client.get(ONE) for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert (api.calls[TOKENS], api.calls[RIGHTS]) == (1, 1)

    run(scenario)


def test_a_withdrawn_right_ends_within_the_caches_seconds():
    async def scenario() -> None:
        async with double() as (api, url):
            cluster, clock = Cluster(Endpoint(url)), Clock()
            await cluster.open()
            access = Access(cluster, seconds=10, clock=clock)
            caller = await access.caller("alice")
            await access.require(caller, "get", "rljobs", "team-a", "x")
            api.rights.clear()
            api.users.clear()
            clock.now = 9.9
            await access.require(await access.caller("alice"), "get", "rljobs", "team-a", "x")
            clock.now = 10.1
            with pytest.raises(Problem) as denied:
                await access.require(caller, "get", "rljobs", "team-a", "x")
            assert denied.value.status == 403
            with pytest.raises(Problem) as stranger:
                await access.caller("alice")
            assert stranger.value.status == 401
            await cluster.close()

    asyncio.run(scenario())


def test_all_that_the_token_says_goes_into_the_question():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        await client.get(ONE)
        token, right = api.bodies
        assert token["spec"] == {"token": "alice"}
        assert right["spec"] == {
            "user": "alice",
            "uid": "uid-alice",
            "groups": ["people"],
            "extra": {"pod": ["p"]},
            "resourceAttributes": {
                "group": "rlightning.io",
                "resource": "rljobs",
                "verb": "get",
                "namespace": "team-a",
                "name": "cartpole",
            },
        }
        assert set(api.authorizations) == {"Bearer service"}  # never the caller's

    run(scenario)


def test_a_token_for_another_audience_is_not_taken():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        answer = await client.get(ONE)
        assert answer.status_code == 401
        assert "for the audience rlightning" in answer.json()["detail"]
        assert api.bodies[0]["spec"]["audiences"] == ["rlightning"]
        api.audience = "rlightning"
        assert (await client.get(ONE)).status_code == 401  # for seconds
        api.users["new"] = "alice"
        assert (await client.get(ONE, headers={"Authorization": "Bearer new"})).status_code == 404

    run(scenario, Settings(audiences=("rlightning",)))


def test_the_cache_is_bounded_and_forgets_the_least_recently_used():
    async def scenario() -> None:
        asked: list[int] = []
        cache: Cache[int] = Cache("test", seconds=10, size=3)

        async def get(key: int) -> int:
            async def ask() -> int:
                asked.append(key)
                return key

            return await cache.get(key, ask)

        for key in (1, 2, 3, 1, 4, 1, 2):
            assert await get(key) == key
            assert len(cache) <= 3
        assert asked == [1, 2, 3, 4, 2]

    asyncio.run(scenario())


def test_errors_are_not_kept_and_a_caller_who_hangs_up_does_not_take_the_answer_from_others():
    async def scenario() -> None:
        cache: Cache[str] = Cache("test", seconds=10, size=3)
        gate = asyncio.Event()

        async def fail() -> str:
            raise RuntimeError("no")

        async def slow() -> str:
            await gate.wait()
            return "yes"

        with pytest.raises(RuntimeError):
            await cache.get("k", fail)
        first = asyncio.create_task(cache.get("k", slow))
        second = asyncio.create_task(cache.get("k", fail))  # joins the first's question
        await asyncio.sleep(0)
        first.cancel()
        gate.set()
        assert await second == "yes"

    asyncio.run(scenario())


def test_no_token_is_kept_in_memory():
    async def scenario() -> None:
        async with double() as (api, url):
            api.users["very-secret"] = "alice"
            cluster = Cluster(Endpoint(url))
            await cluster.open()
            access = Access(cluster)
            caller = await access.caller("very-secret")
            await access.require(caller, "get", "rljobs", "team-a")
            kept = repr([access.__dict__, access._callers.__dict__, access._rights.__dict__, caller.__dict__])
            assert "very-secret" not in kept
            await cluster.close()

    asyncio.run(scenario())
