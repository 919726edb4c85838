"""The health service of gRPC (`grpc.health.v1`), which needs no credentials and so limits its calls

`Check` answers once, `Watch` on every change, until the client ends the call. A client that does not send its request
within REQUEST_SECONDS, and open calls beyond the limits, are refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from broker_io.errors import LimitExceeded
from broker_io.rpc.channel import end_call

CALLS = 1000
"""Calls of a method that are open at a time: watches, which stay open, leave room for checks."""
CALLS_OF_ADDRESS = 100
"""Those of one address."""
REQUEST_SECONDS = 10.0
PATH = "/grpc.health.v1.Health/"


class Health:
    """Whether the services of these names serve. `handler` answers a call of the health service."""

    def __init__(self, names: Iterable[str]) -> None:
        self.serving = False
        self._names = frozenset(names)
        self._changed = asyncio.Event()
        self._open: dict[str, Counter[str]] = defaultdict(Counter)
        """Open calls, by method and address."""

    def set(self, *, serving: bool) -> None:
        """Change the status of all services, and tell those who watch."""
        self.serving = serving
        self._changed.set()
        self._changed = asyncio.Event()

    def handler(self, method: str) -> Any:
        """The handler of a method; None for one of another service."""
        import grpc

        calls = {f"{PATH}Check": self._check, f"{PATH}Watch": self._watch}
        return grpc.stream_stream_rpc_method_handler(self._counted(method, calls[method])) if method in calls else None

    def _counted(self, method: str, answer: Any) -> Any:
        open_ones = self._open[method]

        async def call(_: Any, context: Any) -> None:
            client = context.peer().rpartition(":")[0]
            if open_ones.total() >= CALLS or open_ones[client] >= CALLS_OF_ADDRESS:
                text = f"{open_ones.total()} health calls are open, {open_ones[client]} of them of this address"
                await end_call(context, LimitExceeded(f"{text}: end some, then call again", "health calls"))
                return
            open_ones[client] += 1
            try:
                await answer(context)
            finally:
                open_ones[client] -= 1
                if not open_ones[client]:
                    del open_ones[client]

        return call

    async def _check(self, context: Any) -> None:
        import grpc

        if (name := await self._asked(context)) is None:
            return
        if name not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {name[:200]!r}")
        await context.write(self._status(name))

    async def _watch(self, context: Any) -> None:
        if (name := await self._asked(context)) is None:
            return
        sent = b""
        while True:
            changed, status = self._changed, self._status(name)
            if status != sent:
                await context.write(status)
            sent = status
            await changed.wait()

    async def _asked(self, context: Any) -> str | None:
        """The name in the request of a call; None if the call has ended."""
        import grpc
        from google.protobuf.message import DecodeError
        from grpc_health.v1.health_pb2 import HealthCheckRequest

        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                data = await context.read()
            return None if data is grpc.aio.EOF else str(HealthCheckRequest.FromString(data).service)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no request within {REQUEST_SECONDS:g} s")
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no HealthCheckRequest")
        return None

    def _status(self, name: str) -> bytes:
        from grpc_health.v1.health_pb2 import HealthCheckResponse as Answer

        if name not in self._names:
            return Answer(status=Answer.SERVICE_UNKNOWN).SerializeToString()
        return Answer(status=Answer.SERVING if self.serving else Answer.NOT_SERVING).SerializeToString()
