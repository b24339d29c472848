"""What the routes answer with, and which rights they ask for."""

from __future__ import annotations

import json

import httpx
import jsonschema
from aiohttp import web

from rlightning_operator.rest.app import create_app
from rlightning_operator.rest.cluster import Cluster, Endpoint
from rlightning_operator.rest.settings import Settings
from tests.support.api_double import ApiDouble, run, status
from tests.unit.rest.samples import digest, group, job

ONE = "/v1/namespaces/team-a/rljobs/cartpole"


def as_documented(answer: httpx.Response, path: str) -> None:
    """The answer has the shape that /openapi.json promises for its code."""
    document = create_app(Settings(), Cluster(Endpoint("http://nowhere"))).openapi()
    content = document["paths"][path]["get"]["responses"][str(answer.status_code)]["content"]
    ((media_type, promised),) = content.items()
    assert answer.headers["content-type"] == media_type
    jsonschema.validate(answer.json(), {**promised["schema"], "components": document["components"]})


def test_a_job_has_the_stored_numbers_and_nothing_for_what_was_not_measured():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        stored = job()
        api.store(stored)
        answer = await client.get(ONE)
        assert answer.status_code == 200
        got = answer.json()
        assert got["status"] == stored["status"]
        assert got["spec"] == {
            "environment": "CartPole-v1",
            "numEnvs": 8,
            "policy": "simplePPO",
            "seed": 7,
            "totalEnvSteps": 1000,
            "trainReplicas": 1,
            "evalReplicas": 4,
            "suspend": False,
        }
        as_documented(answer, "/v1/namespaces/{namespace}/rljobs/{name}")

    run(scenario)


def test_a_job_without_status_is_shown():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        stored = job()
        del stored["status"]
        api.store(stored)
        answer = await client.get(ONE)
        assert answer.status_code == 200
        assert "state" not in answer.json()["status"]

    run(scenario)


def test_what_a_newer_operator_wrote_does_not_hide_the_rest():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        api.store(job(progress={"iteration": "three"}, novelty={"of": "tomorrow"}))
        api.store(job("other"))
        answer = await client.get("/v1/namespaces/team-a/rljobs")
        first, second = answer.json()["items"]
        assert first["status"]["weights"]["version"] == 3
        assert "progress" not in first["status"]
        assert any("progress.iteration" in line for line in first["unreadable"])
        assert second["unreadable"] == []

    run(scenario)


def test_a_member_agrees_when_its_digest_is_the_learners_at_its_version():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        api.store(job())
        api.store(group())
        answer = await client.get(f"{ONE}/members")
        got = answer.json()
        # eval-0 holds another digest although the driver counted all four as verified; version 1 is no longer listed.
        assert {m["name"]: m.get("agrees") for m in got["items"]} == {
            "train-0": True,
            "eval-0": False,
            "eval-1": None,
            "eval-2": None,
        }
        assert (got["attempt"], got["version"], got["lastReportTime"]) == (1, 3, "2026-11-29T10:02:00Z")
        as_documented(answer, "/v1/namespaces/{namespace}/rljobs/{name}/members")

    run(scenario)


def test_versions_are_the_reported_ones():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        api.store(job())
        api.store(group())
        answer = await client.get(f"{ONE}/versions")
        assert [(v["version"], v["learnerDigest"]) for v in answer.json()["items"]] == [(2, digest(2)), (3, digest(3))]
        as_documented(answer, "/v1/namespaces/{namespace}/rljobs/{name}/versions")

    run(scenario)


def test_a_group_of_an_earlier_job_of_the_same_name_is_not_this_jobs():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        api.store(job())
        api.store(group(uid="of-the-job-before"))
        answer = await client.get(f"{ONE}/members")
        assert answer.status_code == 200
        assert answer.json() == {"job": "cartpole", "items": [], "unreadable": []}

    run(scenario)


def test_members_of_no_job_are_404_and_before_the_group_exists_there_are_none():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        missing = await client.get(f"{ONE}/members")
        assert missing.status_code == 404
        assert missing.json()["name"] == "cartpole"
        api.store(job())
        assert (await client.get(f"{ONE}/versions")).json() == {"job": "cartpole", "items": [], "unreadable": []}

    run(scenario)


def test_members_need_the_right_to_the_group_and_to_the_job():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        api.store(job())
        api.store(group())
        bob = {"Authorization": "Bearer bob"}
        api.rights.add(("bob", "get", "rljobs", "team-a"))
        assert (await client.get(ONE, headers=bob)).status_code == 200
        answer = await client.get(f"{ONE}/members", headers=bob)
        assert answer.status_code == 403
        assert answer.json()["detail"] == "bob may not get policygroups.rlightning.io in namespace team-a"

    run(scenario)

    async def other_way_round(api: ApiDouble, client: httpx.AsyncClient) -> None:
        api.store(job())
        api.store(group())
        api.rights.add(("bob", "get", "policygroups", "team-a"))
        answer = await client.get(f"{ONE}/members", headers={"Authorization": "Bearer bob"})
        assert answer.status_code == 403
        assert answer.json()["resource"] == "rljobs.rlightning.io"

    run(other_way_round)


def test_without_rights_nobody_learns_whether_a_job_exists():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        api.store(job())
        bob = {"Authorization": "Bearer bob", "X-Request-Id": "same"}
        there, not_there = await client.get(ONE, headers=bob), await client.get(ONE + "x", headers=bob)
        assert there.status_code == not_there.status_code == 403
        assert not_there.json() == {**there.json(), "instance": ONE + "x"}
        assert api.calls[f"/apis/rlightning.io{ONE.replace('/v1', '/v1alpha1')}"] == 0

    run(scenario)


def test_an_unchanged_job_is_304_and_a_changed_one_is_not():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        api.store(job())
        first = await client.get(ONE)
        etag = first.headers["ETag"]
        for given in (etag, f'"other", W/{etag}', "*"):
            same = await client.get(ONE, headers={"If-None-Match": given})
            assert (same.status_code, same.content, same.headers["ETag"]) == (304, b"", etag)
            assert same.headers["Cache-Control"] == "private, no-cache"
        api.store(job(state="Succeeded"))
        changed = await client.get(ONE, headers={"If-None-Match": etag})
        assert changed.status_code == 200
        assert changed.headers["ETag"] != etag

    run(scenario)


def test_rights_are_asked_for_before_an_etag_is_compared():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        api.store(job())
        answer = await client.get(ONE, headers={"If-None-Match": "*", "Authorization": "Bearer bob"})
        assert answer.status_code == 403

    run(scenario)


async def pages(client: httpx.AsyncClient, path: str, limit: int) -> list[list[str]]:
    found, token = [], None
    while True:
        answer = await client.get(path, params={"limit": limit, **({"continue": token} if token else {})})
        assert answer.status_code == 200, answer.text
        found.append([f"{item['namespace']}/{item['name']}" for item in answer.json()["items"]])
        token = answer.json().get("continue")
        if token is None:
            return found


def test_pages_follow_one_another():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        for name in ("a", "b", "c"):
            api.store(job(name))
        api.store(job("d", "team-b"))
        assert await pages(client, "/v1/namespaces/team-a/rljobs", 2) == [["team-a/a", "team-a/b"], ["team-a/c"]]
        assert await pages(client, "/v1/rljobs", 3) == [["team-a/a", "team-a/b", "team-a/c"], ["team-b/d"]]
        first = await client.get("/v1/rljobs", params={"limit": 3})
        assert first.json()["remainingItemCount"] == 1
        as_documented(first, "/v1/rljobs")

    run(scenario)


def test_pages_of_a_namespaced_install_go_through_its_namespaces():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        for namespace, names in (("a", "123"), ("b", ""), ("c", "12"), ("foreign", "1")):
            for name in names:
                api.store(job(f"j{name}", namespace))
        wanted = ["a/j1", "a/j2", "a/j3", "c/j1", "c/j2"]
        for limit in range(1, 7):
            found = await pages(client, "/v1/rljobs", limit)
            assert [job for page in found for job in page] == wanted
            assert all(len(page) <= limit for page in found)
        for token in ("nowhere:", "foreign:"):
            bad = await client.get("/v1/rljobs", params={"continue": token})
            assert bad.status_code == 422
        left_alone = await client.get("/v1/namespaces/foreign/rljobs")
        assert left_alone.status_code == 404
        assert left_alone.json()["detail"] == "namespace foreign is not served by this install, which serves a, b, c"

    run(scenario, Settings(namespaces=("a", "b", "c")))


def test_a_namespaced_install_lists_all_to_whoever_may_list_each():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        bob = {"Authorization": "Bearer bob"}
        api.rights.add(("bob", "list", "rljobs", "a"))
        answer = await client.get("/v1/rljobs", headers=bob)
        assert answer.json()["detail"] == "bob may not list rljobs.rlightning.io in namespace b"
        api.rights.add(("bob", "list", "rljobs", "b"))

    run(scenario, Settings(namespaces=("a", "b")))


def test_a_list_that_went_stale_is_410_and_a_broken_token_422():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        await client.get("/v1/rljobs")  # the rights are known now

        async def expired(_: web.Request) -> web.StreamResponse:
            return status(410, "Expired", "The provided continue parameter is too old")

        async def bad(_: web.Request) -> web.StreamResponse:
            return status(400, "BadRequest", "continue key is not valid")

        api.instead = expired
        answer = await client.get("/v1/rljobs", params={"continue": "abc"})
        assert answer.status_code == 410
        as_documented(answer, "/v1/rljobs")
        api.instead = bad
        answer = await client.get("/v1/rljobs", params={"continue": "abc"})
        assert answer.status_code == 422
        assert answer.json()["errors"] == [{"where": "query.continue", "message": "not a token of a page before"}]

    run(scenario)


def test_missing_crds_are_503_and_say_what_to_install():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        await client.get(ONE)
        await client.get("/v1/rljobs")

        async def unknown(_: web.Request) -> web.StreamResponse:
            return web.Response(status=404, text="404 page not found")

        api.instead = unknown
        for path in (ONE, "/v1/rljobs"):
            answer = await client.get(path)
            assert answer.status_code == 503
            assert "CustomResourceDefinition is missing" in json.loads(answer.text)["detail"]
            assert answer.headers["Retry-After"] == "30"

    run(scenario)
