"""PPO for flat observations, readable top to bottom in one file."""

from rlightning.policy.simple_ppo_policy.ppo_policy import SimplePPOPolicy

__all__ = ["SimplePPOPolicy"]
