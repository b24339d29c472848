"""Acting: an eval member hosts whole shards and returns whole fragments."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlightning.env import EnvShard, EvaluationEnvs
from rlightning.errors import EnvironmentFault, RLightningError
from rlightning.runtime.rng import RngState, Stream
from rlightning.types import EnvRet, Fragment

if TYPE_CHECKING:
    from rlightning.api.models import EnvironmentSpec

_RESPONSE_FIELDS = ("action", "log_prob", "value")


@dataclass
class HostedShard:
    """A shard that lives in this member: its environments, where they stand, and what policies draw from."""

    shard: EnvShard
    observation: np.ndarray
    rng: RngState
    last_reward: np.ndarray
    last_terminated: np.ndarray
    last_truncated: np.ndarray

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next fragment depends on, besides the weights."""
        return {
            "environments": self.shard.state_dict(),
            "rng": self.rng.state_dict(),
            "last_reward": self.last_reward.copy(),
            "last_terminated": self.last_terminated.copy(),
            "last_truncated": self.last_truncated.copy(),
        }

    @property
    def dummy(self) -> np.ndarray:
        """``(N,)`` bool: environments whose next step only resets them."""
        return self.last_terminated | self.last_truncated


class FragmentRolloutMixin:
    """Hosting shards, rolling them out and evaluating. Mixed into :class:`~rlightning.policy.BasePolicy`."""

    _hosted: dict[int, HostedShard]
    _evaluation: dict[Any, EvaluationEnvs]

    def host_shards(
        self,
        environment: EnvironmentSpec,
        shards: Sequence[int],
        envs_per_shard: int,
        seed: int,
        states: Mapping[int, dict[str, Any]] | None = None,
    ) -> dict[str, str]:
        """Create shards here, from the start or from their states.

        Args:
            environment: the manifest's ``spec.environment``.
            shards: indices; each shard's seeds depend on its index only.
            envs_per_shard: N.
            seed: the manifest's seed.
            states: by shard, from :attr:`Fragment.shard_state`; None starts them.

        Returns:
            How the environments were resolved: ``vectorization``, and ``resume`` exact or approximate.
        """
        self.close_shards()
        hosted: dict[int, HostedShard] = {}
        self._hosted = hosted
        resolved: dict[str, str] = {}
        for index in shards:
            shard = EnvShard(environment, index, envs_per_shard, seed)
            resolved = {"vectorization": shard.vectorization, "resume": shard.resume}
            if states is None:
                none = np.zeros(envs_per_shard, dtype=bool)
                hosted[index] = HostedShard(
                    shard=shard,
                    observation=shard.reset(),
                    rng=RngState.seeded(seed, Stream.SHARD_POLICY, index),
                    last_reward=np.zeros(envs_per_shard, dtype=np.float32),
                    last_terminated=none,
                    last_truncated=none.copy(),
                )
                continue
            state = states[index]
            shard.load_state_dict(state["environments"])
            last = {n: np.array(state[n]) for n in ("last_reward", "last_terminated", "last_truncated")}
            if shard.resume != "exact":
                last = {name: np.zeros_like(values) for name, values in last.items()}  # new episodes have begun
            rng = RngState.from_state_dict(state["rng"])
            hosted[index] = HostedShard(shard=shard, observation=shard.observe(), rng=rng, **last)
        return resolved

    def shard_states(self) -> dict[int, dict[str, Any]]:
        """States of the shards hosted here, as they stand now."""
        return {index: hosted.state_dict() for index, hosted in getattr(self, "_hosted", {}).items()}

    def close_shards(self) -> None:
        """Close every environment of this member."""
        for hosted in getattr(self, "_hosted", {}).values():
            hosted.shard.close()
        for envs in getattr(self, "_evaluation", {}).values():
            envs.close()
        self._hosted, self._evaluation = {}, {}

    def rollout_fragment(self, shard: int, version: int, steps: int) -> Fragment:
        """Step one shard ``steps`` times with the acknowledged weights of ``version``.

        Raises:
            WeightsError: this member does not run ``version``, or has not acknowledged it.
            EnvironmentFault: a reward or observation is not finite; names environment, step and shard.
        """
        started = time.perf_counter()
        hosted = self._hosted[shard]
        envs, env = hosted.shard.num_envs, hosted.shard
        first = hosted.observation
        observation = np.empty((steps + 1, *first.shape), dtype=first.dtype)
        observation[0] = first
        reward = np.empty((steps, envs), dtype=np.float32)
        terminated, truncated, valid = (np.empty((steps, envs), dtype=bool) for _ in range(3))
        valid[0] = ~hosted.dummy
        responses: dict[str, list[torch.Tensor]] = {}
        rows = torch.from_numpy(observation)
        env_id = f"shard-{shard}"
        last = (hosted.last_reward, hosted.last_terminated, hosted.last_truncated)
        with self.acting(version), hosted.rng.swapped(), torch.inference_mode():  # type: ignore[attr-defined]
            for t in range(steps):
                answer = self.rollout_step(EnvRet(env_id, rows[t], *last))  # type: ignore[attr-defined]
                fields = vars(answer)
                if t == 0:
                    responses = {n: [] for n, v in fields.items() if n != "env_id" and v is not None}
                    _check_response(self, fields, envs)
                for name, collected in responses.items():
                    collected.append(fields[name])
                env.step_into(
                    _numpy(fields["action"]), observation[t + 1], reward[t], terminated[t], truncated[t], valid[t]
                )
                last = (reward[t], terminated[t], truncated[t])
        _check_finite(env_id, reward, observation)
        arrays = {name: _stacked(collected) for name, collected in responses.items()}
        hosted.observation = observation[-1].copy()
        hosted.last_reward, hosted.last_terminated, hosted.last_truncated = (
            a[-1].copy() for a in (reward, terminated, truncated)
        )
        return Fragment(
            shard=shard,
            version=version,
            member=self.member_name,  # type: ignore[attr-defined]
            observation=observation,
            action=arrays.pop("action"),
            log_prob=arrays.pop("log_prob"),
            value=arrays.pop("value", None),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            valid=valid,
            extra=arrays,
            episodes=env.drain_episodes(),
            shard_state=hosted.state_dict(),
            seconds=time.perf_counter() - started,
        )

    def evaluate_slots(
        self,
        environment: EnvironmentSpec,
        seed: int,
        version: int,
        slots: Sequence[int],
        total_slots: int,
        episodes: int,
    ) -> list[tuple[int, float, int]]:
        """Play evaluation episodes with greedy actions and frozen weights, in environments of their own.

        Args:
            slots: which of ``total_slots`` to play here; one forward pass serves all of them, so the split of slots
                into calls is part of what makes a result repeatable, and callers fix it.

        Returns:
            (episode, return, length) of each episode.
        """
        key = (tuple(slots), total_slots, episodes, seed)
        cache: dict[Any, EvaluationEnvs] = self.__dict__.setdefault("_evaluation", {})
        if key not in cache:
            cache[key] = EvaluationEnvs(environment, seed, slots, episodes, total_slots)
        env_id = f"evaluation-{slots[0]}"
        none = np.zeros(len(slots), dtype=bool)
        rewards = np.zeros(len(slots), dtype=np.float32)

        def act(observation: np.ndarray) -> np.ndarray:
            env_ret = EnvRet(env_id, torch.from_numpy(observation), rewards, none, none)
            answer = self.rollout_step(env_ret, deterministic=True)  # type: ignore[attr-defined]
            return _numpy(answer.action)

        rng = RngState.seeded(seed, Stream.EVALUATION, slots[0])
        with self.acting(version), rng.swapped(), torch.inference_mode():  # type: ignore[attr-defined]
            return cache[key].run(act)


def _numpy(value: Any) -> np.ndarray:
    return value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _stacked(collected: list[Any]) -> np.ndarray:
    if isinstance(collected[0], torch.Tensor):
        return torch.stack(collected).numpy()
    return np.stack([np.asarray(c) for c in collected])


def _check_response(policy: Any, fields: dict[str, Any], envs: int) -> None:
    name = type(policy).__name__
    for field in ("action", "log_prob"):
        if fields.get(field) is None:
            raise RLightningError(
                f"{name}.rollout_step returned no {field}; return PolicyResponse(env_id, action=…, log_prob=…, value=…)"
            )
    for field, value in fields.items():
        if field == "env_id" or value is None:
            continue
        shape = tuple(getattr(value, "shape", ()))
        if not shape or shape[0] != envs:
            raise RLightningError(
                f"{name}.rollout_step returned {field} of shape {shape}; the first axis must be the shard's {envs} "
                "environments"
            )


def _check_finite(env_id: str, reward: np.ndarray, observation: np.ndarray) -> None:
    if not np.isfinite(reward).all():
        step, index = (int(i) for i in np.argwhere(~np.isfinite(reward))[0])
        raise EnvironmentFault(
            f"environment {index} of {env_id} returned reward {reward[step, index]} at step {step} of the fragment; "
            "rewards must be finite: mend the environment, or clip in a wrapper"
        )
    if observation.dtype.kind == "f" and not np.isfinite(observation).all():
        step, index = (int(i) for i in np.argwhere(~np.isfinite(observation))[0][:2])
        raise EnvironmentFault(
            f"environment {index} of {env_id} returned an observation that is not finite before step {step} of the "
            "fragment; mend the environment, or clip in a wrapper"
        )
