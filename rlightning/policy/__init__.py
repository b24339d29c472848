"""Policies and the group that trains them.

Importing a name imports torch; importing this package alone does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlightning.policy.base_policy import BasePolicy, PolicyRole, TrainingProgress
    from rlightning.policy.policy_group import PolicyGroup
    from rlightning.policy.simple_ppo_policy.ppo_policy import SimplePPOPolicy

__all__ = ["BasePolicy", "PolicyGroup", "PolicyRole", "SimplePPOPolicy", "TrainingProgress"]

_HOMES = {
    "BasePolicy": "base_policy",
    "PolicyRole": "base_policy",
    "TrainingProgress": "base_policy",
    "PolicyGroup": "policy_group",
    "SimplePPOPolicy": "simple_ppo_policy.ppo_policy",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"rlightning.policy.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'rlightning.policy' has no attribute {name!r}")
