"""A shard: a fixed part of the job's environments, stepped, saved and moved as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from rlightning.env.native import NativeCartPole
from rlightning.env.registration import find_registered, make_environment, resolve_vectorization
from rlightning.env.seeds import environment_seeds, shard_sequence
from rlightning.env.sync import SyncVector, observation_layout
from rlightning.errors import CheckpointError, RLightningError
from rlightning.types import EnvMeta

if TYPE_CHECKING:
    from rlightning.api.models import EnvironmentSpec


class StepResult(NamedTuple):
    """One step of N environments; where ``valid`` is False the step was a reset and the action was ignored.

    Attributes:
        observation: (N, *obs), the space's dtype; int64 (N,) for Discrete.
        reward: (N,) float32.
        terminated, truncated, valid: (N,) bool.
    """

    observation: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray


class EnvShard:
    """One fixed vector of ``num_envs`` environments with a seed stream of its own.

    Environments reset on the step after an episode's last one (Gymnasium's next-step autoreset): that step is a dummy
    with reward 0, and its observation is the new episode's first. So an episode's final observation is the one that its
    last step returned, and each row's successor is always the next row.

    Args:
        spec: the job's ``environment``.
        shard: index of the shard, part of its seeds.
        num_envs: environments in this shard, N.
        seed: the run's seed.

    Attributes:
        meta: spaces of a single environment; ``num_envs`` is N.
        vectorization: how the environments are stepped, resolved.
        resume: whether :meth:`load_state_dict` continues bit for bit or starts new episodes.
        resume_reason: empty if exact, else why not, for the user.
        step_into: ``step_into(action, observation, reward, terminated, truncated, valid)``: as :meth:`step`, into the
            caller's arrays, of the shapes and dtypes of :class:`StepResult`.

    Raises:
        EnvironmentNotFound, ManifestError, UnsupportedSpace, EnvironmentFault: as ``check_environment``.
    """

    def __init__(self, spec: EnvironmentSpec, shard: int, num_envs: int, seed: int) -> None:
        self.shard, self.num_envs = shard, num_envs
        self.vectorization = resolve_vectorization(spec)
        self._env_id, self._seed = spec.id, seed
        self._restarts = 0
        self._started = False
        self._vector: NativeCartPole | SyncVector
        if self.vectorization == "Native":
            single = make_environment(spec)
            observation_space, action_space = single.observation_space, single.action_space
            single.close()
            registered = find_registered(spec.id)
            limit = spec.max_episode_steps or registered.max_episode_steps
            assert limit is not None  # both CartPoles are registered with one
            kwargs = {**registered.kwargs, **spec.kwargs}
            self._vector = NativeCartPole(num_envs, limit, bool(kwargs.get("sutton_barto_reward", False)))
            self.resume_reason = ""
        else:
            self._vector = SyncVector(lambda: make_environment(spec), num_envs, f"{spec.id}, shard {shard}")
            observation_space = self._vector.envs[0].observation_space
            action_space = self._vector.envs[0].action_space
            self.resume_reason = self._vector.inexact or ""
        self.resume: Literal["exact", "approximate"] = "approximate" if self.resume_reason else "exact"
        self.meta = EnvMeta(spec.id, action_space, observation_space, num_envs)
        self._layout = observation_layout(observation_space)
        self.step_into = self._vector.step_into

    def reset(self) -> np.ndarray:
        """Start from the beginning of the shard's seed stream (of the current one, after an approximate restart).

        Returns:
            First observations, (N, *obs).
        """
        self._restart()
        return self.observe()

    def _restart(self) -> None:
        sequence = shard_sequence(self._seed, self.shard, self._restarts)
        if isinstance(self._vector, NativeCartPole):
            self._vector.reset(environment_seeds(sequence, 1)[0][0])
        else:
            self._vector.reset(environment_seeds(sequence, self.num_envs))
        self._started = True

    def observe(self, out: np.ndarray | None = None) -> np.ndarray:
        """The latest observation, (N, *obs), written into ``out`` where given."""
        self._need_start("observe")
        if out is None:
            shape, dtype = self._layout
            out = np.empty((self.num_envs, *shape), dtype)
        self._vector.observe_into(out)
        return out

    def step(self, action: np.ndarray) -> StepResult:
        """One step of every environment, in arrays of its own.

        Args:
            action: (N,) integers for Discrete, (N, *shape) floats for Box, which are clipped to the space.

        Raises:
            EnvironmentFault: an environment raised, returned a wrong shape, or was given a wrong action.
        """
        self._need_start("step")
        n, (shape, dtype) = self.num_envs, self._layout
        result = StepResult(
            np.empty((n, *shape), dtype),
            np.empty(n, np.float32),
            np.empty(n, bool),
            np.empty(n, bool),
            np.empty(n, bool),
        )
        self.step_into(action, *result)
        return result

    def drain_episodes(self) -> list[tuple[float, int]]:
        """(return, length) of the episodes that ended since the last call, in the order in which they ended."""
        episodes, self._vector.episodes = self._vector.episodes, []
        return episodes

    def state_dict(self) -> dict[str, Any]:
        """The shard's state as a tree of None, bool, int, float, str and arrays, sharing no memory with the shard.

        Raises:
            EnvironmentFault: an environment's own ``state_dict`` holds something else.
        """
        self._need_start("state_dict")
        return {
            "environment": self._env_id,
            "shard": self.shard,
            "num_envs": self.num_envs,
            "vectorization": self.vectorization,
            "resume": self.resume,
            "restarts": self._restarts,
            "vector": self._vector.state_dict() if self.resume == "exact" else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state: bit for bit where ``resume`` is exact, else with new episodes.

        Raises:
            CheckpointError: the state is of another shard, environment or vectorization.
        """
        for key, mine in (
            ("environment", self._env_id),
            ("shard", self.shard),
            ("num_envs", self.num_envs),
            ("vectorization", self.vectorization),
            ("resume", self.resume),
        ):
            if state[key] != mine:
                raise CheckpointError(
                    f"shard {self.shard} of {self._env_id}: the saved state has {key} {state[key]!r}, here it is "
                    f"{mine!r}; resume with the environment settings and package versions of the run"
                )
        self._restarts = state["restarts"]
        if self.resume == "approximate":
            self._restarts += 1  # seeds that no earlier start has used
            self._restart()
            return
        if not self._started:
            self._restart()  # some environments build parts of themselves in their first reset
        self._vector.load_state_dict(state["vector"])

    def close(self) -> None:
        """Release what the environments hold."""
        if isinstance(self._vector, SyncVector):
            self._vector.close()

    def _need_start(self, what: str) -> None:
        if not self._started:
            raise RLightningError(f"{what}: call reset or load_state_dict of the shard first")
