"""The loop around the pure decision: when it looks, what it does with errors, how it stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rlightning_operator import controller as controller_module
from rlightning_operator.controller import Controller
from rlightning_operator.kube import kinds
from rlightning_operator.reconcile.snapshot import Create, Note, OperatorConfig, Plan, Snapshot
from tests.unit.operator.kube.server import Answer, Asked, Server, job, owned, serving, status, until

KEY = ("team", "cartpole")
ACCOUNT = {**owned("ServiceAccount", "rlj-cartpole"), "apiVersion": "v1"}


class Api:
    """One job, ``status`` as it was last written; other objects are accepted and forgotten."""

    def __init__(self) -> None:
        self.version = 5
        self.status: dict[str, Any] = {}
        self.refuse: Callable[[Asked], Answer | None] = lambda _: None

    def __call__(self, asked: Asked) -> Answer:
        refusal = self.refuse(asked)
        if refusal is not None:
            return refusal
        if "watch" in asked.query:
            return 200, {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self.version)}}}
        self.version += 1
        if asked.path.endswith("/rljobs") and asked.method == "GET":
            return 200, {"metadata": {"resourceVersion": str(self.version)}, "items": [job(5, status=self.status)]}
        if asked.method == "GET":
            return 200, {"metadata": {"resourceVersion": str(self.version)}, "items": []}
        if asked.path.endswith("/status"):
            self.status = {**self.status, **asked.body["status"]}
            return 200, job(self.version, status=self.status)
        metadata = {**asked.body["metadata"], "uid": f"uid-{self.version}", "resourceVersion": str(self.version)}
        return 201, {**asked.body, "metadata": metadata}


@asynccontextmanager
async def running(plan: Callable[[Snapshot], Plan], api: Api) -> AsyncIterator[tuple[Controller, Server]]:
    """A controller after its first listing."""
    async with serving(api) as (client, server):
        controller = Controller(client, OperatorConfig(), plan)
        await controller.start()
        await until(lambda: controller.ready)
        try:
            yield controller, server
        finally:
            await controller.stop()


def writes(server: Server, kind: str) -> int:
    """How many requests but GET there were for a kind."""
    return len([one for one in server.asked if one.method != "GET" and f"/{kind}" in one.path])


def test_a_burst_of_events_is_one_pass() -> None:
    passes: list[int] = []

    def plan(snapshot: Snapshot) -> Plan:
        passes.append(len(snapshot.pods))
        return Plan({})

    async def scenario() -> None:
        async with running(plan, Api()) as (controller, _):
            await until(lambda: passes)
            await asyncio.sleep(0.1)
            passes.clear()
            for number in range(20):
                controller.observe(kinds.POD, "ADDED", owned("Pod", f"worker-{number}", 50 + number))
                await asyncio.sleep(0.001)
            await until(lambda: passes)
            await asyncio.sleep(0.1)
            assert passes == [20]

    asyncio.run(scenario())


def test_a_pass_is_told_since_when_the_api_server_answers() -> None:
    told: list[datetime | None] = []

    def plan(snapshot: Snapshot) -> Plan:
        told.append(snapshot.answers_since)
        return Plan({})

    async def scenario() -> None:
        began = datetime.now(UTC)
        async with running(plan, Api()) as (controller, _):
            await until(lambda: told)
            assert told[0] is not None and began <= told[0] <= datetime.now(UTC)
            controller._client.answers_since = later = datetime.now(UTC) + timedelta(seconds=9)
            told.clear()
            controller.observe(kinds.POD, "ADDED", owned("Pod", "worker-1", 50))
            await until(lambda: told)
            assert told == [later]

    asyncio.run(scenario())


def test_passes_follow_one_another_until_one_writes_nothing() -> None:
    def plan(snapshot: Snapshot) -> Plan:
        step = int(snapshot.job.get("status", {}).get("attempt", 0))
        return Plan({"attempt": min(step + 1, 3)})

    async def scenario() -> None:
        api = Api()
        async with running(plan, api) as (_, server):
            await until(lambda: api.status.get("attempt") == 3)
            await asyncio.sleep(0.2)
            assert writes(server, "rljobs") == 3

    asyncio.run(scenario())


def test_a_plan_that_never_settles_slows_down_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    count = 0

    def plan(_: Snapshot) -> Plan:
        nonlocal count
        count += 1
        return Plan({"attempt": count})

    async def scenario() -> None:
        async with running(plan, Api()):
            await asyncio.sleep(1.5)

    asyncio.run(scenario())
    # Ten passes 0.05 s apart, then after 0.1, 0.2, 0.4 s, …: not one every 0.05 s.
    assert 10 <= count <= 15
    assert "nothing settles" in caplog.text


def test_a_bug_in_the_decision_is_logged_shown_on_the_job_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    broken = True

    def plan(_: Snapshot) -> Plan:
        if broken:
            raise ZeroDivisionError("division by zero")
        return Plan({"attempt": 1})

    async def scenario() -> None:
        nonlocal broken
        api = Api()
        async with running(plan, api) as (controller, server):
            await until(lambda: writes(server, "events") == 1)
            event = next(one.body for one in server.asked if "/events" in one.path)
            assert event["reason"] == "ReconcileError"
            assert "a bug in the operator: ZeroDivisionError: division by zero" in event["message"]
            await until(lambda: caplog.text.count("a pass failed") >= 2)
            assert writes(server, "events") == 1, "said once"
            broken = False
            await until(lambda: api.status == {"attempt": 1})
            assert controller.trouble() == []

    asyncio.run(scenario())
    assert "Traceback" in caplog.text


def over_quota(asked: Asked) -> Answer | None:
    """Nobody may make a ServiceAccount."""
    if "/serviceaccounts" in asked.path and asked.body:
        return status(403, "Forbidden", "exceeded quota: small")
    return None


def test_a_refusal_is_one_line_without_a_traceback_and_shown_on_the_job(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        api = Api()
        api.refuse = over_quota
        async with running(lambda _: Plan({}, (Create(ACCOUNT),)), api) as (_, server):
            await until(lambda: writes(server, "events") == 1)
            event = next(one.body for one in server.asked if "/events" in one.path)
            assert "exceeded quota: small" in event["message"]

    asyncio.run(scenario())
    assert "exceeded quota: small" in caplog.text
    assert "Traceback" not in caplog.text


def test_the_decision_knows_what_was_refused_until_it_is_not() -> None:
    seen: list[str | None] = []
    quota = True

    def plan(snapshot: Snapshot) -> Plan:
        seen.append(snapshot.refused)
        return Plan({}, (Create(ACCOUNT),) if quota or snapshot.refused else ())

    async def scenario() -> None:
        nonlocal quota
        api = Api()
        api.refuse = lambda asked: over_quota(asked) if quota else None
        async with running(plan, api):
            await until(lambda: seen and seen[-1] is not None)
            quota = False
            await until(lambda: seen[-1] is None)

    asyncio.run(scenario())
    words = "ServiceAccount rlj-cartpole could not be created: exceeded quota: small"
    assert seen[:3] == [None, None, words], "what passes by itself is not said"
    assert seen[-1] is None, "a pass follows the one that was not refused, so that the words go"


@pytest.mark.parametrize("code", [403, 500])
def test_words_that_differ_each_time_are_not_a_write_each_time(code: int) -> None:
    """As of a webhook that gives each request a number; the event of the status comes before the answer."""
    asked_for = 0
    stored: list[str] = []
    watched: list[Controller] = []

    def plan(snapshot: Snapshot) -> Plan:
        return Plan({"state": snapshot.refused or "none"}, (Create(ACCOUNT),))

    async def scenario() -> None:
        api = Api()

        def refuse(asked: Asked) -> Answer | None:
            nonlocal asked_for
            if asked.path.endswith("/status"):
                state = asked.body["status"]["state"]
                stored.append(state)
                for controller in watched:
                    controller.observe(kinds.RLJOB, "MODIFIED", job(api.version + 1, status={"state": state}))
            if "/serviceaccounts" in asked.path and asked.body:
                asked_for += 1
                return status(code, "Whatever", f"failed calling webhook: request {asked_for}")
            return None

        api.refuse = refuse
        async with running(plan, api) as (controller, _):
            watched.append(controller)
            await until(lambda: len(stored) >= 2, seconds=20)
            await asyncio.sleep(3.0)

    asyncio.run(scenario())
    first = 2 if code == 403 else 4
    assert stored == [
        "none",
        f"ServiceAccount rlj-cartpole could not be created: failed calling webhook: request {first}",
    ]
    assert asked_for <= first + 5, "tried less and less often"


def test_a_conflict_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    refused: list[str] = []

    def conflict_once(asked: Asked) -> Answer | None:
        if asked.path.endswith("/status") and not refused:
            refused.append(asked.path)
            return status(409, "Conflict")
        if asked.method == "GET" and asked.path.endswith("/rljobs/cartpole"):
            return 200, job(90, spec={"seed": 1})
        return None

    async def scenario() -> None:
        api = Api()
        api.version, api.refuse = 100, conflict_once
        async with running(lambda _: Plan({"attempt": 1}), api) as (_, server):
            await until(lambda: api.status == {"attempt": 1})
            stored = [one.body["metadata"]["resourceVersion"] for one in server.asked if one.path.endswith("/status")]
            assert stored == ["5", "90"], "the second is under the lock of the job as it is by then"

    with caplog.at_level("WARNING"):
        asyncio.run(scenario())
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_server_that_is_away_is_waited_for_without_an_event() -> None:
    async def scenario() -> None:
        api = Api()
        away = True
        api.refuse = lambda asked: status(503, "ServiceUnavailable") if away and asked.method != "GET" else None
        async with running(lambda _: Plan({"attempt": 1}), api) as (_, server):
            await until(lambda: writes(server, "rljobs") >= 2)
            assert writes(server, "events") == 0
            away = False
            await until(lambda: api.status == {"attempt": 1})

    asyncio.run(scenario())


def test_a_note_is_an_event_on_the_job() -> None:
    plan = Plan({}, (), (Note("Warning", "KubeRayMissing", "there is none"),))

    async def scenario() -> None:
        async with running(lambda _: plan, Api()) as (controller, server):
            await until(lambda: writes(server, "events") == 1)
            controller.observe(kinds.POD, "ADDED", owned("Pod", "head", 60))
            await asyncio.sleep(0.2)
            assert writes(server, "events") == 1

    asyncio.run(scenario())


def test_time_alone_brings_the_next_pass() -> None:
    passes: list[float] = []

    def plan(_: Snapshot) -> Plan:
        passes.append(asyncio.get_running_loop().time())
        return Plan({}, requeue_after=0.3)

    async def scenario() -> None:
        async with running(plan, Api()):
            await until(lambda: len(passes) >= 3)

    asyncio.run(scenario())
    assert 0.29 <= passes[2] - passes[1] <= 0.5


def test_a_deadline_does_not_wait_for_the_next_try_of_a_refused_write() -> None:
    passes: list[float] = []

    def plan(_: Snapshot) -> Plan:
        passes.append(asyncio.get_running_loop().time())
        return Plan({}, (Create(ACCOUNT),), requeue_after=0.2)

    async def scenario() -> None:
        api = Api()
        api.refuse = over_quota
        async with running(plan, api):
            await until(lambda: len(passes) >= 8)

    asyncio.run(scenario())
    assert passes[7] - passes[0] < 8, "seven tries alone would take 0.5 + 1 + 2 + … s, halved at most: over 31"


def test_nothing_is_decided_before_everything_was_listed() -> None:
    """A RayCluster that is not known yet would be made a second time."""
    passes: list[tuple[Any, ...]] = []
    blocked = True

    def plan(snapshot: Snapshot) -> Plan:
        passes.append(snapshot.clusters)
        return Plan({})

    def refuse(asked: Asked) -> Answer | None:
        if blocked and asked.path.endswith("/rayclusters"):
            return status(503, "ServiceUnavailable")
        if asked.path.endswith("/rayclusters") and "watch" not in asked.query:
            return 200, {"metadata": {"resourceVersion": "9"}, "items": [owned("RayCluster", "c-1", 5)]}
        return None

    async def scenario() -> None:
        nonlocal blocked
        api = Api()
        api.refuse = refuse
        async with serving(api) as (client, _):
            controller = Controller(client, OperatorConfig(), plan)
            await controller.start()
            controller.observe(kinds.RLJOB, None, job(5))
            await asyncio.sleep(0.3)
            assert passes == []
            assert not controller.ready
            blocked = False
            await until(lambda: passes)
            assert len(passes[0]) == 1
            await controller.stop()

    asyncio.run(scenario())


def test_stopping_lets_the_pass_under_way_come_to_its_end() -> None:
    started = asyncio.Event()

    async def slow(asked: Asked) -> Answer:
        if asked.path.endswith("/status"):
            started.set()
            await asyncio.sleep(0.3)
        return Api()(asked)

    async def scenario() -> None:
        async with serving(slow) as (client, server):
            controller = Controller(client, OperatorConfig(), lambda _: Plan({"attempt": 1}, (Create(ACCOUNT),)))
            await controller.start()
            await started.wait()
            begin = asyncio.get_running_loop().time()
            await controller.stop()
            assert asyncio.get_running_loop().time() - begin < 1.0
            assert writes(server, "serviceaccounts") == 1

    asyncio.run(scenario())


def test_a_pass_that_hangs_is_trouble_but_a_long_queue_that_moves_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with running(lambda _: Plan({}), Api()) as (controller, _):
            await asyncio.sleep(0.2)
            assert controller.trouble() == []
            controller.queue._due[KEY] = asyncio.get_running_loop().time() - 500
            assert controller.trouble() == [], "passes end: it is only long"
            controller._last_pass -= 500
            assert "a job has been waiting for" in controller.trouble()[0]
            del controller.queue._due[KEY]
            controller.queue._busy[KEY] = asyncio.get_running_loop().time() - 200
            assert controller.trouble() == ["a pass over a job has been under way for 200 s"]
            controller.queue._busy.clear()

    monkeypatch.setattr(controller_module, "STOP_SECONDS", 0.1)
    asyncio.run(scenario())


def test_a_task_that_dies_takes_the_process_with_it() -> None:
    failures: list[BaseException] = []

    async def scenario() -> None:
        async with serving(Api()) as (client, _):
            controller = Controller(client, OperatorConfig(), lambda _: Plan({}), failed=failures.append)
            await controller.start()
            await until(lambda: controller.ready)
            monkey = controller.relister
            monkey.relist = None  # type: ignore[assignment, method-assign]
            monkey.suspect()
            await until(lambda: failures)
            await controller.stop()

    asyncio.run(scenario())
    assert isinstance(failures[0], TypeError)
