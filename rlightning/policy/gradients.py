"""Exact gradient reduction over train members: flatten, all-gather, sum in rank order.

The result has the same bits on every rank, in every placement and however a network would cut the buffer, for a given
number of ranks: floating-point addition is not associative, so the order of the sum is fixed here and nothing else
may reduce.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from rlightning.errors import MemberDeadlineExceeded, MemberLost
from rlightning.runtime.rng import RngState


class Reduction(Protocol):
    """How one train member exchanges flat tensors with the others."""

    rank: int
    world_size: int

    def all_gather(self, flat: Tensor) -> Sequence[Tensor]:
        """Every rank's ``flat`` (same shape and dtype everywhere), in rank order."""
        ...


def reduce_gradients(
    parameters: Iterable[tuple[str, nn.Parameter]], reduction: Reduction, extra: Tensor | None = None
) -> Tensor | None:
    """Replace every gradient by the sum over ranks, in place.

    Args:
        parameters: named parameters; those that need no gradient are left out. A gradient that is None counts as 0.
        reduction: the train group.
        extra: ``(K,)`` float32 of further sums to take along (losses, counts).

    Returns:
        The sum over ranks of ``extra``, or None.
    """
    trainable = sorted((name, p) for name, p in parameters if p.requires_grad)
    pieces = [
        (torch.zeros(p.numel(), dtype=p.dtype) if p.grad is None else p.grad.detach().reshape(-1)).to(torch.float32)
        for _, p in trainable
    ]
    if extra is not None:
        pieces.append(extra.detach().reshape(-1).to(torch.float32))
    gathered = reduction.all_gather(torch.cat(pieces))
    total = gathered[0].clone()
    for other in gathered[1:]:
        total += other
    offset = 0
    for _, p in trainable:
        summed = total[offset : offset + p.numel()].view_as(p)
        if p.grad is None:
            p.grad = summed.to(p.dtype).clone()
        else:
            p.grad.copy_(summed)
        offset += p.numel()
    return total[offset:] if extra is not None else None


class Baton:
    """Lets train members of one process take turns, one at a time, switching only at collectives.

    torch's generators are global, so two members must never run at once. Rank 0 runs until it contributes to a
    collective, hands over, rank 1 runs, and so on; after the last contribution rank 0 goes on. The global generators
    are swapped at every hand-over.
    """

    def __init__(self, world_size: int, seconds: float) -> None:
        self.world_size, self.seconds = world_size, seconds
        self._turn = 0
        self._contributions: dict[int, Tensor] = {}
        self._finished: set[int] = set()
        self._failed: tuple[int, BaseException] | None = None
        self._changed = threading.Condition()

    def start(self) -> None:
        """Forget an earlier round; call it before the members' threads start."""
        with self._changed:
            self._turn, self._contributions, self._finished, self._failed = 0, {}, set(), None

    def wait_for_turn(self, rank: int) -> None:
        """Block until it is this rank's turn.

        Raises:
            MemberLost: another rank raised, so this collective can never complete.
            MemberDeadlineExceeded: the rank whose turn it is kept it longer than ``collectiveSeconds``.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._failed or self._turn == rank, self.seconds):
                raise MemberDeadlineExceeded(
                    "gradient reduction", [f"train-{self._turn}"], self.seconds, "spec.deadlines.collectiveSeconds"
                )
            if self._failed:
                other, error = self._failed
                raise MemberLost(f"train-{other}", "gradient reduction", f"{type(error).__name__}: {error}")

    def _pass_on(self) -> None:
        for step in range(1, self.world_size + 1):
            following = (self._turn + step) % self.world_size
            if following not in self._finished:
                self._turn = following
                break
        self._changed.notify_all()

    def finish(self, rank: int, error: BaseException | None = None) -> None:
        """This rank's call is over; the others go on, or are told why they cannot."""
        with self._changed:
            self._finished.add(rank)
            if error is not None and self._failed is None:
                self._failed = (rank, error)
            elif self._contributions and self._failed is None:
                left = RuntimeError(f"train-{rank} ended its step without joining a gradient reduction of the others")
                self._failed = (rank, left)
            self._pass_on()

    def all_gather(self, rank: int, flat: Tensor) -> list[Tensor]:
        """Contribute, let the others run up to the same point, and return everybody's contribution in rank order."""
        own = RngState.capture()
        with self._changed:
            self._contributions[rank] = flat
            gathered = self._contributions
            if self._finished:
                missing = min(self._finished)
                raise MemberLost(f"train-{missing}", "gradient reduction", "it had already ended its step")
            if len(gathered) == self.world_size:
                self._contributions = {}
            self._pass_on()
        self.wait_for_turn(rank)
        own.restore()
        return [gathered[r] for r in range(self.world_size)]


class BatonReduction:
    """:class:`Reduction` between train members of one process."""

    def __init__(self, baton: Baton, rank: int) -> None:
        self.baton, self.rank, self.world_size = baton, rank, baton.world_size

    def all_gather(self, flat: Tensor) -> list[Tensor]:
        return self.baton.all_gather(self.rank, flat)


def other_members(rank: int, world_size: int) -> str:
    """Names of the train members but one, for a sentence."""
    return ", ".join(f"train-{r}" for r in range(world_size) if r != rank)


class ProcessGroupReduction:
    """:class:`Reduction` over a torch process group that holds the train members only."""

    def __init__(self, group: torch.distributed.ProcessGroup, rank: int, world_size: int, seconds: float) -> None:
        self.group, self.rank, self.world_size, self.seconds = group, rank, world_size, seconds

    def all_gather(self, flat: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(flat) for _ in range(self.world_size)]
        try:
            work = torch.distributed.all_gather(gathered, flat, group=self.group, async_op=True)
            assert work is not None
            work.wait(datetime.timedelta(seconds=self.seconds))
        except RuntimeError as error:
            raise MemberLost(
                other_members(self.rank, self.world_size),
                "gradient reduction",
                f"train-{self.rank} saw no contribution within {self.seconds:g} s "
                f"(spec.deadlines.collectiveSeconds) or a closed connection: {error}",
            ) from error
        return gathered
