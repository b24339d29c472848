"""How an attempt begins and ends in a cluster, as far as neither Ray nor an API server is needed to see it."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RaySystemError

from rlightning.checkpoint.store import CheckpointStore
from rlightning.errors import CheckpointError, MemberDeadlineExceeded, MemberLost, RunFolderError, Superseded
from rlightning.policy.policy_group import PolicyGroup
from rlightning.runtime.cluster import driver
from rlightning.runtime.driver import run_job
from rlightning.runtime.reporter import Outcome, Reporters
from tests.support.jobs import CARTPOLE, Flag, Recorder, job, run


class ClusterOfTheJob:
    """Stands for the Ray cluster that an operator made: members in this process need none."""

    def wait_until_ready(self) -> None:
        raise AssertionError("members in this process wait for no pools")


def superseding(at: int) -> Recorder:
    def supersede() -> None:
        raise Superseded("attempt 2 has taken over")

    return Recorder({at: supersede})


def drive(recorder: Any, folder: Path, **options: Any) -> Outcome:
    return run_job(
        job(CARTPOLE, checkpoints={"everyIterations": 2}),
        run_dir=folder,
        placement="local",
        reporter=recorder,
        stop=Flag(),
        **options,
    )


def test_a_superseded_driver_reports_no_outcome_and_saves_nothing_more(tmp_path: Path) -> None:
    recorder = superseding(3)
    with pytest.raises(Superseded, match="attempt 2"):
        drive(recorder, tmp_path)
    assert recorder.outcome is None
    assert [c.iteration for c in recorder.checkpoints] == [2]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["iter-00000002"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemberLost("eval-1", "rollout_fragment", "the node died", "pod-7"), "MemberLost"),
        (MemberDeadlineExceeded("rollout", ["eval-1"], 5, "spec.deadlines.fragmentSeconds"), "DeadlineExceeded"),
    ],
)
def test_what_is_not_the_jobs_fault_is_lost_where_somebody_tries_again_and_failed_elsewhere(
    error: Exception, reason: str, tmp_path: Path
) -> None:
    def fail() -> None:
        raise error

    lost = drive(Recorder({3: fail}), tmp_path / "a", cluster=ClusterOfTheJob())
    assert (lost.state, lost.reason, lost.iteration) == ("Lost", reason, 3)
    assert lost.checkpoint is not None and lost.checkpoint.endswith("iter-00000002")
    failed = drive(Recorder({3: fail}), tmp_path / "b")
    assert (failed.state, failed.reason, failed.message) == ("Failed", reason, lost.message)


def test_an_error_of_ray_itself_is_lost_where_somebody_tries_again(tmp_path: Path) -> None:
    def fail() -> None:
        raise RaySystemError("the connection to the raylet is broken")

    recorder = Recorder({3: fail})
    with pytest.raises(RaySystemError):
        drive(recorder, tmp_path, cluster=ClusterOfTheJob())
    assert recorder.outcome is not None
    assert (recorder.outcome.state, recorder.outcome.iteration) == ("Lost", 3)


def test_a_run_that_had_reached_its_target_does_not_train_on(tmp_path: Path) -> None:
    """Its driver was lost after the last checkpoint, before anybody was told."""
    reached = {"everyIterations": 2, "episodes": 2, "stopAtReturn": 1.0}
    first, recorder = run(job(CARTPOLE, evaluation=reached), tmp_path / "run")
    assert (first.state, first.reason, first.iteration) == ("Succeeded", "TargetReached", 2)
    saved = recorder.checkpoints[-1]
    again, recorder = run(job(CARTPOLE, evaluation=reached), tmp_path / "run", resume=saved.path, attempt=2)
    assert (again.state, again.reason, again.iteration, again.digest) == (
        "Succeeded",
        "TargetReached",
        2,
        first.digest,
    )
    assert again.message == first.message
    assert [e.iteration for e in recorder.evaluations] == [2]


def test_a_run_that_had_not_reached_its_target_is_not_evaluated_twice(tmp_path: Path) -> None:
    target = {"everyIterations": 2, "episodes": 2, "stopAtReturn": 1e9}
    options: dict[str, Any] = {"evaluation": target, "checkpoints": {"everyIterations": 2, "keep": 9}}
    whole, recorder = run(job(CARTPOLE, **options), tmp_path / "whole")
    saved = recorder.checkpoints[0]
    assert saved.iteration == 2
    rest, recorder = run(job(CARTPOLE, **options), tmp_path / "rest", resume=saved.path, attempt=2)
    assert rest.digest == whole.digest
    assert 2 not in [e.iteration for e in recorder.evaluations]


@pytest.fixture
def no_clean_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Shutting the members down fails; returns what failed."""
    failed: list[str] = []
    shutdown = PolicyGroup.shutdown

    def fails(group: PolicyGroup) -> None:
        shutdown(group)
        failed.append("shutdown")
        raise OSError("the slots could not be removed")

    monkeypatch.setattr(PolicyGroup, "shutdown", fails)
    return failed


def test_a_clean_up_that_fails_is_a_warning_to_a_run_that_succeeded(tmp_path: Path, no_clean_up: list[str]) -> None:
    recorder = Recorder()
    outcome = drive(recorder, tmp_path)
    assert no_clean_up == ["shutdown"]
    assert (outcome.state, outcome.reason) == ("Succeeded", "TotalEnvStepsReached")
    assert recorder.outcome == outcome
    (warning,) = recorder.warnings
    assert "how the run ended (Succeeded)" in warning
    assert warning.rstrip().endswith("OSError: the slots could not be removed")


def test_a_clean_up_that_fails_does_not_hide_what_ended_the_run(tmp_path: Path, no_clean_up: list[str]) -> None:
    def lose() -> None:
        raise MemberLost("eval-1", "rollout_fragment", "the node died", "pod-7")

    recorder = Recorder({3: lose})
    outcome = drive(recorder, tmp_path, cluster=ClusterOfTheJob())
    assert no_clean_up == ["shutdown"]
    assert (outcome.state, outcome.reason) == ("Lost", "MemberLost")
    assert "slots" not in outcome.message + outcome.extra["traceback"]
    (warning,) = recorder.warnings
    assert "how the run ended (MemberLost)" in warning
    assert "the slots could not be removed" in warning and "the node died" not in warning


def test_a_volume_that_is_away_does_not_hide_what_ended_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: CheckpointStore) -> Path | None:
        raise OSError(errno.ESTALE, "stale file handle")

    def lose() -> None:
        monkeypatch.setattr(CheckpointStore, "latest", away)
        raise MemberLost("eval-1", "rollout_fragment", "the node died", "pod-7")

    recorder = Recorder({3: lose})
    outcome = drive(recorder, tmp_path, cluster=ClusterOfTheJob())
    assert recorder.outcome == outcome
    assert (outcome.state, outcome.reason, outcome.checkpoint) == ("Lost", "MemberLost", None)


def test_a_clean_up_that_fails_does_not_give_a_superseded_driver_an_outcome(
    tmp_path: Path, no_clean_up: list[str]
) -> None:
    recorder = superseding(3)
    with pytest.raises(Superseded, match="attempt 2"):
        drive(recorder, tmp_path)
    assert no_clean_up == ["shutdown"]
    assert recorder.outcome is None


def test_the_users_own_error_is_failed_in_a_cluster_too(tmp_path: Path) -> None:
    outcome = run_job(
        job(CARTPOLE, environment={"id": "CartPoel-v1"}),
        run_dir=tmp_path,
        placement="local",
        reporter=Recorder(),
        stop=Flag(),
        cluster=ClusterOfTheJob(),
    )
    assert (outcome.state, outcome.reason) == ("Failed", "EnvironmentNotFound")


def test_a_reporter_that_cannot_take_the_end_does_not_keep_it_from_the_others(tmp_path: Path) -> None:
    class FullDisk(Recorder):
        def finished(self, outcome: Outcome) -> None:
            raise RunFolderError("no space is left on the device")

    other = Recorder()
    with pytest.raises(RunFolderError, match="no space"):
        drive(Reporters(FullDisk(), other), tmp_path)
    assert other.outcome is not None and other.outcome.state == "Succeeded"


def test_an_attempt_that_ends_before_training_says_where_the_run_is(tmp_path: Path) -> None:
    _, recorder = run(job(CARTPOLE, checkpoints={"everyIterations": 4, "keep": 9}), tmp_path)
    at_four = recorder.checkpoints[0].path
    outcome, _ = run(job(CARTPOLE, seed=8), tmp_path, resume=at_four, attempt=2)
    assert (outcome.state, outcome.reason) == ("Failed", "InvalidManifest")
    assert "spec.seed: cannot change once the job has started: is 8, was 7" in outcome.message
    assert outcome.iteration == 4, "not 0"


def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, recorder = run(job(CARTPOLE, checkpoints={"everyIterations": 4, "keep": 9}), tmp_path)
    checkpoints, warned = tmp_path / "checkpoints", list[str]()
    whole = driver._newest_whole(checkpoints, warned.append)
    assert whole == recorder.checkpoints[-1] and not warned

    def damage(path: Path) -> None:
        with (path / "model.safetensors").open("r+b") as file:
            file.seek(-5, 2)
            file.write(b"\xff")

    damage(recorder.checkpoints[-1].path)
    assert driver._newest_whole(checkpoints, warned.append) == recorder.checkpoints[-2]
    assert warned[0].startswith("iter-00000010 is damaged and passed over: ")
    assert "iter-00000010 is damaged" in capsys.readouterr().out
    for info in recorder.checkpoints[:-1]:
        damage(info.path)
    with pytest.raises(CheckpointError, match=r"all 3 checkpoints .* are damaged; iter-00000010: "):
        driver._newest_whole(checkpoints, warned.append)
    assert driver._newest_whole(tmp_path / "nowhere", warned.append) is None


def test_an_attempt_is_driven_once(capsys: pytest.CaptureFixture[str]) -> None:
    mine = {"pod": "head-0", "podUID": "u", "startTime": "2026-03-01T12:00:00Z"}
    assert driver._driven_before({}, 1) is None
    assert driver._driven_before({"status": {"attempt": 1, "driver": mine}}, 2) is None
    assert driver._driven_before({"status": {"attempt": 2, "driver": mine}}, 2) == 3
    assert "that driver is gone" in capsys.readouterr().out
    for state, status in {"Succeeded": 0, "Stopped": 0, "Failed": 1, "Lost": 3}.items():
        outcome = {"state": state, "reason": "Reason", "message": "why"}
        assert driver._driven_before({"status": {"attempt": 2, "driver": mine, "outcome": outcome}}, 2) == status
