"""REINFORCE with a mean baseline, as a policy of one's own: everything RLightning asks of a policy, in one file.

Run it with ``rlightning run manifests/custom-policy.yaml``.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from rlightning.policy import BasePolicy
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config.config import Config


class Reinforce(BasePolicy):
    """Settings come from ``spec.policy.custom.config`` as ``self.config.policy_kwargs``."""

    def construct_network(self, env_meta: EnvMeta, *args: Any, **kwargs: Any) -> None:
        observations, actions = env_meta.observation_space.shape[0], env_meta.action_space.n
        hidden = self.config.policy_kwargs.get("hidden", 32)
        self.net = nn.Sequential(nn.Linear(observations, hidden), nn.Tanh(), nn.Linear(hidden, actions))

    def setup_optimizer(self, optim_cfg: Config | None) -> None:
        # Optimizers and schedulers that are attributes are saved and restored by themselves.
        self.optimizer = torch.optim.Adam(self.parameters(), lr=self.config.policy_kwargs.get("learningRate", 1e-2))

    def rollout_step(self, env_ret: EnvRet, deterministic: bool = False, **kwargs: Any) -> PolicyResponse:
        logits = self.net(env_ret.observation)
        if deterministic:
            return PolicyResponse(env_ret.env_id, action=logits.argmax(-1))
        distribution = torch.distributions.Categorical(logits=logits)
        action = distribution.sample()
        return PolicyResponse(env_ret.env_id, action=action, log_prob=distribution.log_prob(action))

    def update_dataset(self, data: TensorDict) -> None:
        # Discounted returns to the end of the episode or fragment; `valid` is False on autoreset's dummy steps.
        done = data["terminated"] | data["truncated"]
        returns = torch.zeros_like(data["reward"])
        running = torch.zeros_like(data["reward"][0])
        for t in reversed(range(len(returns))):
            running = data["reward"][t] + 0.99 * running * ~done[t]
            returns[t] = running
        valid = data["valid"]
        self.observation, self.action = data["observation"][valid], data["action"][valid]
        self.advantage = returns[valid] - returns[valid].mean()

    def train(self, *args: Any, **kwargs: Any) -> dict[str, float]:  # type: ignore[override]
        # Several train members: each takes its share of the rows, and the loss is a share of the sum over all.
        share = slice(self.rank, None, self.world_size)
        distribution = torch.distributions.Categorical(logits=self.net(self.observation[share]))
        log_prob = distribution.log_prob(self.action[share])
        loss = -(log_prob * self.advantage[share]).sum() / len(self.advantage)
        self.optimizer.zero_grad()
        loss.backward()
        self.reduce_gradients()
        self.optimizer.step()
        return {"loss": loss.item()}

    def get_trainable_parameters(self) -> dict[str, dict[str, Tensor]]:
        return {"net": self.net.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return self.net.load_state_dict(state_dict["net"])
