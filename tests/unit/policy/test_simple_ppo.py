"""SimplePPO's parts, against torch's own distributions, NumPy and hand-derived numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from rlightning.errors import UnsupportedSpace
from rlightning.policy import PolicyRole, SimplePPOPolicy, TrainingProgress
from rlightning.types import EnvMeta, EnvRet
from rlightning.utils.config.config import Config, PolicyConfig, TrainConfig

BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)
TRAIN = TrainConfig(max_epochs=10, batch_size=24, max_rollout_steps=8)


def policy(action: spaces.Space[Any], observation: spaces.Space[Any] = BOX, **settings: Any) -> SimplePPOPolicy:
    config = PolicyConfig(type="SimplePPOPolicy", policy_kwargs=Config.from_dict({"hidden_sizes": [8], **settings}))
    made = SimplePPOPolicy(config, PolicyRole.TRAIN)
    torch.manual_seed(0)
    made.init_train(TRAIN, EnvMeta("Test-v0", action, observation, 3))
    return made


def act(of: SimplePPOPolicy, rows: int, **options: Any) -> Any:
    observation = torch.from_numpy(np.random.default_rng(1).normal(size=(rows, 3)).astype(np.float32))
    none = np.zeros(rows, dtype=bool)
    with torch.no_grad():
        return observation, of.rollout_step(EnvRet("e", observation, np.zeros(rows, np.float32), none, none), **options)


def batch(of: SimplePPOPolicy, valid: torch.Tensor | None = None) -> TensorDict:
    """8 steps of 3 environments with rewards 0, 1, …, 23."""
    generator = torch.Generator().manual_seed(2)
    shape = (8, 3)
    observation = torch.randn((9, 3, 3), generator=generator)
    with torch.no_grad():
        outputs = of.actor(observation[:-1].reshape(24, 3))
        action = outputs.argmax(-1).view(shape)
        log_prob = outputs.log_softmax(-1).gather(-1, action.view(-1, 1)).view(shape)
    return TensorDict(
        {
            "observation": observation[:-1],
            "next_observation": observation[1:],
            "action": action,
            "log_prob": log_prob,
            "reward": torch.arange(24.0).view(shape),
            "terminated": torch.zeros(shape, dtype=torch.bool),
            "truncated": torch.zeros(shape, dtype=torch.bool),
            "valid": torch.ones(shape, dtype=torch.bool) if valid is None else valid,
        },
        batch_size=shape,
    )


def test_discrete_log_probs_and_entropy_are_those_of_torchs_categorical() -> None:
    of = policy(spaces.Discrete(4))
    observation, answer = act(of, 50)
    reference = torch.distributions.Categorical(logits=of.actor(observation))
    assert torch.allclose(answer.log_prob, reference.log_prob(answer.action), atol=1e-6)
    log_prob, entropy = of.evaluate(observation, answer.action)
    assert torch.allclose(log_prob, answer.log_prob, atol=1e-6)
    assert torch.allclose(entropy, reference.entropy(), atol=1e-6)


def test_continuous_log_probs_and_entropy_are_those_of_torchs_normal() -> None:
    of = policy(spaces.Box(-1, 1, (2,), np.float32), log_std_init=-0.7)
    observation, answer = act(of, 50)
    reference = torch.distributions.Normal(of.actor(observation), of.actor_logstd.exp())
    assert torch.allclose(answer.log_prob, reference.log_prob(answer.action).sum(-1), atol=1e-5)
    log_prob, entropy = of.evaluate(observation, answer.action)
    assert torch.allclose(log_prob, answer.log_prob, atol=1e-5)
    assert torch.allclose(entropy, reference.entropy().sum(-1), atol=1e-5)


def test_samples_follow_the_probabilities() -> None:
    of = policy(spaces.Discrete(3))
    with torch.no_grad():
        of.get_parameter("actor.2.bias").copy_(torch.tensor([0.0, 1.0, 2.0]))
        of.get_parameter("actor.2.weight").zero_()
    _, answer = act(of, 20_000)
    expected = torch.tensor([0.0, 1.0, 2.0]).softmax(-1)
    seen = torch.bincount(answer.action, minlength=3) / 20_000
    # Four standard deviations of a proportion over 20,000 draws are at most 4 * 0.5 / 141 = 0.014.
    assert (seen - expected).abs().max() < 0.015


def test_deterministic_actions_are_the_most_likely_and_draw_nothing() -> None:
    for space in (spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32)):
        of = policy(space)
        before = torch.get_rng_state()
        observation, answer = act(of, 5, deterministic=True)
        outputs = of.actor(observation)
        expected = outputs.argmax(-1) if isinstance(space, spaces.Discrete) else outputs
        assert torch.equal(answer.action, expected)
        assert torch.equal(torch.get_rng_state(), before)


def test_discrete_observations_are_one_hot() -> None:
    of = policy(spaces.Discrete(2), spaces.Discrete(4))
    assert of.features(torch.tensor([2, 0])).tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("action", "observation", "word"),
    [
        (spaces.MultiDiscrete([2, 2]), BOX, "MultiDiscrete"),
        (spaces.Box(-1, 1, (2, 2), np.float32), BOX, "one-dimensional"),
        (spaces.Discrete(2), spaces.Dict({"a": BOX}), "Dict"),
    ],
)
def test_other_spaces_are_refused_by_name(action: Any, observation: Any, word: str) -> None:
    with pytest.raises(UnsupportedSpace, match=word):
        policy(action, observation)


def test_the_normaliser_learns_mean_and_variance_of_valid_rows_for_the_next_version() -> None:
    of = policy(spaces.Discrete(2), normalize_observations=True, minibatch_size=24, epochs=1)
    valid = torch.ones((8, 3), dtype=torch.bool)
    valid[3, 1] = False
    seen = []
    for _ in range(2):
        data = batch(of, valid)
        mean_before = of.observation_mean.clone()
        of.update_dataset(data)
        assert torch.equal(of.observation_mean, mean_before), "this iteration trains with the version's own normaliser"
        of.train()
        seen.append(data["observation"][valid].numpy().astype(np.float64))
    # The normaliser starts as 1e-4 observations of mean 0 and variance 1.
    rows, prior = np.concatenate(seen), 1e-4
    count = len(rows) + prior
    mean = rows.sum(0) / count
    var = (prior * 1.0 + (rows**2).sum(0)) / count - mean**2
    assert of.observation_count.item() == pytest.approx(count)
    assert np.allclose(of.observation_mean.numpy(), mean, rtol=1e-9)
    assert np.allclose(of.observation_var.numpy(), var, rtol=1e-9)


def test_dummy_steps_change_nothing_about_an_update() -> None:
    """The same data with other numbers in its dummy rows gives the same weights, to the bit."""
    valid = torch.ones((8, 3), dtype=torch.bool)
    valid[4, 0] = False
    results = []
    for junk in (0.0, 1e3):
        of = policy(spaces.Discrete(3), minibatch_size=12, epochs=2)
        data = batch(of, valid)
        data["terminated"][3, 0] = True  # the dummy follows an episode's last step
        data["reward"][4, 0] = junk
        data["log_prob"][4, 0] = -junk / 1e4
        torch.manual_seed(3)
        of.update_dataset(data)
        of.train()
        results.append({name: p.detach().clone() for name, p in of.named_parameters()})
    for name, first in results[0].items():
        assert torch.equal(first, results[1][name]), name


@pytest.mark.parametrize(("schedule", "expected"), [("Constant", 0.01), ("Linear", 0.0025)])
def test_schedules_follow_the_steps_done(schedule: str, expected: float) -> None:
    of = policy(spaces.Discrete(3), learning_rate=0.01, learning_rate_schedule=schedule, clip_range_schedule=schedule)
    of.progress = TrainingProgress(iteration=4, env_steps=750, total_env_steps=1000)
    of.update_dataset(batch(of))
    metrics = of.train()
    assert metrics["learning_rate"] == pytest.approx(expected)
    assert metrics["clip_range"] == pytest.approx(0.2 * expected / 0.01)


def test_updates_end_when_the_policy_has_moved_too_far() -> None:
    free = policy(spaces.Discrete(3), learning_rate=0.05, minibatch_size=24, epochs=20)
    free.update_dataset(batch(free))
    assert free.train()["minibatches"] == 20
    bound = policy(spaces.Discrete(3), learning_rate=0.05, minibatch_size=24, epochs=20, target_kl=0.01)
    bound.update_dataset(batch(bound))
    assert bound.train()["minibatches"] < 20


def test_trainable_parameters_hold_the_policys_own_and_come_back() -> None:
    of, other = (policy(spaces.Box(-1, 1, (2,), np.float32)) for _ in range(2))
    with torch.no_grad():
        for p in of.parameters():
            p.add_(1.0)
    saved = of.get_trainable_parameters()
    assert list(saved[""]) == ["actor_logstd"]
    other.load_state_dict(saved)
    for (name, a), (_, b) in zip(of.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_evaluation_mode_reaches_the_modules_and_does_not_train() -> None:
    of = policy(spaces.Discrete(2))
    of.eval()  # nn.Module.eval would call train(False), which is a training step here
    assert not of.actor.training
    of.training_mode()
    assert of.actor.training
