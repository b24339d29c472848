"""Advantages and returns, against numbers worked out by hand and a direct sum of the definition."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from rlightning.policy.utils.returns import explained_variance, generalized_advantage_estimate


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values).unsqueeze(1)


def flags(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool).unsqueeze(1)


# gamma = lambda = 0.5, rewards 1 2 3, values 1 1 1, the last successor is worth 2.
# Without an end:   delta = (0.5, 1.5, 3);  A2 = 3, A1 = 1.5 + 3/4, A0 = 0.5 + A1/4.
# terminated at 1:  delta1 = 2 - 1 = 1 and no trace beyond it;  A0 = 0.5 + 1/4.
# truncated at 1:   delta1 = 1.5 (it bootstraps) and no trace beyond it;  A0 = 0.5 + 1.5/4.
@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [
        ((0, 0, 0), (0, 0, 0), (1.0625, 2.25, 3.0)),
        ((0, 1, 0), (0, 0, 0), (0.75, 1.0, 3.0)),
        ((0, 0, 0), (0, 1, 0), (0.875, 1.5, 3.0)),
        ((0, 0, 1), (0, 0, 0), (0.5 + (1.5 + 2.0 / 4) / 4, 1.5 + 2.0 / 4, 2.0)),
    ],
)
def test_advantages_equal_the_hand_derived_ones(
    terminated: tuple[int, ...], truncated: tuple[int, ...], expected: tuple[float, ...]
) -> None:
    advantages, returns = generalized_advantage_estimate(
        column(1.0, 2.0, 3.0), column(1, 1, 1), column(1, 1, 2), flags(*terminated), flags(*truncated), 0.5, 0.5
    )
    assert advantages.squeeze(1).tolist() == pytest.approx(expected)
    assert returns.squeeze(1).tolist() == pytest.approx([a + 1 for a in expected])


@hypothesis.given(
    data=st.data(),
    steps=st.integers(1, 12),
    envs=st.integers(1, 3),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
@hypothesis.settings(max_examples=50, deadline=None)
def test_advantages_equal_the_sum_in_the_definition(
    data: st.DataObject, steps: int, envs: int, gamma: float, lam: float
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    reward, value, successor = (rng.normal(size=(steps, envs)).astype(np.float32) for _ in range(3))
    terminated, truncated = (rng.random((steps, envs)) < 0.2 for _ in range(2))
    tensors = [torch.from_numpy(a) for a in (reward, value, successor, terminated, truncated)]
    advantages, _ = generalized_advantage_estimate(
        tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], gamma, lam
    )
    for env in range(envs):
        for t in range(steps):
            # Schulman et al. 2016, eq. 16, in float64: sum of (gamma lambda)^k delta_{t+k} to the end of the episode.
            expected = 0.0
            for k in range(t, steps):
                bootstrap = 0.0 if terminated[k, env] else gamma * float(successor[k, env])
                expected += (gamma * lam) ** (k - t) * (float(reward[k, env]) + bootstrap - float(value[k, env]))
                if terminated[k, env] or truncated[k, env]:
                    break
            assert advantages[t, env].item() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_inputs_are_not_changed() -> None:
    reward = column(1.0, 2.0)
    before = reward.clone()
    generalized_advantage_estimate(reward, column(1, 1), column(1, 1), flags(0, 1), flags(0, 0), 0.9, 0.9)
    assert torch.equal(reward, before)


def test_explained_variance_is_one_for_a_perfect_value_and_undefined_for_a_constant_target() -> None:
    target = torch.tensor([1.0, 2.0, 3.0])
    assert explained_variance(target, target) == 1.0
    assert explained_variance(torch.full((3,), 2.0), target) == 0.0
    assert np.isnan(explained_variance(target, torch.ones(3)))
