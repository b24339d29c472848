"""Exact reduction: what each rank contributes, in which order it is summed, and how members take turns."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlightning.errors import MemberLost
from rlightning.policy.gradients import Baton, BatonReduction, reduce_gradients
from rlightning.runtime.rng import RngState, Stream


def in_turns(world: int, body: Any, seconds: float = 10.0) -> tuple[list[Any], list[Any]]:
    """Run body(rank, reduction) on every rank, taking turns; results and errors by rank."""
    baton = Baton(world, seconds)
    baton.start()
    results: list[Any] = [None] * world
    errors: list[Any] = [None] * world

    def run(rank: int) -> None:
        error = None
        try:
            baton.wait_for_turn(rank)
            results[rank] = body(rank, BatonReduction(baton, rank))
        except Exception as caught:
            error = errors[rank] = caught
        finally:
            baton.finish(rank, error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return results, errors


@pytest.mark.parametrize("world", [1, 2, 3])
def test_everybody_gets_everybodys_contribution_in_rank_order(world: int) -> None:
    def body(rank: int, reduction: BatonReduction) -> Any:
        return [[int(t) for t in reduction.all_gather(torch.tensor(rank + 10 * i))] for i in range(3)]

    results, errors = in_turns(world, body)
    assert errors == [None] * world
    assert results == [[[r + 10 * i for r in range(world)] for i in range(3)]] * world


def test_gradients_are_summed_in_rank_order_in_float32_and_a_missing_one_counts_as_zero() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 4)).astype(np.float32)

    def body(rank: int, reduction: BatonReduction) -> Any:
        module = nn.Linear(4, 1)
        module.weight.grad = torch.from_numpy(values[rank : rank + 1].copy())
        if rank == 1:
            module.bias.grad = torch.tensor([2.0])
        extra = reduce_gradients(module.named_parameters(), reduction, torch.tensor([float(rank), 1.0]))
        assert module.bias.grad is not None and extra is not None
        return module.weight.grad.numpy().copy(), module.bias.grad.item(), extra.tolist()

    results, errors = in_turns(3, body)
    assert errors == [None] * 3
    # NumPy adds in the same order and precision: the bits must agree, not only the values.
    expected = (values[0] + values[1]) + values[2]
    for weight, bias, extra in results:
        assert weight.tobytes() == expected.tobytes()
        assert bias == 2.0
        assert extra == [3.0, 3.0]


def test_each_rank_has_its_own_random_state_across_collectives() -> None:
    def alone(rank: int) -> list[float]:
        with RngState.seeded(0, Stream.MEMBER, rank).swapped():
            return [float(torch.rand(())) for _ in range(4)]

    def body(rank: int, reduction: BatonReduction) -> Any:
        RngState.seeded(0, Stream.MEMBER, rank).restore()
        drawn = []
        for _ in range(4):
            drawn.append(float(torch.rand(())))
            reduction.all_gather(torch.zeros(1))
        return drawn

    results, errors = in_turns(2, body)
    assert errors == [None, None]
    assert results == [alone(0), alone(1)]


def test_a_rank_that_raises_is_named_to_the_others() -> None:
    def body(rank: int, reduction: BatonReduction) -> Any:
        reduction.all_gather(torch.zeros(1))
        if rank == 1:
            raise ValueError("broken")
        reduction.all_gather(torch.zeros(1))

    _, errors = in_turns(2, body)
    assert isinstance(errors[1], ValueError)
    assert isinstance(errors[0], MemberLost)
    assert "train-1" in str(errors[0]) and "broken" in str(errors[0])


@pytest.mark.parametrize("fewer", [0, 1])
def test_a_rank_that_skips_a_reduction_is_named(fewer: int) -> None:
    def body(rank: int, reduction: BatonReduction) -> Any:
        for _ in range(1 if rank == fewer else 2):
            reduction.all_gather(torch.zeros(1))

    _, errors = in_turns(2, body)
    lost = [e for e in errors if e is not None]
    assert len(lost) == 1 and isinstance(lost[0], MemberLost)
    assert f"train-{fewer}" in str(lost[0])
