"""What an environment hands to a policy."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class EnvRet:
    """One return of an environment, or of a whole shard (then every value has a leading axis of N environments).

    Attributes:
        env_id: id of the environment or shard.
        observation: ``(*obs)`` or ``(N, *obs)``, NumPy or torch.
        last_reward: reward of the previous step, float or ``(N,)`` float32.
        last_terminated: the previous step ended an episode by the task's own rule.
        last_truncated: the previous step ended an episode by a time limit.
        info: whatever the environment adds.
        ts_env_sent_ns: wall-clock time of sending, nanoseconds.
    """

    env_id: str
    observation: Any
    last_reward: Any = 0.0
    last_terminated: Any = False
    last_truncated: Any = False
    info: dict[str, Any] = field(default_factory=dict)
    _extra: dict[str, Any] = field(default_factory=dict)
    ts_env_sent_ns: int = field(default_factory=time.time_ns)

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, extras included, private fields not."""
        return {
            "env_id": self.env_id,
            "observation": self.observation,
            "last_reward": self.last_reward,
            "last_terminated": self.last_terminated,
            "last_truncated": self.last_truncated,
            "info": self.info,
            **self._extra,
        }
