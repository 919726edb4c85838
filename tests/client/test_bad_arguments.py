"""An invalid argument raises one clear error and has no other effect on the client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from client_world import World, in_world, values

from broker_io.errors import CallerError, InvalidMessage, InvalidTopicName
from txnbuffer import Client, connect
from txnbuffer.client.connection import ServiceLink
from txnbuffer.client.path.record_path import EndPlan, SendQueue
from txnbuffer.client.session.session import Link
from txnbuffer.coordinator.messages import Branch
from txnbuffer.errors import ClientBroken, InvalidRequest
from txnbuffer.model import TxnId
from txnbuffer.rpc.frames import ClientFrame, Query, ServerFrame
from txnbuffer.rpc.session_encoding import encode_client_frame
from txnbuffer.service.engine.engine import Engine

Call = Callable[[Client], Awaitable[Any]]


def sending(**options: Any) -> Call:
    return lambda client: client.send("orders", options.pop("value", b"x"), **options)


async def beginning(client: Client, **options: Any) -> None:
    async with client.transaction(**options) as txn:
        await txn.send("orders", b"never")


async def committing(client: Client, **options: Any) -> None:
    async with client.transaction() as txn:
        await txn.send("orders", b"never")
        await txn.commit(**options)


async def reading(client: Client, **options: Any) -> None:
    await client.send("there", b"x")
    async with await client.reader("there") as reader:
        await reader.read(**options)


def columns(*arguments: Any, **options: Any) -> Call:
    return lambda client: client.send_many("orders", *arguments, **options)


BAD_ID, BAD_COUNT = Branch(TxnId(0, 0), (), ()), Branch(TxnId(0, 1), ("orders",), (2**63,))

BAD: list[tuple[Call, type[CallerError], str]] = [
    (sending(event_time=2**63), InvalidMessage, "an event time must be"),
    (sending(event_time=-1), InvalidMessage, "an event time must be"),
    (sending(event_time=datetime(1900, 1, 1, tzinfo=UTC)), InvalidMessage, "an event time must be"),
    (sending(event_time=True), InvalidMessage, "an event time must be"),
    (sending(key="\ud800"), InvalidMessage, "a key cannot be encoded as UTF-8"),
    (sending(value="\ud800"), InvalidMessage, "a value cannot be encoded as UTF-8"),
    (sending(properties={"a": "\ud800"}), InvalidMessage, "a property cannot be encoded as UTF-8"),
    (sending(ordering_key="\ud800"), InvalidMessage, "a property cannot be encoded as UTF-8"),
    (lambda client: client.send(5, b"x"), InvalidTopicName, "topic name 5 is not text"),  # type: ignore[arg-type]  # on purpose
    (lambda client: client.send("persistent://a/b/c", b"x"), InvalidTopicName, "is a full name: write 'c'"),
    (lambda client: client.reader("non-persistent://a/b/c"), InvalidTopicName, "is a full name: write 'c'"),
    (lambda client: beginning(client, timeout="a"), InvalidRequest, "seconds above 0, got 'a'"),
    (lambda client: beginning(client, timeout=-1), InvalidRequest, "seconds above 0, got -1"),
    (lambda client: beginning(client, timeout=float("nan")), InvalidRequest, "seconds above 0, got nan"),
    (lambda client: beginning(client, timeout=float("inf")), InvalidRequest, "seconds above 0, got inf"),
    (lambda client: beginning(client, timeout=1e300), InvalidRequest, "900"),
    (lambda client: beginning(client, name="n", number=0), InvalidRequest, "from 1 to 2^63 - 1, got 0"),
    (lambda client: beginning(client, name="n", number=2**63), InvalidRequest, "from 1 to 2^63 - 1"),
    (lambda client: beginning(client, name="n", number="a"), InvalidRequest, "from 1 to 2^63 - 1, got 'a'"),
    (lambda client: beginning(client, name="", number=1), InvalidRequest, "the name of a producer must be"),
    (lambda client: client.join("\ud800"), InvalidRequest, "the name of a group must be"),
    (lambda client: client.join("g" * 401), InvalidRequest, "the name of a group must be"),
    (lambda client: client.committed_number(""), InvalidRequest, "the name of a producer must be"),
    (lambda client: client.delete_name("n", last_number=-1), InvalidRequest, "from 0 to 2^63 - 1, got -1"),
    (lambda client: client.delete_name("n", last_number=2**63), InvalidRequest, "from 0 to 2^63 - 1"),
    (lambda client: client.delete_name("n", last_number=True), InvalidRequest, "from 0 to 2^63 - 1, got True"),
    (lambda client: client.outcome(TxnId(0, 0)), InvalidRequest, "'0:0' is not a transaction id"),
    (lambda client: client.outcome(TxnId(2**63, 1)), InvalidRequest, "both numbers must fit in 63 bits"),
    (
        lambda client: committing(client, wait_visible="x"),
        InvalidRequest,
        "wait_visible must be True or False, got 'x'",
    ),
    (lambda client: committing(client, winners=[5]), InvalidRequest, "winners must be a list of branches, got 5"),
    (lambda client: committing(client, winners=5), InvalidRequest, "winners must be a list of branches, got 5"),
    (lambda client: committing(client, winners=[BAD_ID]), InvalidRequest, "'0:0' is not a transaction id"),
    (lambda client: committing(client, winners=[BAD_COUNT]), InvalidRequest, "winners must be a list of branches"),
    (columns("abc"), InvalidMessage, "values must be a list with an item for each record, got str"),
    (columns(iter([b"a"])), InvalidMessage, "values must be a list"),
    (columns([b"a"], keys=b"k"), InvalidMessage, "keys must be a list"),
    (columns([b"a"], properties={"p": "q"}), InvalidMessage, "properties must be a list"),
    (columns([b"a"], properties=["pq"]), InvalidMessage, "a mapping of text to text, got str"),
    (sending(properties=[("p", "q")]), InvalidMessage, "a mapping of text to text, got list"),
    (lambda client: client.outcome("x"), InvalidRequest, "'x' is not a transaction id: write MOST:LEAST"),
    (lambda client: client.outcome(None), InvalidRequest, "'None' is not a transaction id"),  # type: ignore[arg-type]  # on purpose
    (lambda client: client.reader(None), InvalidRequest, "topics must be a name or a list of names, got None"),  # type: ignore[arg-type]  # on purpose
    (lambda client: client.reader([5]), InvalidRequest, "topics must be a name or a list of names, got [5]"),  # type: ignore[list-item]  # on purpose
    (lambda client: reading(client, limit="a"), InvalidRequest, "at least 1 record, got 'a'"),
    (lambda client: client.process("orders", "g", None, on_error="Stop"), InvalidRequest, "got 'Stop'"),  # type: ignore[arg-type]  # on purpose
]


@pytest.mark.parametrize(("call", "error", "text"), BAD)
@in_world
async def test_invalid_argument_is_rejected_and_the_client_stays_usable(
    world: World, call: Call, error: type[CallerError], text: str
) -> None:
    client = await world.client()
    with pytest.raises(error) as caught:
        await call(client)
    assert text in str(caught.value)
    async with client.transaction() as txn:
        await txn.send("orders", b"fine")
    assert values(world.broker, "orders") == [b"fine"]


class EncodingStream:
    """A stream to an engine that encodes frames, as one of gRPC does."""

    def __init__(self, engine: Engine) -> None:
        self._connection = engine.connect()

    async def send(self, frame: ClientFrame) -> None:
        encode_client_frame(frame)
        self._connection.receive(frame)

    async def receive(self) -> ServerFrame | None:
        return await self._connection.next()

    async def end(self) -> None:
        """Do nothing: the engine ends the connection."""

    async def close(self) -> None:
        self._connection.lost()


@in_world
async def test_request_that_cannot_be_encoded_fails_alone(world: World) -> None:
    async def dial() -> Link:
        return ServiceLink(EncodingStream(world.engine))  # type: ignore[arg-type]  # a stream for tests

    client = await world.client(dial=dial)
    session = client.session
    too_large = session.ask("queries", lambda number: Query(number, TxnId(0, 2**70)))
    async with asyncio.timeout(60), client.transaction() as txn:
        await txn.send("orders", b"fine")
        error, number = await asyncio.gather(too_large, client.committed_number("n"), return_exceptions=True)
        broken = session.core.begin()
        never: Any = EndPlan(True, None, positions=("x",))  # type: ignore[arg-type]  # on purpose
        with pytest.raises(InvalidRequest, match="cannot be encoded"):
            await session.result(lambda future: session.end(broken, never._replace(waiter=future)))
    assert isinstance(error, InvalidRequest)
    assert "the request cannot be encoded: ValueError" in str(error)
    assert number == 0
    assert values(world.broker, "orders") == [b"fine"]


@in_world
async def test_internal_error_while_sending_fails_all_callers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: SendQueue, *arguments: Any) -> None:
        raise OverflowError("some defect")

    client = await world.client()
    await client.send("orders", b"one")
    monkeypatch.setattr(SendQueue, "take", broken)
    async with asyncio.timeout(60):
        with pytest.raises(ClientBroken, match="some defect"):
            await client.send("orders", b"two")
        with pytest.raises(ClientBroken):
            await client.send("orders", b"three")


@pytest.mark.parametrize(
    ("address", "options", "text"),
    [
        (None, {}, "address must be text such as 'file:DIR', got None"),
        ("data", {}, "'data' is not a broker address: write memory:"),
        ("kafka://host:9092", {}, "'kafka://host:9092' is not a broker address: write memory:"),
        ("pulsar://host/only-a-tenant", {}, "only-a-tenant"),
        ("txnbuf://host", {}, "txnbuf://host"),
        ("memory:", {"max_unavailable": "x"}, "max_unavailable must be a number of seconds, at least 0, got 'x'"),
        (
            "memory:",
            {"max_unavailable": float("nan")},
            "a number of seconds, at least 0, got nan",
        ),
        ("memory:", {"timeout": -1}, "timeout must be a number of seconds, at least 0, got -1"),
    ],
)
def test_invalid_argument_of_connect_is_rejected_at_once(address: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(CallerError) as caught:
        connect(address, **options)
    assert text in str(caught.value)
