"""What the repository ships is what it says: manifests are valid, the example policy trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlightning import load_policy
from rlightning.api.validate import errors, load_job, validate_sources
from tests.support.jobs import run

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted((ROOT / "manifests").glob("*.yaml"))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.stem)
def test_every_manifest_is_valid(path: Path) -> None:
    assert errors(validate_sources([str(path)])) == []


@pytest.mark.parametrize("train", [1, 2])
def test_the_example_policy_trains_and_acts(train: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    of = load_job(str(ROOT / "manifests" / "custom-policy.yaml"))
    spec = of.spec.model_copy(
        update={
            "training": of.spec.training.model_copy(update={"total_env_steps": 8000}),
            "policy_group": of.spec.policy_group.model_copy(
                update={"train": of.spec.policy_group.train.model_copy(update={"replicas": train})}
            ),
        }
    )
    outcome, recorder = run(of.model_copy(update={"spec": spec}), tmp_path)
    assert outcome.state == "Succeeded", outcome.message
    first, last = recorder.iterations[0].episode_return_mean, recorder.iterations[-1].episode_return_mean
    assert first is not None and last is not None and last > first, "eight iterations should show some learning"
    policy = load_policy(tmp_path)
    assert policy.digest == outcome.digest
    assert policy.act([0.0, 0.0, 0.0, 0.0]) in (0, 1)
    assert policy.act([[0.0, 0.0, 0.0, 0.0]] * 3).shape == (3,)
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        policy.act([0.0, 0.0, 0.0])
