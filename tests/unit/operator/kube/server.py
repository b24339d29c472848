"""An HTTP server that stands for the API server: it answers what a test tells it to, and remembers the questions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import kopf
from aiohttp import web

from rlightning_operator.kube.client import Client

Answer = tuple[int, dict[str, Any]]


@dataclass
class Asked:
    """One request."""

    method: str
    path: str
    query: dict[str, str]
    body: Any
    authorization: str | None

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass
class Server:
    """What is asked of it, in order; ``answer`` decides what it says."""

    answer: Callable[[Asked], Answer | Awaitable[Answer]]
    asked: list[Asked] = field(default_factory=list)

    def writes(self) -> list[str]:
        """``METHOD path`` of all requests but GET."""
        return [str(one) for one in self.asked if one.method != "GET"]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        one = Asked(
            request.method,
            request.path,
            dict(request.query),
            json.loads(text) if text else None,
            request.headers.get("Authorization"),
        )
        self.asked.append(one)
        answer = self.answer(one)
        code, body = answer if isinstance(answer, tuple) else await answer
        return web.json_response(body, status=code)


@asynccontextmanager
async def serving(answer: Callable[[Asked], Answer | Awaitable[Answer]]) -> AsyncIterator[tuple[Client, Server]]:
    """A server, and a client of it."""
    server = Server(answer)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    client = Client(kopf.ConnectionInfo(server=f"http://127.0.0.1:{port}", token="first"))
    try:
        yield client, server
    finally:
        await client.close()
        await runner.cleanup()


def status(code: int, reason: str, message: str = "no") -> Answer:
    """A refusal, as a metav1.Status."""
    return code, {"kind": "Status", "apiVersion": "v1", "code": code, "reason": reason, "message": message}


def job(version: int = 1, uid: str = "job-uid", **more: Any) -> dict[str, Any]:
    """An RLJob ``team/cartpole``."""
    return {
        "apiVersion": "rlightning.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"namespace": "team", "name": "cartpole", "uid": uid, "resourceVersion": str(version)},
        "spec": {},
        **more,
    }


def owned(kind: str, name: str, version: int = 1, uid: str | None = None, **more: Any) -> dict[str, Any]:
    """An object of that job."""
    return {
        "kind": kind,
        "metadata": {
            "namespace": "team",
            "name": name,
            "uid": uid or f"{kind}-{name}-uid",
            "resourceVersion": str(version),
            "labels": {"rlightning.io/job": "cartpole"},
        },
        **more,
    }


async def until(look: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for something to be true."""
    async with asyncio.timeout(seconds):
        while not look():
            await asyncio.sleep(0.005)
