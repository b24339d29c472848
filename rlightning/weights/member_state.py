"""What a policy remembers about its weights, beside the module's own state."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from rlightning.errors import MemberDeadlineExceeded, RLightningError, WeightsError
from rlightning.weights.private_slots import SLOTS, PrivateSlots
from rlightning.weights.slots import SlotReader, SlotVersion, SlotWriter

ACKNOWLEDGEMENT_FIELD = "spec.deadlines.acknowledgementSeconds"

Key = tuple[int, int]  # (attempt, version)


class Deadline:
    """A point in time, counted from now.

    Args:
        seconds: how far away; None is never.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        """Seconds until then, at least 0; None is for ever."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())


@dataclass(frozen=True, eq=False)
class Staged:
    """A version that has arrived and can be applied.

    Attributes:
        number: counts the arrivals at this member. Progress is compared by it and not by the version, because a
            resynchronisation sends the same version again.
        key: its attempt and version.
        arrived: when, on the monotonic clock.
        views: the version's tensors by name.
        bind: point the live tensors at ``views`` (their memory is held then), or copy into them.
        private: the private slot that ``views`` lie in (Double).
        slot: the node's slot that ``views`` lie in (Shared).
    """

    number: int
    key: Key
    arrived: float
    views: Mapping[str, Tensor]
    bind: bool
    private: int | None = None
    slot: SlotVersion | None = None


@dataclass(frozen=True)
class Failure:
    """A version that arrived and could not be applied."""

    number: int
    key: Key
    cause: BaseException

    def __str__(self) -> str:
        if isinstance(self.cause, RLightningError):
            return str(self.cause)
        frames = traceback.extract_tb(self.cause.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
        return f"{type(self.cause).__name__}: {self.cause}{where}"

    def error(self, member: str) -> WeightsError:
        """The same as an exception; raise it from :attr:`cause`."""
        return WeightsError(f"member {member} could not apply version {self.key[1]}: {self}")


class MemberState:
    """Locks, progress and buffers of one policy.

    ``changed`` guards the progress fields. Locks are taken in the order ``stage_lock``, ``act_lock``, ``changed``.
    """

    def __init__(self) -> None:
        self.act_lock = threading.RLock()  # held while acting, while applying and while digesting
        self.stage_lock = threading.Lock()  # one arrival at a time
        self.changed = threading.Condition()
        self.strategy: str | None = None
        self.member = "(unnamed)"
        self.closed = False
        self.daemon: threading.Thread | None = None
        self.published: tuple[Key, str] | None = None  # on a learner: last key and its digest
        self.highest: Key = (-1, -1)  # newest version that came to this member
        self.arrivals = 0
        self.staged: Staged | None = None  # None before the first, and while its private slot is overwritten
        self.staged_number = 0
        self.notified = 0  # arrival that the last notification spoke of
        self.applying: Staged | None = None
        self.applied: Staged | None = None  # whose tensors are live
        self.finished = 0  # last arrival whose application ended, well or not
        self.failure: Failure | None = None
        self.acknowledged = 0  # arrival whose digest was given out
        self.private: PrivateSlots | None = None
        self.private_bound: int | None = None  # private slot that live tensors lie in
        self.reader: SlotReader | None = None
        self.writer: SlotWriter | None = None
        self.acting_depth = 0

    def __reduce__(self) -> tuple[type[MemberState], tuple[()]]:
        return MemberState, ()  # a deep copy of a policy starts without buffers, locks or threads

    def require_strategy(self, *names: str) -> None:
        """Raises WeightsError unless the buffer is open under one of these strategies."""
        if self.closed or self.strategy not in names:
            now = "closed" if self.closed else self.strategy or "not initialised"
            raise WeightsError(
                f"the weight buffer of member {self.member} is {now}: init_weight_buffer with "
                f"{' or '.join(names)} comes first"
            )

    def refuse_older(self, key: Key) -> None:
        """Raises WeightsError for a version older than the newest that came."""
        if key < self.highest:
            raise WeightsError(
                f"member {self.member} was given version {key[1]} of attempt {key[0]} after version {self.highest[1]} "
                f"of attempt {self.highest[0]}: versions never fall; a rollback is a new attempt"
            )

    # --- progress ---

    def arrival(self, key: Key) -> int:
        """Count an arrival; refuses an older version."""
        with self.changed:
            self.refuse_older(key)
            self.highest = key
            self.arrivals += 1
            return self.arrivals

    def free_private_slot(self, deadline: Deadline) -> int:
        """The private slot to fill. What waited there unapplied is superseded."""
        with self.changed:

            def free() -> list[int]:
                held = {self.private_bound, self.applying.private if self.applying else None}
                return [slot for slot in range(SLOTS) if slot not in held]

            if not self.changed.wait_for(free, deadline.left):  # an application is under way
                raise self.late(self.highest[1], deadline)
            slot = free()[0]
            if self.staged is not None and self.staged.private == slot:
                self.staged = None
            return slot

    def put(self, staged: Staged) -> None:
        """The newest arrival can be applied."""
        with self.changed:
            self.staged, self.staged_number = staged, staged.number
            self.changed.notify_all()

    def fail(self, failure: Failure) -> None:
        """An arrival cannot be applied."""
        with self.changed:
            self.failure = failure
            self.changed.notify_all()

    def start_applying(self) -> Staged | None:
        """The newest arrival, if it is still to be applied; its slot is held from here on."""
        with self.changed:
            wanted = self.staged is not None and self.staged.number > self.finished
            self.applying = self.staged if wanted and not self.closed else None
            return self.applying

    def end_applying(self, staged: Staged, failure: Failure | None, private_bound: int | None) -> None:
        """Record how the application went."""
        with self.changed:
            self.applying = None
            self.finished = staged.number
            self.private_bound = private_bound
            if failure is None:
                self.applied = staged
            else:
                self.failure = failure
            self.changed.notify_all()

    def close(self, _: object = None) -> None:
        """Wake everybody up to leave."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    @property
    def applied_number(self) -> int:
        """Arrival whose tensors are live, 0 before the first."""
        return 0 if self.applied is None else self.applied.number

    @property
    def pending(self) -> bool:
        """True if something notified is still to be applied. What is applied then is the newest arrival."""
        return self.staged is not None and self.staged.number > self.finished and self.notified > self.finished

    @property
    def open_failure(self) -> Failure | None:
        """The failure that no later application has made good."""
        return self.failure if self.failure is not None and self.failure.number > self.applied_number else None

    # --- deadlines ---

    @contextlib.contextmanager
    def holding(self, lock: threading.RLock | threading.Lock, version: int, deadline: Deadline) -> Iterator[None]:
        """Hold a lock, or raise MemberDeadlineExceeded."""
        left = deadline.left
        if not lock.acquire(timeout=-1 if left is None else left):
            raise self.late(version, deadline)
        try:
            yield
        finally:
            lock.release()

    def late(self, version: int, deadline: Deadline) -> MemberDeadlineExceeded:
        """This member has not acknowledged in time."""
        what = f"acknowledgement of weight version {version}"
        return MemberDeadlineExceeded(what, [self.member], deadline.seconds or 0.0, ACKNOWLEDGEMENT_FIELD)
