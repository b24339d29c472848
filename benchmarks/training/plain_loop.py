"""PPO on CartPole-v1 as one writes it by hand: the yardstick for what RLightning costs on top.

One file after CleanRL's ppo.py (Huang et al. 2022, JMLR 23/274), on the same environment, network, losses and settings
as the benchmark's job. Where a hand-written loop and a careful one differ, this is the careful one: rollouts without
gradients, bootstrapping through time-outs, no training on the dummy step that gymnasium's next-step autoreset inserts.

    python plain_loop.py --seed 1 --iterations 40

prints one JSON object: valid environment steps and seconds at the end of each iteration.
"""

from __future__ import annotations

import argparse
import json
import time

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions.categorical import Categorical

NUM_ENVS = 64
ROLLOUT_STEPS = 128
EPOCHS = 4
MINIBATCH_SIZE = 2048
HIDDEN = 64
LEARNING_RATE = 3e-4
GAMMA = 0.99
GAE_LAMBDA = 0.95
CLIP_RANGE = 0.2
ENTROPY_COEF = 0.0
VALUE_COEF = 0.5
MAX_GRAD_NORM = 0.5


def linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """A linear layer, orthogonal weights and zero bias."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Two hidden layers of tanh."""
    first, second = linear(inputs, HIDDEN, 2**0.5), linear(HIDDEN, HIDDEN, 2**0.5)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), linear(HIDDEN, outputs, gain))


class Agent(nn.Module):
    """Actor and critic, which share nothing."""

    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()
        self.actor = mlp(observations, actions, 0.01)
        self.critic = mlp(observations, 1, 1.0)

    def value(self, observation: torch.Tensor) -> torch.Tensor:
        """(…, observations) → (…,)."""
        out: torch.Tensor = self.critic(observation).squeeze(-1)
        return out

    def distribution(self, observation: torch.Tensor) -> Categorical:
        """Of actions, for (…, observations)."""
        return Categorical(logits=self.actor(observation))


def train(seed: int, iterations: int) -> dict[str, list[float]]:
    """Train and time: ``steps`` and ``seconds`` (a monotonic clock) at the end of each iteration."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    np.random.seed(seed)
    envs = gym.make_vec("CartPole-v1", num_envs=NUM_ENVS, vectorization_mode="vector_entry_point")
    agent = Agent(4, 2)
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)

    observations = torch.zeros(ROLLOUT_STEPS + 1, NUM_ENVS, 4)
    actions = torch.zeros(ROLLOUT_STEPS, NUM_ENVS, dtype=torch.int64)
    log_probs = torch.zeros(ROLLOUT_STEPS, NUM_ENVS)
    rewards = torch.zeros(ROLLOUT_STEPS, NUM_ENVS)
    values = torch.zeros(ROLLOUT_STEPS + 1, NUM_ENVS)
    terminated = torch.zeros(ROLLOUT_STEPS, NUM_ENVS)
    done = torch.zeros(ROLLOUT_STEPS, NUM_ENVS)
    valid = torch.zeros(ROLLOUT_STEPS, NUM_ENVS, dtype=torch.bool)

    observation, _ = envs.reset(seed=seed)
    ended = torch.zeros(NUM_ENVS, dtype=torch.bool)
    steps = 0
    log: dict[str, list[float]] = {"steps": [], "seconds": []}

    for _ in range(iterations):
        with torch.no_grad():
            observations[0] = torch.from_numpy(observation)
            for t in range(ROLLOUT_STEPS):
                distribution = agent.distribution(observations[t])
                action = distribution.sample()
                values[t] = agent.value(observations[t])
                actions[t] = action
                log_probs[t] = distribution.log_prob(action)
                valid[t] = ~ended  # an environment that ended before this step is only being reset by it
                observation, reward, terminations, truncations, _ = envs.step(action.numpy())
                rewards[t] = torch.from_numpy(reward)
                terminated[t] = torch.from_numpy(terminations)
                ended = torch.from_numpy(terminations | truncations)
                done[t] = ended
                observations[t + 1] = torch.from_numpy(observation)
            values[ROLLOUT_STEPS] = agent.value(observations[ROLLOUT_STEPS])

            # Generalised advantage estimation (Schulman et al. 2016, eq. 16). The observation after an ending step is
            # that episode's last, so a time-out bootstraps from the next row and only termination does not.
            deltas = rewards + GAMMA * values[1:] * (1.0 - terminated) - values[:-1]
            carry = GAMMA * GAE_LAMBDA * (1.0 - done)
            advantages = torch.zeros_like(rewards)
            running = torch.zeros(NUM_ENVS)
            for t in reversed(range(ROLLOUT_STEPS)):
                running = deltas[t] + carry[t] * running
                advantages[t] = running
            returns = advantages + values[:-1]

        rows = valid.flatten().nonzero().squeeze(-1)
        batch = {
            "observations": observations[:-1].flatten(0, 1)[rows],
            "actions": actions.flatten()[rows],
            "log_probs": log_probs.flatten()[rows],
            "advantages": advantages.flatten()[rows],
            "returns": returns.flatten()[rows],
        }
        for _ in range(EPOCHS):
            for chosen in torch.randperm(len(rows)).split(MINIBATCH_SIZE):
                distribution = agent.distribution(batch["observations"][chosen])
                value = agent.value(batch["observations"][chosen])
                advantage = batch["advantages"][chosen]
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                ratio = (distribution.log_prob(batch["actions"][chosen]) - batch["log_probs"][chosen]).exp()
                policy_loss = -torch.min(
                    advantage * ratio, advantage * ratio.clamp(1.0 - CLIP_RANGE, 1.0 + CLIP_RANGE)
                ).mean()
                value_loss = nn.functional.mse_loss(value, batch["returns"][chosen])
                loss = policy_loss + VALUE_COEF * value_loss - ENTROPY_COEF * distribution.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
                optimizer.step()

        steps += len(rows)
        log["steps"].append(steps)
        log["seconds"].append(time.perf_counter())
    envs.close()
    return log


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=40)
    arguments = parser.parse_args()
    print(json.dumps(train(arguments.seed, arguments.iterations)))
