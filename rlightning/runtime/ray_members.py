"""Members in Ray actors: on this machine's own Ray, or on a Ray cluster."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from rlightning.errors import MemberError, MemberLost, RLightningError
from rlightning.runtime.member import Future, Shared


class RayMember:
    """A policy in a Ray actor."""

    def __init__(self, name: str, role: str, handle: Any, node: str = "", pod: str = "") -> None:
        self.name, self.role, self.node, self.pod, self.handle = name, role, node, pod, handle

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            ref = self.handle.member_call.remote(method, *[_stored(a) for a in args], **kwargs)
        except RayError as error:  # an argument found no room, or the object store is gone
            raise MemberLost(self.name, method, _cause(error), self.pod) from error
        return RayFuture(self.name, method, ref, self.pod)


class RayFuture:
    """An object reference whose failures name the member."""

    def __init__(self, member: str, method: str, ref: ray.ObjectRef, pod: str = "") -> None:
        self.member, self.method, self.ref, self.pod = member, method, ref, pod

    def result(self, timeout: float | None = None) -> Any:
        try:
            return ray.get(self.ref, timeout=timeout)
        except GetTimeoutError:
            raise TimeoutError(f"{self.member}.{self.method}") from None
        except RayTaskError as error:
            if isinstance(error.cause, RLightningError):
                raise error.cause from None
            if isinstance(error.cause, RayError):  # an argument was lost on its way, with the node that held it
                raise MemberLost(self.member, self.method, _cause(error.cause), self.pod) from error
            # Not from the policy itself, which explains its errors: Ray could not start the call or return its answer.
            raise MemberError(self.member, self.method, type(error.cause).__name__, str(error), self.pod) from None
        except RayError as error:
            # The actor died, or its answer did with the node that held it: nothing that the user's code did.
            raise MemberLost(self.member, self.method, _cause(error), self.pod) from error

    def done(self) -> bool:
        return bool(ray.wait([self.ref], timeout=0)[0])


def _cause(error: RayError) -> str:
    """Ray's account of what was lost, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines) or "its Ray actor died"


def _stored(argument: Any) -> Any:
    """A shared argument as the reference of the one copy in Ray's object store; anything else as it is."""
    if not isinstance(argument, Shared):
        return argument
    if argument.reference is None:
        argument.reference = ray.put(argument.value)
    return argument.reference
