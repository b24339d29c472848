"""Joining the group of train members that sums gradients."""

from __future__ import annotations

import datetime
from typing import Any

import torch
from torch import distributed

from rlightning.errors import MemberLost, RLightningError
from rlightning.policy.gradients import BatonReduction, ProcessGroupReduction, Reduction, other_members


class TrainGroupMixin:
    """Joining and leaving a train group. Mixed into :class:`~rlightning.policy.BasePolicy`."""

    reduction: Reduction | None

    def join_baton(self, reduction: BatonReduction) -> None:
        """Take turns with the other train members of this process."""
        self.reduction = reduction

    def join_process_group(
        self, rank: int, world_size: int, host: str, port: int, epoch: int, backend: str, seconds: float
    ) -> None:
        """Join the torch process group of train members; blocks until all have.

        Args:
            host, port: the rendezvous store, which the driver hosts and which so outlives any member.
            epoch: life of the group; a new one never meets leftovers of an old one.
            backend: ``gloo`` or ``nccl``.
            seconds: deadline of joining and of every collective.

        Raises:
            MemberLost: the others did not join, or went away meanwhile.
        """
        check_backend(backend)
        timeout = datetime.timedelta(seconds=seconds)
        try:
            store = distributed.TCPStore(host, port, is_master=False, timeout=timeout)
            prefixed = distributed.PrefixStore(f"train-group-{epoch}", store)
            distributed.init_process_group(backend, store=prefixed, rank=rank, world_size=world_size, timeout=timeout)
        except RuntimeError as error:
            raise MemberLost(
                other_members(rank, world_size),
                "joining the train group",
                f"train-{rank} did not meet them within {seconds:g} s (spec.deadlines.collectiveSeconds) or saw a "
                f"closed connection: {error}",
            ) from error
        group: Any = distributed.group.WORLD
        self.reduction = ProcessGroupReduction(group, rank, world_size, seconds)

    def leave_process_group(self) -> None:
        """Leave, if joined."""
        if distributed.is_initialized():
            distributed.destroy_process_group()
        self.reduction = None


def check_backend(backend: str) -> None:
    """Refuse a backend that cannot work here.

    Raises:
        RLightningError: says which one can.
    """
    if backend not in ("gloo", "nccl"):
        raise RLightningError(f"unknown backend {backend!r} for the train group; use 'gloo' (CPU) or 'nccl' (CUDA)")
    if backend == "nccl" and not torch.cuda.is_available():
        raise RLightningError("backend 'nccl' needs CUDA and this process sees no GPU; use init_comm_group('gloo')")
