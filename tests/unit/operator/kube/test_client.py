"""Requests: what comes back, what is said when nothing good does, and how watches end."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import kopf
import pytest
from aiohttp import web

from rlightning_operator.kube import client as client_module
from rlightning_operator.kube import kinds
from rlightning_operator.kube.client import ApiError, Client, LoginError, Unreachable, login
from tests.unit.operator.kube.server import Asked, serving, status


def test_a_long_list_is_read_in_pieces() -> None:
    def answer(asked: Asked) -> tuple[int, dict[str, Any]]:
        assert asked.query["labelSelector"] == "rlightning.io/job"
        if "continue" not in asked.query:
            return 200, {"metadata": {"resourceVersion": "7", "continue": "more"}, "items": [{"n": 1}]}
        return 200, {"metadata": {"resourceVersion": "7"}, "items": [{"n": 2}]}

    async def scenario() -> None:
        async with serving(answer) as (client, _):
            assert await client.list_all(kinds.POD, None, kinds.POD.selector) == ([{"n": 1}, {"n": 2}], "7")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answer", "kind_of_error"),
    [
        (status(409, "AlreadyExists"), "already_exists"),
        (status(409, "Conflict"), "conflict"),
        (
            status(403, "Forbidden", 'roles "x" is forbidden: … because it is being terminated'),
            "namespace_ending",
        ),
        (status(404, "NotFound", 'namespaces "team" not found'), "namespace_ending"),
        (status(429, "TooManyRequests"), "transient"),
        (status(503, "ServiceUnavailable"), "transient"),
        (status(403, "Forbidden"), None),
        (status(404, "NotFound", 'pods "team" not found'), None),
        ((502, {"not": "a status"}), "transient"),
    ],
)
def test_refusals_are_told_apart(answer: tuple[int, dict[str, Any]], kind_of_error: str | None) -> None:
    async def scenario() -> None:
        async with serving(lambda _: answer) as (client, _):
            with pytest.raises(ApiError) as caught:
                await client.get(kinds.POD, "team", "head")
            said = {name for name in ("already_exists", "conflict", "namespace_ending", "transient")
                    if getattr(caught.value, name)}  # fmt: skip
            assert said == ({kind_of_error} if kind_of_error else set())
            assert "GET /api/v1/namespaces/team/pods/head" in str(caught.value)

    asyncio.run(scenario())


def test_a_token_that_was_replaced_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(asked: Asked) -> tuple[int, dict[str, Any]]:
        return (200, {}) if asked.authorization == "Bearer second" else status(401, "Unauthorized")

    async def scenario() -> None:
        async with serving(answer) as (client, server):
            tokens = iter(["first", "second"])
            monkeypatch.setattr(
                client_module, "login", lambda: kopf.ConnectionInfo(server=client.server, token=next(tokens))
            )
            with pytest.raises(ApiError, match="401"):  # the file holds the old one still: asking again is no use
                await client.get(kinds.POD, "team", "head")
            assert len(server.asked) == 1
            assert await client.get(kinds.POD, "team", "head") == {}

    asyncio.run(scenario())


def test_nobody_there() -> None:
    async def scenario() -> None:
        client = Client(kopf.ConnectionInfo(server="http://127.0.0.1:1"))
        with pytest.raises(Unreachable, match=r"GET http://127\.0\.0\.1:1/api/v1/namespaces/team/pods/head"):
            await client.get(kinds.POD, "team", "head")
        await client.close()

    asyncio.run(scenario())


def test_a_server_that_does_not_answer_costs_no_more_than_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "REQUEST_SECONDS", 0.2)

    async def answer(_: Asked) -> tuple[int, dict[str, Any]]:
        await asyncio.sleep(5)
        return 200, {}

    async def scenario() -> None:
        async with serving(answer) as (client, _):
            with pytest.raises(Unreachable, match=r"no answer within 0\.2 s"):
                await client.get(kinds.POD, "team", "head")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answer", "method", "told"),
    [
        ((200, {}), "GET", False),
        (status(404, "NotFound", 'pods "head" not found'), "GET", False),
        (status(503, "ServiceUnavailable"), "GET", True),
        (status(500, "InternalError", "failed calling webhook"), "DELETE", False),
    ],
)
def test_since_when_reads_are_answered(answer: tuple[int, dict[str, Any]], method: str, told: bool) -> None:
    async def scenario() -> None:
        async with serving(lambda _: answer) as (client, _):
            began = client.answers_since
            await asyncio.sleep(0.01)
            with contextlib.suppress(ApiError):
                await client.request(method, "/api/v1/namespaces/team/pods/head", kinds.POD)
            assert (client.answers_since > began) == told

    asyncio.run(scenario())


def test_a_server_that_cannot_be_reached_does_not_answer() -> None:
    async def scenario() -> None:
        client = Client(kopf.ConnectionInfo(server="http://127.0.0.1:1"))
        times = [client.answers_since]
        await asyncio.sleep(0.01)
        with pytest.raises(Unreachable):
            await client.get(kinds.POD, "team", "head")
        times.append(client.answers_since)
        await asyncio.sleep(0.01)
        with pytest.raises(Unreachable):
            await anext(client.watch(kinds.NODE, None, "", "1"))
        times.append(client.answers_since)
        assert times == sorted(set(times))
        await client.close()

    asyncio.run(scenario())


def _watch(lines: list[bytes], hang: float = 0.0) -> tuple[list[tuple[str, Any]], BaseException | None]:
    """What a watch gives of these bytes, which the server then follows by silence."""

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for line in lines:
            await response.write(line)
            await asyncio.sleep(0.01)
        await asyncio.sleep(hang)
        return response

    async def scenario() -> tuple[list[tuple[str, Any]], BaseException | None]:
        app = web.Application()
        app.router.add_get("/{path:.*}", stream)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = Client(kopf.ConnectionInfo(server=f"http://127.0.0.1:{runner.addresses[0][1]}"))
        events, error = [], None
        try:
            async for event in client.watch(kinds.NODE, None, "", "1"):
                events.append(event)
        except (ApiError, Unreachable) as caught:
            error = caught
        await client.close()
        await runner.cleanup()
        return events, error

    return asyncio.run(scenario())


def test_events_come_whole_however_the_bytes_are_cut() -> None:
    large = json.dumps({"type": "ADDED", "object": {"x": "y" * 300_000}}).encode() + b"\n"  # over aiohttp's own limit
    small = b'{"type":"BOOKMARK","object":{}}\n'
    events, error = _watch([large[:7], large[7:150_000], large[150_000:] + small[:5], small[5:]])
    assert error is None
    assert [(change, len(obj.get("x", ""))) for change, obj in events] == [("ADDED", 300_000), ("BOOKMARK", 0)]


def test_an_error_in_the_stream_is_an_error() -> None:
    gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}
    _, error = _watch([json.dumps(gone).encode() + b"\n"])
    assert isinstance(error, ApiError)
    assert (error.code, error.reason) == (410, "Expired")


def test_a_silent_watch_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "SILENCE_SECONDS", 0.2)
    events, error = _watch([b'{"type":"ADDED","object":{}}\n'], hang=5)
    assert (len(events), error) == (1, None)


def test_the_login_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    with pytest.raises(LoginError, match="absent cannot be used: FileNotFoundError"):
        login()
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(LoginError, match="neither a ServiceAccount's token"):
        login()
