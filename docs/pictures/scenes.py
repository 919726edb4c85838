"""What the drawings show: small runs of the product in this process, read with its own readers."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

from bench.log_owner import LogOwner
from bench.pair_process import pair
from broker_io import open_broker
from broker_io.batch import Batch, Message
from broker_io.environment import Environment, use
from broker_io.memory import MemoryBroker
from broker_io.memory.broker import MemoryConnection
from broker_io.port import Broker
from broker_io.system import SystemDisk, SystemFile
from snapshots.format import END, SEGMENT, SNAPSHOT_TOPIC, EntryKey, decode_end
from snapshots.scan import scan
from txnbuffer import connect
from txnbuffer.cli.admin_client import ServiceAddress, call
from txnbuffer.cli.log_picture import LogPicture, read_picture
from txnbuffer.client.client import Client
from txnbuffer.client.path.writers import DirectPath, Writers
from txnbuffer.client.session import session_requests
from txnbuffer.client.session.embedded import EngineLink
from txnbuffer.client.session.session import ClientSession
from txnbuffer.coordinator.decisions import Group, Owner, decode
from txnbuffer.model import EARLIEST, Marker, MarkerItem, Outcome, Position, TxnId
from txnbuffer.protocol import MARKER, TXN, decode_marker, encode_marker, transactional
from txnbuffer.recovery.codec import decode_segment
from txnbuffer.recovery.restore import load
from txnbuffer.rpc.frames import ClientFrame, ServerFrame
from txnbuffer.rpc.session_encoding import client_frame_parts, encode_server_frame
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.servers import grpc_server
from txnbuffer.service.servers.admin import ServiceAdmin

WAIT = 60.0
"""Seconds for which a run waits until something is in a log."""
DECISIONS = "__txnbuffer_decisions"


def log_of_three_transactions() -> LogPicture:
    """The log of a topic with a committed, an aborted and an open transaction, and an ordinary record."""
    with tempfile.TemporaryDirectory() as directory, mock.patch.object(session_requests, "COLLECT_BYTES", 0):
        address = f"file:{directory}/log"
        with connect(address) as client:
            first, second, third = (client.transaction().begin() for _ in range(3))
            steps: list[Callable[[], object]] = [
                partial(first.send, "orders", b"3", key="apples"),
                partial(second.send, "orders", b"5", key="pears"),
                partial(first.send, "orders", b"1", key="plums"),
                first.commit,
                partial(third.send, "orders", b"2", key="figs"),
                partial(second.send, "orders", b"4", key="dates"),
                second.abort,
                partial(client.send, "orders", b"7", key="limes"),
                partial(third.send, "orders", b"6", key="grapes"),
            ]
            with open_broker(address, read_only=True) as broker:
                for number, step in enumerate(steps):
                    step()
                    _wait_for(lambda number=number: _messages(broker, "orders") > number)
                picture = read_picture(broker, "orders", EARLIEST, 50)
            third.abort()
    return picture


def _messages(broker: Broker, topic: str) -> int:
    return sum(ledger.entries for ledger in broker.ledgers(topic)) if topic in broker.topics() else 0


def _wait_for(reached: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WAIT
    while not reached():
        if time.monotonic() > give_up:
            raise TimeoutError("the run made no progress")
        time.sleep(0.005)


async def _until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT):
        while not reached():
            await asyncio.sleep(0.005)


# A commit


class Event(NamedTuple):
    """Something that happened during a commit: a frame, an append, or a write or sync of a file."""

    what: str
    detail: str


class TracedFile:
    """A file whose writes and syncs are events."""

    def __init__(self, file: SystemFile, name: str, events: list[Event]) -> None:
        self._file, self._name, self._events = file, name, events

    def write(self, offset: int, chunks: Any) -> None:
        self._events.append(Event("write", self._name))
        self._file.write(offset, chunks)

    def sync(self) -> None:
        self._events.append(Event("sync", self._name))
        self._file.sync()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class TracedDisk(SystemDisk):
    def __init__(self, events: list[Event]) -> None:
        self._events = events

    def open(self, path: str, *, write: bool = False, create: bool = False) -> Any:
        name = "journal" if "journal" in path.rsplit("/", 1)[1] else "ledgers"
        return TracedFile(super().open(path, write=write, create=create), name, self._events)


def commit_events() -> list[Event]:
    """What a service on an embedded log does for a transaction with a record in each of two topics."""
    events: list[Event] = []

    def frames(data: bytes, *most: int) -> Any:
        for frame in client_frame_parts(data, *most):
            events.append(Event("frame", _frame_text(frame)))
            yield frame

    def answer(frame: ServerFrame) -> bytes:
        outcomes = [result.name for _, result in frame.answers if isinstance(result, Outcome)]
        if outcomes:
            events.append(Event("answer", outcomes[0]))
        return encode_server_frame(frame)

    patches = mock.patch.multiple(grpc_server, client_frame_parts=frames, encode_server_frame=answer)
    with tempfile.TemporaryDirectory() as directory, use(Environment(disk=TracedDisk(events))), patches:
        return asyncio.run(_commits(f"file:{directory}/log", events))


def _frame_text(frame: ClientFrame) -> str:
    return f"{len(frame.sends)} sends, {len(frame.commits)} commit"


async def _commits(address: str, events: list[Event]) -> list[Event]:
    """The events of a commit that most of ten have; others have a snapshot or a lease in between."""
    traces: Counter[tuple[Event, ...]] = Counter()
    with open_broker(address) as broker:
        _trace_appends(broker, events)
        engine = await Engine.start(broker, address="127.0.0.1:1")
        server = grpc_server.GrpcServer(engine.limits, max_clients=10)
        await server.start("127.0.0.1:0")
        await server.serve(engine, ServiceAdmin(engine))
        async with connect(f"txnbuf://127.0.0.1:{server.port}") as client:
            for _ in range(10):
                events.clear()
                async with client.transaction() as txn:
                    await txn.send("orders", b"3", key="apples")
                    await txn.send("stock", b"-3", key="apples")
                traces[tuple(events)] += 1
        await server.stop()
        await engine.stop()
    return [*traces.most_common(1)[0][0]]


def _trace_appends(broker: Any, events: list[Event]) -> None:
    """Let each atomic append of a broker be an event."""
    real = broker.append_together

    def append_together(appends: Any, done: Callable[[Any], None]) -> None:
        messages = [(writer.topic.entry.name, message) for writer, batch in appends for message in batch]
        records = sum(TXN in message.properties for _, message in messages)
        markers = sum(MARKER in message.properties for _, message in messages)
        decisions = sum(name == DECISIONS for name, _ in messages)
        events.append(Event("append", f"{records} records, {decisions} decision, {markers} markers"))

        def durable(result: Any) -> None:
            events.append(Event("durable", ""))
            done(result)

        real(appends, durable)

    broker.append_together = append_together


# A takeover


class Append(NamedTuple):
    """An entry that an owner, 1 or 2, wrote: of the decision log, or a marker of a topic. `lost`: it never arrived."""

    owner: int
    topic: str
    text: str
    lost: bool = False


async def _client(engine: Engine, broker: Broker, *, writes: bool = False) -> Client:
    """A client of an engine; `writes`: it writes its records to the topics itself."""

    async def link() -> EngineLink:
        return EngineLink(engine)

    options = {"path": partial(DirectPath, Writers(broker, WAIT), broker.max_message_bytes)} if writes else {}
    session = ClientSession(link, WAIT, **options)
    await session.open()
    return Client(session, lambda: broker, None)


async def takeover() -> list[Append]:
    """Two owners of a namespace in turn; the first one ends after a decision and one of its two markers."""
    cluster, appends = MemoryBroker(), list[Append]()
    brokers = [cluster.connect(), cluster.connect()]
    owners = {id(broker._connection): number for number, broker in enumerate(brokers, 1)}
    real = MemoryConnection.append

    def append(self: MemoryConnection, parts: Any, *, alone: bool) -> Any:
        for writer, batch in parts:
            lost = writer.topic in self.faults.holds
            found = [(writer.topic, text) for message in batch if (text := _entry_text(writer.topic, message))]
            appends.extend(Append(owners.get(id(self), 0), topic, text, lost) for topic, text in found)
        return real(self, parts, alone=alone)

    with mock.patch.object(MemoryConnection, "append", append):
        first = await Engine.start(brokers[0], cluster_mode=True)
        client = await _client(first, cluster, writes=True)
        txn = client.transaction()
        await txn.begin()
        await txn.send("orders", b"3")
        await txn.send("stock", b"-3")
        brokers[0].faults.hold(topic="stock", written=False)
        await txn.commit()
        await _until(lambda: any(one.lost for one in appends))
        second = await Engine.start(brokers[1], cluster_mode=True)
        await _until(lambda: sum(one.owner == 2 for one in appends) >= 3)
        brokers[0].faults.release()
        for closing in (client.close(), second.stop(), first.stop()):
            await asyncio.gather(closing, return_exceptions=True)
    return appends


def _entry_text(topic: str, message: Message) -> str:
    """What a marker, or an entry of the decision log that matters here, says."""
    if MARKER in message.properties:
        marker = decode_marker(message.value)
        return ", ".join(f"{outcome.name} {txn}" for txn, outcome, _ in marker.items)
    entry = decode(message) if topic == DECISIONS else None
    if isinstance(entry, Owner):
        return f"owner {entry.epoch}"
    if isinstance(entry, Group):
        return ", ".join(f"{row.outcome.name} 0:{row.least}" for row in entry.rows)
    return ""


# A snapshot


class Entry(NamedTuple):
    """An entry of a snapshot: its key, how many aborts it holds, and the first and the last marker of these."""

    key: str
    aborts: int
    first: Position | None
    last: Position | None


class Snapshot(NamedTuple):
    segments: list[Entry]
    end: Entry
    names: range
    applied: Position
    log_end: Position


def snapshot() -> Snapshot:
    """The snapshot of a topic with 20,000 aborted transactions, and what its log has after it."""
    broker = MemoryBroker(ledger_entries=100_000)
    with LogOwner(broker) as manager:
        manager.recover()
        manager.register("topic")
        with broker.writer("topic") as writer:
            for first in range(1, 20_001, 1000):
                writer.append(_aborted(range(first, first + 1000))).result(WAIT)
            manager.pump()
            manager.snapshot("topic")
            writer.append(_aborted(range(20_001, 20_101))).result(WAIT)
        found = scan(broker, SNAPSHOT_TOPIC, "topic").topics["topic"]
        loaded = load(broker, "topic")
        log_end = broker.last_position("topic")
    segments = []
    for number, stored in sorted(found.numbered[SEGMENT].items()):
        items = decode_segment("topic", number, stored).segment.items
        key = str(EntryKey("topic", SEGMENT, number))
        segments.append(Entry(key, len(items.least), items.first, items.last))
    assert found.end is not None
    assert log_end is not None
    unsealed = loaded.buffer.segments.unsealed()
    end = Entry(str(EntryKey("topic", END)), len(unsealed.least), unsealed.first, unsealed.last)
    return Snapshot(segments, end, decode_end("topic", found.end).numbers(SEGMENT), loaded.resume, log_end)


def _aborted(numbers: range) -> Batch:
    """A record of each transaction, and a marker that aborts all of them."""
    records = [transactional(Batch.of([Message(b"k", b"v")]), TxnId(0, number), 1) for number in numbers]
    items = tuple(MarkerItem(TxnId(0, number), Outcome.ABORT, 1) for number in numbers)
    return Batch.concat([*records, Batch.of([encode_marker(Marker(0, 1, 0, True, items))])])


# A group


class Share(NamedTuple):
    """A topic, which of the members reads it, and how many of its records are consumed and not."""

    topic: str
    member: int
    consumed: int
    lag: int


@asynccontextmanager
async def _engine(broker: Broker) -> AsyncIterator[Engine]:
    engine = await Engine.start(broker)
    try:
        yield engine
    finally:
        await engine.stop()


CONSUMED = {"east": 5, "north": 6, "south": 4, "west": 7}
LAG = {"east": 0, "north": 3, "south": 2, "west": 1}


async def group() -> list[Share]:
    """A consumer group with two members on four topics, as `txnbuf groups` shows it."""
    broker, may_handle = MemoryBroker(), True
    async with _engine(broker) as engine:
        clients = [await _client(engine, broker) for _ in range(2)]
        admin = ServiceAdmin(engine)

        async def handle(txn: Any, record: Any) -> None:
            if not may_handle:
                await asyncio.Event().wait()  # until the run ends
            await txn.send("totals", record.value)

        for topic, records in CONSUMED.items():
            await clients[0].send_many(topic, [b"v"] * records)
        working = [asyncio.ensure_future(each.process([*CONSUMED], "billing", handle)) for each in clients]
        await _lags(admin, dict.fromkeys(CONSUMED, 0))
        may_handle = False
        for topic, records in LAG.items():
            await clients[0].send_many(topic, [b"v"] * records)
        rows = await _lags(admin, LAG)
        for each in working:
            each.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in clients), return_exceptions=True)
    members = sorted({row["member"] for row in rows}, key=lambda member: min(_topics(rows, member)))
    return [Share(row["topic"], members.index(row["member"]), CONSUMED[row["topic"]], row["lag"]) for row in rows]


def _topics(rows: list[dict[str, Any]], member: str) -> list[str]:
    return [row["topic"] for row in rows if row["member"] == member]


async def _lags(admin: ServiceAdmin, wanted: dict[str, int]) -> list[dict[str, Any]]:
    """The rows of the group once two members share its topics and have these lags."""
    async with asyncio.timeout(WAIT):
        while True:
            rows = [*await admin.groups({"group": "billing"})]
            if {row["topic"]: row["lag"] for row in rows} == wanted and len({row["member"] for row in rows}) == 2:
                return rows
            await asyncio.sleep(0.02)


# A pair


class Machine(NamedTuple):
    """A machine of a pair, as `txnbuf replication status` shows it."""

    role: str
    in_sync: int
    has_all: bool


def machines() -> list[Machine]:
    """The machines of a pair after a commit."""
    with pair("pair.lease_seconds=2", "service.drain_seconds=0.1") as address:
        with connect(address) as client, client.transaction() as txn:
            txn.send("orders", b"3")
        found = [call(ServiceAddress(host), "Replication") for host in address.removeprefix("txnbuf://").split(",")]
    return [Machine(one["role"], len(found[0]["in_sync"]), one["durable"] >= found[0]["commit"]) for one in found]
