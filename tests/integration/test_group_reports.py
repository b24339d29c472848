"""What a driver writes into its PolicyGroup and heeds in it, on a real API server."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from rlightning.api.models import MAX_INTEGER, PolicyGroupResource
from rlightning.checkpoint.store import CheckpointInfo
from rlightning.errors import RLightningError, Superseded
from rlightning.runtime.cluster.control import Control, first_look
from rlightning.runtime.cluster.group_client import ApiProblem, GroupClient
from rlightning.runtime.cluster.group_reporter import GroupReporter, ReportFailed
from rlightning.runtime.reporter import IterationReport, Outcome, RunInfo
from rlightning_operator.builders import access
from rlightning_operator.builders.names import Identity
from tests.support.groups import Group, digest, make_group, record
from tests.support.jobs import CARTPOLE, job

pytestmark = pytest.mark.apiserver

TWO: dict[str, Any] = {"policyGroup": {"eval": {"replicas": 2}}}
MEMBERS = ("train-0", "eval-0", "eval-1")


@pytest.fixture
def group(kube: Any, monkeypatch: pytest.MonkeyPatch) -> Group:
    monkeypatch.setenv("KUBECONFIG", kube.kubeconfig)
    return make_group(kube, job(CARTPOLE, **TWO))


class Driver:
    """A driver's parts that talk to the API server, without the training."""

    def __init__(self, group: Group, *, attempt: int = 1, seconds: float = 10.0, outcome_seconds: float = 20.0) -> None:
        self.said: list[str] = []
        self.left = threading.Event()
        self.client = GroupClient(group.kube.namespace, group.name)
        seen = first_look(self.client, job_uid=group.job_uid, attempt=attempt, seconds=5, say=self.said.append)
        self.control = Control(
            self.client, seen, job_uid=group.job_uid, attempt=attempt, say=self.said.append, leave=self.left.set
        )
        self.reporter = GroupReporter(
            self.client,
            self.control,
            attempt=attempt,
            driver={"pod": "head-0", "podUID": "uid-0", "startTime": "2026-03-01T12:00:00Z"},
            run_dir=Path("/runs/team/cart-0a1b2c3d"),
            seconds=seconds,
            say=self.said.append,
            outcome_seconds=outcome_seconds,
        )
        self.control.start()
        self.reporter.start()

    def close(self) -> None:
        self.control.close()
        self.reporter.close()


@contextlib.contextmanager
def driving(group: Group, **options: Any) -> Iterator[Driver]:
    driver = Driver(group, **options)
    try:
        yield driver
    finally:
        driver.close()


def run_info(members: tuple[str, ...] = MEMBERS, *, done: int = 0, attempt: int = 1) -> RunInfo:
    return RunInfo(
        job=job(CARTPOLE, **TWO),
        run_dir=Path("/runs/team/cart-0a1b2c3d"),
        placement="ray",
        attempt=attempt,
        resumed_from=None,
        start_iteration=done,
        start_env_steps=done * 256,
        total_env_steps=2300,
        numerics={},
        environment={"vectorization": "Native", "resume": "exact"},
        members=members,
        start_time="2026-03-01T12:00:00Z",
        pods={name: f"pod-of-{name}" for name in members},
    )


def iteration(n: int, **changes: Any) -> IterationReport:
    values: dict[str, Any] = {
        "iteration": n,
        "env_steps": n * 256,
        "version": n - 1,
        "episode_return_mean": 20.0,
        "episode_length_mean": 20.0,
        "episodes": 3,
        "steps_per_second": 1000.0,
        "metrics": {"policy_loss": -0.25, "odd": float("nan")},
        **changes,
    }
    return IterationReport(**values)


def outcome(state: Any = "Succeeded", reason: str = "TotalEnvStepsReached", message: str = "done") -> Outcome:
    return Outcome(state, reason, message, iteration=9, env_steps=2304, version=9, digest=digest(9), checkpoint=None)


def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that in time"
        time.sleep(0.05)


# -- what is written -------------------------------------------------------------------------------------------------


def test_a_run_is_told_from_its_start_to_its_outcome(group: Group) -> None:
    with driving(group) as driver:
        assert group.status == {
            "attempt": 1,
            "driver": {"pod": "head-0", "podUID": "uid-0", "startTime": "2026-03-01T12:00:00Z"},
        }, "at work, and nothing that was not measured"
        driver.reporter.started(run_info())
        eventually(lambda: "members" in group.status)
        assert group.status["members"][1] == {
            "name": "eval-0",
            "role": "Eval",
            "state": "Ready",
            "pod": "pod-of-eval-0",
        }
        driver.reporter.published(record(0))
        driver.reporter.published(record(1))
        driver.reporter.iteration(iteration(1))
        driver.reporter.checkpointed(CheckpointInfo(Path("/runs/team/cart-0a1b2c3d/checkpoints/iter-1"), 1, digest(1)))
        driver.reporter.finished(outcome())
        status = group.status  # stored when finished() returns
    PolicyGroupResource.from_stored(group.live)
    assert status["outcome"] == {"state": "Succeeded", "reason": "TotalEnvStepsReached", "message": "done"}
    assert status["version"] == 1
    assert [v["learnerDigest"] for v in status["versions"]] == [digest(0), digest(1)]
    assert "parentDigest" not in status["versions"][0] and status["versions"][1]["parentDigest"] == digest(0)
    assert {(m["name"], m["role"], m["version"], m["digest"], m["pod"]) for m in status["members"]} == {
        (name, "Train" if name == "train-0" else "Eval", 1, digest(1), f"pod-of-{name}") for name in MEMBERS
    }
    assert status["checkpoint"] == {
        "path": "team/cart-0a1b2c3d/checkpoints/iter-1",
        "iteration": 1,
        "digest": digest(1),
        "resume": "exact",
    }
    assert (status["progress"]["iteration"], status["progress"]["envSteps"]) == (9, 2304)
    assert status["progress"]["metrics"] == [{"name": "policy_loss", "value": -0.25}], "NaN is left out"


def test_a_mismatch_that_was_mended_at_once_stays_in_the_report(group: Group) -> None:
    with driving(group) as driver:
        driver.reporter.started(run_info())
        driver.reporter.published(record(0, MEMBERS[1:], wrong="eval-1"))
        driver.reporter.published(record(0, MEMBERS[1:]))
        driver.reporter.finished(outcome("Succeeded", "TotalEnvStepsReached"))
        (version,) = group.status["versions"]
    assert (version["verified"], version["total"]) == (2, 2)
    assert version["firstMismatch"].startswith("eval-1: ")


def test_rights_that_come_back_are_waited_for(group: Group) -> None:
    """An API server that has just started refuses everything; a RoleBinding may be deleted and restored."""
    with driving(group) as driver:
        driver.reporter.started(run_info())
        eventually(lambda: "members" in group.status)
        apply = driver.client.apply_status
        refused: list[dict[str, Any]] = []

        def no_rights(uid: str, status: dict[str, Any]) -> dict[str, Any]:
            if len(refused) < 2:
                refused.append(status)
                raise ApiProblem("policygroups is forbidden: no rights", 403)
            return apply(uid, status)

        driver.client.apply_status = no_rights  # type: ignore[method-assign]
        driver.reporter.finished(outcome("Succeeded", "TotalEnvStepsReached"))
        assert len(refused) == 2
        assert group.status["outcome"]["state"] == "Succeeded"


def test_the_largest_report_there_can_be_is_taken(group: Group) -> None:
    evals = tuple(f"eval-{i}" for i in range(256))
    members = (*(f"train-{i}" for i in range(16)), *evals)
    with driving(group) as driver:
        driver.reporter.started(run_info(members))
        for version in range(40):
            driver.reporter.published(record(MAX_INTEGER - 40 + version, evals, wrong="eval-255"))
        driver.reporter.iteration(iteration(9, metrics={f"{'m' * 127}{chr(200 + i)}x": 1e300 + i for i in range(99)}))
        driver.reporter.finished(outcome("Failed", "P" * 64, "ü" * 3000 + "\n" + "x" * 9000 + "the end"))
        status = group.status
    assert len(status["members"]) == 272 and len(status["versions"]) == 32
    assert len(status["versions"][0]["firstMismatch"]) == 253
    assert status["members"][-1]["state"] == "Mismatch" and status["members"][-1]["digest"] != status["versions"][-1]
    assert len(status["outcome"]["message"]) == 4096 and status["outcome"]["message"].endswith("the end")
    assert not driver.said, driver.said


def test_progress_is_written_now_and_then_and_transitions_at_once(group: Group) -> None:
    with driving(group, seconds=3.0) as driver:
        driver.reporter.started(run_info())
        driver.reporter.published(record(0))
        time.sleep(2.0)  # both stored
        writes, began = {group.live["metadata"]["resourceVersion"]}, time.monotonic()
        for n in range(1, 101):
            started = time.perf_counter()
            driver.reporter.published(record(n))
            driver.reporter.iteration(iteration(n, env_steps=n))
            assert time.perf_counter() - started < 0.05, "training does not wait for reports"
            time.sleep(0.02)
            if n % 5 == 0:
                writes.add(group.live["metadata"]["resourceVersion"])
        assert len(writes) <= 2 + (time.monotonic() - began) / 3.0, "of a hundred iterations"
        driver.reporter.published(record(101, wrong="eval-1"))
        eventually(lambda: group.status["version"] == 101, 1.5)
        assert group.status["members"][2]["state"] == "Mismatch"
        assert group.status["versions"][-1]["verified"] == 1


def test_the_next_attempt_begins_with_a_clean_report(group: Group) -> None:
    with driving(group) as first:
        first.reporter.started(run_info())
        first.reporter.published(record(0))
        first.reporter.published(record(7))
        first.reporter.finished(outcome("Lost", "MemberLost", "gone"))
    group.patch(attempt=2)
    with driving(group, attempt=2) as second:
        assert set(group.status) == {"attempt", "driver"}
        assert group.status["attempt"] == 2
        second.reporter.resuming(CheckpointInfo(Path("/runs/team/cart-0a1b2c3d/checkpoints/iter-5"), 5, digest(5)))
        second.reporter.started(run_info(done=5, attempt=2))
        second.reporter.published(record(5, attempt=2))  # lower than before, in a later attempt
        eventually(lambda: group.status.get("version") == 5)
        assert group.status["checkpoint"]["iteration"] == 5
        assert group.status["progress"]["iteration"] == 5


# -- who may write ---------------------------------------------------------------------------------------------------


def test_a_driver_of_an_attempt_that_is_over_does_not_start(group: Group) -> None:
    group.patch(attempt=2)
    with pytest.raises(Superseded, match="attempt 2 has taken over"):
        Driver(group)
    assert group.status == {}


def test_a_driver_that_is_too_early_waits_for_its_attempt(group: Group) -> None:
    timer = threading.Timer(0.5, lambda: group.patch(attempt=2))
    timer.start()
    with driving(group, attempt=2) as driver:
        assert any("its spec.attempt is 1, which has to become 2" in line for line in driver.said)
    timer.join()


def test_another_jobs_group_of_the_same_name_is_left_alone(group: Group) -> None:
    client = GroupClient(group.kube.namespace, group.name)
    with pytest.raises(Superseded, match="another job's"):
        first_look(client, job_uid="uid-of-another", attempt=1, seconds=5, say=print)


def test_a_group_that_never_comes_is_named(group: Group) -> None:
    client = GroupClient(group.kube.namespace, "nobody")
    said: list[str] = []
    with pytest.raises(RLightningError, match=r"PolicyGroup .*/nobody could not be used within 1 s: .*not found"):
        first_look(client, job_uid="u", attempt=1, seconds=1, say=said.append)
    assert len(said) == 1


def test_an_old_driver_is_refused_by_the_server_even_if_it_has_seen_nothing(group: Group) -> None:
    with driving(group) as old:
        old.control.close()  # its watch is dead
        old.reporter.started(run_info())
        old.reporter.published(record(3))
        eventually(lambda: group.status.get("version") == 3)
        group.patch(attempt=2)
        with driving(group, attempt=2):
            stored = group.live
            old.reporter.published(record(4, wrong="eval-0"))
            eventually(lambda: old.control.superseded is not None)
            with pytest.raises(Superseded, match="attempt 2 has taken over"):
                old.reporter.published(record(5))
            with pytest.raises(Superseded):
                old.reporter.finished(outcome())
            assert group.live == stored, "nothing of it was written"


def test_a_version_that_falls_within_an_attempt_is_told_as_the_servers_refusal(group: Group) -> None:
    with driving(group) as driver:
        driver.reporter.started(run_info())
        driver.reporter.published(record(3))
        eventually(lambda: group.status.get("version") == 3)
    stale = GroupClient(group.kube.namespace, group.name)
    with pytest.raises(ApiProblem, match=r"\(1, 2\) cannot go below \(1, 3\)") as refused:
        stale.apply_status(group.live["metadata"]["uid"], {"attempt": 1, "version": 2})
    assert refused.value.code == 422 and not refused.value.passing


@pytest.mark.parametrize("again", [False, True])
def test_a_deleted_group_ends_the_driver_and_its_successor_is_left_alone(group: Group, again: bool) -> None:
    with driving(group) as driver:
        driver.reporter.started(run_info())
        group.delete()
        if again:
            make_group(group.kube, job(CARTPOLE, **TWO), name=group.name)
        eventually(lambda: driver.control.superseded is not None)
        with pytest.raises(Superseded, match="the job is gone"):
            driver.reporter.finished(outcome())
        if again:
            assert group.status == {}


def test_an_outcome_that_the_server_refuses_is_an_error_with_its_words(group: Group) -> None:
    with driving(group) as driver:
        driver.reporter.started(run_info())
        with pytest.raises(ReportFailed, match=r"refused the outcome .*status.outcome.state.*Unsupported value"):
            driver.reporter.finished(outcome("Unheard"))


# -- what is heeded --------------------------------------------------------------------------------------------------


def test_a_wish_to_stop_and_a_new_attempt_are_seen_within_a_moment(group: Group) -> None:
    with driving(group) as driver:
        assert not driver.control.requested
        group.patch(state="Stopped")
        eventually(lambda: driver.control.requested, 2)
        assert driver.control.superseded is None
        group.patch(attempt=2, state="Running")
        eventually(lambda: driver.control.superseded is not None, 2)


def test_a_stop_that_was_wanted_before_the_driver_began_is_heeded(group: Group) -> None:
    group.patch(state="Stopped")
    with driving(group) as driver:
        assert driver.control.requested


def test_a_superseded_driver_that_does_not_end_leaves(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlightning.runtime.cluster.control.GRACE_SECONDS", 0.3)
    with driving(group) as driver:
        group.patch(attempt=2)
        assert driver.left.wait(5)
    monkeypatch.setattr("rlightning.runtime.cluster.control.GRACE_SECONDS", 0.3)
    with driving(group, attempt=2) as driver:
        pass
    group.patch(attempt=3)
    assert not driver.left.wait(1), "it had ended by itself"


# -- an API server that is away, or slow -----------------------------------------------------------------------------


class Valve:
    """A TCP proxy in front of the API server: open, shut (connections are refused) or stuck (nothing comes through)."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self.stuck = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._pairs: list[socket.socket] = []
        self._accept(self._listener)

    def _accept(self, listener: socket.socket) -> None:
        def loop() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    far = socket.create_connection(self._target)
                    self._pairs += [near, far]
                    for a, b in ((near, far), (far, near)):
                        threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

        threading.Thread(target=loop, daemon=True).start()

    def _pump(self, a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while True:
                if not select.select([a], [], [], 0.1)[0] or self.stuck.is_set():
                    time.sleep(0.02)
                    continue
                data = a.recv(65536)
                if not data:
                    break
                b.sendall(data)
        for end in (a, b):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def shut(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for pair in self._pairs:
            with contextlib.suppress(OSError):
                pair.shutdown(socket.SHUT_RDWR)
            pair.close()
        self._pairs.clear()

    def open(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._accept(self._listener)


@pytest.fixture
def valve(group: Group, kube: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Valve]:
    config = yaml.safe_load(Path(kube.kubeconfig).read_text())
    cluster = config["clusters"][0]["cluster"]
    url = urlsplit(cluster["server"])
    if url.hostname not in ("127.0.0.1", "localhost"):
        pytest.skip("the certificate of a distant API server is not valid for a proxy here")
    valve = Valve(url.hostname, url.port or 443)
    cluster["server"] = f"https://127.0.0.1:{valve.port}"
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(file))
    yield valve
    valve.stuck.clear()
    valve.shut()


def test_training_goes_on_without_the_api_server_and_the_newest_state_is_stored_when_it_is_back(
    group: Group, valve: Valve
) -> None:
    with driving(group, seconds=0.5) as driver:
        driver.reporter.started(run_info())
        driver.reporter.published(record(0))
        eventually(lambda: group.status.get("version") == 0)
        valve.shut()
        for n in range(1, 50):
            started = time.perf_counter()
            driver.reporter.published(record(n))
            driver.reporter.iteration(iteration(n))
            assert time.perf_counter() - started < 0.05
            time.sleep(0.05)
        assert group.status["version"] == 0
        group.patch(state="Stopped")  # seen by nobody
        valve.open()
        eventually(lambda: group.status["version"] == 49, 15)
        eventually(lambda: driver.control.requested, 15)
    away = [line for line in driver.said if "does not answer" in line]
    assert 1 <= len(away) <= 6, driver.said
    assert "reports reach the API server again" in driver.said


def test_an_outcome_waits_for_an_api_server_that_is_stuck(
    group: Group, valve: Valve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlightning.runtime.cluster.group_client.REQUEST_SECONDS", 1.0)
    with driving(group) as driver:
        driver.reporter.started(run_info())
        valve.stuck.set()
        timer = threading.Timer(3, valve.stuck.clear)
        timer.start()
        started = time.monotonic()
        driver.reporter.finished(outcome())
        assert time.monotonic() - started >= 2.5
        assert group.status["outcome"]["state"] == "Succeeded"
        timer.join()


def test_an_outcome_that_cannot_be_stored_ends_at_its_deadline_with_the_reason(group: Group, valve: Valve) -> None:
    with driving(group, outcome_seconds=2.0) as driver:
        valve.shut()
        with pytest.raises(ReportFailed, match=r"could not be stored within 2 s: .*does not answer"):
            driver.reporter.finished(outcome())
    valve.open()


# -- rights ----------------------------------------------------------------------------------------------------------


def test_the_rights_that_the_operator_gives_a_driver_are_enough_and_not_more(
    group: Group, kube: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the Role that the operator makes, and the token of its service account."""
    identity = Identity(group.name, kube.namespace, "0a1b2c3d-0000-0000-0000-000000000000")
    for build in (access.service_account, access.role, access.role_binding):
        made = build(identity)
        made["metadata"].pop("ownerReferences", None)  # there is no RLJob
        kube.ok("apply", "--server-side", "--filename", "-", stdin=json.dumps(made))
    token = kube.ok("create", "token", identity.access).strip()
    config = yaml.safe_load(Path(kube.kubeconfig).read_text())
    config["users"][0]["user"] = {"token": token}
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(file))
    with driving(group) as driver:
        driver.reporter.started(run_info())
        eventually(lambda: "members" in group.status)
        group.patch(state="Stopped")
        eventually(lambda: driver.control.requested)
        driver.reporter.finished(outcome("Stopped", "Interrupted"))
    other = make_group(kube, job(CARTPOLE, **TWO))
    with pytest.raises(ApiProblem, match="forbidden") as refused:
        GroupClient(kube.namespace, other.name).get()
    assert refused.value.code == 403


def test_a_superseded_driver_sends_not_even_what_was_due(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlightning.runtime.cluster.group_reporter.TRANSITION_SECONDS", 5.0)
    with driving(group) as driver:
        driver.reporter.started(run_info())
        eventually(lambda: "members" in group.status)
        stored = group.status
        driver.reporter.published(record(0))  # due five seconds after the report before it
        group.patch(attempt=2)
        eventually(lambda: driver.control.superseded is not None)
        time.sleep(5.5)
        assert group.status == stored


def test_a_404_without_the_objects_name_is_no_reason_to_leave(group: Group, kube: Any) -> None:
    client = GroupClient(kube.namespace, group.name)
    client._where["plural"] = "policygroupz"  # as an API server that has not loaded its CRDs yet
    with pytest.raises(ApiProblem) as unserved:
        client.get()
    assert (unserved.value.code, unserved.value.gone, unserved.value.passing) == (404, False, True)
    with pytest.raises(ApiProblem) as missing:
        GroupClient(kube.namespace, "nobody").get()
    assert (missing.value.code, missing.value.gone) == (404, True)
