"""Policies that misbehave, for tests."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from rlightning.policy import SimplePPOPolicy
from rlightning.types import EnvRet, PolicyResponse


class RaisesInTrain(SimplePPOPolicy):
    """Raises in its third training step."""

    def train(self, *args: Any, **kwargs: Any) -> dict[str, float]:  # type: ignore[override]
        if self.progress.iteration == 3:
            raise ValueError("the user's own mistake")
        return super().train()


class LosesItsLoss(SimplePPOPolicy):
    """Its loss is NaN from the fourth iteration on."""

    def update_dataset(self, data: Any) -> None:
        super().update_dataset(data)
        if self.progress.iteration >= 4:
            self.batch_returns = self.batch_returns * float("nan")


class ReportsNaN(SimplePPOPolicy):
    """Trains well, and says that its loss is NaN in the second iteration."""

    def train(self, *args: Any, **kwargs: Any) -> dict[str, float]:  # type: ignore[override]
        metrics = super().train()
        return metrics | ({"policy_loss": float("nan")} if self.progress.iteration == 2 else {})


class DiesInRollout(SimplePPOPolicy):
    """Its second member's process ends in the middle of iteration 3's rollout (version 2)."""

    def rollout_fragment(self, shard: int, version: int, steps: int) -> Any:
        if version == 2 and self.member_name == "eval-1":
            os._exit(17)
        return super().rollout_fragment(shard, version, steps)


class SleepsInRollout(SimplePPOPolicy):
    """Its second member takes far longer than a deadline of 6 s."""

    def rollout_fragment(self, shard: int, version: int, steps: int) -> Any:
        if version == 1 and self.member_name == "eval-1":
            time.sleep(15)
        return super().rollout_fragment(shard, version, steps)


class FlipsABit(SimplePPOPolicy):
    """One bit of an eval member's live weights changes while it acts with version 2, once."""

    flipped = False

    def rollout_fragment(self, shard: int, version: int, steps: int) -> Any:
        fragment = super().rollout_fragment(shard, version, steps)
        if version == 2 and self.member_name == "eval-0" and not self.flipped:
            self.flipped = True
            weight = self.get_parameter("critic.2.weight")
            # Out of place: with `Shared` the live tensor lies in read-only memory.
            changed = weight.detach().clone()
            changed.view(torch.int32)[3, 5] ^= 1
            weight.data = changed
        return fragment


class ForgetsToReduce(SimplePPOPolicy):
    """Steps with its own share of the gradient only, in the second iteration."""

    def reduce_gradients(self, extra: torch.Tensor | None = None) -> torch.Tensor | None:
        return extra if self.progress.iteration == 2 else super().reduce_gradients(extra)


class SaysNothing(SimplePPOPolicy):
    """Returns no log_prob."""

    def rollout_step(self, env_ret: EnvRet, deterministic: bool = False, **kwargs: Any) -> PolicyResponse:
        answer = super().rollout_step(env_ret, deterministic=deterministic)
        return PolicyResponse(env_ret.env_id, action=answer.action)


class TakesItsTime(SimplePPOPolicy):
    """A quarter of a second for each training step, so that a test can meet it in the middle of a run."""

    def train(self, *args: Any, **kwargs: Any) -> dict[str, float]:  # type: ignore[override]
        time.sleep(0.25)
        return super().train()


class RecordsGradients(SimplePPOPolicy):
    """Keeps its own gradient share and what came out of the sum, for the first minibatch of each iteration."""

    recorded: list[dict[str, Any]]

    def reduce_gradients(self, extra: torch.Tensor | None = None) -> torch.Tensor | None:
        own = {name: p.grad.detach().clone() for name, p in self.named_parameters() if p.grad is not None}
        answer = super().reduce_gradients(extra)
        summed = {name: p.grad.detach().clone() for name, p in self.named_parameters() if p.grad is not None}
        self.__dict__.setdefault("recorded", []).append({"own": own, "summed": summed})
        return answer

    def gradients(self) -> list[dict[str, Any]]:
        return self.recorded


class SignalsItsDriver(SimplePPOPolicy):
    """Sends its own process the signal that the environment asks for, in the middle of one iteration.

    RLIGHTNING_TEST_SIGNAL: ``<signal number>@<iteration>``; unset, it trains undisturbed.
    """

    def train(self, *args: Any, **kwargs: Any) -> dict[str, float]:  # type: ignore[override]
        number, _, iteration = os.environ.get("RLIGHTNING_TEST_SIGNAL", "").partition("@")
        if number and self.progress.iteration == int(iteration):
            os.kill(os.getpid(), int(number))
        return super().train()
