"""An API server of a few lines over real HTTP, for what the real one cannot be made to do at will: hang, refuse, break.

Tokens are names: ``Bearer alice`` is alice's. What the double cannot do (CRDs, RBAC, tokens) is tested against the real
one, in tests/integration/rest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from aiohttp import web

from rlightning_operator.rest.app import create_app
from rlightning_operator.rest.cluster import Cluster, Endpoint
from rlightning_operator.rest.settings import Settings

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def status(code: int, reason: str, message: str, **headers: str) -> web.Response:
    """A metav1.Status."""
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
    return web.json_response({**body, "message": message}, status=code, headers=headers)


class ApiDouble:
    """Objects by path, rights by user; requests are counted by path."""

    def __init__(self) -> None:
        self.users = {"alice": "alice", "bob": "bob"}
        self.rights: set[tuple[str, str, str, str]] = {
            ("alice", verb, resource, "") for verb in ("get", "list") for resource in ("rljobs", "policygroups")
        }
        self.audience = "https://kubernetes.default.svc"
        self.objects: dict[str, dict[str, Any]] = {}
        self.calls: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.instead: Handler | None = None  # answers everything while it is set

    def store(self, obj: dict[str, Any]) -> None:
        """Keep an object at its path."""
        plural = {"RLJob": "rljobs", "PolicyGroup": "policygroups"}[obj["kind"]]
        metadata = obj["metadata"]
        self.objects[f"/apis/rlightning.io/v1alpha1/namespaces/{metadata['namespace']}/{plural}/{metadata['name']}"] = (
            obj
        )

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One request."""
        self.calls[request.path] += 1
        self.authorizations.append(request.headers.get("Authorization"))
        if self.instead is not None:
            return await self.instead(request)
        match request.path.split("/")[1:]:
            case ["readyz"]:
                return web.Response(text="ok")
            case [*_, "tokenreviews"]:
                return self._token(await request.json())
            case [*_, "subjectaccessreviews"]:
                return self._access(await request.json())
            case ["apis", "rlightning.io", "v1alpha1", *rest]:
                return self._object(request, rest)
        return web.Response(status=404, text="404 page not found")

    def _token(self, body: dict[str, Any]) -> web.Response:
        self.bodies.append(body)
        user = self.users.get(body["spec"]["token"])
        audiences = body["spec"].get("audiences") or [self.audience]
        if user is None or self.audience not in audiences:
            return web.json_response({**body, "status": {"user": {}, "error": "invalid bearer token"}}, status=201)
        answer = {
            "authenticated": True,
            "user": {"username": user, "uid": f"uid-{user}", "groups": ["people"], "extra": {"pod": ["p"]}},
            "audiences": [self.audience],
        }
        return web.json_response({**body, "status": answer}, status=201)

    def _access(self, body: dict[str, Any]) -> web.Response:
        self.bodies.append(body)
        asked, user = body["spec"]["resourceAttributes"], body["spec"]["user"]
        allowed = any(
            (user, asked["verb"], asked["resource"], namespace) in self.rights for namespace in ("", asked["namespace"])
        )
        return web.json_response({**body, "status": {"allowed": allowed}}, status=201)

    def _object(self, request: web.Request, rest: list[str]) -> web.Response:
        if found := self.objects.get(request.path):
            return web.json_response(found)
        if len(rest) == 4:
            return status(404, "NotFound", f'{rest[2]}.rlightning.io "{rest[3]}" not found')
        prefix = request.path.removesuffix("/rljobs") + "/"
        items = [obj for path, obj in sorted(self.objects.items()) if path.startswith(prefix) and "/rljobs/" in path]
        start, limit = int(request.query.get("continue", 0)), int(request.query["limit"])
        left = len(items) - start - limit
        metadata = {"continue": str(start + limit), "remainingItemCount": left} if left > 0 else {}
        return web.json_response({"items": items[start : start + limit], "metadata": metadata})


@asynccontextmanager
async def double() -> AsyncIterator[tuple[ApiDouble, str]]:
    """A running double and its URL."""
    api = ApiDouble()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", api.handle)
    runner = web.AppRunner(application, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield api, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


Scenario = Callable[[ApiDouble, httpx.AsyncClient], Awaitable[None]]


def run(scenario: Scenario, settings: Settings | None = None, api_seconds: float = 5.0) -> None:
    """Play a scenario with a double and a client of the service, as alice."""

    async def play() -> None:
        async with double() as (api, url):
            cluster = Cluster(Endpoint(url, token="service"), api_seconds)
            app = create_app(settings or Settings(), cluster)
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            headers = {"Authorization": "Bearer alice"}
            async with (
                app.router.lifespan_context(app),
                httpx.AsyncClient(transport=transport, base_url="http://status", headers=headers) as client,
            ):
                await scenario(api, client)

    asyncio.run(play())
