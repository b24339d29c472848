"""Requests to the API server: JSON in, JSON out, each with a deadline and counted.

Plain HTTP with aiohttp, which kopf brings, and kopf's own way of finding the credentials: a generated client would
parse every object into models that nobody here looks at.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Any

import aiohttp
import kopf

from rlightning_operator import metrics
from rlightning_operator.kube.kinds import Kind, Object

MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
CHUNK = 500
REQUEST_SECONDS = 30
# Bookmarks arrive about once a minute, so a watch that is silent for longer is dead.
SILENCE_SECONDS = 75
WATCH_SECONDS = 300


class ApiError(Exception):
    """The API server said no. ``code`` is HTTP's, ``reason`` and the text are its own words."""

    def __init__(self, code: int, reason: str, message: str, what: str) -> None:
        super().__init__(f"{what}: {message} ({code} {reason})")
        self.code = code
        self.reason = reason
        self.message = message

    @property
    def already_exists(self) -> bool:
        """An object of that name is there."""
        return self.code == 409 and self.reason == "AlreadyExists"

    @property
    def conflict(self) -> bool:
        """The object has changed since it was read, or is another one of the same name."""
        return self.code == 409 and self.reason != "AlreadyExists"

    @property
    def namespace_ending(self) -> bool:
        """Nothing can be made in the namespace any more, because it is being, or was, deleted."""
        terminating = self.code == 403 and "because it is being terminated" in self.message
        return terminating or (self.code == 404 and self.message.startswith("namespaces "))

    @property
    def object_missing(self) -> bool:
        """There is no object of that name; a 404 may also mean that the kind is not served at the moment."""
        return self.code == 404 and '" not found' in self.message and not self.namespace_ending

    @property
    def transient(self) -> bool:
        """The same request may well succeed a little later."""
        return self.code == 429 or self.code >= 500


class Unreachable(Exception):
    """The API server gave no answer; the message says where it was sought, and how that failed."""


class LoginError(Exception):
    """It is not known where the API server is, or who we are; the message says what to set."""


def login() -> kopf.ConnectionInfo:
    """Where the API server is and who asks: the pod's own account, else what KUBECONFIG names. Raises LoginError."""
    settings = kopf.OperatorSettings()
    try:
        info = None if os.environ.get("KUBECONFIG") else kopf.login_with_service_account(settings=settings)
        if info is not None:
            host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
            if host:  # its name would do as well, as long as DNS does
                host = f"[{host}]" if ":" in host else host
                info = dataclasses.replace(info, server=f"https://{host}:{port}")
            return info
        info = kopf.login_with_kubeconfig(settings=settings)
    except (OSError, KeyError, TypeError, AttributeError, ValueError, kopf.LoginError) as error:
        where = os.environ.get("KUBECONFIG") or "the ServiceAccount's token"
        raise LoginError(f"{where} cannot be used: {type(error).__name__}: {error}") from error
    if info is None or not info.server:
        raise LoginError("there is neither a ServiceAccount's token (as in every pod) nor a file that KUBECONFIG names")
    return info


class Client:
    """The API server. Methods raise :class:`ApiError` or :class:`Unreachable`, nothing else.

    Attributes:
        answers_since: when it last was not reached or failed to answer a read, or this process began: what it holds may
            be old for a while after that, as others could not write either.
    """

    def __init__(self, info: kopf.ConnectionInfo) -> None:
        self._info = info
        self._session: aiohttp.ClientSession | None = None
        self.answers_since = datetime.now(UTC)

    @property
    def server(self) -> str:
        """Its URL."""
        return self._info.server.rstrip("/")

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def list_all(self, kind: Kind, namespace: str | None, selector: str = "") -> tuple[list[Object], str]:
        """All objects and the resourceVersion at which they were so."""
        query = {"limit": str(CHUNK)} | ({"labelSelector": selector} if selector else {})
        items: list[Object] = []
        while True:
            answer = await self.request("GET", kind.path(namespace), kind, verb="list", query=query)
            items += answer.get("items") or []
            metadata = answer.get("metadata", {})
            if not metadata.get("continue"):
                return items, str(metadata.get("resourceVersion", "0"))
            query["continue"] = metadata["continue"]

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        """One object."""
        return await self.request("GET", kind.path(namespace, name), kind)

    async def create(self, kind: Kind, obj: Object) -> Object:
        """POST; returns the object as stored."""
        return await self.request("POST", kind.path(obj["metadata"]["namespace"]), kind, body=obj)

    async def patch(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        patch: Object | list[Object],
        *,
        subresource: str | None = None,
    ) -> Object:
        """A merge patch (an object) or a JSON patch (a list); returns the object as stored."""
        content = JSON_PATCH if isinstance(patch, list) else MERGE
        path = kind.path(namespace, name, subresource)
        return await self.request("PATCH", path, kind, body=patch, content=content)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str, propagation: str) -> Object:
        """DELETE the object of this uid; returns the object, or a Status if it is gone already."""
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": propagation,
        }
        return await self.request("DELETE", kind.path(namespace, name), kind, body=body)

    async def request(
        self,
        method: str,
        path: str,
        kind: Kind | None = None,
        *,
        verb: str = "",
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content: str = "application/json",
    ) -> Object:
        """One request and its answer."""
        data = None if body is None else json.dumps(body).encode()
        code = "none"
        start = time.perf_counter()
        try:
            for again in (True, False):
                timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS, sock_connect=10)
                async with self._open().request(
                    method,
                    self.server + path,
                    params=query,
                    data=data,
                    headers={"Content-Type": content} if data is not None else None,
                    timeout=timeout,
                ) as answer:
                    code, text = str(answer.status), await answer.read()
                if answer.status == 401 and again and await self._renew():
                    continue
                if answer.status >= 400:
                    if answer.status >= 500 and method == "GET":  # a failed write may be a webhook's fault
                        self.answers_since = datetime.now(UTC)
                    raise _error(answer.status, text, f"{method} {path}")
                return _parsed(text, f"{method} {path}")
            raise AssertionError("unreachable")
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            self.answers_since = datetime.now(UTC)
            code = "none" if not isinstance(error, aiohttp.ClientPayloadError) else code
            raise Unreachable(f"{method} {self.server}{path}: {_words(error)}") from error
        finally:
            metrics.REQUESTS.labels(verb or method.lower(), kind.name if kind else "", code).inc()
            metrics.REQUEST_SECONDS.observe(time.perf_counter() - start)

    async def watch(
        self, kind: Kind, namespace: str | None, selector: str, since: str
    ) -> AsyncIterator[tuple[str, Object]]:
        """Events from a resourceVersion on, bookmarks included, until the server ends it, or is silent for too long."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": since,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        if selector:
            query["labelSelector"] = selector
        path = kind.path(namespace)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENCE_SECONDS)
        metrics.REQUESTS.labels("watch", kind.name, "").inc()
        try:
            async with self._open().get(self.server + path, params=query, timeout=timeout) as answer:
                if answer.status >= 400:
                    text = await answer.read()
                    if answer.status == 401:
                        await self._renew()
                    raise _error(answer.status, text, f"watch {path}")
                async for line in _lines(answer.content):
                    event = _parsed(line, f"watch {path}")
                    if event.get("type") == "ERROR":
                        status = event.get("object", {})
                        message = str(status.get("message", "the watch failed"))
                        raise ApiError(
                            int(status.get("code", 500)), str(status.get("reason", "")), message, f"watch {path}"
                        )
                    if not isinstance(event.get("object"), dict):
                        raise Unreachable(f"watch {path}: the answer is not an event: {line[:80]!r}")
                    yield str(event.get("type")), event["object"]
        except TimeoutError:
            return
        except (aiohttp.ClientError, OSError) as error:
            self.answers_since = datetime.now(UTC)
            raise Unreachable(f"watch {self.server}{path}: {_words(error)}") from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=64, ssl=self._info.as_ssl_context()),
                headers={**self._info.as_http_headers(), "User-Agent": "rlightning-operator"},
                proxy=self._info.proxy_url,
            )
        return self._session

    async def _renew(self) -> bool:
        """Read the credentials again: the kubelet replaces a pod's token every hour. True if they are new."""
        try:
            info = login()
        except LoginError:
            return False
        if info.as_http_headers() == self._info.as_http_headers():
            return False
        self._info = info
        if self._session is not None:
            self._session.headers.update(info.as_http_headers())
        return True


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length; aiohttp's own iteration gives up at 128 KiB."""
    rest = b""
    async for data in stream.iter_any():
        *complete, rest = (rest + data).split(b"\n")
        for line in complete:
            if line:
                yield line
    if rest:
        yield rest


def _parsed(text: bytes, what: str) -> Object:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise Unreachable(f"{what}: the answer is not JSON: {text[:80]!r}") from error
    if not isinstance(parsed, dict):
        raise Unreachable(f"{what}: the answer is not an object: {text[:80]!r}")
    return parsed


def _error(code: int, text: bytes, what: str) -> ApiError:
    """From a metav1.Status, or from whatever a proxy in between may have said."""
    try:
        status = json.loads(text)
        return ApiError(code, str(status.get("reason") or ""), str(status["message"])[:2048], what)
    except (ValueError, KeyError, AttributeError, TypeError):
        return ApiError(code, "", text[:200].decode(errors="replace").strip() or "no message", what)


def _words(error: BaseException) -> str:
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return f"no answer within {REQUEST_SECONDS} s"
    return f"{type(error).__name__}: {error}"
