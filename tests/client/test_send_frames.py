"""Sends of any size are cut into frames within the size limit of the service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from client.core_setup import register, rows, taken, welcomed
from client_world import values
from hypothesis import given, settings
from hypothesis import strategies as st

from broker_io.batch import ROW_BYTES
from broker_io.block import encode_block
from broker_io.memory import MemoryBroker
from txnbuffer import Client, connect
from txnbuffer.client.path import record_path, send_columns
from txnbuffer.client.path.send_columns import MAX_PROPERTIES, SendColumns, many_rows, one_row, slices, take_rows
from txnbuffer.errors import OutcomeUnknown
from txnbuffer.rpc.frames import FRAME_BYTES, SEND_BYTES, ServerFrame
from txnbuffer.service.door.connection import Limits
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.servers.grpc_server import GrpcServer
from txnbuffer.service.topics.requests import TRANSACTIONAL

LARGE = b"x" * 5_000_000
SIZES = st.sampled_from(
    [0, 1, SEND_BYTES // 3, SEND_BYTES // 2, SEND_BYTES - ROW_BYTES - 2, SEND_BYTES, SEND_BYTES + 9]
)


@given(st.lists(SIZES, min_size=1, max_size=12), st.integers(1, 5), st.booleans())
def test_slices_have_all_rows_and_each_fits_into_a_send(sizes: list[int], records: int, with_properties: bool) -> None:
    texts = [{"n": str(number)} for number in range(len(sizes))] if with_properties else None
    whole = many_rows([bytes(size) for size in sizes], [b"k"] * len(sizes), [*range(len(sizes))], texts, None)
    cut = list(slices(whole, records))
    assert [value for piece in cut for value in piece.values] == whole.values
    assert [time for piece in cut for time in piece.times or ()] == whole.times
    assert [row for piece in cut for row in piece.properties or ()] == (texts or [])
    assert sum(piece.size for piece in cut) == whole.size
    for piece in cut:
        count = len(piece.values)
        assert 1 <= count <= records
        assert count == 1 or piece.size + ROW_BYTES * count <= SEND_BYTES


@pytest.mark.parametrize("transactional", [True, False])
def test_sends_of_many_tasks_are_cut_into_frames_of_limited_size(transactional: bool) -> None:
    core = welcomed()
    value = b"x" * (SEND_BYTES * 2 // 3)
    transaction = core.begin() if transactional else None
    for number in range(9):
        core.send("a", rows(value), transaction, number)
    if transactional:
        register(core, taken(core))
    sent, number = 0, 0
    while sent < 9:
        frame = taken(core)
        sizes = [len(send.batch.values.data) for send in frame.sends]
        assert max(sizes) <= SEND_BYTES
        assert sum(sizes) <= FRAME_BYTES + SEND_BYTES
        sent += sum(len(send.batch) for send in frame.sends)
        number += len(frame.sends)
        core.receive(ServerFrame(acknowledged=number))
    assert core.has_room
    told = [] if transactional else [(waiter, None) for waiter in range(9)]
    assert core.take_results() == told


SMALL_SEND, SMALL_FRAME, SLACK = 16 * 1024, 32 * 1024, 4 * 1024


@st.composite
def wide_rows(draw: st.DrawFn) -> SendColumns:
    """Records of which each has some of many properties, by turns, with texts of one kind."""
    count, names = draw(st.sampled_from([1, 2, 40, 150])), draw(st.sampled_from([0, 1, 3, 60, 520]))
    each, first = draw(st.integers(0, min(names, 70))), draw(st.sampled_from([0, 30]))
    text = draw(st.sampled_from(["", "{}", "1{}", "\u6f22" * 40 + "{}", "x" * 40]))
    table = [
        {f"n{first + (row * each + at) % names}": text.format(row * at) for at in range(each)} for row in range(count)
    ]
    return many_rows([b"v"] * count, [b"k"] * count, None, table if names else None, None)


@settings(max_examples=40)
@given(st.lists(wide_rows(), min_size=1, max_size=4), st.booleans())
def test_frames_with_many_properties_have_limited_size(sends: list[SendColumns], transactional: bool) -> None:
    core = welcomed()
    with pytest.MonkeyPatch.context() as patch:
        for module, name, size in (
            (record_path, "SEND_BYTES", SMALL_SEND),
            (send_columns, "SEND_BYTES", SMALL_SEND),
            (record_path, "FRAME_BYTES", SMALL_FRAME),
        ):
            patch.setattr(module, name, size)
        transaction = core.begin() if transactional else None
        for whole in sends:
            for piece in slices(whole):
                core.send("a", piece, transaction, None)
        if transactional:
            core.transactions.send_all_early()
            register(core, taken(core))
        due = [row or {} for whole in sends for row in whole.properties or [None] * len(whole.values)]
        found: list[dict[str, str]] = []
        number = 0
        while len(found) < len(due):
            frame = taken(core)
            blocks = [encode_block(send.batch, first_entry=0, publish_time=0).length for send in frame.sends]
            assert sum(blocks) <= SMALL_FRAME + SMALL_SEND + SLACK
            for send, size in zip(frame.sends, blocks, strict=True):
                assert len(send.batch) == 1 or size <= SMALL_SEND + SLACK
                assert len(send.batch) == 1 or len(send.batch.properties) <= MAX_PROPERTIES + len(TRANSACTIONAL)
                found += [own(message.properties) for message in send.batch]
            number += len(frame.sends)
            core.receive(ServerFrame(acknowledged=number))
    assert found == due


def own(properties: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in properties.items() if name not in TRANSACTIONAL}


@asynccontextmanager
async def served(broker: MemoryBroker, limits: Limits | None = None) -> AsyncIterator[Client]:
    """A client over a socket."""
    engine = await Engine.start(broker.connect(), limits=limits or Limits())
    server = GrpcServer(engine.limits, max_clients=10)
    await server.start("127.0.0.1:0")
    await server.serve(engine, ServiceAdmin(engine))
    try:
        async with connect(f"txnbuf://127.0.0.1:{server.port}") as client:
            yield client
    finally:
        await server.stop()
        await engine.stop()


async def many_at_once(client: Client) -> None:
    async with client.transaction() as txn:
        await txn.send_many("log", [LARGE] * 4)


async def many_ordinary_at_once(client: Client) -> None:
    await client.send_many("log", [LARGE] * 4)


async def by_many_tasks(client: Client) -> None:
    async with client.transaction() as txn:
        await asyncio.gather(*(txn.send("log", LARGE) for _ in range(4)))


async def ordinary_by_many_tasks(client: Client) -> None:
    await asyncio.gather(*(client.send("log", LARGE) for _ in range(4)))


@pytest.mark.parametrize(
    "send", [many_at_once, many_ordinary_at_once, by_many_tasks, ordinary_by_many_tasks], ids=lambda send: send.__name__
)
@pytest.mark.parametrize("limits", [Limits(), Limits(client_bytes=64 * 1024)], ids=["usual", "small"])
async def test_more_than_a_frame_of_records_arrives(
    send: Callable[[Client], Coroutine[Any, Any, None]], limits: Limits
) -> None:
    broker = MemoryBroker()
    async with served(broker, limits) as client:
        await send(client)
    assert [len(value or b"") for value in values(broker, "log")] == [len(LARGE)] * 4


async def test_records_with_many_properties_arrive() -> None:
    broker = MemoryBroker()
    rows = [{f"name-{number % 300}": "x"} for number in range(4096)]
    async with served(broker) as client, client.transaction() as txn:
        for _ in range(3):
            await txn.send_many("log", [b"v"] * 4096, properties=rows)
    assert len(values(broker, "log")) == 3 * 4096


async def test_frame_over_the_size_limit_is_an_error_and_not_retried() -> None:
    async with served(MemoryBroker()) as client:
        transaction = client.transaction()
        await transaction.begin()
        whole = SendColumns([None] * 4, [LARGE] * 4, None, None, 4 * len(LARGE))
        client.session.core.send("log", whole, transaction._usable())
        with pytest.raises(OutcomeUnknown, match="larger than max"):  # the commit is in the same frame
            await transaction.commit()


def test_sizes_of_texts_are_in_bytes() -> None:
    properties = {"\u00fc": "\u6f22\u5b57", "plain": "text"}
    assert one_row(b"v", b"k", None, None, properties, None).size == 2 + (2 + 6) + (5 + 4)
    whole = many_rows([b"v"] * 3, None, None, [properties, None, properties], None)
    assert whole.size == 3 + 2 * 17
    assert take_rows(whole, [0, 1]).size == 2 + 17
