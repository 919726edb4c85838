"""Limits of principals and overload protection of a service: what is refused and with which error; nothing is lost."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from access_world import AccessedService, accessed
from raw_session import InProcess, OverGrpc, RawSession, transactional
from service_setup import engine_on, eventually, visible

from broker_io.batch import Batch, Message
from broker_io.errors import TooManyStreams
from broker_io.memory import MemoryBroker
from broker_io.remote import service as log_service
from broker_io.rpc.channel import VERSION_METADATA
from txnbuffer.access.limits import PrincipalLimits
from txnbuffer.client.client import Client
from txnbuffer.client.reading.records import Record
from txnbuffer.client.transaction import Transaction
from txnbuffer.coordinator.messages import Commit, Leased
from txnbuffer.errors import LimitExceeded, TooManyTopics, TooManyTransactions
from txnbuffer.model import Outcome, TxnId
from txnbuffer.rpc.frames import Abort, ClientFrame, LeaseRequest
from txnbuffer.service.door.connection import Limits, SessionConnection
from txnbuffer.service.door.quotas import Quotas
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.servers import grpc_server
from txnbuffer.service.servers.http_server import metrics


async def send(client: Client, topic: str = "a", value: bytes = b"v") -> None:
    async with client.transaction() as txn:
        await txn.send(topic, value)


def limited(**values: float) -> Limits:
    return Limits(principal=PrincipalLimits(**values))  # type: ignore[arg-type]  # integers in a test


def refused(engine: Engine, limit: str) -> int:
    found = {dict(one.labels)["limit"]: one.value for one in metrics(engine) if one.name == "refused"}
    assert found.keys() == {"overload", *engine.quotas.refused}
    return int(found.get(limit, 0))


async def test_sessions_of_a_principal_are_limited(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker(), limits=limited(sessions=2)) as engine, accessed(engine, tmp_path) as service:
        async with service.connect("root") as one, service.connect("root"), service.connect("writer") as other:
            with pytest.raises(LimitExceeded, match=r"limits\.sessions of principal 'root' is 2: .*retry") as caught:
                await service.connect("root", max_unavailable=0.5)
            assert caught.value.limit == "limits.sessions"
            assert caught.value.retry_after == 1.0
            await send(one)
            await send(other)
            assert refused(engine, "limits.sessions") >= 1
            waiting = asyncio.ensure_future(_connected(service))
            await asyncio.sleep(0.1)
        await waiting  # once the others have closed


async def _connected(service: AccessedService) -> None:
    async with service.connect("root", max_unavailable=60.0) as client:
        await send(client)


async def test_lost_connections_free_their_sessions() -> None:
    async with engine_on(MemoryBroker(), limits=limited(sessions=1)) as engine:
        for _ in range(3):
            session = RawSession(InProcess(engine))
            await session.hello()
            await session.link.cut()
        session, late = RawSession(InProcess(engine)), RawSession(InProcess(engine))
        await session.hello()
        with pytest.raises(EOFError, match="the connection ended"):
            await late.hello()
        assert isinstance(late.goodbye, LimitExceeded)
        again = RawSession(InProcess(engine))
        await again.hello(session.session)  # a session that is resumed is no new one


async def test_sessions_that_were_cut_are_not_resumed_beyond_the_limit() -> None:
    async with engine_on(MemoryBroker(), limits=limited(sessions=2)) as engine:
        names = []
        for _ in range(4):
            session = RawSession(InProcess(engine))
            await session.hello()
            names.append(session.session)
            await session.link.cut()
        resumed = [RawSession(InProcess(engine)) for _ in names]
        for session, name in zip(resumed[:2], names[:2], strict=True):
            await session.hello(name)
        for session, name in zip(resumed[2:], names[2:], strict=True):
            with pytest.raises(EOFError, match="the connection ended"):
                await session.hello(name)
            assert isinstance(session.goodbye, LimitExceeded)
        again = RawSession(InProcess(engine))
        await again.hello(names[0])  # it replaces a connection


async def test_connections_without_a_session_are_limited_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "FIRST_FRAME", 0.5)
    async with engine_on(MemoryBroker(), limits=limited(sessions=2)) as engine, accessed(engine, tmp_path) as service:
        metadata = (*VERSION_METADATA, ("authorization", f"Bearer {service.tokens.text['writer']}"))
        links = [OverGrpc(service.server.port, metadata) for _ in range(6)]
        await eventually(lambda: refused(engine, "limits.sessions") == 2)  # there may be two for each session
        await eventually(lambda: not engine.connections)  # they sent nothing
        for link in links:
            await link.cut()


async def test_a_principal_has_half_of_the_readers_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_service, "MAX_READERS", 8)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(engine_on(MemoryBroker()))
        service = await stack.enter_async_context(accessed(engine, tmp_path))
        client = await stack.enter_async_context(service.connect("root"))
        other = await stack.enter_async_context(service.connect("reader"))
        await send(client)
        async with AsyncExitStack() as readers:
            with pytest.raises(TooManyStreams, match="principal 'root' has 4 open readers"):
                for _ in range(5):
                    await readers.enter_async_context(await client.reader("a"))
            await readers.enter_async_context(await other.reader("a"))
        assert refused(engine, "readers") >= 1
        async with await client.reader("a") as reader:
            assert await reader.read(timeout=60.0) is not None


async def test_open_transactions_of_a_principal_are_limited(tmp_path: Path) -> None:
    broker, limits = MemoryBroker(), limited(open_transactions=20)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(engine_on(broker, limits=limits))
        service = await stack.enter_async_context(accessed(engine, tmp_path))
        async with service.connect("root") as one, service.connect("root") as two, service.connect("writer") as other:
            transactions = [one.transaction() for _ in range(20)]
            for txn in transactions:
                await txn.begin()
            with pytest.raises(
                TooManyTransactions, match=r"limits\.open_transactions of principal 'root' is 20"
            ) as caught:
                await two.transaction().begin()
            assert caught.value.limit == "limits.open_transactions"
            await send(other)
            await transactions[0].abort()
            await send(two)


async def test_streams_of_a_principal_are_limited(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(engine_on(MemoryBroker(), limits=limited(streams=1)))
        service = await stack.enter_async_context(accessed(engine, tmp_path))
        async with service.connect("root") as client, service.connect("reader") as other:
            await send(client)
            async with AsyncExitStack() as streams:
                first = await streams.enter_async_context(client.stream("a"))
                await anext(first)
                second = await streams.enter_async_context(client.stream("a"))
                waiting = asyncio.ensure_future(anext(second))
                await eventually(lambda: refused(engine, "limits.streams") > 0)
                async with other.stream("a") as third:
                    await anext(third)
                assert not waiting.done()
                await first.close()
                await waiting  # a client asks again until there is room


async def test_topics_created_by_a_principal_are_limited(tmp_path: Path) -> None:
    broker, limits = MemoryBroker(), limited(topics_created=2)
    async with engine_on(broker, limits=limits) as engine, accessed(engine, tmp_path) as service:
        async with service.connect("root") as client:
            await send(client, "a")
            await client.send("b", b"v")
            for topic in ("c", "d"):
                with pytest.raises(TooManyTopics, match=r"limits\.topics_created of principal 'root' is 2") as caught:
                    await send(client, topic)
                assert not caught.value.retryable
                with pytest.raises(TooManyTopics, match=r"limits\.topics_created of principal 'root' is 2"):
                    await client.send(topic, b"v")
            await send(client, "a")
            async with service.connect("writer") as other:
                await send(other, "ab")
            await send(client, "ab")  # it is there now
        assert {"c", "d"}.isdisjoint(broker.topics())


async def test_requests_per_second_of_a_principal_are_limited(tmp_path: Path) -> None:
    broker, limits = MemoryBroker(), limited(requests_per_second=4)
    async with engine_on(broker, limits=limits) as engine, accessed(engine, tmp_path) as service:
        async with service.connect("root") as client, service.connect("writer") as other:
            kept = [number for number in range(40) if await _was_admitted(client, number)]
            assert 4 <= len(kept) < 40
            assert await _was_admitted(other, 0)
            assert await _was_admitted(other, 1)
            loop = asyncio.get_running_loop()
            began = loop.time()
            for number in range(100, 106):

                async def work(txn: Transaction, value: bytes = b"%d" % number) -> None:
                    await txn.send("a", value)

                await client.run(work)
            assert loop.time() - began > 1.0
            with pytest.raises(LimitExceeded, match=r"limits\.requests_per_second of principal 'root' is 4"):
                for _ in range(40):
                    await client.send("a", b"ordinary")
        found = visible(broker, "a")
        assert [number for number in range(40) if found[b"%d" % number]] == sorted({*kept, 0, 1})
        assert all(found[b"%d" % number] == 1 for number in range(100, 106))


async def _was_admitted(client: Client, number: int) -> bool:
    try:
        await send(client, "a", b"%d" % number)
    except LimitExceeded:
        return False
    return True


async def test_a_group_waits_for_its_limit_and_processes_each_record_once(tmp_path: Path) -> None:
    broker = MemoryBroker()
    async with (
        engine_on(broker, limits=limited(requests_per_second=3)) as engine,
        accessed(engine, tmp_path) as service,
    ):
        async with service.connect("writer") as client:
            await client.send_many("a", [b"%d" % number for number in range(8)])

        async def work(txn: Transaction, record: Record) -> None:
            await txn.send("done", record.value)

        async with service.connect("root") as client:
            done = await client.process("a", "g", work, batch=1, idle_timeout=2.0)
        assert (done.records, done.skipped) == (8, 0)
        assert refused(engine, "limits.requests_per_second") > 0
    assert visible(broker, "done") == {b"%d" % number: 1 for number in range(8)}


async def test_limits_change_with_the_policy(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(engine_on(MemoryBroker()))
        service = await stack.enter_async_context(accessed(engine, tmp_path))
        async with service.connect("root") as client:
            await send(client)
            text = service.policy.read_text()
            service.policy.write_text(f'{text}\n[[limit]]\nprincipals = ["root"]\nrequests_per_second = 0.05\n')
            service.access.refresh()
            engine.quotas.refresh()
            with pytest.raises(LimitExceeded) as caught:
                for _ in range(3):
                    await send(client)
            assert 0.0 < caught.value.retry_after <= 20.0
            service.policy.write_text(text)
            service.access.refresh()
            engine.quotas.refresh()
            for _ in range(3):
                await send(client)


async def test_refused_transaction_is_ended_and_writes_nothing() -> None:
    """A client that sends all in one frame: the commit is refused, and an abort writes no marker."""
    broker = MemoryBroker()
    async with engine_on(broker, limits=limited(requests_per_second=2)) as engine:
        session = RawSession(InProcess(engine))
        await session.hello()
        await session.register("a")
        ids = await session.lease(6)
        commits = tuple(Commit(100 + at, TxnId(0, one), ("a",), (1,)) for at, one in enumerate(ids))
        number = session.send(("a", transactional(ids)))
        session.link.send(ClientFrame(commits=commits))
        await session.until(lambda: session.acknowledged >= number and len(session.answers) == 6)
        outcomes = [session.answers[100 + at] for at in range(6)]
        assert outcomes[:2] == [Outcome.COMMIT, Outcome.COMMIT]
        assert [type(one) for one in outcomes[2:]] == [LimitExceeded] * 4
        assert {failure.txn for failure in session.failures} == {TxnId(0, one) for one in ids[2:]}
        await eventually(lambda: engine.appends.idle)
        before = broker.last_position("a")
        aborted = await session.ask(aborts=lambda request: (Abort(request, TxnId(0, ids[2]), ("a",)),))
        assert aborted is Outcome.ABORT
        await eventually(lambda: engine.appends.idle)
        assert broker.last_position("a") == before
        later = await session.write(("a", transactional(ids[3:4])))
        assert isinstance(later[0].error, LimitExceeded)  # its first record was refused, so all others are
        assert visible(broker, "a").total() == 2


async def test_later_records_of_an_admitted_transaction_are_never_refused() -> None:
    broker = MemoryBroker()
    async with engine_on(broker, limits=limited(requests_per_second=0.01)) as engine:
        session = RawSession(InProcess(engine))
        await session.hello()
        await session.register("a", "b")
        ids = await session.lease(2)
        assert await session.write(("a", transactional(ids[:1]))) == []
        assert await session.write(("b", transactional(ids[1:]))) != []
        assert await session.write(("b", transactional(ids[:1]))) == []
        assert await session.write(("a", transactional(ids[:1], seq=2))) == []
        assert await session.commit(ids[0], ("a", "b"), (2, 1)) is Outcome.COMMIT


async def test_bytes_in_flight_of_a_principal_are_shared_by_its_connections() -> None:
    limits = Limits(principal=PrincipalLimits(bytes_in_flight=100_000))
    async with engine_on(MemoryBroker(), limits=limits) as engine:
        first = RawSession(InProcess(engine))
        await first.hello()
        assert first.credits == 100_000
        second = RawSession(InProcess(engine))
        await second.hello()
        assert second.credits == 50_000
        batch = Batch.of([Message(None, b"x" * 60_000)] * 2)
        number = first.send(("a", batch))
        await asyncio.sleep(0)
        assert engine.quotas.usages[0].too_many_bytes
        await first.until(lambda: first.acknowledged >= number)
        assert engine.quotas.usages[0].bytes_in_flight == 0


async def test_overload_refuses_who_asks_for_most_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue delay is set by the test; the loads are those of connections without access control."""
    adjust = Quotas.adjust
    monkeypatch.setattr(Quotas, "adjust", lambda quotas, delay: False)
    async with engine_on(MemoryBroker(), limits=Limits(overload=1.0)) as engine:
        sessions = [RawSession(InProcess(engine)) for _ in range(3)]
        for session in sessions:
            await session.hello()
        delay, failed = 2000.0, [0, 0, 0]
        for step in range(40):
            for number, session in enumerate(sessions):
                batch = Batch.of([Message(None, b"v")])
                failures = await session.write(*[("a", batch)] * (2 if number else 40))
                assert all(isinstance(one.error, LimitExceeded) for one in failures)
                assert all(one.error.limit == "overload" for one in failures)
                failed[number] += len(failures)
            await asyncio.sleep(0.02)
            adjust(engine.quotas, delay if step < 20 else 0.0)
            if step == 19:
                assert engine.quotas.overloaded
                assert failed[0] > 100
                answer = await sessions[0].ask(leases=lambda request: (LeaseRequest(request, 5),))
                assert isinstance(answer, LimitExceeded | Leased)
        assert failed[1:] == [0, 0]
        assert refused(engine, "overload") >= failed[0]
        for session in sessions:
            await session.link.cut()
        for _ in range(400):
            if not engine.quotas.overloaded:
                break
            await asyncio.sleep(0.02)
            adjust(engine.quotas, 0.0)
        assert not engine.quotas.overloaded


async def test_session_with_few_transactions_in_flight_waits_under_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for far more than its share, one request after the other; who has more in flight is refused."""
    adjust, hold, holds = Quotas.adjust, SessionConnection.hold, dict[SessionConnection, float]()
    monkeypatch.setattr(Quotas, "adjust", lambda quotas, delay: False)

    def counted(connection: SessionConnection, seconds: float) -> None:
        holds[connection] = holds.get(connection, 0.0) + seconds
        hold(connection, seconds)

    monkeypatch.setattr(SessionConnection, "hold", counted)
    async with engine_on(MemoryBroker(), limits=Limits(overload=1.0)) as engine:
        few, many, other = [RawSession(InProcess(engine)) for _ in range(3)]
        for session in (few, many, other):
            await session.hello()
        await few.register("a")
        plain = ("a", Batch.of([Message(None, b"v")]))
        refusals = 0
        for _ in range(30):
            assert await other.write(plain) == []
            for _ in range(8):
                some = await few.lease(8)
                assert await few.write(("a", transactional(some))) == []
                for least in some:
                    assert await few.commit(least, ["a"], [1]) is Outcome.COMMIT
                assert await few.write(plain) == []
            refusals += len(await many.write(*[plain] * 200))
            await asyncio.sleep(0.02)
            adjust(engine.quotas, 2000.0)
        assert engine.quotas.overloaded
        assert refusals > 0
        assert refused(engine, "overload") == refusals
        assert holds[few.link.connection] > 0.0
