"""Stepping shards, and trees that have been through a file."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from rlightning.api.models import EnvironmentSpec
from rlightning.env import EnvShard, StepResult
from tests.unit.env.environments import MODULE


def spec(env_id: str, **fields: Any) -> EnvironmentSpec:
    """``environment`` of a manifest; ids of the test environments get their module."""
    return EnvironmentSpec(id=f"{MODULE}:{env_id}" if env_id.startswith("RLTest/") else env_id, **fields)


def random_actions(shard: EnvShard, steps: int, seed: int = 0) -> list[np.ndarray]:
    """``steps`` batches of actions, Box ones up to half outside the bounds."""
    generator = np.random.default_rng(seed)
    space, n = shard.meta.action_space, shard.num_envs
    assert space is not None
    if space.shape == ():
        return list(generator.integers(0, space.n, size=(steps, n)))  # type: ignore[attr-defined]
    low, high = np.clip(space.low, -3, 3), np.clip(space.high, -3, 3)  # type: ignore[attr-defined]
    return list(generator.uniform(1.5 * low, 1.5 * high, size=(steps, n, *low.shape)).astype(np.float32))


def play(shard: EnvShard, actions: list[np.ndarray]) -> list[StepResult]:
    """The results of all ``actions``."""
    return [shard.step(action) for action in actions]


def assert_identical(first: list[StepResult], second: list[StepResult]) -> None:
    """Equal in every bit, dtype and shape."""
    assert len(first) == len(second)
    for t, (one, other) in enumerate(zip(first, second, strict=True)):
        for name, a, b in zip(StepResult._fields, one, other, strict=True):
            assert a.dtype == b.dtype, f"step {t}, {name}"
            assert a.shape == b.shape, f"step {t}, {name}"
            assert a.tobytes() == b.tobytes(), f"step {t}, {name}: {a} against {b}"


def through_file(tree: Any) -> Any:
    """A copy of ``tree``, arrays by way of the npy format without pickle; fails on anything that is not a tree."""
    if tree is None or type(tree) in (bool, int, float, str, bytes):
        return tree
    if type(tree) is np.ndarray:
        buffer = io.BytesIO()
        np.save(buffer, tree, allow_pickle=False)
        buffer.seek(0)
        return np.load(buffer, allow_pickle=False)
    if type(tree) in (list, tuple):
        return type(tree)(through_file(item) for item in tree)
    assert type(tree) is dict, f"{type(tree)} is not part of a tree"
    assert all(type(key) in (str, int) for key in tree)
    return {key: through_file(value) for key, value in tree.items()}
