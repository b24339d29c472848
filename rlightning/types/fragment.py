"""One shard's rollout: what an eval member returns and a learner trains on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Fragment:
    """``T`` steps of ``N`` environments of one shard under one weight version.

    Environments reset on the step *after* an episode's last one (gymnasium's next-step autoreset). That step is a
    dummy: its ``valid`` is False, its action was ignored. So the successor of row ``t`` is always
    ``observation[t + 1]``, and where ``terminated | truncated`` at ``t`` that row is the episode's final observation.

    Attributes:
        shard: index of the shard.
        version: version of the weights that acted, acknowledged before the first step.
        member: name of the eval member that produced it.
        observation: ``(T + 1, N, *obs)`` as the environment returned it, never normalised.
        action: ``(T, N)`` int64 for discrete actions, ``(T, N, A)`` float32 for continuous ones, before clipping.
        log_prob: ``(T, N)`` float32, of ``action`` under ``version``.
        value: ``(T, N)`` float32, of ``observation[:T]`` under ``version``; None if the learner computes values.
        reward: ``(T, N)`` float32.
        terminated, truncated, valid: ``(T, N)`` bool.
        extra: further ``(T, N, …)`` arrays that the policy's responses carried.
        episodes: (return, length) of the episodes that ended here, in order.
        shard_state: the shard's state after the last step: environments, RNGs, statistics.
        seconds: wall time of the rollout.
    """

    shard: int
    version: int
    member: str
    observation: np.ndarray
    action: np.ndarray
    log_prob: np.ndarray
    value: np.ndarray | None
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray
    extra: dict[str, np.ndarray] = field(default_factory=dict)
    episodes: list[tuple[float, int]] = field(default_factory=list)
    shard_state: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        """Number of valid environment steps."""
        return int(self.valid.sum())
