"""What the outside sees of a service process: its gRPC and HTTP ports, before there is an engine and after."""

from __future__ import annotations

import socket

from txnbuffer.config import ServiceConfig
from txnbuffer.service.admin import Admin
from txnbuffer.service.engine import Engine
from txnbuffer.service.grpc_server import GrpcServer
from txnbuffer.service.http_server import HttpServer
from txnbuffer.service.limits import Limits

ALL_HOSTS = ("0.0.0.0", "::")  # noqa: S104 - to be recognised, not to listen at


class Front:
    """Listens from `start` on and serves from `serve` on. `port` and `http_port` are those it listens to."""

    def __init__(self, service: ServiceConfig, limits: Limits) -> None:
        self.engine: Engine | None = None
        self._service = service
        self._grpc = GrpcServer(limits, max_clients=service.max_clients)
        self._http = HttpServer()
        self._stopped = False

    @property
    def port(self) -> int:
        return self._grpc.port

    @property
    def http_port(self) -> int:
        return self._http.port

    async def start(self, certificate: bytes | None, key: bytes | None) -> None:
        """Raises EnvironmentFault if a port can't be listened to."""
        await self._grpc.start(self._service.listen, certificate=certificate, key=key)
        if self._service.http:
            await self._http.start(self._service.http)

    def waits_for(self, what: str) -> None:
        """What is told to those who come before an engine is served."""
        self._grpc.waits_for = self._http.waits_for = what

    async def serve(self, engine: Engine) -> None:
        """Let clients in."""
        self.engine = self._http.engine = engine
        await self._grpc.serve(engine, Admin(engine))

    async def drain(self) -> None:
        """Tell health checks that nothing new is served."""
        await self._grpc.drain()

    async def stop(self) -> None:
        """Give the last frames their time, then end; nothing happens the second time."""
        if self._stopped:
            return
        self._stopped = True
        if self.engine is not None:
            self.engine.streams.close()
            for connection in self.engine.connections:
                connection.close()
        await self._grpc.stop()
        await self._http.stop()


def advertised(service: ServiceConfig, port: int) -> str:
    """HOST:PORT that clients are to dial: what is configured, else where it listens, by this host's name if at all."""
    host, _, wanted = (service.advertise or service.listen).rpartition(":")
    if not service.advertise and host.strip("[]") in ALL_HOSTS:
        host = socket.gethostname()
    return f"{host}:{port if wanted == '0' or not service.advertise else wanted}"
