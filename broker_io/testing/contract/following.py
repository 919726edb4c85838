"""Readers that follow a writer, and threads that do everything at once."""

# ruff: noqa: S101

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore

from broker_io.batch import Batch, Message, PlacedMessage
from broker_io.port import Broker, TellingReader
from broker_io.position import Position
from broker_io.testing.contract.base import (
    PATIENCE_SECONDS,
    Base,
    ascending,
    new_topic,
    numbered,
    positions_of,
    put,
    read_all,
    read_count,
)


class FollowingContract(Base):
    def test_a_reader_follows_over_ledgers(self, broker: Broker, topic: str) -> None:
        with broker.writer(topic) as writer, broker.reader(topic) as reader:
            found: list[PlacedMessage] = []
            for number in range(0, 60, 3):
                put(writer, numbered(3, start=number))
                if number % 12 == 0:
                    broker.roll(topic)
                found += read_count(reader, 3)
        assert [placed.message for placed in found] == numbered(60)

    def test_a_waiting_reader_is_woken(self, broker: Broker, topic: str) -> None:
        with broker.reader(topic) as reader, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(reader.read, timeout=PATIENCE_SECONDS)
            with broker.writer(topic) as writer:
                positions = put(writer, numbered(2))
            batch = waiting.result(PATIENCE_SECONDS)
            assert batch is not None
            assert positions_of(batch) == positions[: len(batch)], "an append may come in portions"

    def test_a_reader_that_tells_of_more_tells_once_and_at_once_of_what_is_there(
        self, broker: Broker, topic: str
    ) -> None:
        told = Semaphore(0)
        with broker.writer(topic) as writer, broker.reader(topic) as reader:
            if not isinstance(reader, TellingReader):
                return
            reader.when_more(told.release)
            assert reader.read() is None
            reader.when_more(told.release)
            assert not told.acquire(timeout=0.2)
            put(writer, numbered(3))
            assert told.acquire(timeout=PATIENCE_SECONDS)
            found = read_count(reader, 1)
            if len(found) < 3:
                reader.when_more(told.release)
                assert told.acquire(timeout=PATIENCE_SECONDS), "it is there already"
                found += read_count(reader, 3 - len(found))
            assert [placed.message for placed in found] == numbered(3)
            put(writer, numbered(2, start=3))
            assert not told.acquire(timeout=0.2), "it was not asked again"
            assert [placed.message for placed in read_count(reader, 2)] == numbered(2, start=3)

    def test_all_that_comes_while_a_reader_is_asked_to_tell_is_read_in_order(self, broker: Broker, topic: str) -> None:
        found: list[PlacedMessage] = []
        told = Semaphore(0)
        with ThreadPoolExecutor(1) as pool, broker.writer(topic) as writer, broker.reader(topic) as reader:
            if not isinstance(reader, TellingReader):
                return
            pool.submit(lambda: [put(writer, numbered(1, start=number)) for number in range(200)])
            while len(found) < 200:
                reader.when_more(told.release)
                assert told.acquire(timeout=PATIENCE_SECONDS)
                found += reader.read() or ()
        assert [placed.message for placed in found] == numbered(200)

    def test_a_reader_gives_nothing_that_is_not_acknowledged_later(self, broker: Broker, topic: str) -> None:
        with broker.writer(topic) as writer, broker.reader(topic) as reader:
            futures = [writer.append(Batch.of(numbered(5, start=number))) for number in range(0, 500, 5)]
            seen = positions_of(read_count(reader, 500))
            acknowledged = [position for future in futures for position in future.result(PATIENCE_SECONDS)]
        assert seen == acknowledged

    def test_writers_of_one_topic_in_several_threads(self, broker: Broker, topic: str) -> None:
        def write(name: int) -> list[Position]:
            with broker.writer(topic) as writer:
                futures = [writer.append(Batch.of([Message(b"%d" % name, b"%d" % number)] * 2)) for number in range(40)]
                return [position for future in futures for position in future.result(PATIENCE_SECONDS)]

        with ThreadPoolExecutor(4) as pool:
            acknowledged = [*pool.map(write, range(4))]
        found = read_all(broker, topic)
        for name, positions in enumerate(acknowledged):
            assert ascending(positions)
            assert positions_of(placed for placed in found if placed.message.key == b"%d" % name) == positions
        assert len(found) == 4 * 40 * 2

    def test_one_writer_in_several_threads(self, broker: Broker, topic: str) -> None:
        with broker.writer(topic) as writer, ThreadPoolExecutor(4) as pool:
            positions = [*pool.map(lambda number: put(writer, numbered(1, start=number))[0], range(200))]
        found = {placed.position: placed.message for placed in read_all(broker, topic)}
        assert found == {position: numbered(1, start=number)[0] for number, position in enumerate(positions)}

    def test_topics_in_several_threads(self, broker: Broker) -> None:
        def live(name: int) -> bool:
            topic = new_topic(broker)
            with broker.writer(topic, exclusive=True) as writer, broker.reader(topic) as reader:
                for number in range(15):
                    put(writer, numbered(3, start=number * 3))
                    if number % 5 == name % 5:
                        broker.roll(topic)
                whole = [placed.message for placed in read_count(reader, 45)] == numbered(45)
            broker.delete_topic(topic)
            return whole

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(live, range(8)))

    def test_readers_in_several_threads_while_it_grows(self, broker: Broker, topic: str) -> None:
        total = 600

        def follow(_: int) -> Counter[bytes | None]:
            with broker.reader(topic) as reader:
                return Counter(placed.message.value for placed in read_count(reader, total))

        with broker.writer(topic) as writer, ThreadPoolExecutor(3) as pool:
            followers = [pool.submit(follow, number) for number in range(3)]
            for number in range(0, total, 20):
                put(writer, numbered(20, start=number))
                if number % 200 == 0:
                    broker.roll(topic)
            expected = Counter(message.value for message in numbered(total))
            assert all(follower.result(PATIENCE_SECONDS * 2) == expected for follower in followers)
