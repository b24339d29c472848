"""The native CartPole against gymnasium's CartPoleVectorEnv, which is the independent implementation here."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from rlightning.env.native import NativeCartPole
from rlightning.errors import CheckpointError, EnvironmentFault


class Buffers:
    """What one step writes, in the layout of a rollout's arrays."""

    def __init__(self, n: int) -> None:
        self.observation, self.reward = np.empty((n, 4), np.float32), np.empty(n, np.float32)
        self.terminated, self.truncated, self.valid = (np.empty(n, bool) for _ in range(3))

    def step(self, cartpole: NativeCartPole, action: np.ndarray) -> list[bytes]:
        out = [self.observation, self.reward, self.terminated, self.truncated, self.valid]
        cartpole.step_into(action, *out)
        return [array.tobytes() for array in out]


def reference(n: int, **kwargs: Any) -> gymnasium.vector.VectorEnv:
    return gymnasium.make_vec("CartPole-v1", num_envs=n, vectorization_mode="vector_entry_point", **kwargs)


def balancing(observation: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Mostly pushes under the falling pole, so that both falls and time limits happen."""
    good = observation[:, 2] + 0.5 * observation[:, 3] > 0
    return np.where(generator.random(len(good)) < 0.9, good, generator.integers(0, 2, len(good))).astype(np.int64)


@pytest.mark.parametrize(
    ("n", "limit", "sutton_barto_reward"), [(1, 500, False), (7, 25, True), (64, 500, False), (65, 100, True)]
)
def test_is_gymnasiums_cartpole_bit_for_bit_over_thousands_of_steps(
    n: int, limit: int, sutton_barto_reward: bool
) -> None:
    vector: Any = reference(n, max_episode_steps=limit, sutton_barto_reward=sutton_barto_reward)
    native, buffers, generator = NativeCartPole(n, limit, sutton_barto_reward), Buffers(n), np.random.default_rng(n)
    expected, _ = vector.reset(seed=3)
    native.reset(3)
    native.observe_into(buffers.observation)
    assert buffers.observation.tobytes() == expected.tobytes()
    was_done = np.zeros(n, bool)
    falls = time_limits = 0
    for t in range(2500):
        action = balancing(expected, generator)
        expected, reward, terminated, truncated, _ = vector.step(action)
        got = buffers.step(native, action)
        assert got == [a.tobytes() for a in (expected, reward, terminated, truncated, ~was_done)], f"step {t}"
        was_done = terminated | truncated
        falls, time_limits = falls + terminated.sum(), time_limits + truncated.sum()
    assert falls
    assert time_limits
    state = native.state_dict()
    assert state["state"].tobytes() == vector.state.tobytes()
    assert state["steps"].tolist() == vector.steps.tolist()
    assert state["prev_done"].tolist() == vector.prev_done.tolist()
    assert state["np_random"] == vector.np_random.bit_generator.state


def test_returns_and_lengths_are_the_sums_of_the_rewards_of_valid_steps() -> None:
    for sutton_barto_reward in (False, True):
        native, buffers = NativeCartPole(5, 12, sutton_barto_reward), Buffers(5)
        native.reset(0)
        sums, lengths, expected = np.zeros(5), np.zeros(5, int), []
        for action in np.random.default_rng(0).integers(0, 2, size=(100, 5)):
            buffers.step(native, action)
            sums += buffers.reward
            lengths += buffers.valid
            for i in np.flatnonzero(buffers.terminated | buffers.truncated):
                expected.append((float(sums[i]), int(lengths[i])))
                sums[i], lengths[i] = 0.0, 0
        assert len(expected) > 30
        assert native.episodes == expected


def test_saved_in_the_middle_it_continues_bit_for_bit() -> None:
    generator = np.random.default_rng(1)
    for cut in (0, 1, 11, 12, 57):  # 11: the step before the time limit; 12: every environment about to be reset
        one, other, buffers = NativeCartPole(6, 12), NativeCartPole(6, 12), Buffers(6)
        one.reset(5)
        for action in generator.integers(0, 2, size=(cut, 6)):
            buffers.step(one, action)
        other.load_state_dict(one.state_dict())
        for action in generator.integers(0, 2, size=(60, 6)):
            assert buffers.step(one, action) == buffers.step(other, action)
        assert one.episodes == other.episodes


@pytest.mark.parametrize(
    "action",
    [
        np.array([0, 2, 1]),
        np.array([0, -1, 1]),
        np.array([0, 256, 1]),
        np.array([0.0, 1.0, 1.0]),
        np.array([1]),
        np.array([[0, 1, 0]]),
    ],
)
def test_an_action_that_is_neither_0_nor_1_is_refused_before_anything_moves(action: np.ndarray) -> None:
    native, buffers = NativeCartPole(3, 500), Buffers(3)
    native.reset(0)
    before = native.state_dict()
    with pytest.raises(EnvironmentFault, match=r"3 integer actions, each 0 or 1"):
        buffers.step(native, action)
    assert native.state_dict()["state"].tobytes() == before["state"].tobytes()


def test_a_state_of_another_number_of_environments_is_refused() -> None:
    small, large = NativeCartPole(2, 500), NativeCartPole(4, 500)
    with pytest.raises(CheckpointError, match=r"\(4, 2\), this shard needs \(4, 4\)"):
        large.load_state_dict(small.state_dict())


def test_arrays_that_are_not_contiguous_are_written_all_the_same() -> None:
    one, other, plain, strided = NativeCartPole(3, 500), NativeCartPole(3, 500), Buffers(3), Buffers(3)
    one.reset(0)
    other.reset(0)
    strided.observation, strided.valid = np.empty((4, 3), np.float32).T, np.empty(6, bool)[::2]
    assert plain.step(one, np.array([0, 1, 0])) == strided.step(other, np.array([0, 1, 0]))
