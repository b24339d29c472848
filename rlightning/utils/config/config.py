"""Configuration objects that policies receive.

A policy sees the manifest through these: ``config.policy_kwargs`` is the free-form (or, for built-in policies, the
typed) part of ``spec.policy``, ``config.optim_cfg`` what :meth:`BasePolicy.setup_optimizer` needs.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Config(BaseModel):
    """Named settings, readable as attributes and with :meth:`get`; unknown names are kept (free form)."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)

    def get(self, name: str, default: Any = None) -> Any:
        """The setting, or ``default`` where it is absent."""
        return getattr(self, name, default)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Config:
        """From a mapping; nested mappings stay mappings."""
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """As a mapping."""
        return self.model_dump()


class WeightBufferConfig(Config):
    """How published weights reach eval members."""

    model_config = ConfigDict(extra="forbid")

    buffer_strategy: Literal["None", "Double", "Shared"] = "Double"


class PolicyConfig(Config):
    """What :class:`~rlightning.policy.BasePolicy` is made with.

    Attributes:
        type: name of the policy's class.
        optim_cfg: handed to ``setup_optimizer``.
        weight_buffer: how published weights are held by eval members.
        policy_kwargs: the policy's own settings: ``spec.policy.custom.config``, or the typed built-in's fields.
    """

    model_config = ConfigDict(extra="forbid")

    type: str
    optim_cfg: Config | None = None
    weight_buffer: WeightBufferConfig = Field(default_factory=WeightBufferConfig)
    policy_kwargs: Config = Field(default_factory=Config)


class TrainConfig(Config):
    """What ``init_train`` is called with.

    Attributes:
        max_epochs: iterations that the run would take if every environment step were valid.
        batch_size: valid and dummy steps of one iteration: ``rolloutSteps`` × ``numEnvs``.
        max_rollout_steps: steps of one fragment.
        lr: the initial learning rate, where the policy has one.
    """

    model_config = ConfigDict(extra="forbid")

    max_epochs: int
    batch_size: int
    max_rollout_steps: int
    lr: float | None = None
