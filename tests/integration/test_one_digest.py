"""One manifest, one seed: one final digest, wherever members run and however many host the shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import CARTPOLE, HALF_CHEETAH, job, run

TASKS = {"cartpole": CARTPOLE, "halfcheetah": HALF_CHEETAH}


@pytest.fixture(scope="module", params=TASKS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, int]:
    """Digest of an in-process run with one eval member."""
    base = TASKS[request.param]
    outcome, recorder = run(job(base), tmp_path_factory.mktemp(request.param))
    assert outcome.state == "Succeeded", outcome.message
    assert outcome.digest is not None
    expected = {"cartpole": 10, "halfcheetah": 20}[request.param]
    assert outcome.iteration == expected
    assert len({r.digest for r in recorder.versions}) == expected + 1, "every iteration must change the weights"
    return outcome.digest, base, expected


@pytest.mark.parametrize("evals", [2, 4])
@pytest.mark.parametrize("strategy", ["None", "Double", "Shared"])
def test_in_process_eval_members_and_strategies_do_not_change_it(
    reference: tuple[str, Any, int], evals: int, strategy: str, tmp_path: Path
) -> None:
    digest, base, _ = reference
    outcome, recorder = run(
        job(base, policyGroup={"eval": {"replicas": evals}}, weights={"strategy": strategy}), tmp_path
    )
    assert outcome.digest == digest
    assert all(r.verified == r.total == evals for r in recorder.versions)


def test_evaluation_on_or_off_does_not_change_it(reference: tuple[str, Any, int], tmp_path: Path) -> None:
    digest, base, iterations = reference
    outcome, recorder = run(job(base, evaluation={"everyIterations": 1, "episodes": 2}), tmp_path)
    assert outcome.digest == digest
    assert len(recorder.evaluations) == iterations


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.parametrize("evals", [1, 2, 4])
def test_on_local_ray_it_is_the_same(
    reference: tuple[str, Any, int], evals: int, local_ray: None, tmp_path: Path
) -> None:
    digest, base, _ = reference
    outcome, recorder = run(job(base, policyGroup={"eval": {"replicas": evals}}), tmp_path, placement="ray")
    assert outcome.state == "Succeeded", outcome.message
    assert outcome.digest == digest
    assert all(r.verified == r.total == evals for r in recorder.versions)
    assert sorted(recorder.versions[0].members) == [f"eval-{i}" for i in range(evals)]


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.parametrize("task", TASKS)
def test_two_train_members_agree_in_process_and_on_ray(task: str, local_ray: None, tmp_path: Path) -> None:
    two = job(TASKS[task], policyGroup={"train": {"replicas": 2}, "eval": {"replicas": 2}})
    local, _ = run(two, tmp_path / "local")
    remote, _ = run(two, tmp_path / "ray", placement="ray")
    assert local.state == remote.state == "Succeeded", (local.message, remote.message)
    assert local.digest == remote.digest


def test_the_seed_changes_it(reference: tuple[str, Any, int], tmp_path: Path) -> None:
    digest, base, _ = reference
    outcome, _ = run(job(base, seed=8), tmp_path)
    assert outcome.digest != digest
