"""What goes wrong in a run: the reason and the sentence that the user gets, and what is still whole afterwards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

from rlightning.checkpoint.verify import verify_checkpoint
from tests.support.jobs import CARTPOLE, job, merged, run

POLICIES = "tests.support.policies"


def custom(name: str, **changes: Any) -> dict[str, Any]:
    """The small CartPole job with one of the misbehaving policies."""
    settings = CARTPOLE["policy"]["simplePPO"]
    base = {k: v for k, v in CARTPOLE.items() if k != "policy"}
    return merged(base, {"policy": {"custom": {"class": f"{POLICIES}:{name}", "config": settings}}, **changes})


class CorridorWithNaN(gymnasium.Env[np.ndarray, int]):
    """Pays NaN on the 20th step of an episode."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)  # type: ignore[assignment]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(3, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return np.zeros(3, np.float32), float("nan") if self.steps == 20 else 1.0, False, False, {}


@pytest.fixture(autouse=True)
def _environments() -> Iterator[None]:
    gymnasium.register("CorridorWithNaN-v0", lambda **_: CorridorWithNaN(), disable_env_checker=True)
    yield
    gymnasium.registry.pop("CorridorWithNaN-v0", None)


def test_an_unknown_environment_is_named_with_its_nearest_neighbour(tmp_path: Path) -> None:
    outcome, _ = run(job(environment={"id": "CartPoel-v1"}), tmp_path)
    assert (outcome.state, outcome.reason) == ("Failed", "EnvironmentNotFound")
    assert "CartPoel-v1" in outcome.message and "CartPole-v1" in outcome.message


def test_a_policy_that_raises_in_train_ends_the_run_with_member_and_traceback(tmp_path: Path) -> None:
    outcome, _ = run(job(custom("RaisesInTrain", checkpoints={"everyIterations": 1})), tmp_path)
    assert (outcome.state, outcome.reason, outcome.iteration) == ("Failed", "PolicyError", 2)
    assert "train-0" in outcome.message
    assert "ValueError: the user's own mistake" in outcome.message
    assert "policies.py" in outcome.message, "the traceback must lead to the user's file"
    assert outcome.checkpoint is not None and verify_checkpoint(Path(outcome.checkpoint)) == []
    assert outcome.checkpoint.endswith("iter-00000002")


def test_a_reward_that_is_not_finite_names_environment_and_step(tmp_path: Path) -> None:
    outcome, _ = run(job(environment={"id": "CorridorWithNaN-v0", "maxEpisodeSteps": 50}), tmp_path)
    assert (outcome.state, outcome.reason, outcome.iteration) == ("Failed", "EnvironmentFault", 0)
    # Each environment pays NaN on its 20th step, which is row 19.
    assert "environment 0 of shard-0" in outcome.message and "reward nan at step 19" in outcome.message


@pytest.mark.parametrize(("policy", "iteration"), [("LosesItsLoss", 4), ("ReportsNaN", 2)])
def test_a_loss_that_is_not_finite_names_the_iteration_and_keeps_the_checkpoint(
    policy: str, iteration: int, tmp_path: Path
) -> None:
    outcome, recorder = run(job(custom(policy, checkpoints={"everyIterations": 1})), tmp_path)
    assert (outcome.state, outcome.reason) == ("Failed", "NonFiniteLoss")
    assert outcome.message.startswith(f"iteration {iteration}:")
    assert outcome.checkpoint is not None and outcome.checkpoint.endswith(f"iter-{iteration - 1:08d}")
    assert verify_checkpoint(Path(outcome.checkpoint)) == []
    assert recorder.versions[-1].version == iteration - 1, "nothing of the bad step was published"


def test_a_policy_without_log_prob_is_told_what_to_return(tmp_path: Path) -> None:
    outcome, _ = run(job(custom("SaysNothing")), tmp_path)
    assert outcome.state == "Failed"
    assert "SaysNothing.rollout_step returned no log_prob" in outcome.message


def test_a_class_that_is_not_there_lists_what_is(tmp_path: Path) -> None:
    outcome, _ = run(job(custom("RaisesInTrian")), tmp_path)
    assert (outcome.state, outcome.reason) == ("Failed", "InvalidManifest")
    assert "RaisesInTrian" in outcome.message and "RaisesInTrain" in outcome.message


def test_a_setting_that_the_policy_does_not_know_is_named(tmp_path: Path) -> None:
    base = custom("RaisesInTrain")
    base["policy"]["custom"]["config"] = {"learningRat": 0.1}
    outcome, _ = run(job(base), tmp_path)
    assert outcome.state == "Failed"
    assert "learningRat" in outcome.message


def test_a_train_member_that_skips_a_reduction_is_found(tmp_path: Path) -> None:
    """Both members skip: nothing hangs, but their weights part, and the next publication names the tensor."""
    two = {"train": {"replicas": 2}, "eval": {"replicas": 1}}
    outcome, recorder = run(job(custom("ForgetsToReduce", policyGroup=two)), tmp_path)
    assert (outcome.state, outcome.reason) == ("Failed", "WeightMismatch")
    assert "train-1: actor.0.bias" in outcome.message and "version 2" in outcome.message
    assert recorder.versions[-1].version == 1


@pytest.mark.parametrize("strategy", ["None", "Double", "Shared"])
def test_a_flipped_bit_of_a_live_tensor_is_named_by_the_next_verification(strategy: str, tmp_path: Path) -> None:
    outcome, recorder = run(job(custom("FlipsABit", weights={"strategy": strategy})), tmp_path)
    assert (outcome.state, outcome.reason) == ("Failed", "WeightMismatch")
    assert "eval-0: critic.2.weight" in outcome.message and "version 2" in outcome.message
    assert recorder.versions[-1].first_mismatch == "eval-0: critic.2.weight"
    assert [r.first_mismatch for r in recorder.versions[:-1]] == [None] * 3, "undisturbed, no version differs"


def test_with_resync_a_flipped_bit_costs_a_fragment_and_no_digest(tmp_path: Path) -> None:
    roles = {"eval": {"replicas": 2}}
    disturbed, recorder = run(
        job(custom("FlipsABit", policyGroup=roles, weights={"onMismatch": "Resync"})), tmp_path / "a"
    )
    undisturbed, calm = run(job(CARTPOLE, policyGroup=roles), tmp_path / "b")
    assert disturbed.state == "Succeeded", disturbed.message
    assert disturbed.digest == undisturbed.digest
    assert [r.first_mismatch for r in recorder.versions if r.first_mismatch] == ["eval-0: critic.2.weight"]
    assert len(recorder.warnings) == 1 and not calm.warnings


def test_with_warn_the_run_goes_on_and_says_so(tmp_path: Path) -> None:
    outcome, recorder = run(job(custom("FlipsABit", weights={"onMismatch": "Warn"})), tmp_path)
    assert outcome.state == "Succeeded"
    assert len(recorder.warnings) == 1 and "eval-0: critic.2.weight" in recorder.warnings[0]


@pytest.mark.ray
@pytest.mark.timeout(300)
class TestOnRay:
    """Members with processes of their own."""

    roles: ClassVar[dict[str, Any]] = {"eval": {"replicas": 2}}

    def test_a_lost_member_is_named_with_its_cause(self, local_ray: None, tmp_path: Path) -> None:
        outcome, _ = run(job(custom("DiesInRollout", policyGroup=self.roles)), tmp_path, placement="ray")
        assert (outcome.state, outcome.reason, outcome.iteration) == ("Failed", "MemberLost", 2)
        assert "member eval-1 was lost during rollout_fragment" in outcome.message
        assert "died" in outcome.message and re.search(r"pid: \d+", outcome.message), "Ray's own account of it"

    def test_a_late_member_is_named_with_its_deadline(self, local_ray: None, tmp_path: Path) -> None:
        of = job(custom("SleepsInRollout", policyGroup=self.roles, deadlines={"fragmentSeconds": 6}))
        outcome, _ = run(of, tmp_path, placement="ray")
        assert (outcome.state, outcome.reason) == ("Failed", "DeadlineExceeded")
        assert "eval-1" in outcome.message and "eval-0" not in outcome.message
        assert "within 6 s (spec.deadlines.fragmentSeconds)" in outcome.message

    def test_an_error_of_the_users_keeps_its_traceback(self, local_ray: None, tmp_path: Path) -> None:
        outcome, _ = run(job(custom("RaisesInTrain")), tmp_path, placement="ray")
        assert (outcome.state, outcome.reason) == ("Failed", "PolicyError")
        assert "train-0" in outcome.message and "ValueError: the user's own mistake" in outcome.message
        assert "policies.py" in outcome.message

    def test_a_ray_without_pools_is_refused_and_one_of_its_own_has_them(self, local_ray: None, tmp_path: Path) -> None:
        """The last test: it ends the Ray that the others share."""
        import ray

        pooled: dict[str, Any] = {
            "policyGroup": {"train": {"pool": "learners"}, "eval": {"replicas": 2, "pool": "actors"}},
            "pools": [{"name": "learners"}, {"name": "actors", "membersPerReplica": 2}],
        }
        refused, _ = run(job(CARTPOLE, **pooled), tmp_path / "a", placement="ray")
        ray.shutdown()
        outcome, _ = run(job(CARTPOLE, **pooled), tmp_path / "b", placement="ray")
        assert outcome.state == "Succeeded", outcome.message
        assert refused.state == "Failed"
        assert "spec.policyGroup.train.pool" in refused.message and "rlightning-pool-learners" in refused.message
