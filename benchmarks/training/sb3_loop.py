"""stable-baselines3's PPO on the benchmark's job: 64 CartPole-v1 in a DummyVecEnv, one thread, on the CPU.

Runs in an environment of its own (see setup-sb3). Prints the same JSON object as plain_loop.py.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv

NUM_ENVS = 64
ROLLOUT_STEPS = 128


class Clock(BaseCallback):
    """Notes steps and seconds whenever an iteration has ended, which is when the next rollout starts."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.seconds: list[float] = []

    def note(self) -> None:
        if self.num_timesteps > 0:
            self.steps.append(self.num_timesteps)
            self.seconds.append(time.perf_counter())

    def _on_rollout_start(self) -> None:
        self.note()

    def _on_training_end(self) -> None:
        self.note()

    def _on_step(self) -> bool:
        return True


def train(seed: int, iterations: int) -> dict[str, list[float]]:
    """Train and time: ``steps`` and ``seconds`` (a monotonic clock) at the end of each iteration."""
    torch.set_num_threads(1)
    model = PPO(
        "MlpPolicy",  # 2×64 tanh, actor and critic apart, Adam with eps 1e-5: defaults, like all that is not named here
        make_vec_env("CartPole-v1", n_envs=NUM_ENVS, seed=seed, vec_env_cls=DummyVecEnv),
        n_steps=ROLLOUT_STEPS,
        batch_size=2048,
        n_epochs=4,
        seed=seed,
        device="cpu",
    )
    clock = Clock()
    model.learn(iterations * NUM_ENVS * ROLLOUT_STEPS, callback=clock)
    return {"steps": [float(n) for n in clock.steps], "seconds": clock.seconds}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=40)
    arguments = parser.parse_args()
    print(json.dumps(train(arguments.seed, arguments.iterations)))
