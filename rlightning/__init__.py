"""RLightning trains reinforcement-learning policies, on a laptop and on Kubernetes, from one manifest.

Importing this package imports neither torch nor ray: the parts that need them import them themselves, so that
``rlightning validate`` and the operator start in milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "load_policy"]

if TYPE_CHECKING:
    from rlightning.checkpoint.policy import load_policy


def __getattr__(name: str) -> Any:
    if name == "load_policy":
        from rlightning.checkpoint.policy import load_policy

        return load_policy
    raise AttributeError(f"module 'rlightning' has no attribute {name!r}")
