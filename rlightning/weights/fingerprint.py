"""L2 norms of parameters: the reference API's quick comparison.

A norm does not see a sign flip or swapped rows; what proves that two policies are equal is their digest
(:mod:`rlightning.weights.digest`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from rlightning.weights.digest import persistent_state


def param_fingerprint(module: nn.Module) -> dict[str, float]:
    """The float32 L2 norm of each parameter by ``<module>.<param>``; ties once under their first name."""
    fingerprint: dict[str, float] = {}
    for name, tensor in persistent_state(module).tensors.items():
        if isinstance(tensor, nn.Parameter):
            values = tensor.detach().to(torch.complex64 if tensor.is_complex() else torch.float32)
            fingerprint[name] = float(torch.linalg.vector_norm(values))
    return fingerprint


def compare_fingerprints(train: Mapping[str, float], evaluated: Mapping[str, float], rtol: float = 1e-3) -> str | None:
    """The first name (sorted) whose norms do not match, or None if all do.

    A name that only one side has is a mismatch, and so is a norm that is not finite on either side (also on both:
    NaN weights agree with nothing). Otherwise ``|train − eval| / max(|train|, 1e-8) > rtol`` is one.
    """
    for name in sorted(train.keys() | evaluated.keys()):
        want, have = train.get(name, math.nan), evaluated.get(name, math.nan)
        finite = math.isfinite(want) and math.isfinite(have)
        if not finite or abs(want - have) / max(abs(want), 1e-8) > rtol:
            return name
    return None
