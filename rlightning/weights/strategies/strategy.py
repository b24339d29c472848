"""How published weights reach the members that act with them."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from rlightning.errors import RLightningError, WeightsError
from rlightning.runtime.member import Future, Member, Shared, gather
from rlightning.weights.payload import Acknowledgement, WeightPayload

ACKNOWLEDGEMENT_FIELD = "spec.deadlines.acknowledgementSeconds"
START_FIELD = "spec.deadlines.memberStartSeconds"
CLOSE_SECONDS = 10.0

_log = logging.getLogger(__name__)


class WeightStrategy(ABC):
    """Stores each version for a set of eval members, has them apply it, and collects what they prove to run.

    Works through :meth:`Member.call` only, so members may be local objects or Ray actors.

    Attributes:
        name: as in ``spec.weights.strategy``.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self._members: list[Member] = []
        self._published: tuple[int, int] | None = None

    def prepare(self, members: Sequence[Member], deadline_seconds: float = 120.0) -> None:
        """Set up the buffers of these members, who replace the earlier ones.

        Raises:
            MemberError: a policy cannot use this strategy; says why.
            MemberDeadlineExceeded: names who was late.
        """
        self._members = list(members)
        self._prepare(deadline_seconds)

    def publish(self, payload: WeightPayload, deadline_seconds: float) -> list[Acknowledgement]:
        """Bring a version to every member. Publishing the last version again resynchronises it.

        Returns:
            One acknowledgement per member, in member order, failed ones (a member could not apply the version)
            included. Comparing digests is :meth:`rlightning.weights.ledger.VersionRecord.build`.

        Raises:
            WeightsError: the version is lower than the last one.
            MemberDeadlineExceeded: names who did not answer in time.
            MemberError, MemberLost: a member raised or is gone; a lease that outlives its deadline is of the first
                kind and names the holder.
        """
        key = (payload.attempt, payload.version)
        if self._published is not None and key < self._published:
            raise WeightsError(
                f"version {key[1]} of attempt {key[0]} cannot be published after version {self._published[1]} of "
                f"attempt {self._published[0]}: versions never fall; a rollback is a new attempt"
            )
        self._published = key
        return self._publish(payload, deadline_seconds)

    def close(self) -> None:
        """Close all buffers and remove shared slots. Members that are gone, or stay silent, are passed over."""
        end = time.monotonic() + CLOSE_SECONDS
        closing = {member.name: member.call("close_weight_buffer") for member in self._members}
        for name, future in closing.items():
            try:
                future.result(max(0.0, end - time.monotonic()))
            except (RLightningError, TimeoutError) as error:  # must not hide the error that ended the run
                _log.warning("weight buffer of %s was not closed: %s", name, str(error) or "no answer")
        self._members = []

    def _acknowledgements(
        self, futures: Mapping[str, Future[Acknowledgement]], version: int, seconds: float
    ) -> list[Acknowledgement]:
        what = f"acknowledgement of weight version {version}"
        answers = gather(futures, what=what, seconds=seconds, field=ACKNOWLEDGEMENT_FIELD)
        return [answers[member.name] for member in self._members]

    @abstractmethod
    def _prepare(self, deadline_seconds: float) -> None: ...

    @abstractmethod
    def _publish(self, payload: WeightPayload, deadline_seconds: float) -> list[Acknowledgement]: ...


class PayloadStrategy(WeightStrategy):
    """Every member is sent the whole payload and stores it by itself."""

    def _prepare(self, deadline_seconds: float) -> None:
        futures = {m.name: m.call("init_weight_buffer", self.name, member=m.name) for m in self._members}
        gather(futures, what="weight buffer set-up", seconds=deadline_seconds, field=START_FIELD)

    def _publish(self, payload: WeightPayload, deadline_seconds: float) -> list[Acknowledgement]:
        shared = Shared(payload)
        futures = {m.name: m.call("receive_weights", shared, deadline_seconds) for m in self._members}
        return self._acknowledgements(futures, payload.version, deadline_seconds)
