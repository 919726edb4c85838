"""A log service on loopback for tests: a grpc.aio server in a thread."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Any, Self

import grpc

from broker_io import open_broker, serve_broker
from broker_io.memory import MemoryBroker
from broker_io.port import Broker
from broker_io.remote.broker import RemoteBroker

TOPIC = "orders"

OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.http2.max_ping_strikes", 0),  # clients ping, as the service allows
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", -1),
]


class LogServer:
    """Serves a broker at `address` until `stop`; `kill` ends it abruptly. The caller owns the broker."""

    def __init__(self, broker: Broker, *, port: int = 0, **options: Any) -> None:
        self.port = port
        self._options = options
        self._broker = broker
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._stopped = False
        self._run(self._start())

    @property
    def address(self) -> str:
        return f"txnbuf://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._end(self._stop(grace=2.0))

    def kill(self) -> None:
        """Cut all connections, then stop."""
        self._end(self._stop(grace=None))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def call(self, function: Any, *arguments: Any) -> Any:
        """Call a function on the loop."""

        async def called() -> Any:
            return function(*arguments)

        return self._run(called())

    async def _start(self) -> None:
        self.service = serve_broker(self._broker, **self._options)
        self._server = grpc.aio.server(options=OPTIONS)
        self._server.add_generic_rpc_handlers((self.service.handler,))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def _stop(self, grace: float | None) -> None:
        if grace is None:
            await self._server.stop(None)
            await self.service.close()
        else:
            await self.service.close()
            await self._server.stop(grace)

    def _end(self, work: Any) -> None:
        if self._stopped:
            work.close()
            return
        self._stopped = True
        self._run(work)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)


class Place:
    """A service that can be stopped, killed and restarted at one port, over topics that persist."""

    def __init__(self, **options: Any) -> None:
        self.log = MemoryBroker()
        self.log.create_topic(TOPIC)
        self._options = options
        self.port = 0
        self.start()

    def start(self) -> None:
        self.broker = self.log.connect()
        self.server = LogServer(self.broker, port=self.port, **self._options)
        self.port = self.server.port

    def stop(self) -> None:
        self.server.stop()
        self.broker.close()

    def kill(self) -> None:
        self.server.kill()
        self.broker.close()

    def restart(self) -> None:
        self.kill()
        self.start()

    def open(self, **options: Any) -> RemoteBroker:
        broker = open_broker(self.server.address, **options)
        assert isinstance(broker, RemoteBroker)
        return broker
