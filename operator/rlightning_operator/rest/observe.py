"""Around every request: its id, deadline, log line, metrics and security headers; the last catch of exceptions."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlightning_operator.rest import metrics, problems
from rlightning_operator.rest.problems import Problem

LOG = logging.getLogger("rlightning.status")
REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
QUIET = frozenset({"/healthz", "/readyz", "/metrics"})  # asked every few seconds: logged only when they fail
SECURITY = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}


class Observe:
    """ASGI middleware; inside Starlette's catch-all, which would answer in plain text."""

    def __init__(self, app: ASGIApp, seconds: float, pages: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._seconds = seconds
        self._pages = pages  # paths that are pages with scripts of their own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id = _request_id(Headers(scope=scope))
        security = {
            k: v for k, v in SECURITY.items() if k != "Content-Security-Policy" or scope["path"] not in self._pages
        }
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                _add(MutableHeaders(scope=message), {**security, "X-Request-Id": request_id})
            await send(message)

        async def fail(problem: Problem) -> None:
            if not status:  # else half an answer is on its way, and the connection's end says the rest
                await problems.response(Request(scope), problem)(scope, receive, answer)

        try:
            async with asyncio.timeout(self._seconds):
                await self._app(scope, receive, answer)
        except TimeoutError:
            detail = f"the API server did not answer all that was asked within {self._seconds:g} s; try again"
            await fail(Problem("unavailable", 503, detail, {"Retry-After": "5"}))
        except Exception:
            LOG.exception("a request failed by an error of the service", extra={"fields": {"requestId": request_id}})
            detail = f"an error of the service, not of yours; its log has more under request id {request_id}"
            await fail(Problem("internal", 500, detail))
        finally:
            _note(scope, status, time.perf_counter() - start)


def _request_id(headers: Headers) -> str:
    """The caller's, so that a request can be followed through several services, if it is fit for a log."""
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _add(headers: MutableHeaders, more: Mapping[str, str]) -> None:
    for name, value in more.items():
        headers.setdefault(name, value)


def _note(scope: Scope, status: int, seconds: float) -> None:
    method = scope["method"] if scope["method"] in METHODS else "other"
    route = getattr(scope.get("route"), "path", "none")
    metrics.REQUESTS.labels(method, route, str(status or "none")).inc()
    metrics.SECONDS.labels(route).observe(seconds)
    level = logging.DEBUG if route in QUIET and 0 < status < 400 else logging.INFO
    # Neither query nor headers: a token may stand in either.
    fields = {
        "method": method,
        "path": scope["path"][:300],
        "status": status or "none",
        "ms": round(seconds * 1000, 1),
        "user": scope["state"].get("user"),
        "requestId": scope["state"]["request_id"],
    }
    LOG.log(level, "request", extra={"fields": fields})
