"""Small environments whose every number can be worked out by hand; importing this module registers them."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import WrapperSpec

MODULE = __name__


class Counter(gymnasium.Env):
    """Counts its steps: observation [count, episode], reward count; episode e ends after ``lengths[e]`` steps."""

    observation_space: spaces.Space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space: spaces.Space = spaces.Discrete(2)

    def __init__(self, lengths: tuple[int, ...] = (3,), truncates: bool = False) -> None:
        self.lengths, self.truncates = lengths, truncates
        self.count, self.episode = 0, -1
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.count, self.episode = 0, self.episode + 1
        return np.array([self.count, self.episode], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.actions.append(action)
        self.count += 1
        done = self.count >= self.lengths[self.episode % len(self.lengths)]
        observation = np.array([self.count, self.episode], np.float32)
        return observation, float(self.count), done and not self.truncates, done and self.truncates, {}


class Walk(gymnasium.Env):
    """A random walk with hidden state in a closure: nothing outside can know how to save it."""

    observation_space: spaces.Space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space: spaces.Space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self) -> None:
        self.position = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.position = float(self.np_random.normal())
        return np.array([self.position]), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.position += float(self.np_random.normal()) + float(action[0])
        return np.array([self.position]), -abs(self.position), abs(self.position) > 4, False, {}


class SavingWalk(Walk):
    """The same, with a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "scalar": np.float64(self.position), "nested": {1: (None, [True])}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert type(state["scalar"]) is np.float64
        assert state["nested"] == {1: (None, [True])}
        self.position = state["position"]


class UnsavableWalk(SavingWalk):
    """Its state holds an object."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "sensor": object()}


class WrongShape(Counter):
    """Its observations have another shape than its space says, from the given step on."""

    def __init__(self, at: int = 0) -> None:
        super().__init__(lengths=(50,))
        self.at = at

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        observation, info = super().reset(seed=seed)
        return (observation[:1] if self.at == 0 else observation), info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        observation, *rest = super().step(action)
        return (observation[:1] if self.count >= self.at else observation), *rest  # type: ignore[return-value]


class Failing(Counter):
    """Raises in its third step."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self.count == 2:
            raise RuntimeError("the gripper is stuck")
        return super().step(action)


class Spaces(Counter):
    """Has the spaces it is given by name."""

    def __init__(self, observation: str = "ok", action: str = "ok") -> None:
        super().__init__()
        table = {
            "dict": spaces.Dict({"a": spaces.Discrete(2)}),
            "multi": spaces.MultiDiscrete([2, 2]),
            "from one": spaces.Discrete(3, start=1),
            "integers": spaces.Box(0, 5, (2,), np.int64),
        }
        self.observation_space = table.get(observation, self.observation_space)
        self.action_space = table.get(action, self.action_space)


def _register(name: str, entry: type, **options: Any) -> None:
    gymnasium.register(f"RLTest/{name}", f"{MODULE}:{entry.__name__}", **options)


def _wrapper(name: str, **kwargs: Any) -> WrapperSpec:
    return WrapperSpec(name, f"gymnasium.wrappers:{name}", kwargs)


WRAPPED = {
    "ClipAction": _wrapper("ClipAction"),
    "ClipReward": _wrapper("ClipReward", min_reward=-5.0, max_reward=-0.1),
    "DtypeObservation": _wrapper("DtypeObservation", dtype=np.float16),
    "FlattenObservation": _wrapper("FlattenObservation"),
    "FrameStackObservation": _wrapper("FrameStackObservation", stack_size=3),
    "NormalizeObservation": _wrapper("NormalizeObservation"),
    "NormalizeReward": _wrapper("NormalizeReward"),
    "RescaleAction": _wrapper("RescaleAction", min_action=-7.0, max_action=7.0),
    "StickyAction": _wrapper("StickyAction", repeat_action_probability=0.5),
    "TimeAwareObservation": _wrapper("TimeAwareObservation"),
}

_register("Counter-v0", Counter)
_register("Counter-v1", Counter)
_register("Limited-v0", Counter, max_episode_steps=4, kwargs={"lengths": (100,)})
_register("Walk-v0", Walk, max_episode_steps=30)
_register("SavingWalk-v0", SavingWalk, max_episode_steps=30)
_register("UnsavableWalk-v0", UnsavableWalk)
_register("WrongShape-v0", WrongShape)
_register("Failing-v0", Failing)
_register("Spaces-v0", Spaces)
_register("Unknown-v0", Counter, additional_wrappers=(_wrapper("TransformReward", func=abs),))
for _name, _spec in WRAPPED.items():
    gymnasium.register(
        f"RLTest/{_name}-v0",
        "gymnasium.envs.classic_control:PendulumEnv",
        max_episode_steps=30,
        additional_wrappers=(_spec,),
    )
