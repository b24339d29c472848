"""``Shared``: two slots in ``/dev/shm`` per node; its members run out of them read-only."""

from __future__ import annotations

from typing import ClassVar

from rlightning.runtime.member import Member, Shared, gather
from rlightning.weights.payload import Acknowledgement, WeightPayload
from rlightning.weights.slots import SlotsHandle, SlotVersion
from rlightning.weights.strategies.strategy import ACKNOWLEDGEMENT_FIELD, START_FIELD, WeightStrategy


class SharedStrategy(WeightStrategy):
    """A version crosses to each node once and is written there by its first member.

    Args:
        lease_seconds: how long a slot's writer waits for members that still act from it.
    """

    name: ClassVar[str] = "Shared"

    def __init__(self, lease_seconds: float) -> None:
        super().__init__()
        self._lease_seconds = lease_seconds

    @property
    def _writers(self) -> dict[str, Member]:
        """The first member of each node, by node."""
        writers: dict[str, Member] = {}
        for member in self._members:
            writers.setdefault(member.node, member)
        return writers

    def _prepare(self, deadline_seconds: float) -> None:
        opened = {writer.name: writer.call("open_weight_slots") for writer in self._writers.values()}
        handles: dict[str, SlotsHandle] = gather(
            opened, what="set-up of shared weight slots", seconds=deadline_seconds, field=START_FIELD
        )
        bound = {}
        for member in self._members:
            slots = handles[self._writers[member.node].name]
            bound[member.name] = member.call("init_weight_buffer", self.name, slots=slots, member=member.name)
        gather(bound, what="weight buffer set-up", seconds=deadline_seconds, field=START_FIELD)

    def _publish(self, payload: WeightPayload, deadline_seconds: float) -> list[Acknowledgement]:
        writers, shared = self._writers, Shared(payload)
        writing = {w.name: w.call("write_weight_slot", shared, self._lease_seconds) for w in writers.values()}
        written: dict[str, SlotVersion] = gather(
            writing,
            what=f"storing weight version {payload.version}",
            seconds=deadline_seconds + self._lease_seconds,
            field=ACKNOWLEDGEMENT_FIELD,
        )
        binding = {}
        for member in self._members:
            version = written[writers[member.node].name]
            binding[member.name] = member.call("receive_weight_slot", version, deadline_seconds)
        return self._acknowledgements(binding, payload.version, deadline_seconds)
