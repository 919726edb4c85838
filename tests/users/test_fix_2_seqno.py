"""Fix 2: each visible record has its number, the same for every reader, whatever comes later."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from client_world import World, run
from hypothesis import example, given
from hypothesis import strategies as st
from snapshot_driver import forget_origins

from broker_io import open_broker
from broker_io.batch import Batch, Message
from broker_io.memory import MemoryBroker
from broker_io.port import Broker
from txnbuffer import Client, CommittedReader, Record, Seqno, connect
from txnbuffer.config import RetentionConfig
from txnbuffer.errors import InvalidRequest
from txnbuffer.service.topics.retention import LogRetention

TOPIC = "log"


def found(records: Iterable[Record]) -> list[tuple[int | None, bytes]]:
    return [(record.seqno, record.value) for record in records]


def read(broker: Broker, **options: Any) -> list[tuple[int | None, bytes]]:
    with CommittedReader(broker, TOPIC, **options) as reader:
        return found(reader.records(timeout=0.0))


@pytest.mark.parametrize("address", ["memory:", "file"])
def test_ordinary_sends_have_numbers_that_a_transaction_does_not_change(address: str, tmp_path: Path) -> None:
    with connect(f"file:{tmp_path / 'log'}" if address == "file" else address) as client:
        client.send_many(TOPIC, [b"a", b"b"])
        with client.reader(TOPIC) as early:
            assert found(early.records(timeout=0.1)) == [(1, b"a"), (2, b"b")]
            with client.transaction() as txn:
                txn.send(TOPIC, b"c")
            aborted = client.transaction()
            with aborted:
                aborted.send(TOPIC, b"no")
                aborted.abort()
            client.send(TOPIC, b"d")
            assert found(early.records(timeout=0.5)) == [(3, b"c"), (4, b"d")]
        with client.reader(TOPIC) as late:
            assert found(late.records(timeout=0.1)) == [(1, b"a"), (2, b"b"), (3, b"c"), (4, b"d")]


def test_readers_of_a_closed_log_and_of_a_service_have_the_same_numbers(tmp_path: Path) -> None:
    address = f"file:{tmp_path / 'log'}"
    with connect(address) as client:
        client.send_many(TOPIC, [b"a", b"b", b"c"])
    with open_broker(address) as broker:
        assert read(broker, start=Seqno(2)) == [(2, b"b"), (3, b"c")]


def test_the_numbers_of_a_reader_that_starts_later_are_the_same() -> None:
    with connect("memory:") as client:
        client.send_many(TOPIC, [b"a", b"b", b"c"])
        broker = client.client.open_broker()
        positions = [record.position for batch in [CommittedReader(broker, TOPIC).read()] for record in batch or ()]
        for number, position in enumerate(positions, 1):
            assert read(broker, start=position)[0][0] == number


@pytest.mark.parametrize("trimmed", [False, True])
def test_without_registration_a_log_that_may_have_lost_records_has_no_numbers(
    trimmed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MemoryBroker() as broker:
        broker.create_topic(TOPIC)
        with broker.writer(TOPIC) as writer:
            for value in (b"a", b"b"):
                writer.append(Batch.of([Message(None, value)])).result()
                broker.roll(TOPIC)
        if trimmed:
            broker.trim(TOPIC, broker.ledgers(TOPIC)[1].ledger)
        else:
            forget_origins(monkeypatch)
        assert {number for number, _ in read(broker)} == {None}
        with pytest.raises(InvalidRequest, match="has no seqnos yet"):
            read(broker, start=Seqno(1))


def test_a_restored_log_keeps_its_numbers(tmp_path: Path) -> None:
    """The ledgers of a restored log continue elsewhere; a topic that is created there is whole as well."""
    with connect(f"file:{tmp_path / 'log'}") as client:
        client.send_many(TOPIC, [b"a", b"b"])
        client.send("other", b"x")
    with open_broker(f"file:{tmp_path / 'log'}") as broker:
        broker.delete_topic("other")
        broker.create_topic("other")
        (first,) = broker.ledgers("other")
        assert (first.original, first.ledger > 1) == (True, True)
        with broker.writer("other") as writer:
            writer.append(Batch.of([Message(None, b"y")])).result()
            broker.roll("other")
            writer.append(Batch.of([Message(None, b"z")])).result()
        with CommittedReader(broker, "other") as reader:
            assert found(reader.records(timeout=0.0)) == [(1, b"y"), (2, b"z")]
        broker.trim("other", broker.ledgers("other")[-1].ledger)
        assert not broker.ledgers("other")[0].original
    with open_broker(f"file:{tmp_path / 'log'}") as again:
        assert not again.ledgers("other")[0].original
        assert again.ledgers(TOPIC)[0].original


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["send", "commit", "abort", "sets"]), st.integers(1, 3)),
        st.tuples(st.sampled_from(["roll", "retain", "restart", "read"]), st.just(0)),
        st.tuples(st.just("open"), st.integers(0, 30)),
    ),
    max_size=20,
)


@given(STEPS)
@example([("send", 2), ("roll", 0), ("send", 2), ("open", 0), ("retain", 0), ("commit", 1), ("open", 0)])
@example([("send", 2), ("open", 0), ("read", 0), ("commit", 1), ("restart", 0), ("open", 0)])
@example([("send", 2), ("roll", 0), ("retain", 0), ("restart", 0), ("send", 1), ("open", 9), ("commit", 2)])
def test_every_reader_numbers_each_record_as_the_whole_history_does(steps: list[tuple[str, int]]) -> None:
    async def whole() -> None:
        async with World() as world:
            await Numbers(world, await world.client()).take(steps)

    with pytest.MonkeyPatch.context() as patch:  # aborted records are in the log too
        patch.setattr("txnbuffer.client.session.session_requests.COLLECT_BYTES", 0)
        run(whole())


class Numbers:
    """A topic, its readers, and the number of each visible record: by its order since the topic was created."""

    def __init__(self, world: World, client: Client) -> None:
        self.world, self.client = world, client
        self.numbers: dict[bytes, int] = {}
        self.sent = 0
        self.readers: list[CommittedReader] = []

    async def take(self, steps: list[tuple[str, int]]) -> None:
        try:
            for step, number in [*steps, ("open", 0), ("read", 0)]:
                await getattr(self, step)(number)
        finally:
            for reader in self.readers:
                reader.close()

    def values(self, count: int, *, visible: bool = True) -> list[bytes]:
        values = [b"%d" % (self.sent + number) for number in range(count)]
        self.sent += count
        if visible:
            self.numbers |= {value: len(self.numbers) + number for number, value in enumerate(values, 1)}
        return values

    async def send(self, count: int) -> None:
        await self.client.send_many(TOPIC, self.values(count))

    async def sets(self, count: int) -> None:
        for value in self.values(count):
            await self.client.send(TOPIC, value, key=b"k")

    async def commit(self, count: int) -> None:
        async with self.client.transaction() as txn:
            await txn.send_many(TOPIC, self.values(count))

    async def abort(self, count: int) -> None:
        async with self.client.transaction() as txn:
            await txn.send_many(TOPIC, self.values(count, visible=False))
            await txn.abort()

    async def roll(self, _: int) -> None:
        if self.sent:
            self.world.broker.roll(TOPIC)

    async def retain(self, _: int) -> None:
        engine = self.world.engine
        keep = LogRetention(engine.topics, engine.snapshots, RetentionConfig(bytes=1), engine.clock, engine.trim_floors)
        topic = engine.topics.get(TOPIC)
        if topic is not None and (topic.followed is not None or topic.writer is not None):
            await keep.check(topic)

    async def restart(self, _: int) -> None:
        await self.world.restart()

    async def open(self, start: int) -> None:
        if not self.sent:
            return
        broker = self.world.broker
        first = min(start, len(self.numbers)) + 1
        for place in ("beginning", "end", Seqno(first)):
            try:
                reader = await asyncio.to_thread(CommittedReader, broker, TOPIC, start=place)
            except Exception as error:
                assert "was trimmed" in str(error)  # noqa: PT017  # of a seqno
                assert isinstance(place, Seqno)
            else:
                self.readers.append(reader)

    async def read(self, _: int) -> None:
        for reader in [*self.readers]:
            try:
                for record in reader.records(timeout=0.0):
                    assert record.seqno == self.numbers[record.value]
            except Exception as error:
                assert type(error).__name__ == "PositionTrimmed"  # noqa: PT017
                reader.close()
                self.readers.remove(reader)
