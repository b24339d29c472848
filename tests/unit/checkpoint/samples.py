"""States of the kind that real runs save."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import nn

from rlightning.checkpoint.store import Snapshot
from rlightning.weights.digest import digest_tensors


def make_snapshot(iteration: int = 10, *, hidden: int = 64, shards: int = 8, **changes: Any) -> Snapshot:
    """A policy of 9 k parameters (``hidden=64``) with Adam's moments, and shards of environments with their RNGs."""
    torch.manual_seed(iteration)
    actor = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 2))
    critic = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    policy = nn.ModuleDict({"actor": actor, "critic": critic})
    policy.register_buffer("count", torch.tensor(float(iteration), dtype=torch.float64))
    policy.register_buffer("table", torch.arange(iteration, iteration + 6).to(torch.bfloat16).reshape(2, 3))
    policy.register_buffer("mask", torch.zeros(0, dtype=torch.bool))
    model = {name: tensor.detach() for name, tensor in policy.state_dict().items()}
    snapshot = Snapshot(
        iteration=iteration,
        env_steps=iteration * 1024,
        version=iteration,
        attempt=1,
        model=model,
        aliases={"critic.tied.weight": "actor.0.weight"},
        digest=digest_tensors(model),
        sections={
            "learner": {
                "optimizer": _adam_state(list(policy.parameters())),
                "rng": torch.get_rng_state(),
                "progress": 1 / 3,
            },
            "shards": {shard: _shard_state(shard, iteration) for shard in range(shards)},
            "engine": {"episodes": [(21.0, 21), (float("nan"), 3)], "note": "no arrays here"},
        },
        ledger_head={"version": iteration, "attempt": 1, "digest": digest_tensors(model).root},
        numerics={"torch": str(torch.__version__), "threads": "1"},
        job={"apiVersion": "rlightning.io/v1alpha1", "kind": "RLJob", "spec": {"seed": 7}},
    )
    return dataclasses.replace(snapshot, **changes)


def _adam_state(parameters: list[nn.Parameter]) -> dict[str, Any]:
    """As ``torch.optim.Adam.state_dict`` gives it, whose first step would import torch's compiler for seconds."""
    moments = [{"exp_avg": torch.randn_like(p), "exp_avg_sq": torch.randn_like(p).square()} for p in parameters]
    group = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "params": list(range(len(parameters)))}
    return {"state": {i: {"step": torch.tensor(1.0), **m} for i, m in enumerate(moments)}, "param_groups": [group]}


def _shard_state(shard: int, iteration: int) -> dict[str, Any]:
    rng = np.random.Generator(np.random.PCG64(1000 * shard + iteration))
    return {
        "rng": rng.bit_generator.state,  # holds 128-bit integers
        "observation": rng.normal(size=(8, 4)).astype(np.float32),
        "steps": rng.integers(0, 500, size=8),
        "previously_done": rng.random(8) < 0.1,
        "envs": [{"state": rng.normal(size=4), "elapsed": 3, "lives": np.int32(2)} for _ in range(8)],
        "episodes": [(1.5, 12)],
    }
