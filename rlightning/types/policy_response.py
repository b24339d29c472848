"""What a policy hands back to an environment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class PolicyResponse(SimpleNamespace):
    """A policy's answer to one :class:`~rlightning.types.EnvRet`, free-form attributes by keyword.

    For training, ``action``, ``log_prob`` and ``value`` must be there, each with the leading axis of the
    observation it answers. In evaluation (``deterministic=True``) ``action`` is enough.
    """

    def __init__(self, env_id: str | None = None, **data: Any) -> None:
        super().__init__(env_id=env_id, **data)

    def to_dict(self) -> dict[str, Any]:
        """Attributes by name, without ``env_id``."""
        return {k: v for k, v in vars(self).items() if k != "env_id"}
