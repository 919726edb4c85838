"""Metrics and health over HTTP: `/metrics`, `/health` (it runs), `/ready` (it serves; else 503).

It answers before there is an engine too: then what it serves is `waits_for`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from broker_io.errors import EnvironmentFault
from broker_io.waits import long_waits
from txnbuffer.service.engine import Engine
from txnbuffer.service.metrics import exposition


class HttpServer:
    """Serves on the engine's loop; `port` is the one it listens to, `engine` is set once there is one."""

    def __init__(self) -> None:
        self.port = 0
        self.engine: Engine | None = None
        self.waits_for = "the service is being started"
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, address: str) -> None:
        """Listen at HOST:PORT. Raises EnvironmentFault if that can't be."""
        import uvicorn

        listening = _listen(address)
        self.port = listening.getsockname()[1]
        config = uvicorn.Config(self._app(), log_config=None, access_log=False, lifespan="off", ws="none")
        server = self._server = _server(config)
        self._serving = asyncio.ensure_future(server.serve([listening]))
        while not server.started and not self._serving.done():
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._serving

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route

        async def metrics(_: Any) -> Response:
            return Response(exposition(self.engine), media_type="text/plain; version=0.0.4; charset=utf-8")

        async def health(_: Any) -> Response:
            damaged = [] if self.engine is None else sorted(self.engine.verifying.damages)
            ended = self.engine is not None and self.engine.ended.done()
            waits = [wait._asdict() for wait in long_waits()]
            return JSONResponse({"status": "running", "damaged": damaged, "waits": waits}, 503 if ended else 200)

        async def ready(_: Any) -> Response:
            waits = self._why_not_ready()
            told = {"ready": not waits, "waits_for": waits, "waits": [*map(str, long_waits())]}
            return JSONResponse(told, 503 if waits else 200)

        return Starlette(routes=[Route("/metrics", metrics), Route("/health", health), Route("/ready", ready)])

    def _why_not_ready(self) -> list[str]:
        engine = self.engine
        if engine is None:
            return [self.waits_for]
        waits = []
        if engine.ended.done():
            waits.append("the engine has stopped")
        if engine.intake.draining:
            waits.append("the service drains")
        if not engine.coordinator.ready:
            waits.append("the predecessor's transactions are being taken over")
        return waits


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        return socket.create_server((host.strip("[]"), int(port)), family=_family(host))
    except OSError as error:
        raise EnvironmentFault(f"can't listen at {address}: {error.strerror}; is another service there?") from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _server(config: Any) -> Any:
    import uvicorn

    class Quiet(uvicorn.Server):
        """Leaves signals to the service."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Quiet(config)
