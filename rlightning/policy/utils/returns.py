"""Returns and advantages over fragments with next-step autoreset."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def generalized_advantage_estimate(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, truncated: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    r"""Advantages and returns by GAE (Schulman et al. 2016, eq. 16; with time limits as in Pardo et al. 2018).

    .. math:: \delta_t = r_t + \gamma (1 - \mathrm{terminated}_t) V(s_{t+1}) - V(s_t), \qquad
              A_t = \delta_t + \gamma\lambda (1 - \mathrm{done}_t) A_{t+1}

    Termination stops bootstrapping; termination and truncation stop the trace. A truncated step bootstraps from the
    value of its final observation, which is what ``next_value`` holds there.

    Args:
        reward, value, next_value: ``(T, N)`` float32; ``next_value[t]`` is the value of the true successor of row t.
        terminated, truncated: ``(T, N)`` bool.
        gamma: discount in [0, 1].
        lam: trace decay in [0, 1].

    Returns:
        (advantages, returns), each ``(T, N)`` float32, returns = advantages + value. Rows of dummy steps (autoreset)
        hold numbers without meaning; mask them.
    """
    r, v, nv = reward.numpy(), value.numpy(), next_value.numpy()
    g = np.float32(gamma)
    delta = r + g * nv * ~terminated.numpy() - v
    decay = (g * np.float32(lam)) * ~(terminated | truncated).numpy()
    advantage = np.empty_like(delta)
    running = np.zeros(delta.shape[1:], dtype=np.float32)
    for t in range(len(delta) - 1, -1, -1):
        running = np.multiply(decay[t], running, out=advantage[t])
        running += delta[t]
    advantages = torch.from_numpy(advantage)
    return advantages, advantages + value


def explained_variance(value: Tensor, target: Tensor) -> float:
    """``1 − Var[target − value] / Var[target]``; NaN where the target does not vary.

    1 is perfect, 0 no better than a constant.
    """
    variance = target.var(unbiased=False)
    if variance == 0:
        return float("nan")
    return float(1 - (target - value).var(unbiased=False) / variance)
