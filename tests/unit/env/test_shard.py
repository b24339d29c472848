"""What a shard returns: autoreset, validity, episodes, clipping, seeds, faults."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from rlightning.env import EnvShard
from rlightning.env.seeds import environment_seeds, shard_sequence
from rlightning.errors import EnvironmentFault, RLightningError, UnsupportedSpace
from tests.unit.env.environments import Counter
from tests.unit.env.support import assert_identical, play, random_actions, spec


def envs_of(shard: EnvShard) -> list[Any]:
    return [env.unwrapped for env in shard._vector.envs]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "env_id",
    ["CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1", "FrozenLake-v1",
     "Taxi-v4", "Hopper-v5", "HalfCheetah-v5"],
)  # fmt: skip
def test_sync_steps_as_gymnasiums_sync_vector_with_next_step_autoreset(env_id: str) -> None:
    n, limit, steps = 3, 23, 120
    shard = EnvShard(spec(env_id, max_episode_steps=limit, vectorization="Sync"), 1, n, seed=4)
    assert shard.vectorization == "Sync"
    vector = SyncVectorEnv([lambda: gymnasium.make(env_id, max_episode_steps=limit)] * n)
    seeds = environment_seeds(shard_sequence(4, 1), n)
    expected, _ = vector.reset(seed=[seed for seed, _ in seeds])
    first = shard.reset()
    assert (first.dtype, first.tobytes()) == (expected.dtype, expected.tobytes())
    was_done = np.zeros(n, bool)
    space = shard.meta.action_space
    for t, action in enumerate(random_actions(shard, steps)):
        got = shard.step(action)
        clipped = np.clip(action, space.low, space.high) if action.ndim > 1 else action  # type: ignore[union-attr]
        expected, reward, terminated, truncated, _ = vector.step(clipped)
        assert got.observation.tobytes() == expected.tobytes(), f"step {t}"
        assert got.reward.tolist() == reward.astype(np.float32).tolist()
        assert got.terminated.tolist() == terminated.tolist()
        assert got.truncated.tolist() == truncated.tolist()
        assert got.valid.tolist() == (~was_done).tolist()
        was_done = terminated | truncated
    assert shard.drain_episodes()


def test_the_step_after_an_episodes_last_is_a_dummy_that_returns_the_next_episodes_first_observation() -> None:
    # lengths (2, 3): episode 0 takes 2 steps, episode 1 takes 3. Rewards are 1, 2, … within an episode.
    shard = EnvShard(spec("RLTest/Counter-v0", kwargs={"lengths": [2, 3]}), 0, 1, seed=0)
    assert shard.reset().tolist() == [[0, 0]]
    rows = [
        (r.observation[0].tolist(), float(r.reward[0]), bool(r.terminated[0]), bool(r.valid[0]))
        for r in play(shard, [np.array([1])] * 8)
    ]
    assert rows == [
        ([1, 0], 1.0, False, True),
        ([2, 0], 2.0, True, True),  # final observation of episode 0
        ([0, 1], 0.0, False, False),  # reset
        ([1, 1], 1.0, False, True),
        ([2, 1], 2.0, False, True),
        ([3, 1], 3.0, True, True),
        ([0, 2], 0.0, False, False),
        ([1, 2], 1.0, False, True),
    ]
    assert shard.drain_episodes() == [(3.0, 2), (6.0, 3)]
    assert shard.drain_episodes() == []
    play(shard, [np.array([0])])  # the second step of episode 2, whose first step was drained away with nothing
    assert shard.drain_episodes() == [(3.0, 2)]
    assert len(envs_of(shard)[0].actions) == 2 + 3 + 2  # the actions of dummy steps never reach the environment


def test_time_limits_truncate_and_terminations_terminate() -> None:
    for fields, terminates in (
        ({"env_id": "RLTest/Counter-v0", "kwargs": {"lengths": [3]}}, True),
        ({"env_id": "RLTest/Counter-v0", "kwargs": {"lengths": [3], "truncates": True}}, False),
        ({"env_id": "RLTest/Counter-v0", "kwargs": {"lengths": [9]}, "max_episode_steps": 3}, False),
        ({"env_id": "RLTest/Limited-v0", "max_episode_steps": 3}, False),
    ):
        shard = EnvShard(spec(**fields), 0, 2, seed=0)
        shard.reset()
        last = play(shard, [np.array([0, 0])] * 3)[-1]
        assert last.terminated.tolist() == [terminates] * 2
        assert last.truncated.tolist() == [not terminates] * 2
    registered = EnvShard(spec("RLTest/Limited-v0"), 0, 1, seed=0)  # registered with a limit of 4
    registered.reset()
    assert [bool(r.truncated[0]) for r in play(registered, [np.array([0])] * 5)] == [False, False, False, True, False]


def test_native_cartpole_is_chosen_for_auto_and_takes_its_limit_and_reward_from_the_spec() -> None:
    shard = EnvShard(spec("CartPole-v1"), 0, 4, seed=0)
    assert (shard.vectorization, shard.resume) == ("Native", "exact")
    assert shard.meta.observation_space == gymnasium.make("CartPole-v1").observation_space
    assert shard.meta.num_envs == 4
    limited = EnvShard(spec("CartPole-v1", max_episode_steps=5, kwargs={"sutton_barto_reward": True}), 0, 2, seed=0)
    limited.reset()
    results = play(limited, [np.array([0, 1])] * 5)
    assert results[-1].truncated.tolist() == [True, True]
    assert limited.drain_episodes() == [(0.0, 5), (0.0, 5)]  # nobody falls in 5 steps, so no reward of -1


def test_keyword_arguments_reach_the_environment() -> None:
    moon, earth = (EnvShard(spec("Pendulum-v1", kwargs={"g": g}), 0, 2, seed=0) for g in (1.62, 9.81))
    assert moon.reset().tobytes() == earth.reset().tobytes()
    actions = random_actions(moon, 1)
    assert play(moon, actions)[0].observation.tolist() != play(earth, actions)[0].observation.tolist()
    assert [env.g for env in envs_of(moon)] == [1.62, 1.62]


def test_each_environment_has_its_own_copy_of_keyword_arguments() -> None:
    shard = EnvShard(spec("RLTest/Counter-v0", kwargs={"lengths": [2, 3]}), 0, 2, seed=0)
    one, other = envs_of(shard)
    assert one.lengths == other.lengths
    assert one.lengths is not other.lengths


def test_box_actions_are_clipped_to_the_space_and_the_callers_array_is_left_alone() -> None:
    clipped, wide = (EnvShard(spec("Pendulum-v1"), 0, 2, seed=0) for _ in range(2))
    clipped.reset()
    wide.reset()
    action = np.array([[30.0], [-30.0]], np.float32)  # Pendulum's torque is within ±2
    result = wide.step(action)
    assert_identical([result], [clipped.step(np.array([[2.0], [-2.0]], np.float32))])
    assert action.tolist() == [[30.0], [-30.0]]


def test_steps_into_the_callers_arrays_what_it_returns_in_new_ones() -> None:
    for env_id in ("CartPole-v1", "Pendulum-v1", "FrozenLake-v1"):
        one, other = (EnvShard(spec(env_id), 0, 3, seed=0) for _ in range(2))
        first = one.reset()
        other.reset()
        rows = np.empty((21, *first.shape), first.dtype)
        reward, flags = np.empty((20, 3), np.float32), np.empty((3, 20, 3), bool)
        actions = random_actions(one, 20)
        for t, action in enumerate(actions):
            one.step_into(action, rows[t + 1], reward[t], flags[0, t], flags[1, t], flags[2, t])
        results = play(other, actions)
        copies = [r.observation.copy() for r in results]
        play(other, actions)  # what was returned must not change later
        for t, result in enumerate(results):
            assert result.observation.tobytes() == copies[t].tobytes() == rows[t + 1].tobytes()
            assert result.reward.tobytes() == reward[t].tobytes()
            assert [result.terminated.tolist(), result.truncated.tolist(), result.valid.tolist()] == flags[
                :, t
            ].tolist()
        assert one.observe().tobytes() == rows[-1].tobytes()


def test_seed_and_shard_decide_the_episodes() -> None:
    def start(env_id: str, shard: int, seed: int) -> bytes:
        return EnvShard(spec(env_id), shard, 4, seed).reset().tobytes()

    for env_id in ("CartPole-v1", "Pendulum-v1"):
        assert start(env_id, 0, 1) == start(env_id, 0, 1)
        assert len({start(env_id, shard, seed) for shard in range(3) for seed in range(3)}) == 9
        first = EnvShard(spec(env_id), 0, 4, 1).reset()
        assert len(np.unique(first, axis=0)) == 4
    seeds = [pair for shard in range(64) for pair in environment_seeds(shard_sequence(0, shard), 16)]
    assert len({seed for seed, _ in seeds}) == len({seed for _, seed in seeds}) == 64 * 16
    assert all(0 <= seed < 2**31 for pair in seeds for seed in pair)


def test_action_spaces_are_seeded_too() -> None:
    samples = []
    for _ in range(2):
        shard = EnvShard(spec("Pendulum-v1"), 0, 2, seed=9)
        shard.reset()
        samples.append([env.action_space.sample().tolist() for env in envs_of(shard)])
    assert samples[0] == samples[1]
    assert samples[0][0] != samples[0][1]


def test_an_environment_that_raises_is_named_with_what_it_was_asked() -> None:
    shard = EnvShard(spec("RLTest/Failing-v0"), 2, 2, seed=0)
    shard.reset()
    play(shard, [np.array([0, 1])] * 2)
    with pytest.raises(EnvironmentFault, match=r"Failing-v0, shard 2, environment 0: step.*RuntimeError: the gripper"):
        shard.step(np.array([0, 1]))


@pytest.mark.filterwarnings("ignore:.*not within the observation space")
@pytest.mark.parametrize("at", [0, 1])
def test_an_observation_of_another_shape_is_refused_rather_than_broadcast(at: int) -> None:
    shard = EnvShard(spec("RLTest/WrongShape-v0", kwargs={"at": at}), 0, 1, seed=0)

    def start_and_step() -> None:
        shard.reset()
        shard.step(np.array([0]))

    with pytest.raises(EnvironmentFault, match=r"shape \(1,\).*\(2,\)|AssertionError"):
        start_and_step()


def test_actions_of_a_wrong_shape_are_refused() -> None:
    discrete, box = EnvShard(spec("FrozenLake-v1"), 0, 3, 0), EnvShard(spec("Pendulum-v1"), 0, 3, 0)
    discrete.reset()
    box.reset()
    with pytest.raises(EnvironmentFault, match=r"shape \(2,\) for 3 environments; they need shape \(3,\)"):
        discrete.step(np.zeros(2, np.int64))
    with pytest.raises(EnvironmentFault, match=r"shape \(3,\) for 3 environments; they need shape \(3, 1\)"):
        box.step(np.zeros(3, np.float32))


def test_nothing_works_before_reset() -> None:
    shard = EnvShard(spec("CartPole-v1"), 0, 1, 0)
    for call in (shard.observe, shard.state_dict, lambda: shard.step(np.array([0]))):
        with pytest.raises(RLightningError, match="call reset"):
            call()


def test_spaces_are_checked_in_the_shard_too() -> None:
    with pytest.raises(UnsupportedSpace):
        EnvShard(spec("RLTest/Spaces-v0", kwargs={"action": "multi"}), 0, 1, 0)


def test_close_closes_every_environment() -> None:
    closed: list[int] = []
    shard = EnvShard(spec("RLTest/Counter-v0"), 0, 3, 0)
    for i, env in enumerate(envs_of(shard)):
        assert isinstance(env, Counter)
        env.close = lambda i=i: closed.append(i)  # type: ignore[method-assign, misc]
    shard.close()
    assert closed == [0, 1, 2]


def test_mujocos_warnings_are_logged_once_and_not_left_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shard = EnvShard(spec("HalfCheetah-v5"), 0, 2, 0)  # its XML uses a deprecated attribute
    shard.reset()
    for env in envs_of(shard):
        env.data.qacc[...] = 0
        env.data.qvel[...] = np.nan
        env.do_simulation(np.zeros(6), 1)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().err == ""
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [(record.name, "QVEL" in record.getMessage()) for record in warnings] == [("rlightning.env.mujoco", True)]
