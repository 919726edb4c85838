"""The asyncio and the sync client have the same methods and arguments, and raise the same errors."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from txnbuffer import Client, SyncClient, SyncTransaction, Transaction, connect
from txnbuffer.client.reading.async_reader import AsyncReader
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.client.streams.cursors import DurableCursors
from txnbuffer.client.streams.streams import ChangeStream
from txnbuffer.client.sync.sync_client import SyncCursors, SyncStream
from txnbuffer.errors import Error

OF_CLIENTS = (
    "close outcome committed_number delete_name send send_many delete reader stream transaction run process "
    "process_batches forget_group topics last_visible delete_topic read_table"
)
PAIRS = [
    (Client, SyncClient, OF_CLIENTS),
    (Transaction, SyncTransaction, "begin send send_many delete commit abort"),
    (ChangeStream, SyncStream, "next rolled_back done close statistics"),
    (DurableCursors, SyncCursors, "add advance remove"),
    (AsyncReader, CommittedReader, "read lag close"),
]


@pytest.mark.parametrize(
    ("async_class", "sync_class", "name"), [(one, other, name) for one, other, names in PAIRS for name in names.split()]
)
def test_pairs_of_methods_have_the_same_arguments(async_class: type, sync_class: type, name: str) -> None:
    expected, found = (inspect.signature(getattr(kind, name)).parameters for kind in (async_class, sync_class))
    assert [(one.name, one.kind, one.default) for one in found.values()] == [
        (one.name, one.kind, one.default) for one in expected.values()
    ]


async def awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


async def committed(client: Any, **options: Any) -> None:
    txn = client.transaction()
    await awaited(txn.begin())
    await awaited(txn.commit(**options))


async def read(client: Any, *, closed: bool = False, **options: Any) -> None:
    reader = await awaited(client.reader("log"))
    if closed:
        await awaited(reader.close())
    await awaited(reader.read(**options))


async def closed(client: Any, call: Callable[[Any], Any]) -> None:
    await awaited(client.close())
    await awaited(call(client))


CALLS: dict[str, Callable[[Any], Any]] = {
    "list as topic": lambda client: client.send(["a"], b"v"),
    "list as topic of many": lambda client: client.send_many(["a"], [b"v"]),
    "list as topic of a stream": lambda client: client.stream(["a"]),
    "store": lambda client: client.stream("log", store=5),
    "attempts as text": lambda client: client.run(abs, attempts="x"),
    "attempts as fraction": lambda client: client.run(abs, attempts=1.5),
    "no attempts": lambda client: client.run(abs, attempts=0),
    "work": lambda client: client.run(5),
    "last number": lambda client: client.delete_name("n", last_number=-1),
    "visible": lambda client: committed(client, wait_visible="x"),
    "winners": lambda client: committed(client, winners=[5]),
    "timeout of a read": lambda client: read(client, timeout="x"),
    "timeout of a stream": lambda client: client.stream("log").next(timeout="x"),
    "closed reader": lambda client: read(client, closed=True),
    "closed client: send": lambda client: closed(client, lambda client: client.send("log", b"v")),
    "closed client: outcome": lambda client: closed(client, lambda client: client.outcome("0:1")),
    "closed client: reader": lambda client: closed(client, lambda client: client.reader("log")),
    "closed client: stream": lambda client: closed(client, lambda client: client.stream("log")),
    "closed client: cursor": lambda client: closed(client, lambda client: client.cursors.add("log", "c")),
    "closed client: transaction": lambda client: closed(client, lambda client: client.transaction().begin()),
}


async def error_of(work: Awaitable[Any]) -> tuple[type[BaseException], str]:
    with pytest.raises(Error) as caught:
        await work
    return type(caught.value), str(caught.value)


async def call(client: Any, made: Callable[[Any], Any]) -> None:
    await awaited(client.send("log", b"v"))
    await awaited(made(client))


@pytest.mark.parametrize("made", [pytest.param(made, id=name) for name, made in CALLS.items()])
def test_pairs_of_methods_raise_the_same_errors(made: Callable[[Any], Any]) -> None:
    async def of_async() -> tuple[type[BaseException], str]:
        async with connect("memory:") as client:
            return await error_of(call(client, made))

    with connect("memory:") as client:
        assert asyncio.run(error_of(call(client, made))) == asyncio.run(of_async())


def test_work_of_the_wrong_kind_is_an_invalid_handler() -> None:
    async def asynchronous(txn: Any) -> None:
        raise AssertionError

    async def of_async() -> type[BaseException]:
        async with connect("memory:") as client:
            return (await error_of(client.run(lambda txn: None)))[0]  # type: ignore[arg-type,return-value]  # on purpose

    with connect("memory:") as client, pytest.raises(Error) as caught:
        client.run(asynchronous)
    assert type(caught.value) is asyncio.run(of_async())
