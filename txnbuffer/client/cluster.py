"""A client of a cluster: records go there by writers of its own, decisions to the service of the namespace."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Protocol, TypeAlias, TypeVar

from broker_io.port import Broker, PartitionedBroker
from snapshots.shards import Shard
from txnbuffer.client.client import Client
from txnbuffer.client.direct_link import Carrier
from txnbuffer.client.link import Dial, Link
from txnbuffer.client.ordinary import OrdinarySends
from txnbuffer.client.routing import Routes
from txnbuffer.client.serializers import Serializers
from txnbuffer.client.session import Session
from txnbuffer.client.sessions import Sessions
from txnbuffer.client.writers import Writers
from txnbuffer.errors import Error, ServiceUnavailable
from txnbuffer.rpc.discovery import ServiceDiscovery

LOOK = 0.5
"""Seconds between two looks whether another owner came, while the one that is known does not answer."""


class Closeable(Protocol):
    async def close(self) -> None: ...


L = TypeVar("L", bound=Closeable)
DialAddress: TypeAlias = Callable[[str], Awaitable[L]]
"""Opens a connection to HOST:PORT. Raises ServiceUnavailable."""


async def client_on(
    broker: Broker,
    dials: Sequence[Dial],
    serializers: Serializers,
    patience: float,
    resources: AsyncExitStack,
) -> Client:
    """A client that writes to `broker` itself, and reaches the service of each shard by its dial.

    `resources` end with it.
    """
    writers = Writers(broker, patience)
    resources.push_async_callback(writers.close, ServiceUnavailable("the client was closed"))

    def session_of(number: int) -> Session:
        carrier = Carrier(writers, broker.max_message_bytes)

        async def direct() -> Link:
            return carrier.over(await dials[number]())

        session = Session(direct, patience, apart=True, shard=Shard(number, len(dials)))
        session.begin()
        return session

    home = random.randrange(len(dials))  # noqa: S311  clients are to spread over the shards
    session = session_of(home)
    client = Client(session, lambda: broker, serializers, OrdinarySends(writers, broker))
    client.sessions = Sessions(session, home, len(dials), session_of)
    if isinstance(broker, PartitionedBroker):
        client.routes = Routes(broker)
    return client


def dial_at(address: str, dial: DialAddress[L]) -> Callable[[], Awaitable[L]]:
    """Dials a service whose address is given."""

    async def given() -> L:
        return await dial(address)

    return given


def dial_owner(discovery: ServiceDiscovery, dial: DialAddress[L]) -> Callable[[], Awaitable[L]]:
    """Dials the owner of the namespace, and the next one as soon as there is one."""

    async def found() -> L:
        try:
            return await _dial_newest(discovery, dial)
        except Error:
            raise
        except Exception as error:  # a session that met it would never dial again
            raise ServiceUnavailable(f"the service could not be looked for: {error!r}") from error

    return found


async def _dial_newest(discovery: ServiceDiscovery, dial: DialAddress[L]) -> L:
    noted = await asyncio.to_thread(discovery.noted_address)
    address = await asyncio.to_thread(discovery.newest_address) if noted is None else noted
    dialling = asyncio.ensure_future(dial(address))
    try:
        while True:
            await asyncio.wait([dialling], timeout=LOOK)
            if dialling.done() and dialling.exception() is None:
                return dialling.result()
            if (newer := await asyncio.to_thread(discovery.newest_address)) != address:
                await _abandon(dialling)
                address = newer
                dialling = asyncio.ensure_future(dial(address))
            elif dialling.done():
                return dialling.result()
    except BaseException:
        await _abandon(dialling)
        raise


async def _abandon(dialling: asyncio.Future[L]) -> None:
    dialling.cancel()
    (link,) = await asyncio.gather(dialling, return_exceptions=True)
    if not isinstance(link, BaseException):
        await link.close()
