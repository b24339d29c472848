"""The weight plane: publish a version, apply it at a safe point, and prove by digest that every member runs it."""

from __future__ import annotations

from rlightning.weights.digest import StateDigest, aliases, digest_module, digest_tensors, persistent_tensors
from rlightning.weights.fingerprint import compare_fingerprints
from rlightning.weights.layout import StateLayout
from rlightning.weights.ledger import Ledger, VersionRecord
from rlightning.weights.payload import Acknowledgement, WeightPayload
from rlightning.weights.strategies import WeightStrategy, build_strategy
from rlightning.weights.weight_buffer_mixin import WeightBufferMixin

__all__ = [
    "Acknowledgement",
    "Ledger",
    "StateDigest",
    "StateLayout",
    "VersionRecord",
    "WeightBufferMixin",
    "WeightPayload",
    "WeightStrategy",
    "aliases",
    "build_strategy",
    "compare_fingerprints",
    "digest_module",
    "digest_tensors",
    "persistent_tensors",
]
