"""Environments for evaluation: a fixed list of seeded episodes, independent of who plays them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlightning.env.registration import check_spaces, make_environment
from rlightning.env.seeds import episode_seeds
from rlightning.env.sync import action_rows, observation_layout
from rlightning.errors import EnvironmentFault

if TYPE_CHECKING:
    from rlightning.api.models import EnvironmentSpec


class EvaluationEnvs:
    """Some of the slots of an evaluation, each with an environment of its own.

    Slot ``s`` of ``total_slots`` plays episodes s, s + total_slots, s + 2 · total_slots, …; episode k is reset with a
    seed that depends on (seed, k) only. So an episode's result does not depend on how slots are spread over members.

    Args:
        spec: the job's ``environment``; always stepped one by one.
        seed: the run's seed.
        slots: indices of the slots played here, each below ``total_slots``.
        episodes: number of episodes over all slots.
        total_slots: number of slots over all members.
    """

    def __init__(self, spec: EnvironmentSpec, seed: int, slots: Sequence[int], episodes: int, total_slots: int) -> None:
        if not slots or not all(0 <= slot < total_slots for slot in slots):
            raise ValueError(f"slots {list(slots)}: give at least one, each from 0 to {total_slots - 1}")
        self._env_id, self._seed = spec.id, seed
        self._quotas = [range(slot, episodes, total_slots) for slot in slots]
        self._envs = [make_environment(spec) for _ in slots]
        first = self._envs[0]
        check_spaces(spec.id, first.observation_space, first.action_space)
        self._rows_of = action_rows(first.action_space)
        self._shape, self._dtype = observation_layout(first.observation_space)

    def run(self, act: Callable[[np.ndarray], np.ndarray]) -> list[tuple[int, float, int]]:
        """Play all episodes of these slots.

        Args:
            act: from observations (len(slots), *obs) to actions (len(slots), …), Box actions before clipping. The batch
                keeps its shape to the end: the row of a slot that has nothing left to play does not change any more,
                and its action is ignored.

        Returns:
            (episode, return, length), in the order of episodes.

        Raises:
            EnvironmentFault: an environment raised or returned a wrong shape.
        """
        n = len(self._envs)
        observation = np.zeros((n, *self._shape), self._dtype)
        waiting = [iter(quota) for quota in self._quotas]
        playing = [next(quota, None) for quota in waiting]
        returns, lengths = [0.0] * n, [0] * n
        results: list[tuple[int, float, int]] = []
        for i, episode in enumerate(playing):
            if episode is not None:
                observation[i] = self._start(i, episode)
        while any(episode is not None for episode in playing):
            rows = self._rows_of(act(observation.copy()), n)
            for i, episode in enumerate(playing):
                if episode is None:
                    continue
                try:
                    row, reward, terminated, truncated, _ = self._envs[i].step(rows[i])
                    returns[i] += float(reward)
                except Exception as error:
                    raise self._fault(episode, f"step({rows[i]!r})", error) from error
                lengths[i] += 1
                if terminated or truncated:
                    results.append((episode, returns[i], lengths[i]))
                    returns[i], lengths[i] = 0.0, 0
                    playing[i] = episode = next(waiting[i], None)
                    if episode is not None:
                        observation[i] = self._start(i, episode)
                        continue
                observation[i] = row
        return sorted(results)

    def _start(self, i: int, episode: int) -> np.ndarray:
        seed, action_seed = episode_seeds(self._seed, episode)
        self._envs[i].action_space.seed(action_seed)
        try:
            row, _ = self._envs[i].reset(seed=seed)
        except Exception as error:
            raise self._fault(episode, f"reset(seed={seed})", error) from error
        if np.shape(row) != self._shape:
            raise EnvironmentFault(
                f"{self._env_id}, evaluation episode {episode}: an observation of shape {np.shape(row)}, but the "
                f"observation space says {self._shape}"
            )
        return np.asarray(row)

    def _fault(self, episode: int, what: str, error: Exception) -> EnvironmentFault:
        return EnvironmentFault(
            f"{self._env_id}, evaluation episode {episode}: {what} raised {type(error).__name__}: {error}"
        )

    def close(self) -> None:
        """Close every environment."""
        for env in self._envs:
            env.close()
