"""The log of this process: its engine, which starts when something is to be written, and connections to it

A client that only reads needs no engine: its readers read the log themselves. So the engine starts at once only if its
log is new or has something for its owner to do, such as aborting what a killed process left open. Otherwise the first
request starts it, and the files of the log stay as they are until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from broker_io.port import Broker
from txnbuffer.client.lifecycle import run_to_completion
from txnbuffer.client.session.session import CLOSED, LinkUser
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import TxnId
from txnbuffer.streams.messages import ClientMessage, ServerMessage

if TYPE_CHECKING:
    from txnbuffer.service.door.connection import SessionConnection
    from txnbuffer.service.engine.engine import Engine
    from txnbuffer.service.standby.takeover import StandbyState


class EmbeddedLog:
    """A log that this process has locked, from `open` to `close`; the caller closes its broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._closed = False
        self._found: StandbyState | None = None
        self._starting: asyncio.Task[Engine] | None = None

    @classmethod
    async def open(cls, broker: Broker) -> EmbeddedLog:
        """Read the log; start its engine if there is something to write. Raises as `Engine.start`."""
        from txnbuffer.service.standby.takeover import find

        log = cls(broker)
        found = await asyncio.to_thread(find, broker)
        log._found = None if found is None else found.state
        if found is None or not found.idle:
            await log.engine()
        return log

    @property
    def started(self) -> bool:
        """Whether the engine was started."""
        return self._starting is not None

    async def engine(self) -> Engine:
        """Return the engine, which the first call starts. Raises as `Engine.start`; then the next call tries again."""
        if self._closed:
            raise InvalidRequest(CLOSED)
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
        starting = self._starting
        try:
            return await asyncio.shield(starting)
        except BaseException:
            if self._starting is starting and starting.done():
                self._starting = None
            raise

    async def _start(self) -> Engine:
        from txnbuffer.service.engine.engine import Engine

        found, self._found = self._found, None
        return await run_to_completion(Engine.start(self._broker, standby_state=found), Engine.stop)

    def ends_by(self, txn: TxnId) -> float | None:
        """When an open transaction is aborted at the latest; None if the engine does not know it. In any thread."""
        starting = self._starting
        if starting is None or not starting.done() or starting.cancelled() or starting.exception() is not None:
            return None
        return starting.result().coordinator.ends_by(txn)

    async def close(self) -> None:
        """Stop the engine, if it was started."""
        self._closed = True
        if (starting := self._starting) is not None:
            await asyncio.wait([starting])
            if not starting.cancelled() and starting.exception() is None:
                await starting.result().stop()
        if self._found is not None:
            await asyncio.to_thread(self._found.close)
            self._found = None


class EngineLink:
    """A session connection to an engine on the same event loop: its turns begin and end with an exchange of frames."""

    def __init__(self, engine: Engine, *, local: bool = False) -> None:
        self._engine = engine
        self._connection: SessionConnection = engine.connect(local=local)
        self._user: LinkUser
        self._awake = True
        self._has_answer = True

    def start(self, user: LinkUser) -> None:
        self._user = user
        self._connection.notify = self._answered
        self._engine.exchanges.append(self._exchange)
        self._engine.wake()

    def wake(self) -> None:
        self._awake = True
        self._engine.wake()

    async def close(self) -> None:
        if self._exchange in self._engine.exchanges:
            self._engine.exchanges.remove(self._exchange)
        self._connection.lost()

    def _answered(self) -> None:
        self._has_answer = True
        if not self._engine.in_turn:
            self._engine.wake()

    def _exchange(self) -> None:
        connection = self._connection
        if self._has_answer:
            self._has_answer = False
            if (answer := connection.take()) is not None:
                self._user.receive(answer)
            if connection.closed:
                self._user.ended(None)
        while self._awake and connection.reads:
            frame = self._user.take_frame()
            if frame is None:
                self._awake = False
            else:
                connection.receive(frame)


class EngineStreamLink:
    """A connection for change streams to an engine on the same event loop."""

    def __init__(self, engine: Engine) -> None:
        self._connection = engine.streams.connect()

    async def send(self, messages: Sequence[ClientMessage]) -> None:
        self._connection.receive(messages)

    async def receive(self) -> Sequence[ServerMessage] | None:
        return await self._connection.next()

    async def close(self) -> None:
        self._connection.lost()


class EngineAdminLink:
    """Admin requests to an engine on the same event loop."""

    def __init__(self, engine: Engine) -> None:
        from txnbuffer.service.servers.admin import ServiceAdmin

        self._methods = ServiceAdmin(engine).methods()

    async def ask(self, method: str, arguments: dict[str, Any]) -> Any:
        return await self._methods[method](arguments)

    async def close(self) -> None:
        pass
