"""Who calls (TokenReview) and what they may read (SubjectAccessReview): the API server decides, every time but seconds.

Answers are kept for seconds, so that a page that polls costs the API server little. Keys are digests of tokens under a
key that this process draws at its start; a token itself is never kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rlightning.api.models import GROUP
from rlightning_operator.rest import metrics
from rlightning_operator.rest.cluster import Cluster
from rlightning_operator.rest.problems import Problem, unauthenticated

REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
MAX_TOKEN = 16 * 1024  # longer than any issuer's; what is longer is not sent on

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Caller:
    """Whom a token belongs to, in the API server's words."""

    key: bytes = field(repr=False)
    username: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: dict[str, list[str]] = field(default_factory=dict, repr=False)


class Access:
    """The two questions, each with a cache."""

    def __init__(
        self,
        cluster: Cluster,
        audiences: Sequence[str] = (),
        seconds: float = 10.0,
        size: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._audiences = list(audiences)
        self._secret = secrets.token_bytes(32)
        self._callers: Cache[Caller | None] = Cache("token", seconds, size, clock)
        self._rights: Cache[str | None] = Cache("right", seconds, size, clock)

    async def caller(self, token: str | None) -> Caller:
        """Whose token it is. Raises a 401 Problem."""
        if not token:
            raise unauthenticated(
                "no bearer token was given; send `Authorization: Bearer TOKEN`, for instance with the token that "
                "`kubectl create token NAME" + "".join(f" --audience={a}" for a in self._audiences[:1]) + "` prints"
            )
        caller = None
        if len(token) <= MAX_TOKEN and token.isascii():
            key = hashlib.blake2b(token.encode(), key=self._secret, digest_size=32).digest()
            caller = await self._callers.get(key, lambda: self._review(token, key))
        if caller is None:
            audience = f" for the audience {' or '.join(self._audiences)}" if self._audiences else ""
            raise unauthenticated(
                f"the API server does not take this token{audience}: it is unknown, has expired or was revoked",
                "invalid_token",
            )
        return caller

    async def require(self, caller: Caller, verb: str, resource: str, namespace: str | None, name: str = "") -> None:
        """Return when the caller may; namespace None: in all namespaces. Raises a 403 Problem."""
        key = (caller.key, verb, resource, namespace, name)
        denial = await self._rights.get(key, lambda: self._ask(caller, verb, resource, namespace, name))
        if denial is not None:
            where = f"in namespace {namespace}" if namespace else "in all namespaces"
            detail = f"{caller.username} may not {verb} {resource}.{GROUP} {where}{denial}"
            raise Problem(
                "forbidden",
                403,
                detail,
                user=caller.username,
                verb=verb,
                resource=f"{resource}.{GROUP}",
                namespace=namespace,
            )

    async def _review(self, token: str, key: bytes) -> Caller | None:
        spec: dict[str, Any] = {"token": token}
        if self._audiences:
            spec["audiences"] = self._audiences
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        status = (await self._cluster.create("tokenreview", REVIEWS, body)).get("status") or {}
        if status.get("authenticated") is not True:
            return None
        # An API server that knows nothing of audiences answers without them; then nobody has checked them.
        if self._audiences and not set(self._audiences) & set(status.get("audiences") or ()):
            return None
        user = status.get("user") or {}
        if not user.get("username"):
            return None
        return Caller(
            key, user["username"], user.get("uid", ""), tuple(user.get("groups") or ()), dict(user.get("extra") or {})
        )

    async def _ask(self, caller: Caller, verb: str, resource: str, namespace: str | None, name: str) -> str | None:
        """None: allowed; else the reason that the authorizer gives, if any, to end a sentence with."""
        attributes = {"group": GROUP, "resource": resource, "verb": verb, "namespace": namespace or "", "name": name}
        spec = {
            "user": caller.username,
            "uid": caller.uid,
            "groups": list(caller.groups),
            "extra": caller.extra,
            "resourceAttributes": attributes,
        }
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        status = (await self._cluster.create("subjectaccessreview", ACCESS_REVIEWS, body)).get("status") or {}
        if status.get("allowed") is True and status.get("denied") is not True:
            return None
        reason = status.get("reason")
        return f": {reason}" if reason else ""


class Cache(Generic[Answer]):
    """Answers by key, for seconds; bounded, the least recently used goes first. Equal questions at once are one."""

    def __init__(self, name: str, seconds: float, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._seconds = seconds
        self._size = size
        self._clock = clock
        self._kept: OrderedDict[Hashable, tuple[float, Answer]] = OrderedDict()
        self._asking: dict[Hashable, asyncio.Task[Answer]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    async def get(self, key: Hashable, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """The kept answer, or a new one; an exception goes to all who wait, and is not kept."""
        kept = self._kept.get(key)
        if kept is not None and kept[0] > self._clock():
            self._kept.move_to_end(key)
            metrics.CACHE.labels(self._name, "hit").inc()
            return kept[1]
        task = self._asking.get(key)
        if task is None:
            metrics.CACHE.labels(self._name, "miss").inc()
            task = asyncio.create_task(self._ask(key, ask))
            self._asking[key] = task
            task.add_done_callback(lambda done: self._done(key, done))
        return await asyncio.shield(task)  # one caller that hangs up does not take the answer from the others

    async def _ask(self, key: Hashable, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        answer = await ask()
        self._kept[key] = (self._clock() + self._seconds, answer)
        self._kept.move_to_end(key)
        while len(self._kept) > self._size:
            self._kept.popitem(last=False)
        return answer

    def _done(self, key: Hashable, task: asyncio.Task[Answer]) -> None:
        self._asking.pop(key, None)
        if not task.cancelled():
            task.exception()  # seen, even when everybody who waited has hung up
