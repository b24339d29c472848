"""Train members share the work of each minibatch, and together they compute the gradient of all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlightning.api.resolve import resolve
from rlightning.env import check_environment
from rlightning.policy import TrainingProgress
from rlightning.runtime.numerics import prepare_process
from rlightning.runtime.placement import open_group
from rlightning.types import Fragment
from tests.support.jobs import CARTPOLE, job, merged, run

ENVS, STEPS = 6, 32
GAMMA, LAMBDA, ENTROPY_COEF, VALUE_COEF = 0.99, 0.95, 0.01, 0.5


def recording_job(world: int) -> Any:
    """One iteration, one epoch, one minibatch of everything; every member keeps its gradients."""
    settings = CARTPOLE["policy"]["simplePPO"] | {
        "epochs": 1,
        "minibatchSize": ENVS * STEPS,
        "entropyCoef": ENTROPY_COEF,
    }
    base = {k: v for k, v in CARTPOLE.items() if k != "policy"}
    return job(
        merged(
            base,
            {
                "policy": {"custom": {"class": "tests.support.policies:RecordsGradients", "config": settings}},
                "environment": {"numEnvs": ENVS, "shards": 2},
                "policyGroup": {"train": {"replicas": world}},
            },
        )
    )


def full_batch_gradient(weights: dict[str, torch.Tensor], fragments: list[Fragment]) -> dict[str, np.ndarray]:
    """PPO's gradient over every valid step at once, in float64, written from the formulas and not from our code."""
    w = {name: tensor.double().requires_grad_() for name, tensor in weights.items()}

    def mlp(net: str, x: torch.Tensor) -> torch.Tensor:
        for layer in (0, 2):
            x = torch.tanh(x @ w[f"{net}.{layer}.weight"].T + w[f"{net}.{layer}.bias"])
        return x @ w[f"{net}.4.weight"].T + w[f"{net}.4.bias"]

    rows: list[tuple[Any, int, float, float, float]] = []  # observation, action, log-prob, advantage, return
    for f in fragments:
        value = mlp("critic", torch.from_numpy(f.observation).double())[..., 0].detach().numpy()
        for env in range(f.reward.shape[1]):
            for t in range(STEPS):
                if not f.valid[t, env]:
                    continue
                advantage, weight = 0.0, 1.0
                for k in range(t, STEPS):
                    successor = 0.0 if f.terminated[k, env] else value[k + 1, env]
                    advantage += weight * (float(f.reward[k, env]) + GAMMA * successor - value[k, env])
                    weight *= GAMMA * LAMBDA
                    if f.terminated[k, env] or f.truncated[k, env]:
                        break
                rows.append(
                    (
                        f.observation[t, env],
                        int(f.action[t, env]),
                        float(f.log_prob[t, env]),
                        advantage,
                        advantage + value[t, env],
                    )
                )
    observation = torch.tensor(np.stack([r[0] for r in rows])).double()
    action = torch.tensor([r[1] for r in rows])
    old, advantage_, returns = (torch.tensor([r[i] for r in rows], dtype=torch.float64) for i in (2, 3, 4))
    normalised = (advantage_ - advantage_.mean()) / (advantage_.std() + 1e-8)
    logits = mlp("actor", observation)
    log_probs = logits - torch.logsumexp(logits, -1, keepdim=True)
    ratio = torch.exp(log_probs[torch.arange(len(rows)), action] - old)
    surrogate = torch.minimum(ratio * normalised, ratio.clamp(0.8, 1.2) * normalised)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    value_error = (mlp("critic", observation)[:, 0] - returns) ** 2
    loss = (-surrogate - ENTROPY_COEF * entropy + VALUE_COEF * value_error).mean()
    loss.backward()
    return {name: tensor.grad.numpy() for name, tensor in w.items() if tensor.grad is not None}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_shares_differ_and_sum_to_the_full_batch_gradient(world: int) -> None:
    spec = resolve(recording_job(world).spec)
    prepare_process(1)
    with open_group(spec, check_environment(spec.environment), "local") as group:
        group.host_shards(spec.environment, 2, ENVS // 2, spec.seed)
        group.start_versions(0, 1)
        group.sync_weights()
        fragments = group.rollout(STEPS)
        weights = {name: p.detach().clone() for name, p in group.train_list[0].named_parameters()}
        group.update_dataset([fragments] * world, TrainingProgress(1, 0, 2300))
        group.train()
        recorded = [policy.gradients()[0] for policy in group.train_list]
    dummies = sum(int((~f.valid).sum()) for f in fragments)
    assert dummies > 0, "the batch should hold autoreset dummies, which must not count"
    expected = full_batch_gradient(weights, fragments)
    assert recorded[0]["own"].keys() == expected.keys()
    for name, gradient in expected.items():
        shares = [r["own"][name].double().numpy() for r in recorded]
        for a in range(world):
            for b in range(a):
                assert not np.array_equal(shares[a], shares[b]), f"ranks {b} and {a} did the same work on {name}"
        # The shares are float32: 1e-6 of the tensor's scale is what their own rounding leaves room for.
        assert np.abs(sum(shares) - gradient).max() < 1e-6 * max(1.0, np.abs(gradient).max()), name
        summed = {r["summed"][name].numpy().tobytes() for r in recorded}
        assert len(summed) == 1, f"ranks hold different sums of {name}"


@pytest.mark.parametrize("world", [2, 3])
def test_several_train_members_repeat_themselves_and_learn_as_one_does(world: int, tmp_path: Path) -> None:
    """Their digest is their own (the order of the sum differs); what they learn is one member's up to rounding."""
    base = merged(
        CARTPOLE, {"environment": {"numEnvs": 6, "shards": 2}, "policy": {"simplePPO": {"minibatchSize": 48}}}
    )
    of = job(base, policyGroup={"train": {"replicas": world}}, training={"totalEnvSteps": 500})
    first, recorder = run(of, tmp_path / "a")
    second, _ = run(of, tmp_path / "b")
    alone, one = run(job(base, training={"totalEnvSteps": 500}), tmp_path / "c")
    assert first.state == "Succeeded", first.message
    assert first.digest == second.digest
    assert first.iteration == alone.iteration == 3
    for several, single in zip(recorder.iterations, one.iterations, strict=True):
        assert several.metrics["value_loss"] == pytest.approx(single.metrics["value_loss"], rel=1e-3)
        assert several.metrics["entropy"] == pytest.approx(single.metrics["entropy"], rel=1e-3)
