"""Where every random number of an environment comes from.

Seeds are derived with NumPy's SeedSequence from the run's seed, a word for the purpose and an index, so that shards,
environments and evaluation episodes are independent of each other and of the processes that host them.
"""

from __future__ import annotations

import numpy as np

SHARD, EVALUATION = 0x656E76, 0x6576616C  # "env", "eval"


def shard_sequence(seed: int, shard: int, restarts: int = 0) -> np.random.SeedSequence:
    """The stream of one shard; ``restarts`` counts starts after the first, which must not repeat its episodes."""
    return np.random.SeedSequence([seed, SHARD, shard, restarts])


def environment_seeds(sequence: np.random.SeedSequence, count: int) -> list[tuple[int, int]]:
    """For each of ``count`` environments a seed for its own generator and one for its action space."""
    children = np.random.SeedSequence(sequence.entropy, pool_size=sequence.pool_size).spawn(count)
    return [_pair(child) for child in children]


def episode_seeds(seed: int, episode: int) -> tuple[int, int]:
    """Seeds of evaluation episode ``episode``: for the environment and for its action space."""
    return _pair(np.random.SeedSequence([seed, EVALUATION, episode]))


def _pair(sequence: np.random.SeedSequence) -> tuple[int, int]:
    # 31 bits: simulators behind Gymnasium environments often take a C int.
    first, second = (sequence.generate_state(2) >> 1).tolist()
    return first, second
