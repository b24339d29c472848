"""One interface to a policy, whether it lives in this process or in a Ray actor."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from rlightning.errors import MemberDeadlineExceeded, MemberError, RLightningError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Future(Protocol[T_co]):
    """An answer that may not be there yet."""

    def result(self, timeout: float | None = None) -> T_co:
        """The answer.

        Raises:
            TimeoutError: it did not come within ``timeout`` seconds.
            MemberError: the member raised; carries its traceback.
            MemberLost: the member's process is gone.
        """
        ...

    def done(self) -> bool:
        """True once :meth:`result` returns or raises at once."""
        ...


@runtime_checkable
class Member(Protocol):
    """A policy that can be called.

    Attributes:
        name: ``train-0``, ``eval-3``…: unique in its group, and what every error, deadline and ledger line calls it.
        role: ``train`` or ``eval``.
        node: id of the Ray node (on Kubernetes a pod). Members with the same node share ``/dev/shm``.
        pod: name of its Kubernetes pod; empty for a member that is in none.
    """

    name: str
    role: str
    node: str
    pod: str

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start ``policy.method(*args, **kwargs)`` and return its future. Never raises what the method raises."""
        ...


class Shared(Generic[T]):
    """An argument that goes to several members; where calls cross processes it crosses once, not once per member.

    The members' methods receive ``value`` itself. Hold on to the object for as long as calls are under way.
    """

    def __init__(self, value: T) -> None:
        self.value = value
        self.reference: Any = None
        """What the placement made of it (Ray: an object reference); None until the first call."""


class Done(Generic[T]):
    """A future that was answered at once (calls into this process)."""

    def __init__(self, value: T | None = None, error: BaseException | None = None) -> None:
        self._value, self._error = value, error

    def result(self, timeout: float | None = None) -> T:
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def done(self) -> bool:
        return True


def explained(member: str, method: str, error: Exception, pod: str = "") -> RLightningError:
    """The error a caller gets: ours as it is, anybody else's with the member's name and its traceback."""
    if isinstance(error, RLightningError):
        return error
    shown = "".join(traceback.format_exception(error))
    wrapped = MemberError(member, method, f"{type(error).__name__}: {error}", shown, pod)
    wrapped.__cause__ = error
    return wrapped


def gather(
    futures: Mapping[str, Future[T]],
    *,
    what: str,
    seconds: float,
    field: str,
    clock: Callable[[], float] | None = None,
) -> dict[str, T]:
    """All answers by member name, or an error that names who was late.

    Args:
        futures: by member name.
        what: what the members were asked, for the error: "rollout of shard 3".
        seconds: one deadline for all of them.
        field: the manifest field that sets it: "spec.deadlines.fragmentSeconds".

    Raises:
        MemberDeadlineExceeded: some had not answered when the deadline passed; names all of those.
        MemberError, MemberLost: the first (in mapping order) failure, as soon as its turn comes.
    """
    now = clock or time.monotonic
    end = now() + seconds
    answers: dict[str, T] = {}
    for name, future in futures.items():
        try:
            answers[name] = future.result(max(0.0, end - now()))
        except TimeoutError:
            late = [n for n, f in futures.items() if n not in answers and not f.done()]
            raise MemberDeadlineExceeded(what, late or [name], seconds, field) from None
    return answers
