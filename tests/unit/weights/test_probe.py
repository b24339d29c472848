from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlightning.weights.digest import digest_module
from rlightning.weights.probe import private_copy, written_tensors
from tests.unit.weights.policies import TinyPolicy


class Counter(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))


class Writer(nn.Module):
    """A forward pass that counts its calls, in the way that ``how`` says."""

    def __init__(self, how: Callable[[Writer], None]) -> None:
        super().__init__()
        self.inner = Counter()
        self.weight = nn.Parameter(torch.ones(1))
        self.how = how

    def forward(self) -> Tensor:
        self.how(self)
        return self.weight


def in_place(policy: Writer) -> None:
    policy.inner.calls.add_(1)


def same_value(policy: Writer) -> None:
    policy.inner.calls.mul_(1)


def past_the_counter(policy: Writer) -> None:
    policy.inner.calls.data.add_(1)


def replaced(policy: Writer) -> None:
    policy.inner.calls = policy.inner.calls + 1


def run(module: nn.Module) -> None:
    with torch.inference_mode():
        module()


@pytest.mark.parametrize("how", [in_place, same_value, past_the_counter, replaced])
def test_a_write_to_a_persistent_buffer_is_named_and_leaves_the_policy_alone(how: Callable[[Writer], None]) -> None:
    policy = Writer(how)
    assert written_tensors(policy, run) == ["inner.calls"]
    assert policy.inner.calls.item() == 0


def test_a_write_that_reaches_the_original_past_the_copy_is_named_too() -> None:
    original = Writer(lambda _: None)
    original.how = lambda _: in_place(original)
    assert written_tensors(original, run) == ["inner.calls"]


def test_batch_norm_writes_in_training_mode_only() -> None:
    module = nn.BatchNorm1d(2)

    def forward(module: nn.Module) -> None:
        module(torch.randn(4, 2))

    assert written_tensors(module, forward) == ["num_batches_tracked", "running_mean", "running_var"]
    assert written_tensors(module.eval(), forward) == []


def test_transient_buffers_may_be_written() -> None:
    def scribble(policy: nn.Module) -> None:
        policy.get_buffer("scratch").add_(1)

    assert written_tensors(TinyPolicy(), scribble) == []


def test_random_states_are_put_back() -> None:
    def draw(_: nn.Module) -> None:
        torch.rand(3)
        np.random.rand(3)
        random.random()

    before = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
    written_tensors(TinyPolicy(), draw)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert str(np.random.get_state(legacy=False)) == str(before[1])
    assert random.getstate() == before[2]


def test_a_private_copy_has_the_same_state_ties_included_and_its_own_memory() -> None:
    policy = TinyPolicy()
    copy = private_copy(policy)
    assert isinstance(copy, TinyPolicy)
    assert digest_module(copy) == digest_module(policy)
    assert copy.critic[0].weight is copy.actor[0].weight
    copy.learn()
    assert digest_module(copy) != digest_module(policy)
    assert copy._weights is not policy._weights
