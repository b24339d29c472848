"""A shard restored from its saved state continues bit for bit, or says that it does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlightning.env import EnvShard
from rlightning.errors import CheckpointError, EnvironmentFault
from tests.unit.env.environments import WRAPPED
from tests.unit.env.support import assert_identical, play, random_actions, spec, through_file

MUJOCO = [
    f"{name}-{version}"
    for version in ("v4", "v5")
    for name in (
        "Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum", "InvertedPendulum",
        "Pusher", "Reacher", "Swimmer", "Walker2d",
    )
    if (name, version) != ("Pusher", "v4")  # refuses to run on MuJoCo 3 and later
]  # fmt: skip
CASES: list[dict[str, Any]] = [
    {"env_id": "CartPole-v1"},
    {"env_id": "CartPole-v1", "kwargs": {"sutton_barto_reward": True}},
    *(
        {"env_id": env_id, "vectorization": "Sync"}
        for env_id in (
            "CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1", "FrozenLake-v1",
            "CliffWalking-v1", "CliffWalkingSlippery-v1", "Taxi-v4",
        )
    ),
    {"env_id": "Taxi-v4", "kwargs": {"fickle_passenger": True, "is_rainy": True}},
    *({"env_id": env_id} for env_id in MUJOCO),
    {"env_id": "RLTest/SavingWalk-v0"},
    *({"env_id": f"RLTest/{name}-v0"} for name in WRAPPED),
]  # fmt: skip


def name_of(case: dict[str, Any]) -> str:
    return "-".join([case["env_id"].removeprefix("RLTest/"), case.get("vectorization", ""), *case.get("kwargs", {})])


@pytest.mark.filterwarnings("ignore:.*is out of date", "ignore:.*precision lowered")
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_restored_shard_continues_bit_for_bit(case: dict[str, Any]) -> None:
    # MuJoCo is slow, and takes some steps to fall and touch the ground: fewer points, longer episodes.
    limit, steps, window = (29, 56, 8) if case["env_id"] in MUJOCO else (17, 150, 40)
    environment = spec(**case, max_episode_steps=limit)
    shard, other = (EnvShard(environment, 3, 2, seed=8) for _ in range(2))
    assert (shard.resume, shard.resume_reason) == ("exact", "")
    shard.reset()
    generator = np.random.default_rng(len(name_of(case)))
    actions = random_actions(shard, steps)
    # 0: before the first step. limit, limit + 1: at a time limit and at the reset after it, if no episode ended before.
    cuts = {0, 1, limit, limit + 1, *generator.integers(2, steps - window, size=3).tolist()}
    saved: dict[int, tuple[Any, bytes]] = {}
    results = []
    for t, action in enumerate(actions):
        if t in cuts:
            saved[t] = through_file(shard.state_dict()), shard.observe().tobytes()
            shard.drain_episodes()
        results.append(shard.step(action))
    ends = shard.state_dict()
    for t, (state, observation) in saved.items():
        for target in (other, shard):  # one that never ran this, and the one that ran past it
            target.load_state_dict(state)
            assert target.observe().tobytes() == observation
            assert_identical(play(target, actions[t : t + window]), results[t : t + window])
    last = max(saved)
    shard.load_state_dict(saved[last][0])
    play(shard, actions[last:])
    after = shard.state_dict()
    after["vector"].pop("episodes")
    ends["vector"].pop("episodes")
    assert repr(through_file(after)) == repr(through_file(ends))  # states themselves agree, generators included
    shard.close()
    other.close()


@pytest.mark.parametrize("fields", [{"env_id": "CartPole-v1"}, {"env_id": "Pendulum-v1"}], ids=["Native", "Sync"])
def test_episodes_and_their_running_sums_are_part_of_the_state(fields: dict[str, Any]) -> None:
    shard, other = (EnvShard(spec(**fields, max_episode_steps=9), 0, 3, seed=8) for _ in range(2))
    shard.reset()
    actions = random_actions(shard, 60)
    play(shard, actions[:33])
    other.load_state_dict(through_file(shard.state_dict()))
    play(shard, actions[33:])
    play(other, actions[33:])
    episodes = shard.drain_episodes()
    assert len(episodes) >= 15
    assert other.drain_episodes() == episodes


def test_time_limits_go_on_counting_after_a_restore() -> None:
    for fields in ({"env_id": "CartPole-v1"}, {"env_id": "Pendulum-v1"}):
        shard, other = (EnvShard(spec(**fields, max_episode_steps=8), 0, 1, seed=0) for _ in range(2))
        shard.reset()
        actions = random_actions(shard, 9)
        play(shard, actions[:5])
        other.load_state_dict(shard.state_dict())
        assert [bool(r.truncated[0]) for r in play(other, actions[5:])] == [False, False, True, False]


def test_a_saved_state_does_not_change_when_the_shard_goes_on() -> None:
    for fields in ({"env_id": "CartPole-v1"}, {"env_id": "Pendulum-v1"}, {"env_id": "Hopper-v5"}):
        shard = EnvShard(spec(**fields), 0, 2, seed=0)
        shard.reset()
        state = shard.state_dict()
        before = repr(through_file(state))
        play(shard, random_actions(shard, 30))
        assert repr(state) == before
        shard.load_state_dict(state)
        play(shard, random_actions(shard, 30))
        assert repr(state) == before


def test_action_space_generators_are_restored() -> None:
    shard, other = (EnvShard(spec("Pendulum-v1"), 0, 2, seed=0) for _ in range(2))
    shard.reset()
    spaces, others = ([env.action_space for env in s._vector.envs] for s in (shard, other))  # type: ignore[union-attr]
    for space in spaces:
        space.sample()
    other.load_state_dict(through_file(shard.state_dict()))
    assert [space.sample().tolist() for space in spaces] == [space.sample().tolist() for space in others]


def test_an_environment_of_unknown_state_starts_new_episodes_and_says_so() -> None:
    shard, other = (EnvShard(spec("RLTest/Walk-v0"), 0, 2, seed=0) for _ in range(2))
    assert shard.resume == "approximate"
    assert "Walk has no state_dict and load_state_dict" in shard.resume_reason
    first = shard.reset()
    actions = random_actions(shard, 25)
    original = play(shard, actions)
    state = through_file(shard.state_dict())
    shard.drain_episodes()
    shard.load_state_dict(state)
    other.load_state_dict(state)
    start = shard.observe()
    assert start.tobytes() == other.observe().tobytes()
    assert start.tobytes() != first.tobytes()  # not the episodes of the start again
    assert start.tobytes() != original[-1].observation.tobytes()
    assert_identical(play(shard, actions), play(other, actions))
    assert shard.drain_episodes() == other.drain_episodes()
    again = through_file(shard.state_dict())
    shard.load_state_dict(again)
    assert shard.observe().tobytes() not in (first.tobytes(), start.tobytes())
    assert shard.reset().tobytes() == shard.observe().tobytes()


def test_an_unknown_wrapper_or_rendering_makes_a_known_environment_approximate() -> None:
    wrapped = EnvShard(spec("RLTest/Unknown-v0"), 0, 1, seed=0)
    assert "gymnasium.wrappers.transform_reward.TransformReward" in wrapped.resume_reason
    rendering = EnvShard(spec("Pendulum-v1", kwargs={"render_mode": "rgb_array"}), 0, 1, seed=0)
    assert (rendering.resume, "renders" in rendering.resume_reason) == ("approximate", True)


def test_a_state_dict_of_ones_own_that_holds_an_object_is_named() -> None:
    shard = EnvShard(spec("RLTest/UnsavableWalk-v0"), 0, 1, seed=0)
    shard.reset()
    with pytest.raises(EnvironmentFault, match=r"UnsavableWalk\.state_dict\(\)\['sensor'\] holds a builtins\.object"):
        shard.state_dict()


def test_a_state_of_something_else_is_refused_by_name() -> None:
    shard = EnvShard(spec("Pendulum-v1"), 0, 2, seed=0)
    shard.reset()
    for other, what in (
        (EnvShard(spec("MountainCarContinuous-v0"), 0, 2, 0), "environment 'MountainCarContinuous-v0'"),
        (EnvShard(spec("Pendulum-v1"), 1, 2, 0), "shard 1"),
        (EnvShard(spec("Pendulum-v1"), 0, 3, 0), "num_envs 3"),
    ):
        other.reset()
        with pytest.raises(CheckpointError, match=what):
            shard.load_state_dict(other.state_dict())
    sync, native = (EnvShard(spec("CartPole-v1", vectorization=v), 0, 2, 0) for v in ("Sync", "Native"))
    sync.reset()
    with pytest.raises(CheckpointError, match="vectorization 'Sync', here it is 'Native'"):
        native.load_state_dict(sync.state_dict())


def test_a_simulation_with_other_arrays_is_refused() -> None:
    shard = EnvShard(spec("Hopper-v5"), 0, 1, seed=0)
    shard.reset()
    state = shard.state_dict()
    state["vector"]["environments"][0][-1]["physics"]["layout"] = "0000000000000000"
    with pytest.raises(CheckpointError, match="resume with the MuJoCo and the model of the run"):
        shard.load_state_dict(state)


def test_mujocos_own_arrays_stay_where_they_are() -> None:
    # The capture reads through views taken at the start; arrays of the arena would have moved.
    shard = EnvShard(spec("HumanoidStandup-v5"), 0, 1, seed=0)  # lies on the ground
    shard.reset()
    play(shard, random_actions(shard, 5))
    vector: Any = shard._vector
    data, physics = vector.envs[0].unwrapped.data, vector._states[0].layers[-1].physics
    assert data.ncon > 0
    held = {array.ctypes.data for arrays in physics._arrays.values() for array in arrays}
    from rlightning.env.mujoco_state import _own_arrays

    assert {getattr(data, name).ctypes.data for name in _own_arrays(data.model)} == held
    assert {data.xpos.ctypes.data, data.cfrc_ext.ctypes.data, data.qpos.ctypes.data} <= held
