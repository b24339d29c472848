"""From ``spec.policy`` to a class and its configuration."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

from rlightning.errors import ManifestError
from rlightning.utils.config.config import Config, PolicyConfig, TrainConfig, WeightBufferConfig

if TYPE_CHECKING:
    from rlightning.api.models import RLJobSpec
    from rlightning.policy.base_policy import BasePolicy


def policy_class(spec: RLJobSpec) -> type[BasePolicy]:
    """The class that ``spec.policy`` names.

    Raises:
        ManifestError: the module or class is not there, or is no policy.
    """
    if spec.policy.simple_ppo is not None:
        from rlightning.policy.simple_ppo_policy.ppo_policy import SimplePPOPolicy

        return SimplePPOPolicy
    assert spec.policy.custom is not None
    from rlightning.policy.base_policy import BasePolicy

    path = spec.policy.custom.class_
    field = f"spec.policy.custom.class: {path!r}"
    module_name, _, class_name = path.partition(":")
    if os.getcwd() not in sys.path:
        # A console script's path lacks the current folder, where a user's own module usually is.
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise
        raise ManifestError(
            f"{field}: there is no module {error.name!r}; install it, or run from the folder that holds it"
        ) from None
    found = module
    for part in class_name.split("."):
        found = getattr(found, part, None)  # type: ignore[assignment]
    if found is None:
        candidates = sorted(n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, BasePolicy))
        raise ManifestError(
            f"{field}: module {module_name} has no {class_name}; policies in it: {', '.join(candidates) or 'none'}"
        )
    if not (isinstance(found, type) and issubclass(found, BasePolicy)):
        raise ManifestError(f"{field} is not a subclass of rlightning.policy.BasePolicy")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ManifestError(f"{field} does not define {', '.join(missing)}, which every policy must")
    return found


def policy_config(spec: RLJobSpec) -> PolicyConfig:
    """What the policy is made with."""
    if spec.policy.simple_ppo is not None:
        name, kwargs = "SimplePPOPolicy", spec.policy.simple_ppo.model_dump()
        optim = Config.from_dict({"lr": spec.policy.simple_ppo.learning_rate})
    else:
        assert spec.policy.custom is not None
        name, kwargs = spec.policy.custom.class_.rpartition(":")[2], dict(spec.policy.custom.config)
        optim = None
    return PolicyConfig(
        type=name,
        optim_cfg=optim,
        weight_buffer=WeightBufferConfig(buffer_strategy=spec.weights.strategy),
        policy_kwargs=Config.from_dict(kwargs),
    )


def train_config(spec: RLJobSpec) -> TrainConfig:
    """What ``init_train`` is called with."""
    batch = spec.training.rollout_steps * spec.environment.num_envs
    return TrainConfig(
        max_epochs=-(-spec.training.total_env_steps // batch),
        batch_size=batch,
        max_rollout_steps=spec.training.rollout_steps,
        lr=spec.policy.simple_ppo.learning_rate if spec.policy.simple_ppo is not None else None,
    )
