"""A large frame of one client delays the others for a part of it only, and what its sender may not do costs little."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from access_world import accessed
from raw_session import InProcess, OverGrpc, RawSession
from service_setup import engine_on, listening

from broker_io.memory import MemoryBroker
from broker_io.rpc.channel import VERSION_METADATA
from txnbuffer.coordinator.messages import MOST_OPEN_SESSION
from txnbuffer.errors import InvalidRequest, NotAuthorized
from txnbuffer.model import TxnId
from txnbuffer.rpc.frames import ClientFrame, IdBlock, LeaseRequest, NamedRequest, Query, SessionHello
from txnbuffer.rpc.session_encoding import PART_ROWS, client_frame_parts, encode_client_frame
from txnbuffer.service.door.connection import FREE_MISTAKES, WAITING_ROWS, SessionConnection
from txnbuffer.service.door.quotas import MAX_HOLD
from txnbuffer.service.engine.engine import TURN_ROWS, Engine
from txnbuffer.service.topics.requests import MAX_LEASES

if TYPE_CHECKING:
    pass


def queries(count: int, first: int = 1) -> ClientFrame:
    return ClientFrame(queries=tuple(Query(number, TxnId(0, number)) for number in range(first, first + count)))


def count_rows(engine: Engine) -> list[list[tuple[SessionConnection, int]]]:
    """The rows that each turn of an engine handles, with their connections."""
    turns: list[list[tuple[SessionConnection, int]]] = []
    turn, handle = engine._turn, engine.requests.handle

    def counted_turn() -> None:
        turns.append([])
        turn()

    def counted(connection: SessionConnection, frame: ClientFrame, now: float) -> None:
        turns[-1].append((connection, frame.rows))
        handle(connection, frame, now)

    engine._turn = counted_turn  # type: ignore[method-assign]  # of this engine only
    engine.requests.handle = counted  # type: ignore[method-assign]  # likewise
    return turns


async def test_rows_of_a_turn_are_bounded_and_shared() -> None:
    async with engine_on(MemoryBroker()) as engine:
        greedy, other = RawSession(InProcess(engine)), RawSession(InProcess(engine))
        await greedy.hello()
        await other.hello()
        turns = count_rows(engine)
        for part in client_frame_parts(encode_client_frame(queries(8 * TURN_ROWS))):
            greedy.link.send(part)
        other.link.send(queries(1, first=1))
        await other.until(lambda: other.answers)
        await greedy.until(lambda: len(greedy.answers) == 8 * TURN_ROWS)
        assert max(sum(rows for _, rows in turn) for turn in turns) <= TURN_ROWS + PART_ROWS
        assert [rows for connection, rows in turns[0][:2] if connection is other.link.connection] == [1]


async def test_a_connection_is_not_read_while_its_rows_wait() -> None:
    async with engine_on(MemoryBroker()) as engine:
        session = RawSession(InProcess(engine))
        await session.hello()
        parts = [*client_frame_parts(encode_client_frame(queries(WAITING_ROWS + 1)))]
        for part in parts[:-1]:
            session.link.send(part)
            await asyncio.wait_for(session.link.connection.room(), 60)
        session.link.send(parts[-1])
        read = asyncio.ensure_future(session.link.connection.room())
        await asyncio.sleep(0)
        assert not read.done() or not session.link.connection.frames
        await asyncio.wait_for(read, 60)
        assert session.link.connection.waiting_rows <= WAITING_ROWS


async def test_a_client_is_read_less_for_what_it_should_not_have_asked() -> None:
    async with engine_on(MemoryBroker()) as engine:
        session = RawSession(InProcess(engine))
        await session.hello()
        connection = session.link.connection
        for count, read in ((FREE_MISTAKES, True), (FREE_MISTAKES + 1, False)):
            session.link.send(queries(count))
            await session.until(lambda count=count: len(session.answers) == count)
            session.answers.clear()
            reading = asyncio.ensure_future(connection.room())
            await asyncio.sleep(0)
            assert reading.done() is read
            await asyncio.wait_for(reading, 60)
        for _ in range(3):
            session.link.send(queries(TURN_ROWS))
        await session.until(lambda: len(session.answers) == TURN_ROWS)
        assert (
            asyncio.get_running_loop().time() < connection._held_until <= asyncio.get_running_loop().time() + MAX_HOLD
        )


async def test_a_large_frame_over_grpc_is_handled_in_parts_and_answered_whole() -> None:
    async with engine_on(MemoryBroker()) as engine, listening(engine, max_clients=10) as server:
        session = RawSession(OverGrpc(server.port))
        await session.hello()
        turns = count_rows(engine)
        session.link.send(queries(3_000))
        await session.until(lambda: len(session.answers) == 3_000)
        assert max(rows for turn in turns for _, rows in turn) <= PART_ROWS
        assert max(sum(rows for _, rows in turn) for turn in turns) <= TURN_ROWS
        await session.link.cut()


def test_parts_of_a_frame_have_its_rows_in_order_and_decode_when_asked() -> None:
    frame = ClientFrame(
        hello=SessionHello("", ()),
        registers=tuple(NamedRequest(number, f"t{number}") for number in range(1, 200)),
        leases=(LeaseRequest(300, 5),),
        queries=tuple(Query(number, TxnId(0, number)) for number in range(400, 900)),
        returned=tuple(IdBlock(number, 1) for number in range(1, 130)),
        bye=True,
    )
    parts = [*client_frame_parts(encode_client_frame(frame))]
    assert [part.hello for part in parts if part.hello is not None] == [frame.hello]
    assert parts[0].hello is not None
    assert [part.bye for part in parts] == [False] * (len(parts) - 1) + [True]
    assert max(part.rows for part in parts) <= PART_ROWS
    assert sum(part.rows for part in parts) == sum(1 for _ in frame.split()) == frame.rows
    together = [(name, row) for part in parts for name, row, _ in part.split()]
    assert together == [(name, row) for name, row, _ in frame.split()]


async def test_a_new_session_names_no_open_transactions_and_no_session_too_many() -> None:
    async with engine_on(MemoryBroker()) as engine:
        session = RawSession(InProcess(engine))
        with pytest.raises(EOFError, match="at most 0"):
            await session.hello(claims=[TxnId(0, 1)])
        assert isinstance(session.goodbye, InvalidRequest)
        session = RawSession(InProcess(engine))
        with pytest.raises(EOFError, match=f"at most {MOST_OPEN_SESSION}"):
            await session.hello("0" * 32, [TxnId(0, 1)] * (MOST_OPEN_SESSION + 1))


async def test_many_leases_at_once_end_the_connection() -> None:
    async with engine_on(MemoryBroker()) as engine:
        session = RawSession(InProcess(engine))
        await session.hello()
        session.link.send(ClientFrame(leases=tuple(LeaseRequest(number, 1) for number in range(1, MAX_LEASES + 2))))
        with pytest.raises(EOFError, match="leases were asked for at once"):
            await session.until(lambda: session.answers)


async def test_who_may_neither_write_nor_join_a_group_leases_no_ids(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        answers = {}
        for principal in ("reader", "operator", "writer", "processor"):
            metadata = (*VERSION_METADATA, ("authorization", f"Bearer {service.tokens.text[principal]}"))
            session = RawSession(OverGrpc(service.server.port, metadata))
            await session.hello()
            answers[principal] = await session.ask(leases=lambda request: (LeaseRequest(request, 8),))
            await session.link.cut()
        assert {name for name, answer in answers.items() if isinstance(answer, NotAuthorized)} == {"reader", "operator"}
        assert "may not begin transactions" in str(answers["reader"])
        assert engine.coordinator.outstanding_of.total() == 16


async def test_a_connection_that_comes_while_the_engine_stops_ends() -> None:
    """It would wait for its welcome for as long as its client waits for a service."""
    engine = await Engine.start(MemoryBroker())
    stopping = asyncio.ensure_future(engine.stop())
    await asyncio.sleep(0)
    session = RawSession(InProcess(engine))
    with pytest.raises(EOFError, match="has stopped"):
        await asyncio.wait_for(session.hello(), 60)
    await stopping
