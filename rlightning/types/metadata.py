"""What a policy needs to know of its environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gymnasium import spaces


@dataclass(frozen=True)
class EnvMeta:
    """Spaces of a single environment (not of the vector) and how many of them step together."""

    env_id: str | None = None
    action_space: spaces.Space | None = None
    observation_space: spaces.Space | None = None
    num_envs: int | None = None
