"""/healthz, /readyz and /metrics, in the event loop of everything else: when that hangs, so do they."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from rlightning_operator.controller import Controller


class HealthServer:
    """Serves while the process lives; ``controller`` is None until the API server was found."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._runner: web.AppRunner | None = None
        self.controller: Controller | None = None

    async def start(self) -> None:
        """Listen. Raises OSError."""
        app = web.Application()
        app.add_routes(
            [web.get("/healthz", self._health), web.get("/readyz", self._readiness), web.get("/metrics", self._metrics)]
        )
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()

    async def stop(self) -> None:
        """Close the port and all connections."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, _: web.Request) -> web.Response:
        trouble = self.controller.trouble() if self.controller is not None else []
        if trouble:
            return web.Response(status=503, text="; ".join(trouble) + "\n")
        return web.Response(text="ok\n")

    async def _readiness(self, _: web.Request) -> web.Response:
        if self.controller is None:
            return web.Response(status=503, text="waiting for the API server and the CRDs\n")
        if not self.controller.ready:
            return web.Response(status=503, text="the first listing is under way\n")
        return web.Response(text="ok\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})
