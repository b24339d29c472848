"""From the manifest's environment to spaces, and what is said of one that does not fit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from rlightning.env import check_environment, resolve_vectorization
from rlightning.errors import EnvironmentFault, EnvironmentNotFound, ManifestError, UnsupportedSpace
from tests.unit.env.support import spec


def test_returns_the_spaces_of_a_single_environment() -> None:
    meta = check_environment(spec("CartPole-v1", num_envs=16))
    env = gymnasium.make("CartPole-v1")
    assert (meta.env_id, meta.num_envs) == ("CartPole-v1", 16)
    assert meta.observation_space == env.observation_space
    assert meta.action_space == env.action_space


@pytest.mark.parametrize(
    ("env_id", "suggestion"),
    [
        ("CartPole-v2", "did you mean 'CartPole-v1' or 'CartPole-v0'?"),
        ("cartpole-v1", "did you mean 'CartPole-v1' or 'CartPole-v0'?"),
        ("HalfCheeta-v5", "did you mean 'HalfCheetah-v5'"),
        ("Taxi-v3", "did you mean 'Taxi-v4'?"),
        ("CartPole", "write 'CartPole-v1'"),
        ("RLTest/Countr-v1", "did you mean 'RLTest/Counter-v1' or"),
        ("Zzyzx-v0", "If a package of yours registers it, name its module: 'package.module:Name-v0'"),
        ("no_such_package_here:Thing-v0", "module 'no_such_package_here' is not installed"),
        ("a:b:c", "module 'a:b' is not installed"),
        ("???", "not registered with Gymnasium"),
    ],
)
def test_an_unknown_id_is_refused_with_what_was_probably_meant(env_id: str, suggestion: str) -> None:
    with pytest.raises(EnvironmentNotFound) as caught:
        check_environment(spec(env_id))
    assert env_id in str(caught.value)
    assert suggestion in str(caught.value)


def test_a_module_that_raises_when_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_tasks_module.py").write_text("raise ValueError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvironmentFault, match=r"importing 'broken_tasks_module' raised ValueError: no licence"):
        check_environment(spec("broken_tasks_module:Thing-v0"))
    assert "broken_tasks_module" not in sys.modules


@pytest.mark.parametrize(
    ("env_id", "name", "said"),
    [
        ("Pendulum-v1", "gg", "Pendulum-v1 has no such argument; did you mean 'g'? It takes render_mode, g"),
        ("CartPole-v1", "sutton_barto", "CartPole-v1 has no such argument; did you mean 'sutton_barto_reward'?"),
        ("Hopper-v5", "frame_skipp", "Hopper-v5 has no such argument; did you mean 'frame_skip'?"),
        ("Pendulum-v1", "max_episode_steps", "this has its own field, environment.maxEpisodeSteps"),
        ("Pendulum-v1", "disable_env_checker", "this belongs to gymnasium.make; leave it out"),
    ],
)
def test_an_argument_that_the_environment_does_not_take_is_named(env_id: str, name: str, said: str) -> None:
    with pytest.raises(ManifestError) as caught:
        check_environment(spec(env_id, kwargs={name: 1}))
    assert str(caught.value).startswith(f"environment.kwargs.{name}: {said}")


def test_an_environment_that_cannot_be_made_says_why() -> None:
    with pytest.raises(EnvironmentFault, match=r"'Ant-v5' cannot be made with environment.kwargs .*no_such.xml"):
        check_environment(spec("Ant-v5", kwargs={"xml_file": "/no_such.xml"}))
    with pytest.raises(EnvironmentFault, match=r"'Hopper-v3' cannot be made: ImportError: .*gymnasium-robotics"):
        check_environment(spec("Hopper-v3"))


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"observation": "dict"}, "observations must be Box or Discrete"),
        ({"observation": "from one"}, "observation space Discrete(3, start=1) does not start at 0"),
        ({"action": "multi"}, "actions must be Discrete or Box"),
        ({"action": "from one"}, "action space Discrete(3, start=1) does not start at 0"),
        ({"action": "integers"}, "Box actions must be floats"),
    ],
)
def test_spaces_that_policies_cannot_handle_are_refused(kwargs: dict[str, str], said: str) -> None:
    with pytest.raises(UnsupportedSpace) as caught:
        check_environment(spec("RLTest/Spaces-v0", kwargs=kwargs))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("env_id", "fields", "resolved"),
    [
        ("CartPole-v1", {}, "Native"),
        ("CartPole-v0", {}, "Native"),
        ("CartPole-v1", {"vectorization": "Native"}, "Native"),
        ("CartPole-v1", {"vectorization": "Sync"}, "Sync"),
        ("CartPole-v1", {"kwargs": {"sutton_barto_reward": True}}, "Native"),
        ("CartPole-v1", {"kwargs": {"render_mode": "rgb_array"}}, "Sync"),
        ("Pendulum-v1", {}, "Sync"),
        ("Hopper-v5", {}, "Sync"),
    ],
)
def test_auto_is_native_where_its_state_can_be_saved(env_id: str, fields: dict[str, Any], resolved: str) -> None:
    assert resolve_vectorization(spec(env_id, **fields)) == resolved


def test_native_where_there_is_none_is_refused() -> None:
    with pytest.raises(ManifestError, match=r"environment.vectorization: Native, but Hopper-v5 has no native vector"):
        check_environment(spec("Hopper-v5", vectorization="Native"))
    with pytest.raises(ManifestError, match=r"does not take environment.kwargs.render_mode; use Auto or Sync"):
        check_environment(spec("CartPole-v1", vectorization="Native", kwargs={"render_mode": "rgb_array"}))


def test_a_missing_mujoco_is_said_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "mujoco" or "envs.mujoco" in n]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mujoco", None)
    with pytest.raises(EnvironmentNotFound, match=r"Hopper-v5.*pip install 'rlightning\[mujoco\]'"):
        check_environment(spec("Hopper-v5"))
