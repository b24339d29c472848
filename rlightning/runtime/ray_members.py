"""Members in Ray actors: on this machine's own Ray, or on a Ray cluster."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rlightning.errors import MemberError, MemberLost, RLightningError
from rlightning.runtime.member import Future, Shared


class RayMember:
    """A policy in a Ray actor."""

    def __init__(self, name: str, role: str, handle: Any, node: str = "") -> None:
        self.name, self.role, self.node, self.handle = name, role, node, handle

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return RayFuture(
            self.name, method, self.handle.member_call.remote(method, *[_stored(a) for a in args], **kwargs)
        )


class RayFuture:
    """An object reference whose failures name the member."""

    def __init__(self, member: str, method: str, ref: ray.ObjectRef) -> None:
        self.member, self.method, self.ref = member, method, ref

    def result(self, timeout: float | None = None) -> Any:
        try:
            return ray.get(self.ref, timeout=timeout)
        except GetTimeoutError:
            raise TimeoutError(f"{self.member}.{self.method}") from None
        except RayActorError as error:
            raise MemberLost(self.member, self.method, _cause(error)) from error
        except RayTaskError as error:
            if isinstance(error.cause, RLightningError):
                raise error.cause from None
            # Not from the policy itself, which explains its errors: Ray could not start the call or return its answer.
            raise MemberError(self.member, self.method, type(error.cause).__name__, str(error)) from None

    def done(self) -> bool:
        return bool(ray.wait([self.ref], timeout=0)[0])


def _cause(error: RayActorError) -> str:
    """Ray's account of an actor's death, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines) or "its Ray actor died"


def _stored(argument: Any) -> Any:
    """A shared argument as the reference of the one copy in Ray's object store; anything else as it is."""
    if not isinstance(argument, Shared):
        return argument
    if argument.reference is None:
        argument.reference = ray.put(argument.value)
    return argument.reference
