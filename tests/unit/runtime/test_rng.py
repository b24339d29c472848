"""Random state as a value."""

from __future__ import annotations

import random

import numpy as np
import torch

from rlightning.checkpoint import tree
from rlightning.runtime.rng import RngState, Stream


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_a_block_under_a_state_leaves_the_outer_generators_as_they_were() -> None:
    outer = RngState.capture()
    expected = draw()
    outer.restore()
    inner = RngState.seeded(0, Stream.LEARNER)
    with inner.swapped():
        first = draw()
    assert draw() == expected
    assert first != expected


def test_a_state_goes_on_where_its_last_block_ended() -> None:
    whole = RngState.seeded(3, Stream.MEMBER, 1)
    with whole.swapped():
        expected = [draw(), draw()]
    parts = RngState.seeded(3, Stream.MEMBER, 1)
    drawn = []
    for _ in range(2):
        with parts.swapped():
            drawn.append(draw())
    assert drawn == expected


def test_the_state_is_kept_when_the_block_raises() -> None:
    state = RngState.seeded(3, Stream.MEMBER)
    with RngState.seeded(3, Stream.MEMBER).swapped():
        draw()
        expected = draw()
    try:
        with state.swapped():
            draw()
            raise KeyError
    except KeyError:
        pass
    with state.swapped():
        assert draw() == expected


def test_streams_and_indices_are_independent() -> None:
    drawn = set()
    for stream in Stream:
        for index in range(3):
            with RngState.seeded(7, stream, index).swapped():
                drawn.add(draw())
    assert len(drawn) == 3 * len(Stream)


def test_a_state_survives_a_checkpoint_with_every_generator_in_mid_stream() -> None:
    state = RngState.seeded(5, Stream.LEARNER)
    with state.swapped():
        draw()
        random.gauss(0, 1)  # leaves a second normal number cached in Python's generator
        np.random.normal()  # and one in NumPy's
    encoded = tree.encode(state.state_dict())
    restored = RngState.from_state_dict(tree.decode(*encoded))
    with state.swapped():
        expected = (draw(), random.gauss(0, 1), float(np.random.normal()))
    with restored.swapped():
        assert (draw(), random.gauss(0, 1), float(np.random.normal())) == expected
