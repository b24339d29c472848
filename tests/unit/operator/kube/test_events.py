"""Events: once, few, and never in the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from rlightning_operator.kube import events
from rlightning_operator.kube.events import Recorder, event_of
from rlightning_operator.reconcile.snapshot import Note
from tests.unit.operator.kube.server import Answer, Asked, Server, job, serving, status

CREATE = "POST /api/v1/namespaces/team/events"


def record(notes: list[Note], answer: Callable[[Asked], Answer] = lambda _: (201, {})) -> Server:
    """All of them, one after the other, by one operator."""

    async def scenario() -> Server:
        async with serving(answer) as (client, server):
            recorder = Recorder(client)
            task = asyncio.create_task(recorder.run())
            for note in notes:
                recorder.record(job(), note)
                await recorder.drain(5)
            task.cancel()
            return server

    return asyncio.run(scenario())


def test_the_same_note_in_plan_after_plan_is_one_event() -> None:
    pending = Note("Warning", "Unschedulable", "0/2 nodes")
    assert record([pending] * 5).writes() == [CREATE]
    assert len(record([pending, Note("Warning", "Unschedulable", "0/3 nodes"), pending]).writes()) == 3


def test_an_operator_that_has_just_started_does_not_repeat_what_was_said() -> None:
    server = record([Note("Warning", "Unschedulable", "0/2 nodes")], lambda _: status(409, "AlreadyExists"))
    assert [str(asked) for asked in server.asked] == [CREATE]


def test_a_note_that_comes_back_counts_up() -> None:
    made: set[str] = set()

    def answer(asked: Asked) -> Answer:
        if asked.method == "GET":
            return 200, {"count": 4}
        name = (asked.body.get("metadata") or {}).get("name", "")
        if name in made:
            return status(409, "AlreadyExists")
        made.add(name)
        return 201, {}

    first, second = Note("Warning", "Unschedulable", "0/2 nodes"), Note("Warning", "Unschedulable", "0/3 nodes")
    server = record([first, second, first], answer)
    assert [asked.method for asked in server.asked] == ["POST", "POST", "POST", "GET", "PATCH"]
    assert server.asked[-1].body["count"] == 5


def test_a_job_that_says_too_much_is_cut_short() -> None:
    server = record([Note("Normal", "Chatter", f"line {number}") for number in range(60)])
    assert len(server.writes()) == events.BURST


def test_a_server_that_refuses_events_is_no_trouble(caplog: pytest.LogCaptureFixture) -> None:
    notes = [Note("Normal", "A", "1"), Note("Normal", "B", "2")]
    server = record(notes, lambda _: status(403, "Forbidden", "cannot create events"))
    assert len(server.asked) == 2, "the second is tried though the first failed"
    assert "the event A was not recorded" in caplog.text


def test_an_event_is_what_kubectl_describe_shows() -> None:
    now = datetime(2026, 11, 29, 12, tzinfo=UTC)
    event = event_of(job(), Note("Warning", "ImagePull", "x" * 5000), now)
    assert event["involvedObject"] == {
        "apiVersion": "rlightning.io/v1alpha1",
        "kind": "RLJob",
        "namespace": "team",
        "name": "cartpole",
        "uid": "job-uid",
    }
    assert (event["type"], event["reason"], event["lastTimestamp"]) == ("Warning", "ImagePull", "2026-11-29T12:00:00Z")
    assert len(event["message"]) == 1024, "the API server refuses longer ones"
    assert event["metadata"]["name"].startswith("cartpole.")
