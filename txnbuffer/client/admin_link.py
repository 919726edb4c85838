"""Connections by which services are asked what operators ask: a question by name, its answer as plain values."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from snapshots.shards import shard_of
from txnbuffer.client.grpc_link import open_channel
from txnbuffer.errors import Error, InvalidRequest, ServiceUnavailable
from txnbuffer.rpc.log_identity import LogIdentity
from txnbuffer.wire.faults import told

if TYPE_CHECKING:
    from txnbuffer.service.engine import Engine

SERVICE = "/txnbuffer.v1.Admin/"
ERROR_NAME, ERROR_FAULT = "txnbuffer-error", "txnbuffer-fault"
TIMEOUT = 30.0
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds before a service that did not answer is asked again."""


class AdminLink(Protocol):
    async def ask(self, method: str, question: dict[str, Any]) -> Any:
        """Raises what the service answers, and ServiceUnavailable if it does not."""

    async def close(self) -> None:
        """Let go."""


AdminDial: TypeAlias = Callable[[], Awaitable[AdminLink]]
"""Opens a connection. Raises ServiceUnavailable."""


class Questions:
    """Questions to the service of whichever shard they are for, by connections that are kept.

    `dials` reach the service of each shard; `patience`: seconds for which one may be away.
    """

    def __init__(self, dials: Sequence[AdminDial], patience: float) -> None:
        self.patience = patience
        self._dials = dials
        self._links: dict[int, AdminLink] = {}
        self._asking = asyncio.Lock()

    async def ask(self, owned: str, method: str, question: dict[str, Any], patience: float = 0.0) -> Any:
        """The answer of the shard that a topic, a name or a group is of, which is asked again for so many seconds.

        Raises what the service answers, ServiceUnavailable.
        """
        if not self._dials:
            raise InvalidRequest("this client was made without a way to ask its service this: use connect")
        give_up, pause = time.monotonic() + patience, FIRST_PAUSE
        number = shard_of(owned, len(self._dials))
        while True:
            async with self._asking:  # so that nobody closes the link under another's question
                try:
                    if number not in self._links:
                        self._links[number] = await self._dials[number]()
                    return await self._links[number].ask(method, question)
                except ServiceUnavailable:
                    await self._hang_up(number)
                    if time.monotonic() + pause > give_up:
                        raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def close(self) -> None:
        for number in [*self._links]:
            await self._hang_up(number)

    async def _hang_up(self, number: int) -> None:
        link = self._links.pop(number, None)
        if link is not None:
            await link.close()


class EngineAdminLink:
    """To an engine on the same loop."""

    def __init__(self, engine: Engine) -> None:
        from txnbuffer.service.admin import Admin

        self._methods = Admin(engine).methods()

    async def ask(self, method: str, question: dict[str, Any]) -> Any:
        return await self._methods[method](question)

    async def close(self) -> None:
        pass


class GrpcAdminLink:
    def __init__(self, target: str, channel: Any, log: LogIdentity) -> None:
        self._target = target
        self._channel = channel
        self._log = log

    @classmethod
    async def open(
        cls, target: str, root_certificates: bytes | None, timeout: float, log: LogIdentity
    ) -> GrpcAdminLink:
        """Connect to HOST:PORT within `timeout` seconds. Raises ServiceUnavailable, UsedAfterFork."""
        return cls(target, await open_channel(target, root_certificates, timeout), log)

    async def ask(self, method: str, question: dict[str, Any]) -> Any:
        import grpc

        call, metadata = self._channel.unary_unary(SERVICE + method), await self._log.metadata()
        try:
            return json.loads(await call(json.dumps(question).encode(), timeout=TIMEOUT, metadata=metadata))
        except grpc.aio.AioRpcError as error:
            raise named(error, self._target) from None

    async def close(self) -> None:
        await self._channel.close()


def named(error: Any, target: str) -> Error:
    """The error that a service raised, as one of the same class; or that it did not answer."""
    known = dict(error.trailing_metadata() or ())
    if ERROR_NAME not in known:
        return ServiceUnavailable(f"no service answers at {target} ({error.details()}): start it, or say where it is")
    fields = {"name": known[ERROR_NAME], "fault": known.get(ERROR_FAULT, ""), "message": error.details(), "details": {}}
    return told(fields)
