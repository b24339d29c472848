"""Small policies and a member for the tests of the weight plane."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rlightning.errors import MemberError, RLightningError
from rlightning.runtime.member import Done, Future, Shared
from rlightning.weights.slots import SlotsHandle
from rlightning.weights.weight_buffer_mixin import WeightBufferMixin


class TinyPolicy(nn.Module, WeightBufferMixin):
    """Parameters in modules and at the top, tied ones, float64 and int64 statistics, a buffer that is not saved."""

    mean: Tensor
    count: Tensor
    scratch: Tensor

    def __init__(self, seed: int = 0, hidden: int = 8) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2))
            self.critic = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 1))
            self.log_std = nn.Parameter(torch.randn(()))
            self.register_buffer("mean", torch.randn(4, dtype=torch.float64))
            self.register_buffer("count", torch.tensor(seed))
            self.register_buffer("scratch", torch.randn(3), persistent=False)
        self.critic[0].weight = self.actor[0].weight  # tied

    def forward(self, observation: Tensor) -> Tensor:
        return torch.as_tensor(self.actor(observation - self.mean.float()))

    def act(self, version: int) -> Tensor:
        with self.acting(version), torch.inference_mode():
            return self(torch.ones(1, 4))

    def init_weight_buffer(
        self,
        strategy: str,
        slots: SlotsHandle | None = None,
        member: str = "",
        probe: Callable[[nn.Module], None] | None = None,
    ) -> None:
        super().init_weight_buffer(strategy, slots, member, probe or (lambda policy: policy(torch.ones(1, 4))))

    def learn(self, step: int = 1) -> None:
        """Change every tensor, as training and new statistics do."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.add_(torch.full_like(parameter, 0.01 * step + 0.001 * len(name)))
            self.mean.add_(0.5)
            self.count.add_(step)


class LocalMember:
    """Calls in the caller's thread, as the local placement's members do."""

    def __init__(self, name: str, policy: Any, node: str = "local") -> None:
        self.name, self.role, self.node, self.pod, self.policy = name, "eval", node, "", policy

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        plain = [a.value if isinstance(a, Shared) else a for a in args]
        try:
            return Done(getattr(self.policy, method)(*plain, **kwargs))
        except RLightningError as error:
            return Done(error=error)
        except Exception as error:
            return Done(error=MemberError(self.name, method, repr(error), traceback.format_exc()))


def flip_bit(tensor: Tensor, byte: int = 0, bit: int = 0) -> None:
    """Change one bit of a tensor in place."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    data[byte] ^= 1 << bit
