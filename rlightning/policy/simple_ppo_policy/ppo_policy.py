"""PPO with clipped ratios (Schulman et al. 2017) for discrete and continuous actions.

Separate actor and critic MLPs, orthogonal initialisation, GAE, advantages normalised per minibatch, Adam with
ε = 1e-5: the settings of stable-baselines3's PPO unless the manifest says otherwise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from rlightning.api.models import SimplePPOSpec
from rlightning.errors import NonFiniteLoss, UnsupportedSpace
from rlightning.policy.base_policy import BasePolicy
from rlightning.policy.utils.returns import explained_variance, generalized_advantage_estimate
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config.config import Config

if TYPE_CHECKING:
    from tensordict import TensorDict

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_NORMALISED_CLIP = 10.0


class SimplePPOPolicy(BasePolicy):
    """PPO. Settings: :class:`~rlightning.api.models.SimplePPOSpec`, given as ``config.policy_kwargs``."""

    observation_mean: Tensor
    observation_var: Tensor
    observation_count: Tensor

    def construct_network(self, env_meta: EnvMeta, *args: Any, **kwargs: Any) -> None:
        """Actor and critic MLPs; observations are flattened, discrete ones one-hot encoded."""
        self.settings = SimplePPOSpec.model_validate(self.config.policy_kwargs.to_dict())
        observation, action = env_meta.observation_space, env_meta.action_space
        if isinstance(observation, spaces.Discrete):
            self.one_hot: tuple[int, int] | None = (int(observation.start), int(observation.n))
            features = int(observation.n)
        elif isinstance(observation, spaces.Box):
            self.one_hot = None
            features = math.prod(observation.shape)
        else:
            raise UnsupportedSpace(
                f"simplePPO takes Box and Discrete observations; environment {env_meta.env_id} has {observation}. "
                "Flatten it in a wrapper or write a custom policy"
            )
        if isinstance(action, spaces.Discrete):
            self.discrete, self.action_start, outputs = True, int(action.start), int(action.n)
        elif isinstance(action, spaces.Box) and len(action.shape) == 1:
            self.discrete, self.action_start, outputs = False, 0, action.shape[0]
        else:
            raise UnsupportedSpace(
                f"simplePPO takes Discrete and one-dimensional Box actions; environment {env_meta.env_id} has "
                f"{action}. Write a custom policy for it"
            )
        self.actor = _mlp(features, self.settings.hidden_sizes, outputs, self.settings.activation, output_gain=0.01)
        self.critic = _mlp(features, self.settings.hidden_sizes, 1, self.settings.activation, output_gain=1.0)
        if not self.discrete:
            self.actor_logstd = nn.Parameter(torch.full((outputs,), self.settings.log_std_init))
        if self.settings.normalize_observations:
            self.register_buffer("observation_mean", torch.zeros(features, dtype=torch.float64))
            self.register_buffer("observation_var", torch.ones(features, dtype=torch.float64))
            self.register_buffer("observation_count", torch.tensor(1e-4, dtype=torch.float64))

    def setup_optimizer(self, optim_cfg: Config | None) -> None:
        """Adam over all parameters."""
        self.optimizer = torch.optim.Adam(self.parameters(), lr=self.settings.learning_rate, eps=1e-5, fused=True)

    # --- acting ----------------------------------------------------------------------------------------------------

    def rollout_step(self, env_ret: EnvRet, deterministic: bool = False, **kwargs: Any) -> PolicyResponse:
        """Sample (or take the most likely) actions; the learner computes values, all rows in one pass."""
        outputs = self.actor(self.features(env_ret.observation))
        if self.discrete:
            if deterministic:
                return PolicyResponse(env_ret.env_id, action=outputs.argmax(-1) + self.action_start)
            log_probs = outputs.log_softmax(-1)
            # Gumbel-max: argmax(log p + Gumbel noise) is a sample from p, and -log of an exponential is such noise.
            index = (log_probs - torch.empty_like(log_probs).exponential_().log_()).argmax(-1, keepdim=True)
            log_prob = log_probs.gather(-1, index).squeeze(-1)
            return PolicyResponse(env_ret.env_id, action=index.squeeze(-1) + self.action_start, log_prob=log_prob)
        if deterministic:
            return PolicyResponse(env_ret.env_id, action=outputs)
        noise = torch.randn_like(outputs)
        log_prob = (-0.5 * noise.square() - self.actor_logstd).sum(-1) - _HALF_LOG_2PI * noise.shape[-1]
        return PolicyResponse(env_ret.env_id, action=outputs + self.actor_logstd.exp() * noise, log_prob=log_prob)

    def features(self, observation: Tensor) -> Tensor:
        """``(B, *obs)`` as ``(B, F)`` float32: flat, one-hot where discrete, normalised if asked."""
        if self.one_hot is not None:
            start, n = self.one_hot
            flat = F.one_hot(observation.long() - start, n).float()
        else:
            flat = observation.reshape(len(observation), -1).float()
        if self.settings.normalize_observations:
            scale = (self.observation_var + 1e-8).rsqrt()
            flat = ((flat - self.observation_mean) * scale).clamp(-_NORMALISED_CLIP, _NORMALISED_CLIP).float()
        return flat

    def get_value(self, features: Tensor) -> Tensor:
        """``(B,)`` state values of ``(B, F)`` features."""
        return self.critic(features).squeeze(-1)

    def evaluate(self, features: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of actions and entropy of the policy, each ``(B,)``."""
        outputs = self.actor(features)
        if self.discrete:
            log_probs = outputs.log_softmax(-1)
            chosen = log_probs.gather(-1, (action - self.action_start).unsqueeze(-1)).squeeze(-1)
            return chosen, -(log_probs.exp() * log_probs).sum(-1)
        scaled = (action - outputs) * (-self.actor_logstd).exp()
        constant = self.actor_logstd.sum() + _HALF_LOG_2PI * action.shape[-1]
        return -0.5 * scaled.square().sum(-1) - constant, (constant + 0.5 * action.shape[-1]).expand(len(action))

    # --- learning --------------------------------------------------------------------------------------------------

    def update_dataset(self, data: TensorDict) -> None:
        """Values by the critic in one pass (the row after the last one included), advantages, returns."""
        steps, envs = data.batch_size
        rows = data["observation"].reshape(steps * envs, *data["observation"].shape[2:])
        last = data["next_observation"][-1]
        self.raw_observation, self.valid = rows, data["valid"].reshape(-1)
        self.batch_features = self.features(rows)
        with torch.no_grad():
            value = self.get_value(self.batch_features).view(steps, envs)
            # Autoreset comes one step late, so the successor of row t is row t + 1, final observations included.
            next_value = torch.cat([value[1:], self.get_value(self.features(last)).unsqueeze(0)])
            advantage, returns = generalized_advantage_estimate(
                data["reward"],
                value,
                next_value,
                data["terminated"],
                data["truncated"],
                self.settings.gamma,
                self.settings.gae_lambda,
            )
        self.batch_value, self.batch_returns, self.batch_advantage = (
            value.view(-1),
            returns.view(-1),
            advantage.view(-1),
        )
        self.batch_action = data["action"].reshape(steps * envs, *data["action"].shape[2:])
        self.batch_log_prob = data["log_prob"].reshape(-1)

    def train(self, *args: Any, **kwargs: Any) -> dict[str, float]:  # type: ignore[override]
        """``epochs`` passes of minibatches; rank r computes the r-th slice of each, gradients are summed.

        Returns:
            policy_loss, value_loss, entropy, approx_kl, clip_fraction, grad_norm (means over minibatches),
            explained_variance, learning_rate, clip_range, minibatches.
        """
        s = self.settings
        clip = s.clip_range * (self.progress.remaining if s.clip_range_schedule == "Linear" else 1.0)
        rate = s.learning_rate * (self.progress.remaining if s.learning_rate_schedule == "Linear" else 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        size = len(self.batch_returns)
        valid = self.valid.float()
        sums: list[Tensor] = []
        norms: list[Tensor] = []
        stopped = False
        for _ in range(s.epochs):
            order = torch.randperm(size)
            for start in range(0, size, s.minibatch_size):
                minibatch = order[start : start + s.minibatch_size]
                share = torch.tensor_split(minibatch, self.world_size)[self.rank]
                self.optimizer.zero_grad(set_to_none=True)
                losses = self._loss(minibatch, share, valid, clip)
                losses[0].backward()
                # Every term is a share of a sum over ranks, so the metrics of all ranks travel with the gradients.
                metrics = self.reduce_gradients(torch.stack([t.detach() for t in losses[1:]]))
                assert metrics is not None
                sums.append(metrics)
                if s.target_kl is not None and metrics[3] > 1.5 * s.target_kl:
                    stopped = True
                    break
                norms.append(nn.utils.clip_grad_norm_(self.parameters(), s.max_grad_norm, foreach=True))
                self.optimizer.step()
            if stopped:
                break
        means = torch.stack(sums).mean(0).tolist()
        norm = float(torch.stack(norms).mean()) if norms else 0.0
        if not math.isfinite(norm):
            raise NonFiniteLoss(self.progress.iteration, f"the gradient's norm is {norm}")
        if s.normalize_observations:
            self._merge_observations()
        value, returns = self.batch_value[self.valid], self.batch_returns[self.valid]
        names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
        metrics_out = dict(zip(names, means, strict=True)) | {
            "grad_norm": norm,
            "learning_rate": rate,
            "clip_range": clip,
            "minibatches": float(len(sums)),
        }
        variance = explained_variance(value, returns)
        return metrics_out if math.isnan(variance) else metrics_out | {"explained_variance": variance}

    def _loss(self, minibatch: Tensor, share: Tensor, valid: Tensor, clip: float) -> tuple[Tensor, ...]:
        """This rank's share of the loss, then of policy loss, value loss, entropy, KL and clipped fraction."""
        s = self.settings
        weight = valid[share] / valid[minibatch].sum().clamp(min=1.0)
        advantage = self.batch_advantage[share]
        if s.normalize_advantages:
            whole = self.batch_advantage[minibatch][self.valid[minibatch]]
            if len(whole) > 1:
                advantage = (advantage - whole.mean()) / (whole.std() + 1e-8)
        features = self.batch_features[share]
        log_prob, entropy = self.evaluate(features, self.batch_action[share])
        log_ratio = log_prob - self.batch_log_prob[share]
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - clip, 1 + clip)
        policy_loss = -(torch.min(advantage * ratio, advantage * clipped) * weight).sum()
        value_loss = ((self.get_value(features) - self.batch_returns[share]).square() * weight).sum()
        mean_entropy = (entropy * weight).sum()
        loss = policy_loss + s.value_coef * value_loss - s.entropy_coef * mean_entropy
        with torch.no_grad():
            # The k3 estimator of KL(old‖new): (r − 1) − log r, never negative (Schulman 2020, "Approximating KL").
            kl = (((ratio - 1) - log_ratio) * weight).sum()
            clip_fraction = (((ratio - 1).abs() > clip) * weight).sum()
        return loss, policy_loss, value_loss, mean_entropy, kl, clip_fraction

    @torch.no_grad()
    def _merge_observations(self) -> None:
        """Fold this iteration's observations into the normaliser (Chan et al. 1979), for the next version."""
        flat = self.raw_observation[self.valid].reshape(int(self.valid.sum()), -1).double()
        if self.one_hot is not None or not len(flat):
            return
        count, mean, var = len(flat), flat.mean(0), flat.var(0, unbiased=False)
        total = self.observation_count + count
        delta = mean - self.observation_mean
        m2 = self.observation_var * self.observation_count + var * count
        m2 += delta.square() * self.observation_count * count / total
        self.observation_mean += delta * count / total
        self.observation_var.copy_(m2 / total)
        self.observation_count.copy_(total)

    # --- weights ---------------------------------------------------------------------------------------------------

    def get_trainable_parameters(self) -> dict[str, dict[str, Tensor]]:
        """State dicts of ``actor`` and ``critic``; the policy's own parameters under an empty name."""
        own = {name: p.detach() for name, p in self.named_parameters(recurse=False)}
        modules = {"actor": self.actor.state_dict(), "critic": self.critic.state_dict()}
        return modules | ({"": own} if own else {})

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True, assign: bool = False) -> Any:  # type: ignore[override]
        """From :meth:`get_trainable_parameters`, or a flat state dict."""
        flat: dict[str, Any] = {}
        for module, value in state_dict.items():
            if isinstance(value, dict):
                flat |= {f"{module}.{name}" if module else name: t for name, t in value.items()}
            else:
                flat[module] = value
        return nn.Module.load_state_dict(self, flat, strict=strict, assign=assign)


def _mlp(inputs: int, hidden: Sequence[int], outputs: int, activation: str, output_gain: float) -> nn.Sequential:
    """Linear layers with an activation between; orthogonal weights (gain √2, ``output_gain`` at the end), zero bias."""
    sizes = [inputs, *hidden, outputs]
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        linear = nn.Linear(a, b)
        nn.init.orthogonal_(linear.weight, output_gain if i == len(sizes) - 2 else math.sqrt(2))
        nn.init.zeros_(linear.bias)
        layers.append(linear)
        if i < len(sizes) - 2:
            layers.append(nn.Tanh() if activation == "Tanh" else nn.ReLU())
    return nn.Sequential(*layers)
