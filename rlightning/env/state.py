"""Saving and restoring one Gymnasium environment so that it continues bit for bit.

There is no general way to do this: state may hide in a closure, a C library or another process. So an environment
counts as exact only if each layer, from the outermost wrapper to the environment itself, is a class of Gymnasium's
that is known to keep its state in its attributes, or brings its own ``state_dict`` and ``load_state_dict``. All else
restarts from a reset, and says so.

State is a tree: None, bool, int, float, str, bytes and NumPy arrays in dicts, lists and tuples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers.utils import RunningMeanStd

from rlightning.errors import CheckpointError, EnvironmentFault

# Names that never change after construction and would cost: tables of transitions, maps, and what Gymnasium derives.
_CLASSIC = frozenset({"metadata"})
_TOY_TEXT = frozenset({"metadata", "P", "desc", "initial_state_distrib"})
_MUJOCO = frozenset({"metadata", "model", "data", "mujoco_renderer", "observation_structure"})
_WRAPPER = frozenset({"env", "_action_space", "_observation_space", "_metadata", "_saved_kwargs"})

_KNOWN_MODULES = {
    **{
        f"gymnasium.envs.classic_control.{name}": _CLASSIC
        for name in ("acrobot", "cartpole", "continuous_mountain_car", "mountain_car", "pendulum")
    },
    **{f"gymnasium.envs.toy_text.{name}": _TOY_TEXT for name in ("cliffwalking", "frozen_lake", "taxi")},
    **{
        f"gymnasium.envs.mujoco.{name}_{version}": _MUJOCO
        for version in ("v4", "v5")
        for name in (
            "ant", "half_cheetah", "hopper", "humanoid", "humanoidstandup", "inverted_double_pendulum",
            "inverted_pendulum", "pusher", "reacher", "swimmer", "walker2d",
        )
    },
}  # fmt: skip

_KNOWN_WRAPPERS = frozenset(
    {
        "ClipAction", "ClipReward", "DtypeObservation", "FlattenObservation", "FrameStackObservation",
        "NormalizeObservation", "NormalizeReward", "OrderEnforcing", "PassiveEnvChecker", "RescaleAction",
        "StickyAction", "TimeAwareObservation", "TimeLimit",
    }
)  # fmt: skip

_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_MISSING = object()


class EnvironmentState:
    """What is needed to save and restore ``env``, worked out once, right after it was made.

    Attributes:
        inexact: None if a restored environment continues bit for bit, else the reason why not.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        self.layers = [_Layer(layer) for layer in _unwrap(env)]
        reasons = [layer.inexact for layer in self.layers if layer.inexact is not None]
        self.inexact: str | None = reasons[0] if reasons else None
        if self.inexact is None and getattr(env.unwrapped, "render_mode", None) is not None:
            self.inexact = "it renders, and windows and surfaces cannot be saved"

    def capture(self) -> list[dict[str, Any]]:
        """The state of every layer, outermost first.

        Raises:
            EnvironmentFault: an attribute holds something that is not a tree.
        """
        return [layer.capture() for layer in self.layers]

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Set every layer to a captured state.

        Raises:
            CheckpointError: the state is of other layers.
        """
        saved, mine = [layer["class"] for layer in state], [layer.name for layer in self.layers]
        if saved != mine:
            raise CheckpointError(
                f"the saved environment is {' in '.join(reversed(saved))}, this one is {' in '.join(reversed(mine))}; "
                "the environment or the version of gymnasium has changed since"
            )
        for layer, tree in zip(self.layers, state, strict=True):
            layer.restore(tree)


class _Layer:
    """One wrapper, or the environment inside all of them."""

    def __init__(self, env: gymnasium.Env) -> None:
        self.env = env
        self.name = type(env).__name__
        self.owns_state = all(callable(getattr(type(env), name, None)) for name in ("state_dict", "load_state_dict"))
        self.skip: frozenset[str] = frozenset()
        self.physics: Any = None
        self.inexact: str | None = None
        module = type(env).__module__
        if self.owns_state:
            pass
        elif isinstance(env, gymnasium.Wrapper):
            self.skip = _WRAPPER
            if not (module.startswith("gymnasium.wrappers.") and self.name in _KNOWN_WRAPPERS):
                self.inexact = f"the state of wrapper {module}.{self.name} is not known"
        elif module in _KNOWN_MODULES:
            self.skip = _KNOWN_MODULES[module]
            if self.skip is _MUJOCO:
                from rlightning.env.mujoco_state import MujocoState

                self.physics = MujocoState(env.model, env.data)  # type: ignore[attr-defined]
        else:
            self.inexact = f"{module}.{self.name} has no state_dict and load_state_dict"
        # Values that cannot change in place need saving only once they are another object than at the start.
        self.initial = dict(vars(env))
        self.spaces = _own_spaces(env)

    def capture(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "class": self.name,
            # None: not seeded yet, though Gymnasium types the attribute as if that could not be.
            "spaces": [None if (g := vars(s)["_np_random"]) is None else generator_state(g) for s in self.spaces],
        }
        if self.owns_state:
            generator = vars(self.env).get("_np_random")
            state["np_random"] = None if generator is None else generator_state(generator)
            state["own"] = encode(self.env.state_dict(), f"{self.name}.state_dict()")  # type: ignore[attr-defined]
            return state
        initial, skip = self.initial, self.skip
        state["attributes"] = attributes = {}
        for name, value in vars(self.env).items():
            if type(value) in _ATOMS:
                if value is not initial.get(name, _MISSING) and name not in skip:
                    attributes[name] = value
            elif not (name in skip or isinstance(value, (gymnasium.Space, EnvSpec)) or callable(value)):
                attributes[name] = encode(value, f"{self.name}.{name}")
        if self.physics is not None:
            state["physics"] = self.physics.capture()
        return state

    def restore(self, state: dict[str, Any]) -> None:
        for space, saved in zip(self.spaces, state["spaces"], strict=True):
            vars(space)["_np_random"] = None if saved is None else set_generator_state(space._np_random, saved)
        attributes = vars(self.env)
        if self.owns_state:
            if state["np_random"] is not None:
                attributes["_np_random"] = set_generator_state(attributes.get("_np_random"), state["np_random"])
            self.env.load_state_dict(decode(state["own"]))  # type: ignore[attr-defined]
            return
        saved = state["attributes"]
        for name in [name for name in attributes if name not in saved and name not in self.skip]:
            if name not in self.initial:
                del attributes[name]
            elif type(self.initial[name]) in _ATOMS:
                attributes[name] = self.initial[name]
        for name, tree in saved.items():
            attributes[name] = decode(tree, attributes.get(name))
        if self.physics is not None:
            self.physics.restore(state["physics"])


def _unwrap(env: gymnasium.Env) -> Iterator[gymnasium.Env]:
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env


def _own_spaces(env: gymnasium.Env) -> list[gymnasium.Space]:
    """The spaces that this layer holds itself, nested ones included, in a fixed order."""
    prefix = "_" if isinstance(env, gymnasium.Wrapper) else ""
    names = (f"{prefix}action_space", f"{prefix}observation_space")
    found: list[gymnasium.Space] = []
    queue = [space for name in names if (space := getattr(env, name, None)) is not None]
    while queue:
        space = queue.pop(0)
        found.append(space)
        inner = getattr(space, "spaces", ())
        queue.extend(inner.values() if isinstance(inner, dict) else inner)
    return found


def generator_state(generator: np.random.Generator) -> dict[str, Any]:
    """The generator's state as a tree: names, integers of any size, for some generators an array."""
    return dict(generator.bit_generator.state)


def set_generator_state(generator: np.random.Generator | None, state: dict[str, Any]) -> np.random.Generator:
    """Set ``generator`` in place where it is of the saved kind, else make one.

    Raises:
        CheckpointError: NumPy has no such kind of generator.
    """
    kind = state["bit_generator"]
    if generator is None or generator.bit_generator.state["bit_generator"] != kind:
        bit_generator = getattr(np.random, kind, None)
        if not (isinstance(bit_generator, type) and issubclass(bit_generator, np.random.BitGenerator)):
            raise CheckpointError(f"the saved random generator is a {kind!r}, which numpy.random does not have")
        generator = np.random.Generator(bit_generator())
    generator.bit_generator.state = state
    return generator


def encode(value: Any, where: str) -> Any:
    """``value`` as a tree that shares no memory with it; kinds that trees lack are dicts with a ``$`` key.

    Raises:
        EnvironmentFault: ``where`` holds something that cannot be saved.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is np.ndarray and value.dtype.kind in "biuf":
        return value.copy()
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {"$scalar": np.array(value)}
    if kind is list or kind is tuple:
        return kind(encode(item, f"{where}[{i}]") for i, item in enumerate(value))
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        return {"$items": [[encode(k, where), encode(item, f"{where}[{k!r}]")] for k, item in value.items()]}
    if kind is np.random.Generator:
        return {"$generator": generator_state(value)}
    if kind is deque:
        return {"$deque": [encode(item, where) for item in value], "maxlen": value.maxlen}
    if kind is RunningMeanStd:
        return {"$attributes": encode(vars(value), where)}
    raise EnvironmentFault(
        f"the state of the environment cannot be saved: {where} holds a {kind.__module__}.{kind.__qualname__}. "
        "It may hold None, bool, int, float, str, bytes, NumPy arrays of numbers, and dicts, lists and tuples of them"
    )


def decode(tree: Any, current: Any = None) -> Any:
    """The value that :func:`encode` was given; objects with identity are set in place in ``current``."""
    if isinstance(tree, np.ndarray):
        return tree.copy()
    if isinstance(tree, (list, tuple)):
        return type(tree)(decode(item) for item in tree)
    if not isinstance(tree, dict):
        return tree
    if "$scalar" in tree:
        return tree["$scalar"][()]
    if "$items" in tree:
        return {decode(key): decode(item) for key, item in tree["$items"]}
    if "$generator" in tree:
        return set_generator_state(current if isinstance(current, np.random.Generator) else None, tree["$generator"])
    if "$deque" in tree:
        return deque((decode(item) for item in tree["$deque"]), maxlen=tree["maxlen"])
    if "$attributes" in tree:
        target = current if isinstance(current, RunningMeanStd) else RunningMeanStd()
        vars(target).update(decode(tree["$attributes"]))
        return target
    return {key: decode(item) for key, item in tree.items()}
