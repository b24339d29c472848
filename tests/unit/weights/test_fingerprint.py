from __future__ import annotations

import math

import torch

from rlightning.weights.fingerprint import compare_fingerprints
from tests.unit.weights.policies import TinyPolicy


def test_a_fingerprint_is_the_float32_norm_of_each_parameter_top_level_ones_included() -> None:
    policy = TinyPolicy()
    with torch.no_grad():
        policy.log_std.fill_(-3.0)
        policy.get_parameter("actor.2.bias").copy_(torch.tensor([3.0, 4.0]))  # norm 5
    fingerprint = policy.get_param_fingerprint()
    assert fingerprint["log_std"] == 3.0
    assert fingerprint["actor.2.bias"] == 5.0
    assert set(fingerprint) == {name for name, _ in policy.named_parameters()}


def test_norms_are_compared_relative_to_the_learner() -> None:
    assert compare_fingerprints({"a": 1.0}, {"a": 1.0009}) is None
    assert compare_fingerprints({"a": 1.0}, {"a": 1.0011}) == "a"
    assert compare_fingerprints({"a": 1.0}, {"a": 1.0011}, rtol=1e-2) is None
    assert compare_fingerprints({"a": 0.0}, {"a": 1e-12}) is None  # 1e-12 / 1e-8 = 1e-4
    assert compare_fingerprints({"a": 0.0}, {"a": 1e-10}) == "a"


def test_a_norm_that_is_not_finite_is_a_mismatch_even_on_both_sides() -> None:
    for bad in (math.nan, math.inf):
        assert compare_fingerprints({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": bad}) == "b"
        assert compare_fingerprints({"a": bad}, {"a": bad}) == "a"


def test_names_must_match_both_ways() -> None:
    assert compare_fingerprints({"a": 1.0, "b": 0.0}, {"a": 1.0}) == "b"
    assert compare_fingerprints({"a": 1.0}, {"a": 1.0, "b": 0.0}) == "b"
