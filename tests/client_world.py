"""Helpers of the client's tests: running coroutines, links that break, and reading a whole topic."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, Self, TypeVar

from service_setup import eventually

from broker_io import open_broker
from broker_io.port import Broker
from snapshots.errors import OwnershipLost
from txnbuffer import Transaction
from txnbuffer.client.client import Client
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.client.reading.records import Record
from txnbuffer.client.session.embedded import EngineLink
from txnbuffer.client.session.session import ClientSession, Connector, Link, LinkUser
from txnbuffer.errors import ServiceUnavailable
from txnbuffer.rpc.frames import ClientFrame, ServerFrame
from txnbuffer.service.engine.engine import Engine

Result = TypeVar("Result")

LONG = 200.0
"""Seconds after which a hanging test fails."""
until = eventually


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine that must end soon."""

    async def limited() -> Result:
        async with asyncio.timeout(LONG):
            return await work

    return asyncio.run(limited())


def read_all(broker: Broker, topic: str, isolation: str = "read_committed") -> list[Record]:
    """All records that a new reader gets."""
    records: list[Record] = []
    with CommittedReader(broker, topic, isolation=isolation) as reader:
        while (batch := reader.read()) is not None:
            records += batch
    return records


def values(broker: Broker, topic: str) -> list[bytes | None]:
    return [record.value for record in read_all(broker, topic)]


class Breaks(Protocol):
    """Decides when links break; see `World`."""

    before: Callable[[ClientFrame], bool]
    after: Callable[[ClientFrame], bool]
    late: float


class BreakingLink:
    """A link that breaks if `before` returns true for a frame to be sent, or `after` for a sent one, or by `cut`."""

    def __init__(self, link: Link, world: Breaks) -> None:
        self._link = link
        self._world = world
        self._user: LinkUser
        self._cut = False
        self.sent: list[ClientFrame] = []

    def start(self, user: LinkUser) -> None:
        self._user = user
        self._link.start(self)

    def wake(self) -> None:
        self._link.wake()

    async def close(self) -> None:
        self._cut = True  # the user may have another link
        await self._link.close()

    def cut(self) -> None:
        if not self._cut:
            self._cut = True
            self._user.ended(ServiceUnavailable("the link broke"))

    def take_frame(self) -> ClientFrame | None:
        frame = None if self._cut else self._user.take_frame()
        if frame is None:
            return None
        if self._world.before(frame):
            self.cut()
            return None
        self.sent.append(frame)
        if self._world.after(frame):
            asyncio.get_running_loop().call_later(self._world.late, self.cut)
        return frame

    def reject(self, field: str, row: Any, error: Exception) -> None:
        self._user.reject(field, row, error)

    def receive(self, frame: ServerFrame) -> None:
        if not self._cut:
            self._user.receive(frame)

    def ended(self, error: BaseException | None) -> None:
        self._user.ended(error)


def never(_: ClientFrame) -> bool:
    return False


def once(what: Callable[[ClientFrame], bool]) -> Callable[[ClientFrame], bool]:
    """A condition that returns true once, the first time that `what` holds."""
    done = False

    def first(frame: ClientFrame) -> bool:
        nonlocal done
        holds = not done and what(frame)
        done = done or holds
        return holds

    return first


class World:
    """An engine on a broker, and clients of it whose links break on demand.

    `late`: seconds between the arrival of a frame and the break after it, in which the service handles the frame.
    """

    cluster_mode = False

    def __init__(self, address: str = "memory:") -> None:
        self.broker: Any = open_broker(address)
        self.engine: Engine
        self.links: list[BreakingLink] = []
        self.before: Callable[[ClientFrame], bool] = never
        self.after: Callable[[ClientFrame], bool] = never
        self.late = 0.0
        self.reachable = True
        self.closers: list[Callable[[], Awaitable[None]]] = []

    async def client(self, max_unavailable: float = 60.0, dial: Connector | None = None) -> Client:
        session = ClientSession(dial or self._dial, max_unavailable)
        await session.open()
        client = Client(session, lambda: self.broker, None)
        self.closers.append(client.close)
        return client

    def cut(self) -> None:
        """Break all links."""
        for link in self.links:
            link.cut()

    async def restart(self) -> None:
        """Another owner takes over, as after a crash of the process that left the log intact."""
        old = self.engine
        self.engine = await self._start()
        self.cut()
        for connection in old.connections:  # else it waits a second until their last frames are taken
            connection.lost()
        with contextlib.suppress(OwnershipLost):
            await old.stop()

    async def _dial(self) -> Link:
        if not self.reachable:
            raise ServiceUnavailable("nobody there")
        self.links.append(BreakingLink(EngineLink(self.engine), self))
        return self.links[-1]

    async def _start(self) -> Engine:
        return await Engine.start(self.broker, cluster_mode=self.cluster_mode)

    async def __aenter__(self) -> Self:
        self.engine = await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.before = self.after = never
        for close in self.closers:
            await close()
        await self.engine.stop()
        self.broker.close()


def inside(place: Callable[[], AbstractAsyncContextManager[Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator of tests that are coroutines: what `place` opens is the first argument."""

    def decorated(test: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(test)
        async def whole(**fixtures: Any) -> None:
            async with asyncio.timeout(LONG), place() as opened:
                await test(opened, **fixtures)

        _, *fixtures = inspect.signature(test).parameters.values()
        whole.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]  # pytest looks here for fixtures
        return whole

    return decorated


in_world = inside(World)


async def run_many(world: World, disturb: Callable[[], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run 600 transactions on two topics, 50 at a time, while they are disturbed; each record is there once."""
    client, limit = await world.client(), asyncio.Semaphore(50)

    async def one(value: bytes) -> None:
        async def work(txn: Transaction) -> None:
            await txn.send("log", value)
            await txn.send("other", value)

        async with limit:
            await client.run(work, **options)

    disturbing = asyncio.create_task(disturb())
    expected = sorted(b"%d" % index for index in range(600))
    await asyncio.gather(*map(one, expected))
    await disturbing
    for topic in ("log", "other"):
        await until(lambda topic=topic: sorted(value or b"" for value in values(world.broker, topic)) == expected)
