"""Environments that step a whole shard with array operations."""

from rlightning.env.native.cartpole import NativeCartPole

__all__ = ["NativeCartPole"]
