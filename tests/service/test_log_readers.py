"""Log readers: their messages are taken in batches, what they hold is limited, and a dead reader is replaced."""

from __future__ import annotations

import asyncio
import threading
import time
from unittest.mock import patch

import pytest
from service_setup import eventually

from broker_io.batch import Batch, Message, PlacedBatch
from broker_io.errors import Closed, Damaged, TopicNotFound
from broker_io.memory import MemoryBroker
from broker_io.position import EARLIEST, Position
from txnbuffer.errors import ReplayStalled
from txnbuffer.service import log_readers
from txnbuffer.service.log_readers import LogReader, LogReaders, merged


class Taker:
    """A loop's side of log readers: `readers.take` runs as the engine's turn would."""

    def __init__(self, broker) -> None:
        self.values: list[bytes | None] = []
        self.batches = 0
        self.failures: list[BaseException] = []
        self.readers = LogReaders(asyncio.get_running_loop(), self.turn)
        self.broker = broker
        self.holding = False

    def turn(self) -> None:
        if not self.holding:
            self.readers.take()

    def follow(self, topic: str, at: Position = EARLIEST, *of: object):
        return self.readers.follow(LogReader(self.broker, topic, at, self.take, self.failures.append, *of))

    def take(self, placed: PlacedBatch) -> None:
        self.batches += 1
        self.values += placed.messages.values.to_list()

    async def stop(self) -> None:
        await asyncio.to_thread(self.readers.stop)


def put(broker: MemoryBroker, *values: bytes) -> None:
    with broker.writer("a") as writer:
        writer.append(Batch.of([Message(None, value) for value in values])).result()


@pytest.fixture
def broker():
    with MemoryBroker() as opened:
        opened.create_topic("a")
        yield opened


async def test_all_that_came_is_taken_in_order(broker):
    taker = Taker(broker)
    taker.follow("a")
    values = [b"%d" % number for number in range(200)]
    for start in range(0, 200, 7):
        put(broker, *values[start : start + 7])
    await eventually(lambda: len(taker.values) == 200)
    assert taker.values == values
    await taker.stop()


async def test_it_continues_with_the_reader_of_the_replay(broker):
    put(broker, b"before", b"behind")
    reader = broker.reader("a")
    before = reader.read(limit=1)
    assert before is not None
    at, incarnation, taker = before.positions.last, broker.incarnation("a"), Taker(broker)
    with patch.object(broker, "reader", side_effect=AssertionError("another reader")):
        taker.follow("a", at, incarnation, reader)
        await eventually(lambda: taker.values == [b"behind"])
        put(broker, b"later")
        await eventually(lambda: taker.values == [b"behind", b"later"])
        await taker.stop()
    assert taker.failures == []
    with pytest.raises(Closed):
        reader.read()


async def test_a_log_reader_that_begins_now_does_not_wait_for_those_that_are_slow_to_open(broker):
    """A cluster that is slow to open the readers of many topics delays none that somebody waits for."""
    slow, opening = threading.Event(), broker.reader

    def reader(topic, *arguments, **options):
        if topic != "a":
            slow.wait()
        return opening(topic, *arguments, **options)

    taker = Taker(broker)
    with patch.object(broker, "reader", reader):
        for number in range(log_readers.SLOW_THREADS):
            broker.create_topic(f"slow-{number}")
            taker.follow(f"slow-{number}")
        put(broker, b"v")
        hurried = taker.follow("a")
        hurried.begin_now()
        hurried.begin_now()
        await eventually(lambda: taker.values == [b"v"])
        slow.set()
        await taker.stop()
    assert taker.values == [b"v"]


async def test_a_reader_of_a_recreated_topic_is_not_continued(broker):
    put(broker, b"old")
    incarnation = broker.incarnation("a")
    broker.delete_topic("a")
    broker.create_topic("a")
    put(broker, b"new")
    taker = Taker(broker)
    taker.follow("a", EARLIEST, incarnation, broker.reader("a"))
    await eventually(lambda: taker.failures)
    assert isinstance(taker.failures[0], TopicNotFound)
    assert taker.values == []
    await taker.stop()


async def test_what_is_not_taken_stops_the_reading(broker, monkeypatch):
    monkeypatch.setattr(log_readers, "HELD_BYTES", 1)
    monkeypatch.setattr(log_readers, "LEAST_HELD", 2000)
    monkeypatch.setattr(log_readers, "READ_MESSAGES", 1)
    taker = Taker(broker)
    taker.holding = True
    reader = taker.follow("a")
    for _ in range(50):
        put(broker, b"x" * 1000)
    await eventually(lambda: reader._held >= 2000)
    await asyncio.sleep(0.1)
    assert reader._held < 5000
    taker.holding = False
    taker.turn()
    await eventually(lambda: len(taker.values) == 50)
    await taker.stop()


async def test_a_reader_that_waits_for_room_can_be_stopped(broker, monkeypatch):
    monkeypatch.setattr(log_readers, "HELD_BYTES", 1)
    monkeypatch.setattr(log_readers, "LEAST_HELD", 1)
    monkeypatch.setattr(log_readers, "READ_MESSAGES", 1)
    taker = Taker(broker)
    taker.holding = True
    reader = taker.follow("a")
    put(broker, b"1", b"2", b"3")
    await eventually(lambda: reader._held > 0)
    await asyncio.wait_for(taker.stop(), 30)


async def test_a_silent_topic_is_not_read_until_something_comes(broker, monkeypatch):
    monkeypatch.setattr(log_readers, "FIRST_CHECK", 10.0)
    reader = broker.reader("a")
    taker = Taker(broker)
    with patch.object(reader, "read", wraps=reader.read) as read:
        taker.follow("a", EARLIEST, None, reader)
        await eventually(lambda: reader._log.waiting)
        await asyncio.sleep(0.2)
        assert read.call_count == 1
        began = time.monotonic()
        put(broker, b"1")
        await eventually(lambda: taker.values == [b"1"])
        assert time.monotonic() - began < 8
    await taker.stop()


async def test_what_comes_while_others_are_waited_for_is_read_when_they_came(broker, monkeypatch):
    monkeypatch.setattr(log_readers, "FIRST_CHECK", 10.0)
    monkeypatch.setattr(log_readers, "BATCH_DELAY", 0.2)
    taker = Taker(broker)
    taker.follow("a")
    began = time.monotonic()
    for count in range(1, 4):
        put(broker, b"%d" % count)
        await eventually(lambda count=count: len(taker.values) == count)
    assert time.monotonic() - began < 8
    await taker.stop()


async def test_a_topic_that_is_slow_to_open_delays_no_other(broker):
    """The readers of several topics open slowly or fail to answer, as on a cluster with problems."""
    go, opened = threading.Event(), broker.reader

    def slowly(topic: str, *where: object, **how: object):
        assert topic == "a" or go.wait(60)
        return opened(topic, *where, **how)

    taker = Taker(broker)
    taker.follow("a")
    put(broker, b"1")
    await eventually(lambda: taker.values == [b"1"])
    broker.reader = slowly
    for number in range(3 * (log_readers.THREADS + log_readers.SLOW_THREADS)):
        broker.create_topic(f"slow {number}")
        taker.follow(f"slow {number}")
    try:
        for number in range(2, 20):
            put(broker, b"%d" % number)
            await eventually(lambda number=number: len(taker.values) == number)
    finally:
        go.set()
    await taker.stop()


async def test_topics_share_a_few_threads_and_take_turns(broker, monkeypatch):
    monkeypatch.setattr(log_readers, "READ_MESSAGES", 1)
    before = {*threading.enumerate()}
    taker = Taker(broker)
    names = [f"t{number}" for number in range(1000)]
    for name in names:
        broker.create_topic(name)
        taker.follow(name)
    await asyncio.to_thread(put, broker, *(b"busy" for _ in range(3000)))
    taker.follow("a")
    for name in names:
        with broker.writer(name) as writer:
            writer.append(Batch.of([Message(None, name.encode())])).result()
    await eventually(lambda: {name.encode() for name in names} <= {*taker.values})
    started = {thread for thread in {*threading.enumerate()} - before if thread.name.startswith("txnbuffer-readers")}
    assert 0 < len(started) <= log_readers.THREADS + log_readers.SLOW_THREADS + 1  # one knows the time
    await taker.stop()
    assert not any(thread.is_alive() for thread in started)


class Late:
    """A reader of a cluster that holds messages back until `come`."""

    def __init__(self, inner, come: threading.Event) -> None:
        self._inner, self._come = inner, come
        self.close = inner.close

    def read(self, **how):
        return self._inner.read(**how) if self._come.is_set() else None


async def test_a_topic_whose_messages_do_not_come_is_named(broker, monkeypatch):
    monkeypatch.setattr(log_readers, "QUIET", 0.0)
    opened, come = broker.reader, threading.Event()
    broker.reader = lambda topic, *where, **how: Late(opened(topic, *where, **how), come)
    taker = Taker(broker)
    reader = taker.follow("a")
    put(broker, b"1")
    await eventually(lambda: isinstance(reader.problem, ReplayStalled))
    assert "ends at" in str(reader.problem)
    come.set()
    await eventually(lambda: taker.values == [b"1"])
    await eventually(lambda: reader.problem is None)
    put(broker, b"2")
    await eventually(lambda: taker.values == [b"1", b"2"])
    await taker.stop()


async def test_a_failure_is_reported_once_after_the_messages_before_it(broker):
    taker = Taker(broker)
    put(broker, b"1")
    reader = taker.follow("a")
    await eventually(lambda: taker.values == [b"1"])
    broker.faults.fail_read(Damaged("a", 1, "torn"), topic="a")
    await eventually(lambda: taker.failures)
    assert isinstance(taker.failures[0], Damaged)
    assert reader not in taker.readers._readers
    taker.turn()
    assert len(taker.failures) == 1
    await taker.stop()


def test_batches_of_one_ledger_become_one():
    with MemoryBroker(ledger_entries=4) as broker:
        broker.create_topic("a")
        put(broker, *(b"%d" % number for number in range(10)))
        with broker.reader("a") as reader:
            batches = list(iter(lambda: reader.read(limit=1), None))
    assert len(batches) == 10
    few = merged(batches)
    assert [len(placed) for placed in few] == [4, 4, 2]
    assert [message.position for placed in few for message in placed] == [placed.positions.first for placed in batches]
    assert [value for placed in few for value in placed.messages.values] == [b"%d" % number for number in range(10)]
