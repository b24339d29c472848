"""Evaluation plays the same episodes with the same results, whoever plays which slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlightning.env import EvaluationEnvs
from rlightning.env.seeds import episode_seeds
from rlightning.errors import EnvironmentFault
from tests.unit.env.support import spec


def balance(observation: np.ndarray) -> np.ndarray:
    return (observation[:, 2] > 0).astype(np.int64)  # falls after 30 to 60 steps


def swing(observation: np.ndarray) -> np.ndarray:
    return (-3.0 * observation[:, 1:2] - observation[:, 2:3]).astype(np.float32)


def play(
    groups: Sequence[Sequence[int]], total: int, episodes: int, act: Callable = balance, seed: int = 5, **fields: Any
) -> list[tuple[int, float, int]]:
    found = []
    for group in groups:
        envs = EvaluationEnvs(spec(**{"env_id": "CartPole-v1", **fields}), seed, group, episodes, total)
        found += envs.run(act)
        envs.close()
    return sorted(found)


@pytest.mark.parametrize(
    "fields",
    [{"env_id": "CartPole-v1"}, {"env_id": "Pendulum-v1", "act": swing, "max_episode_steps": 40}],
    ids=["CartPole", "Pendulum"],
)
def test_results_do_not_depend_on_how_slots_are_grouped(fields: dict[str, Any]) -> None:
    whole = play([range(16)], 16, 50, **fields)
    assert [episode for episode, _, _ in whole] == list(range(50))
    assert len({value for _, value, _ in whole}) > 10  # episodes differ, so the comparison means something
    assert play([range(8), range(8, 16)], 16, 50, **fields) == whole
    assert play([[3, 15], [0, 1, 2, *range(4, 15)]], 16, 50, **fields) == whole
    assert play([range(16)], 16, 50, **{**fields, "seed": 6}) != whole


def test_an_episode_is_the_one_that_its_seed_gives_in_a_plain_environment() -> None:
    env = gymnasium.make("CartPole-v1")
    for episode, value, length in play([range(3)], 3, 7):
        observation, _ = env.reset(seed=episode_seeds(5, episode)[0])
        total, steps, done = 0.0, 0, False
        while not done:
            observation, reward, terminated, truncated, _ = env.step(int(balance(observation[None])[0]))
            total, steps, done = total + float(reward), steps + 1, terminated or truncated
        assert (value, length) == (total, steps)


def test_a_second_run_repeats_the_first() -> None:
    envs = EvaluationEnvs(spec("CartPole-v1"), 5, range(4), 9, 4)
    assert envs.run(balance) == envs.run(balance)


def test_the_batch_keeps_its_shape_and_finished_slots_their_row() -> None:
    batches: list[np.ndarray] = []

    def act(observation: np.ndarray) -> np.ndarray:
        batches.append(observation)
        return np.zeros(len(observation), np.int64)

    # Counter observes [count, episode of this environment] and ends after 2 then 4 steps. With 3 slots and 4 episodes,
    # slot 0 plays episodes 0 and 3, slot 1 plays 1 (2 steps), slot 2 plays 2 (2 steps).
    envs = EvaluationEnvs(spec("RLTest/Counter-v0", kwargs={"lengths": [2, 4]}), 0, range(3), 4, 3)
    assert envs.run(act) == [(0, 3.0, 2), (1, 3.0, 2), (2, 3.0, 2), (3, 10.0, 4)]
    assert [batch.tolist() for batch in batches] == [
        [[0, 0], [0, 0], [0, 0]],
        [[1, 0], [1, 0], [1, 0]],
        [[0, 1], [2, 0], [2, 0]],
        [[1, 1], [2, 0], [2, 0]],
        [[2, 1], [2, 0], [2, 0]],
        [[3, 1], [2, 0], [2, 0]],
    ]


def test_slots_without_an_episode_play_nothing() -> None:
    assert play([range(4)], 4, 2) == play([[0], [1]], 4, 2)
    assert play([[2, 3]], 4, 2) == []


def test_the_time_limit_of_the_manifest_holds_in_evaluation() -> None:
    assert all(length <= 6 for _, _, length in play([range(2)], 2, 4, max_episode_steps=6))


def test_slots_outside_the_total_are_refused() -> None:
    for slots in ([], [4], [-1]):
        with pytest.raises(ValueError, match="from 0 to 3"):
            EvaluationEnvs(spec("CartPole-v1"), 0, slots, 4, 4)


def test_an_environment_that_raises_is_named_with_its_episode() -> None:
    envs = EvaluationEnvs(spec("RLTest/Failing-v0"), 0, [1], 4, 2)
    with pytest.raises(EnvironmentFault, match=r"evaluation episode 1: step.*RuntimeError: the gripper is stuck"):
        envs.run(lambda observation: np.zeros(len(observation), np.int64))
