"""Every error is a problem, in time, and gives nothing away."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time

import httpx
import pytest
from aiohttp import web

from rlightning_operator import logs
from rlightning_operator.rest.settings import Settings
from tests.support.api_double import ApiDouble, run, status
from tests.unit.rest.samples import job

ONE = "/v1/namespaces/team-a/rljobs/cartpole"


def is_problem(answer: httpx.Response, code: int) -> dict:
    problem = answer.json()
    assert answer.status_code == code, problem
    assert answer.headers["content-type"] == "application/problem+json"
    assert problem["status"] == code
    assert re.fullmatch(r"tag:rlightning\.io,2026:problem/[a-z-]+", problem["type"])
    assert problem["title"] and problem["detail"]
    assert problem["instance"] == answer.request.url.path
    assert problem["requestId"] == answer.headers["X-Request-Id"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Cache-Control"] == "no-store"
    return problem


def test_no_token_is_401_whatever_else_is_wrong():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        for path in (ONE, "/v1/rljobs?limit=x", "/v1/namespaces/NO/rljobs"):
            for header in ({}, {"Authorization": "Basic YTpi"}, {"Authorization": "Bearer "}):
                client.headers.pop("Authorization", None)
                answer = await client.get(path, headers=header)
                problem = is_problem(answer, 401)
                assert answer.headers["WWW-Authenticate"] == 'Bearer realm="rlightning"'
                assert "kubectl create token" in problem["detail"]
        assert not api.calls

    run(scenario)


@pytest.mark.parametrize("token", ["garbage", "alice2", "x" * 20_000, "a.b.c"])
def test_a_token_that_the_api_server_does_not_know_is_401(token: str):
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        answer = await client.get(ONE, headers={"Authorization": f"Bearer {token}"})
        is_problem(answer, 401)
        assert answer.headers["WWW-Authenticate"].endswith('error="invalid_token"')
        assert token not in answer.text

    run(scenario)


def test_a_missing_right_names_who_what_and_where():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        client.headers["Authorization"] = "Bearer bob"
        problem = is_problem(await client.get("/v1/rljobs"), 403)
        assert problem["detail"] == "bob may not list rljobs.rlightning.io in all namespaces"
        problem = is_problem(await client.get(ONE), 403)
        assert problem["detail"] == "bob may not get rljobs.rlightning.io in namespace team-a"
        assert (problem["user"], problem["verb"], problem["resource"], problem["namespace"]) == (
            "bob",
            "get",
            "rljobs.rlightning.io",
            "team-a",
        )

    run(scenario)


def test_unknown_paths_and_methods():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        for path in ("/", "/v1", "/v1/namespaces", "/docs", "/redoc", ONE + "/", ONE + "/logs", "/v1/%0d%0aX: y"):
            is_problem(await client.get(path), 404)
        for method in ("POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"):
            answer = await client.request(method, ONE)
            assert answer.status_code == 405
            assert answer.headers["Allow"] == "GET"

    run(scenario)


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("/v1/rljobs?limit=0", "query.limit"),
        ("/v1/rljobs?limit=501", "query.limit"),
        ("/v1/rljobs?limit=many", "query.limit"),
        ("/v1/rljobs?limt=5", "query.limt"),
        ("/v1/rljobs?continue=a%26limit%3D9", "query.continue"),
        ("/v1/namespaces/Team/rljobs", "path.namespace"),
        ("/v1/namespaces/a.b/rljobs/x", "path.namespace"),
        ("/v1/namespaces/a/rljobs/1abc", "path.name"),
        ("/v1/namespaces/a/rljobs/" + "x" * 41, "path.name"),
    ],
)
def test_a_bad_parameter_is_422_and_named(path: str, where: str):
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        problem = is_problem(await client.get(path), 422)
        assert [error["where"] for error in problem["errors"]] == [where]
        assert where in problem["detail"]

    run(scenario)


def test_an_api_server_that_hangs_is_503_within_the_deadline():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        async def hang(_: web.Request) -> web.StreamResponse:
            await asyncio.sleep(3)
            raise AssertionError

        api.instead = hang
        for path in (ONE, "/readyz"):
            start = time.monotonic()
            answer = await client.get(path)
            assert time.monotonic() - start < 2
            problem = is_problem(answer, 503)
            assert problem["detail"] == "the API server did not answer within 0.3 s; try again"
            assert int(answer.headers["Retry-After"]) > 0
        assert (await client.get("/healthz")).status_code == 200

    run(scenario, api_seconds=0.3)


def test_a_request_as_a_whole_has_a_deadline():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        async def slow(request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(0.3)
            api.instead = None
            answer = await api.handle(request)
            api.instead = slow
            return answer

        api.instead = slow  # three requests of 0.3 s each
        answer = await client.get(ONE)
        problem = is_problem(answer, 503)
        assert "within 0.5 s" in problem["detail"]
        assert answer.headers["Retry-After"] == "5"

    run(scenario, Settings(request_seconds=0.5), api_seconds=0.4)


@pytest.mark.parametrize(
    ("code", "headers", "retry"),
    [(429, {"Retry-After": "7"}, "7"), (500, {}, "5"), (503, {"Retry-After": "900"}, "60")],
)
def test_an_api_server_in_trouble_is_503_with_its_words(code: int, headers: dict[str, str], retry: str):
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        async def trouble(_: web.Request) -> web.StreamResponse:
            return status(code, "Trouble", "etcdserver: request timed out", **headers)

        api.instead = trouble
        answer = await client.get(ONE)
        problem = is_problem(answer, 503)
        assert problem["detail"] == f"the API server answered {code}: etcdserver: request timed out; try again"
        assert answer.headers["Retry-After"] == retry
        api.instead = None
        api.store(job())
        assert (await client.get(ONE)).status_code == 200  # the failure was not kept

    run(scenario)


def test_a_service_without_rights_of_its_own_says_so():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        async def refuse(_: web.Request) -> web.StreamResponse:
            return status(403, "Forbidden", 'User "status" cannot create resource "tokenreviews"')

        api.instead = refuse
        problem = is_problem(await client.get(ONE), 500)
        assert 'User "status" cannot create resource "tokenreviews"' in problem["detail"]

        async def unknown(_: web.Request) -> web.StreamResponse:
            return status(401, "Unauthorized", "Unauthorized")

        api.instead = unknown
        for path in (ONE, "/readyz"):
            problem = is_problem(await client.get(path), 503)
            assert "does not take the token of the status service's own account" in problem["detail"]

    run(scenario)


def test_an_error_of_the_service_is_500_with_its_id_and_no_more(caplog: pytest.LogCaptureFixture):
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        stored = job()
        del stored["metadata"]["uid"]  # no API server would
        api.store(stored)
        answer = await client.get(ONE, headers={"X-Request-Id": "follow-me.1"})
        problem = is_problem(answer, 500)
        assert problem["requestId"] == "follow-me.1"
        assert "KeyError" not in answer.text

    run(scenario)
    assert "KeyError: 'uid'" in caplog.text


def test_request_ids_that_are_unfit_for_a_log_are_replaced():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        for given in ("", "a b", "x" * 65, "é", "-a"):
            answer = await client.get("/healthz", headers={b"X-Request-Id": given.encode()})
            assert re.fullmatch("[0-9a-f]{32}", answer.headers["X-Request-Id"])

    run(scenario)


def test_logs_hold_who_and_what_but_no_token(caplog: pytest.LogCaptureFixture):
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        api.users["s3cret-token"] = "carol"
        headers = {"Authorization": "Bearer s3cret-token"}
        await client.get(ONE, headers=headers)
        await client.get(ONE + "?token=s3cret-token", headers=headers)
        await client.get("/v1/%0aforged", headers=headers)

        async def broken(_: web.Request) -> web.StreamResponse:
            return web.Response(text="not JSON")

        api.instead = broken
        await client.get("/v1/rljobs", headers={"Authorization": "Bearer other-s3cret"})

    with caplog.at_level(logging.DEBUG):
        run(scenario)
    for form in (logs.Lines(), logs.JsonLines()):
        lines = [form.format(record) for record in caplog.records if record.name == "rlightning.status"]
        assert len(lines) == 4
        assert "carol" in lines[0] and ONE in lines[0]
        ours = [record for record in caplog.records if record.name not in ("httpx", "aiohttp.access")]  # the tests' own
        assert not any("s3cret" in form.format(record) for record in ours)
        assert not any("\n" in line for line in lines)
    assert json.loads(lines[0])["status"] == 403


def test_metrics_count_routes_and_codes_but_hold_no_names():
    async def scenario(api: ApiDouble, client: httpx.AsyncClient) -> None:
        await client.get("/v1/namespaces/unheard-of-namespace/rljobs/x")
        await client.request("BREW", "/unheard-of-path")
        text = (await client.get("/metrics", headers={"Authorization": ""})).text
        assert "unheard-of" not in text and "alice" not in text and "BREW" not in text
        route = "/v1/namespaces/{namespace}/rljobs/{name}"
        assert re.search(
            rf'rlightning_status_requests_total{{code="404",method="GET",route="{re.escape(route)}"}} [1-9]', text
        )
        assert 'method="other",route="none"' in text
        assert "process_resident_memory_bytes" in text

    run(scenario)
