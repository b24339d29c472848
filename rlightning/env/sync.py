"""A vector of Gymnasium environments, stepped one after the other.

It behaves as ``gymnasium.vector.SyncVectorEnv`` with next-step autoreset, which a test compares step for step. It
exists because its state can be saved, and because it leaves out what training does not use (the batched infos).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlightning.env.registration import check_spaces
from rlightning.env.state import EnvironmentState
from rlightning.errors import CheckpointError, EnvironmentFault


class SyncVector:
    """``num_envs`` environments that reset on the step after an episode's last one.

    Args:
        make: makes one environment.
        num_envs: number of environments, N.
        name: what to call the vector in errors, e.g. ``Hopper-v5, shard 2``.

    Raises:
        UnsupportedSpace: as ``check_spaces``, and what ``make`` raises.
    """

    def __init__(self, make: Callable[[], gymnasium.Env], num_envs: int, name: str) -> None:
        self.name = name
        first = make()
        check_spaces(name, first.observation_space, first.action_space)
        self.envs = [first, *(make() for _ in range(num_envs - 1))]
        self.episodes: list[tuple[float, int]] = []
        self._rows_of = action_rows(first.action_space)
        self._shape, dtype = observation_layout(first.observation_space)
        self._observation = np.zeros((num_envs, *self._shape), dtype)
        self._finished = [False] * num_envs
        self._any_finished = False
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, dtype=np.int64)
        self._shape_seen = False
        self._states = [EnvironmentState(env) for env in self.envs]
        self._steps = [env.step for env in self.envs]

    @property
    def inexact(self) -> str | None:
        """None if a restored vector continues bit for bit, else the reason why not."""
        return self._states[0].inexact

    def reset(self, seeds: list[tuple[int, int]]) -> None:
        """Start every environment anew; ``seeds`` are (generator, action space) of each."""
        for i, (seed, action_seed) in enumerate(seeds):
            self.envs[i].action_space.seed(action_seed)
            self._observation[i] = self._reset_one(i, seed)
        self._finished = [False] * len(self.envs)
        self._any_finished = False
        self._returns[...] = 0.0
        self._lengths[...] = 0
        self.episodes = []

    def observe_into(self, observation: np.ndarray) -> None:
        """Write the latest observation, (N, *obs) in the space's dtype."""
        observation[...] = self._observation

    def step_into(
        self,
        action: np.ndarray,
        observation: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        valid: np.ndarray,
    ) -> None:
        """One step of every environment, written into the caller's arrays.

        Args:
            action: (N,) integers for Discrete, (N, *shape) floats for Box, clipped here.
            observation: (N, *obs) in the space's dtype.
            reward: (N,) float32.
            terminated, truncated, valid: (N,) bool.

        Raises:
            EnvironmentFault: an environment raised, or returned a wrong shape.
        """
        rows = self._rows_of(action, len(self.envs))
        current, finished = self._observation, self._finished
        rewards: list[Any] = []
        ends: list[Any] = []
        cuts: list[Any] = []
        value: Any
        i = 0
        try:
            for i, step in enumerate(self._steps):
                if finished[i]:
                    current[i] = self._reset_one(i, None)
                    value, end, cut = 0.0, False, False
                else:
                    row, value, end, cut, _ = step(rows[i])
                    if not self._shape_seen:
                        self._check_shape(i, row)
                    current[i] = row
                rewards.append(value)
                ends.append(end)
                cuts.append(cut)
            self._shape_seen = True
            values = np.array(rewards, dtype=np.float64)
            if values.ndim != 1:
                raise ValueError(f"rewards must be single numbers, they are of shape {values.shape[1:]}")
        except EnvironmentFault:
            raise
        except Exception as error:
            raise self._fault(i, f"step({rows[i]!r})", error) from error
        observation[...] = current
        reward[...] = values
        terminated[...] = ends
        truncated[...] = cuts
        self._returns += values
        self._lengths += 1
        if self._any_finished:
            was = np.array(finished)
            np.logical_not(was, valid)
            self._returns[was] = 0.0
            self._lengths[was] = 0
        else:
            valid.fill(True)
        done = np.logical_or(terminated, truncated)
        self._any_finished = bool(done.any())
        self._finished = done.tolist()
        if self._any_finished:
            for j in np.flatnonzero(done).tolist():
                self.episodes.append((float(self._returns[j]), int(self._lengths[j])))

    def _reset_one(self, i: int, seed: int | None) -> Any:
        try:
            row, _ = self.envs[i].reset(seed=seed)
        except Exception as error:
            raise self._fault(i, f"reset(seed={seed})", error) from error
        self._check_shape(i, row)
        return row

    def _check_shape(self, i: int, row: Any) -> None:
        # NumPy would broadcast a row of another shape into place without a word.
        if np.shape(row) != self._shape:
            raise EnvironmentFault(
                f"{self.name}, environment {i}: an observation of shape {np.shape(row)}, but the observation space "
                f"says {self._shape}; correct the environment's observation_space or what it returns"
            )

    def _fault(self, i: int, what: str, error: Exception) -> EnvironmentFault:
        return EnvironmentFault(f"{self.name}, environment {i}: {what} raised {type(error).__name__}: {error}")

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps depend on; meaningful only where :attr:`inexact` is None."""
        return {
            "environments": [state.capture() for state in self._states],
            "observation": self._observation.copy(),
            "finished": np.array(self._finished, dtype=bool),
            "returns": self._returns.copy(),
            "lengths": self._lengths.copy(),
            "episodes": list(self.episodes),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()`` of an equally configured vector.

        Raises:
            CheckpointError: the state is of other environments.
        """
        if state["observation"].shape != self._observation.shape or len(state["environments"]) != len(self.envs):
            raise CheckpointError(
                f"{self.name}: the saved observations are of shape {state['observation'].shape}, here of shape "
                f"{self._observation.shape}; numEnvs, shards and the environment must be those of the run"
            )
        for own, saved in zip(self._states, state["environments"], strict=True):
            own.restore(saved)
        self._observation[...] = state["observation"]
        self._finished = state["finished"].tolist()
        self._any_finished = any(self._finished)
        self._returns[...] = state["returns"]
        self._lengths[...] = state["lengths"]
        self.episodes = [(float(value), int(length)) for value, length in state["episodes"]]

    def close(self) -> None:
        """Close every environment."""
        for env in self.envs:
            env.close()


def observation_layout(space: spaces.Space) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of one observation of a Box or Discrete space."""
    if isinstance(space, spaces.Discrete):
        return (), np.dtype(np.int64)
    assert space.shape is not None
    assert space.dtype is not None
    return space.shape, space.dtype


def action_rows(space: spaces.Space) -> Callable[[np.ndarray, int], list[Any]]:
    """A function from a batch of ``n`` actions to one action per environment, Box actions clipped to the space.

    The rows share no memory with the batch: environments may keep the action that they were given.
    """

    def refuse(action: np.ndarray, n: int, want: tuple[int, ...]) -> EnvironmentFault:
        return EnvironmentFault(f"actions of shape {np.shape(action)} for {n} environments; they need shape {want}")

    if isinstance(space, spaces.Discrete):

        def discrete(action: np.ndarray, n: int) -> list[Any]:
            if np.shape(action) != (n,):
                raise refuse(action, n, (n,))
            return list(action)

        return discrete

    assert isinstance(space, spaces.Box)
    low, high, shape = space.low, space.high, space.shape

    def continuous(action: np.ndarray, n: int) -> list[Any]:
        if np.shape(action) != (n, *shape):
            raise refuse(action, n, (n, *shape))
        clipped = np.maximum(np.asarray(action, space.dtype), low)
        return list(np.minimum(clipped, high, out=clipped))

    return continuous
