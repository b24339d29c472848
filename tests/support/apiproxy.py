"""A proxy in front of the API server that counts what passes, and fails where a test says so.

Plain HTTP towards the client, whose bearer token is handed on. It runs in a thread of its own, so tests stay plain
functions.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import kopf
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

READS = ("GET", "HEAD", "OPTIONS")


@dataclass(frozen=True)
class Seen:
    """One request."""

    time: float
    method: str
    path: str
    watch: bool
    agent: str

    @property
    def write(self) -> bool:
        """Whether it may change something."""
        return self.method not in READS


class ApiProxy:
    """As a context manager. ``url`` is where it listens.

    Attributes:
        before: asked about each request before it is handed on; an answer (code, body) is given instead of it.
        after: told of each request when the server has done it, before the client gets the answer.
        down: connections are cut and new ones are too, as long as it is set.
    """

    def __init__(self, info: kopf.ConnectionInfo) -> None:
        self._info = info
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._open: dict[int, web.Request] = {}
        self._seen: deque[Seen] = deque(maxlen=100_000)
        self.before: Callable[[Seen], tuple[int, dict[str, Any]] | None] = lambda _: None
        self.after: Callable[[Seen], None] = lambda _: None
        self.down = False
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def seen(self, since: float = 0.0) -> list[Seen]:
        """All requests since a moment (of time.monotonic)."""
        return [one for one in list(self._seen) if one.time >= since]

    def writes(self, since: float = 0.0) -> list[str]:
        """``METHOD path`` of the requests that may change something."""
        return [f"{one.method} {one.path}" for one in self.seen(since) if one.write]

    def cut(self) -> int:
        """Cut all connections, watches too; returns how many requests that hit."""

        def cut() -> int:
            for request in self._open.values():
                if request.transport is not None:
                    request.transport.abort()
            return len(self._open)

        return asyncio.run_coroutine_threadsafe(_call(cut), self._loop).result(10)

    def kubeconfig(self, path: Path, token: str) -> Path:
        """Write a kubeconfig that leads here."""
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "proxy", "cluster": {"server": self.url}}],
            "users": [{"name": "user", "user": {"token": token}}],
            "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "user"}}],
            "current-context": "proxy",
        }
        path.write_text(json.dumps(content))
        return path

    async def _start(self) -> None:
        self._session = ClientSession(
            connector=TCPConnector(ssl=self._info.as_ssl_context(), limit=0),
            timeout=ClientTimeout(total=None),
            auto_decompress=False,
        )
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        # A watch ends with its client, as it would without the proxy.
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        one = Seen(
            time.monotonic(),
            request.method,
            request.path,
            "watch" in request.query,
            request.headers.get("User-Agent", "").split("/")[0],
        )
        if self.down:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        self._seen.append(one)
        answer = self.before(one)
        if answer is not None:
            return web.json_response(answer[1], status=answer[0])
        self._open[id(request)] = request
        try:
            return await self._forward(request, one)
        finally:
            self._open.pop(id(request), None)

    async def _forward(self, request: web.Request, one: Seen) -> web.StreamResponse:
        hop = ("host", "connection", "transfer-encoding", "content-length")
        headers = {name: value for name, value in request.headers.items() if name.lower() not in hop}
        async with self._session.request(
            request.method, self._info.server + request.path_qs, data=await request.read() or None, headers=headers
        ) as answer:
            if not one.watch:
                content = await answer.read()
                self.after(one)
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in hop}
                return web.Response(status=answer.status, body=content, headers=kept)
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": "application/json"})
            await response.prepare(request)
            async for data in answer.content.iter_any():
                await response.write(data)
            return response


async def _call(function: Callable[[], int]) -> int:
    return function()
