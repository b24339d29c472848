"""Does a policy's forward pass write its own published tensors?

Under strategy ``Shared`` those lie in read-only memory, where a write is a SIGSEGV and not an exception. So one forward
pass is made before, on private copies, and whatever it wrote, or replaced, is named.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from rlightning.weights.digest import digest_tensors, persistent_state


def written_tensors(module: nn.Module, probe: Callable[[nn.Module], None]) -> list[str]:
    """Names of persistent tensors that ``probe(copy of module)`` writes in place or replaces.

    The copy has tensors of its own and shares every other attribute; the global random states are put back. Code that
    reaches the original past the copy (a compiled function, a bound method kept as an attribute) is watched too, so
    the original must not be bound to a slot yet.
    """
    clone = private_copy(module)
    before = [(watched, _marks(watched)) for watched in (module, clone)]
    with _random_states_kept():
        probe(clone)
    written: set[str] = set()
    for watched, marks in before:
        after = _marks(watched)
        written.update(name for name in marks.keys() | after.keys() if marks.get(name) != after.get(name))
    return sorted(written)


def private_copy(module: nn.Module) -> nn.Module:
    """A copy of a module tree with its own tensors (ties kept); all other attributes are shared."""
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor] = {}

    def tensor_copy(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in tensors:
            own = copy.deepcopy(tensor) if isinstance(tensor, nn.Parameter) else tensor.detach().clone()
            tensors[id(tensor)] = own
        return tensors[id(tensor)]

    def module_copy(node: nn.Module | None) -> nn.Module | None:
        if node is None:
            return None
        if id(node) in modules:
            return modules[id(node)]
        own = object.__new__(type(node))
        modules[id(node)] = own
        own.__dict__.update(node.__dict__)
        own.__dict__.pop("_weight_state", None)  # locks and buffers belong to the original
        own.__dict__["_parameters"] = {name: tensor_copy(value) for name, value in node._parameters.items()}
        own.__dict__["_buffers"] = {name: tensor_copy(value) for name, value in node._buffers.items()}
        own.__dict__["_modules"] = {name: module_copy(value) for name, value in node._modules.items()}
        return own

    own = module_copy(module)
    assert own is not None
    return own


def _marks(module: nn.Module) -> dict[str, tuple[int, int, str]]:
    """Identity, version counter (in-place writes) and digest (writes past the counter, through ``.data``)."""
    tensors = persistent_state(module).tensors
    digests = digest_tensors(tensors).tensors
    return {
        name: (id(tensor), -1 if tensor.is_inference() else tensor._version, digests[name])
        for name, tensor in tensors.items()
    }


@contextmanager
def _random_states_kept() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
