"""CartPole for a whole shard: gymnasium's ``CartPoleVectorEnv``, bit for bit, at a fraction of its time.

A CartPole step is arithmetic on a few hundred numbers, so the time goes into the number of NumPy calls and their
temporaries, not into the arithmetic. Three things keep the calls few: the state, its derivative and the scratch
values lie in one array, so that operations on neighbouring rows become one; constants are whole rows (converting a
Python float costs more than the operation); every result has its place. The order of floating-point operations is
gymnasium's, and a test compares every bit.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np
from gymnasium.utils import seeding

from rlightning.env.state import generator_state, set_generator_state
from rlightning.errors import CheckpointError, EnvironmentFault

GRAVITY, MASS_CART, MASS_POLE, HALF_LENGTH, FORCE, TAU = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
TOTAL_MASS = MASS_POLE + MASS_CART
POLE_MASS_LENGTH = MASS_POLE * HALF_LENGTH
POSITION_LIMIT, ANGLE_LIMIT = 2.4, 12 * 2 * math.pi / 360
RESET_BOUND = 0.05

# Rows of the state here are (x, θ, ẋ, θ̇), so that state and derivative overlap; gymnasium's are (x, ẋ, θ, θ̇).
_TO_GYMNASIUM = np.array([0, 2, 1, 3])


class NativeCartPole:
    """``num_envs`` cart-poles that reset on the step after an episode's last one.

    Args:
        num_envs: number of environments, N.
        max_episode_steps: steps after which an episode is truncated.
        sutton_barto_reward: reward 0 per step and -1 at the fall, instead of 1 per step.
    """

    def __init__(self, num_envs: int, max_episode_steps: int, sutton_barto_reward: bool = False) -> None:
        self.num_envs = num_envs
        self.max_episode_steps = max_episode_steps
        self.sutton_barto_reward = sutton_barto_reward
        self.episodes: list[tuple[float, int]] = []
        self._random, self._seed = seeding.np_random(0)
        self._started = False

        n = num_envs
        # x, θ, ẋ, θ̇, ẍ, θ̈: the state is rows 0..3, its derivative rows 2..5.
        self._rows = np.zeros((6, n))
        self._done = np.zeros(n, dtype=bool)
        self._any_done = False
        # Steps since reset are _tick - _start: nothing to count while no episode ends.
        self._tick = 0
        self._start = np.zeros(n, dtype=np.int64)
        self._next_time_limit = max_episode_steps
        self._view = self._rows[:4].reshape(2, 2, n).transpose(2, 1, 0)  # (N, position or angle, value or rate)
        self._gymnasium_rows = self._rows[:4].reshape(2, 2, n).transpose(1, 0, 2)

        def row(*values: float) -> np.ndarray:
            return np.repeat(np.array(values)[:, None], n, axis=1).reshape(
                (len(values), n) if len(values) > 1 else (n,)
            )

        scratch = np.zeros((2, n))
        self._bound = (
            self._rows[:4],
            self._rows[2:6],
            self._rows[:2],
            self._rows[1],
            self._rows[3:5],
            self._rows[4],
            self._rows[5],
            scratch,
            scratch[0],
            scratch[1],
            np.zeros(n),
            np.zeros(n),
            np.zeros((4, n)),
            np.zeros((2, n)),
            np.zeros((2, n), dtype=bool),
            row(POLE_MASS_LENGTH, MASS_POLE),
            row(TOTAL_MASS, TOTAL_MASS),
            row(TOTAL_MASS),
            row(4.0 / 3.0),
            row(HALF_LENGTH),
            row(GRAVITY),
            row(POLE_MASS_LENGTH),
            row(TAU, TAU, TAU, TAU),
            row(POSITION_LIMIT, ANGLE_LIMIT),
            np.array([-FORCE, FORCE]),
        )

    def reset(self, seed: int) -> None:
        """Start every environment anew from ``seed``, as ``CartPoleVectorEnv.reset(seed=seed)`` does."""
        self._random, self._seed = seeding.np_random(seed)
        self._rows[_TO_GYMNASIUM] = self._random.uniform(-RESET_BOUND, RESET_BOUND, size=(4, self.num_envs))
        self._set_progress(np.zeros(self.num_envs, dtype=np.int64), np.zeros(self.num_envs, dtype=bool))
        self.episodes = []

    def observe_into(self, observation: np.ndarray) -> None:
        """Write the latest observation, (N, 4) float32."""
        observation.reshape(-1, 2, 2)[...] = self._view

    def step_into(
        self,
        action: np.ndarray,
        observation: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        valid: np.ndarray,
    ) -> None:
        """One step of every environment, written into the caller's arrays.

        Args:
            action: (N,) integers, 0 pushes left, 1 right.
            observation: (N, 4) float32.
            reward: (N,) float32.
            terminated, truncated, valid: (N,) bool.

        Raises:
            EnvironmentFault: an action is neither 0 nor 1, or there are not N of them.
        """
        # Integers 0 and 1 consist of bytes 0 and 1 only; a float or a negative number does not.
        if action.shape != self._start.shape or action.tobytes().translate(None, b"\x00\x01"):
            self._refuse(action)
        (
            state, derivative, position, angle, rate_and_cos, cos, angle_acceleration,
            scratch, temp, denominator, sin, work, change, distance, outside,
            pole_masses, total_masses, total_mass, four_thirds, half_length, gravity, pole_mass_length, tau, limits,
            forces,
        ) = self._bound  # fmt: skip
        multiply, subtract, divide = np.multiply, np.subtract, np.divide
        try:
            force = forces[action]
        except IndexError:
            self._refuse(action)

        np.cos(angle, cos)
        np.sin(angle, sin)
        # temp = (force + POLE_MASS_LENGTH * θ̇² * sin) / TOTAL_MASS, and below it MASS_POLE * cos² / TOTAL_MASS
        np.square(rate_and_cos, scratch)
        multiply(scratch, pole_masses, scratch)
        multiply(temp, sin, temp)
        np.add(temp, force, temp)
        divide(scratch, total_masses, scratch)
        # θ̈ = (GRAVITY * sin - cos * temp) / (HALF_LENGTH * (4/3 - MASS_POLE * cos² / TOTAL_MASS))
        subtract(four_thirds, denominator, denominator)
        multiply(denominator, half_length, denominator)
        multiply(sin, gravity, sin)
        multiply(cos, temp, work)
        subtract(sin, work, work)
        divide(work, denominator, angle_acceleration)
        # ẍ = temp - POLE_MASS_LENGTH * θ̈ * cos / TOTAL_MASS; the cosine's row is ẍ's
        multiply(angle_acceleration, pole_mass_length, work)
        multiply(work, cos, work)
        divide(work, total_mass, work)
        subtract(temp, work, cos)
        # Euler: every row moves by TAU times the row two below it, all from the old values.
        multiply(derivative, tau, change)
        np.add(state, change, state)

        np.absolute(position, distance)
        np.greater(distance, limits, outside)
        np.logical_or(outside[0], outside[1], terminated)
        self._tick += 1
        if self.sutton_barto_reward:
            reward[...] = terminated
            np.negative(reward, reward)
        else:
            reward.fill(1.0)
        if self._any_done:
            self._reset_finished(reward, terminated, valid)
        else:
            valid.fill(True)
        observation.reshape(-1, 2, 2)[...] = self._view

        done = self._done
        if self._tick >= self._next_time_limit:
            np.equal(self._start, self._tick - self.max_episode_steps, truncated)
            np.logical_or(terminated, truncated, done)
            self._next_time_limit = max(self._tick + 1, int(self._start.min()) + self.max_episode_steps)
        else:
            truncated.fill(False)
            done[...] = terminated
        self._any_done = b"\x01" in done.tobytes()
        if self._any_done:
            self._record_episodes(terminated)

    def _reset_finished(self, reward: np.ndarray, terminated: np.ndarray, valid: np.ndarray) -> None:
        (finished,) = self._done.nonzero()
        # Gymnasium draws a row each of x, ẋ, θ, θ̇.
        start = self._random.uniform(-RESET_BOUND, RESET_BOUND, size=(2, 2, len(finished)))
        self._gymnasium_rows[:, :, finished] = start
        self._start[finished] = self._tick
        reward[finished] = 0.0
        terminated[finished] = False
        np.logical_not(self._done, valid)

    def _record_episodes(self, terminated: np.ndarray) -> None:
        (finished,) = self._done.nonzero()
        lengths = (self._tick - self._start[finished]).tolist()
        if self.sutton_barto_reward:
            returns = [-1.0 if fell else 0.0 for fell in terminated[finished].tolist()]
        else:
            returns = [float(length) for length in lengths]
        self.episodes.extend(zip(returns, lengths, strict=True))

    def _refuse(self, action: np.ndarray) -> NoReturn:
        raise EnvironmentFault(
            f"CartPole takes {self.num_envs} integer actions, each 0 or 1; it was given {action.dtype} of shape "
            f"{action.shape}: {np.array2string(np.asarray(action), threshold=16)}"
        )

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps depend on, in the terms of gymnasium's ``CartPoleVectorEnv``."""
        return {
            "state": self._rows[_TO_GYMNASIUM],
            "steps": self._tick - self._start,
            "prev_done": self._done.copy(),
            "np_random": generator_state(self._random),
            "np_random_seed": self._seed,
            "episodes": list(self.episodes),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()`` of an equally configured instance.

        Raises:
            CheckpointError: the state is of another number of environments.
        """
        if state["state"].shape != (4, self.num_envs):
            raise CheckpointError(
                f"the saved CartPole state is of shape {state['state'].shape}, this shard needs (4, {self.num_envs}); "
                "numEnvs and shards must be those of the run"
            )
        self._rows[_TO_GYMNASIUM] = state["state"]
        self._set_progress(state["steps"], state["prev_done"])
        self._random = set_generator_state(self._random, state["np_random"])
        self._seed = state["np_random_seed"]
        self.episodes = [(float(value), int(length)) for value, length in state["episodes"]]

    def _set_progress(self, steps: np.ndarray, done: np.ndarray) -> None:
        self._tick = 0
        self._start[...] = -steps
        self._done[...] = done
        self._any_done = bool(self._done.any())
        self._next_time_limit = 1  # the first step works out the real one
