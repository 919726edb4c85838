"""Contract of appends and readers: all is read as it was written, in order, from any position, by many at once."""

# ruff: noqa: S101

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore

import numpy as np
import pytest

from broker_io.batch import Batch, Blobs, Labels, Message, Numbers, PlacedMessage
from broker_io.errors import MessageTooLarge
from broker_io.port import READ_SECONDS, Broker, NotifyingReader, existing
from broker_io.position import EARLIEST, LATEST, NO_INDEX, Position
from broker_io.testing.contract.base import (
    WAIT_SECONDS,
    Base,
    ascending,
    fill,
    new_topic,
    numbered,
    positions_of,
    put,
    read_all,
    read_count,
    read_on,
    values,
)

ODD_MESSAGES = {
    "nothing": Message(None, None),
    "empty value": Message(None, b""),
    "empty key": Message(b"", b"v"),
    "delete": Message(b"k", None),
    "binary": Message(bytes(range(256)), bytes(range(255, -1, -1))),
    "not utf-8": Message(b"\xff\xfe", b"\xc3\x28"),
    "large value": Message(b"k", bytes(range(256)) * 4096),
    "large key": Message(b"k" * 60_000, b"v"),
    "properties": Message(b"k", b"v", {"tb.v": "1", "tb.txn": "0:17", "tb.seq": "3"}),
    "unicode properties": Message(b"k", b"v", {"ключ": "значение", "😀": "\u0000\n ", "e": ""}),
    "numbers as text": Message(b"k", b"v", {"a": "007", "b": "-0", "c": "9223372036854775807", "d": "-12", "e": "1e3"}),
    "many properties": Message(b"k", b"v", {f"name-{number}": f"text-{number}" for number in range(200)}),
    "event time": Message(b"k", b"v", {}, 1_700_000_000_123),
    "event time before 1970": Message(b"k", b"v", {}, -5),
    "far event time": Message(b"k", b"v", {}, 2**53 + 1),
}


class ContentsContract(Base):
    @pytest.mark.parametrize("name", ODD_MESSAGES)
    def test_message_is_read_exactly_as_written(self, broker: Broker, topic: str, name: str) -> None:
        message = ODD_MESSAGES[name]
        ((position,),) = fill(broker, topic, [message])
        (placed,) = read_all(broker, topic)
        assert placed.message == message
        assert placed.position == position

    def test_different_messages_in_one_batch_are_read_exactly(self, broker: Broker, topic: str) -> None:
        messages = [*ODD_MESSAGES.values(), *reversed(ODD_MESSAGES.values())]
        (positions,) = fill(broker, topic, messages)
        found = read_all(broker, topic)
        assert [placed.message for placed in found] == messages
        assert positions_of(found) == positions

    @pytest.mark.parametrize("size", [1, 2, 3, 64, 1000, 10_000])
    def test_batches_of_any_size_keep_their_order(self, broker: Broker, topic: str, size: int) -> None:
        with broker.writer(topic) as writer:
            positions = put(writer, numbered(size)) + put(writer, numbered(size, start=size))
        found = read_all(broker, topic)
        assert [placed.message for placed in found] == numbered(2 * size)
        assert positions_of(found) == positions
        assert ascending(positions)

    def test_slices_of_columns_are_read_exactly(self, broker: Broker, topic: str) -> None:
        messages = [
            Message(None if number % 3 == 0 else b"k%d" % number, b"v" * (number % 11), {"n": str(number)}, number)
            for number in range(300)
        ]
        whole = Batch.of(messages)
        mask = np.arange(300) % 4 == 1
        with broker.writer(topic) as writer:
            for part in (whole.take(slice(100, 150)), whole.take(mask), whole.take(slice(299, 300))):
                writer.append(part).result(WAIT_SECONDS)
        expected = messages[100:150] + messages[1::4] + messages[299:]
        assert [placed.message for placed in read_all(broker, topic)] == expected

    def test_property_columns_of_every_form_are_read_exactly(self, broker: Broker, topic: str) -> None:
        batch = Batch(
            Blobs.none(4),
            Blobs.of([b"a", None, b"", b"d"]),
            {
                "constant": Labels.constant("same", 4),
                "labels": Labels(np.array([1, -1, 0, 1], np.int32), ("x", "y", "unused")),
                "numbers": Numbers(np.array([5, -6, 2**62, 0], np.int64)),
                "some numbers": Numbers(np.array([1, 2, 3, 4], np.int64), np.array([True, False, False, True])),
            },
            np.array([0, 1, 0, -1], np.int64),
        )
        with broker.writer(topic) as writer:
            writer.append(batch).result(WAIT_SECONDS)
        assert [placed.message for placed in read_all(broker, topic)] == [*batch]

    def test_an_empty_batch_has_no_positions(self, broker: Broker, topic: str) -> None:
        with broker.writer(topic) as writer:
            assert put(writer, []) == []
            (position,) = put(writer, numbered(1))
            assert put(writer, []) == []
        assert positions_of(read_all(broker, topic)) == [position]

    def test_many_pending_appends_are_acknowledged_in_order(self, broker: Broker, topic: str) -> None:
        done: list[object] = []
        with broker.writer(topic) as writer:
            futures = []
            for number in range(300):
                future = writer.append(Batch.of(numbered(1 + number % 3, start=number * 3)))
                future.add_done_callback(done.append)
                futures.append(future)
            positions = [position for future in futures for position in future.result(WAIT_SECONDS)]
        assert done == futures
        assert ascending(positions)
        assert positions_of(read_all(broker, topic)) == positions

    def test_single_messages_have_no_batch_index_or_distinct_ones(self, broker: Broker, topic: str) -> None:
        (positions,) = fill(broker, topic, numbered(5))
        assert len({*positions}) == 5
        assert all(position.batch >= NO_INDEX and position.entry >= 0 for position in positions)

    def test_message_over_the_limit_is_rejected_and_nothing_lost(self, broker: Broker, topic: str) -> None:
        small, large = Message(b"k", b"small"), Message(b"k", b"x" * (self.max_message_bytes + 1))
        with broker.writer(topic) as writer:
            before = writer.append(Batch.of([small]))
            for batch in ([large], [small, large], [large, small], [small] * 99 + [large]):
                with pytest.raises(MessageTooLarge):
                    writer.append(Batch.of(batch))
            after = put(writer, [small])
            assert before.result(WAIT_SECONDS).first < after[0]
        assert values(read_all(broker, topic)) == [b"small", b"small"]

    def test_broker_has_its_limit(self, broker: Broker) -> None:
        assert broker.max_message_bytes == self.max_message_bytes

    def test_the_limit_counts_key_value_and_properties(self, broker: Broker, topic: str) -> None:
        third = self.max_message_bytes // 3 + 1
        with broker.writer(topic) as writer:
            with pytest.raises(MessageTooLarge):
                writer.append(Batch.of([Message(b"k" * third, b"v" * third, {"p": "t" * third})]))
            put(writer, [Message(b"k", b"v" * (third * 2), {"p": "t"})])
        assert len(read_all(broker, topic)) == 1

    def test_publish_times_are_those_of_the_append(self, broker: Broker, topic: str) -> None:
        before = self.now_ms(broker)
        with broker.writer(topic) as writer:
            put(writer, numbered(3))
            between = self.now_ms(broker)
            self.pass_time(broker, 0.005)
            put(writer, numbered(3))
        after = self.now_ms(broker)
        times = [placed.publish_time for placed in read_all(broker, topic)]
        slack = self.time_slack_ms
        assert all(before - slack <= time <= between + slack for time in times[:3])
        assert all(between - slack <= time <= after + slack for time in times[3:])


class ReadingContract(Base):
    def test_reader_starts_at_or_after_any_position(self, broker: Broker, topic: str) -> None:
        groups = fill(broker, topic, numbered(7), numbered(1, 7), numbered(5, 8))
        positions = [position for group in groups for position in group]
        for index, position in enumerate(positions):
            assert positions_of(read_all(broker, topic, position)) == positions[index:]
            assert positions_of(read_all(broker, topic, position, inclusive=False)) == positions[index + 1 :]

    @pytest.mark.parametrize("inclusive", [True, False])
    def test_reader_at_earliest_reads_everything(self, broker: Broker, topic: str, inclusive: bool) -> None:
        fill(broker, topic, numbered(7), numbered(3, 7))
        assert values(read_all(broker, topic, inclusive=inclusive)) == [b"value-%d" % number for number in range(10)]

    def test_reader_at_latest_reads_later_messages(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, numbered(5))
        with broker.reader(topic, LATEST, inclusive=False) as reader:
            assert reader.read() is None
            fill(broker, topic, numbered(2, 5))
            assert values(read_count(reader, 2)) == [b"value-5", b"value-6"]

    def test_position_after_the_end_of_a_ledger_is_in_the_next_one(self, broker: Broker, topic: str) -> None:
        groups = fill(broker, topic, numbered(3), numbered(2, 3))
        past = Position(groups[0][-1].ledger, groups[0][-1].entry + 1000)
        for inclusive in (True, False):
            assert positions_of(read_all(broker, topic, past, inclusive=inclusive)) == groups[1]

    @pytest.mark.parametrize("inclusive", [True, False])
    def test_reader_above_the_end_waits_for_that_position(self, broker: Broker, topic: str, inclusive: bool) -> None:
        (positions,) = fill(broker, topic, numbered(2))
        start = Position(positions[-1].ledger, positions[-1].entry + 4)
        with broker.reader(topic, start, inclusive=inclusive) as reader:
            assert reader.read() is None
            with broker.writer(topic) as writer:
                more = put(writer, numbered(3, 2))
                more += put(writer, numbered(5, 5))
            expected = [position for position in more if position > start or (inclusive and position == start)]
            assert positions_of(read_count(reader, len(expected))) == expected

    @pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
    def test_reads_of_any_limit_return_everything(self, broker: Broker, topic: str, limit: int) -> None:
        groups = fill(broker, topic, numbered(20), numbered(20, 20), numbered(1, 40))
        with broker.reader(topic) as reader:
            found = read_on(reader, limit=limit)
        assert [placed.message for placed in found] == numbered(41)
        assert positions_of(found) == [position for group in groups for position in group]

    def test_small_appends_are_read_together(self, broker: Broker, topic: str) -> None:
        with broker.writer(topic) as writer:
            for number in range(200):
                put(writer, numbered(1, start=number))
        with broker.reader(topic) as reader:
            found = read_on(reader, limit=50)
        assert [placed.message for placed in found] == numbered(200)

    def test_messages_of_different_columns_are_read_together(self, broker: Broker, topic: str) -> None:
        odd = [message._replace(properties={"only": "here"}, event_time=5) for message in numbered(1)]
        with broker.writer(topic) as writer:
            put(writer, numbered(1))
            put(writer, odd)
            put(writer, [odd[0]._replace(key=None, value=None, properties={"n": "12"})])
        expected = [numbered(1)[0], odd[0], odd[0]._replace(key=None, value=None, properties={"n": "12"})]
        assert [placed.message for placed in read_all(broker, topic)] == expected

    def test_readers_do_not_disturb_each_other(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, numbered(30))
        with broker.reader(topic) as slow, broker.reader(topic) as fast:
            first = slow.read(limit=10)
            assert first is not None
            assert [placed.message for placed in read_on(fast)] == numbered(30)
            assert [placed.message for placed in [*first, *read_on(slow, limit=3)]] == numbered(30)

    def test_reader_continues_where_another_one_stopped(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, numbered(10), numbered(10, 10))
        position, found = EARLIEST, []
        while True:
            with broker.reader(topic, position, inclusive=False) as reader:
                batch = reader.read(limit=3)
            if batch is None:
                break
            found += [*batch]
            position = found[-1].position
        assert [placed.message for placed in found] == numbered(20)

    def test_reader_at_the_end_reads_the_next_messages(self, broker: Broker, topic: str) -> None:
        (positions,) = fill(broker, topic, numbered(4))
        with broker.reader(topic, positions[-1], inclusive=False) as reader:
            assert reader.read() is None
            (more,) = fill(broker, topic, numbered(3, 4))
            assert positions_of(read_count(reader, 3)) == more

    def test_empty_topic_has_no_messages(self, broker: Broker, topic: str) -> None:
        for start in (EARLIEST, LATEST):
            with broker.reader(topic, start) as reader:
                assert reader.read() is None
                assert reader.read(timeout=0.01) is None

    def test_many_messages_are_read_in_order(self, broker: Broker, topic: str) -> None:
        with broker.writer(topic) as writer:
            for start in range(0, 12_000, 4_000):
                put(writer, numbered(4_000, start=start))
        found = read_all(broker, topic)
        assert values(found) == [b"value-%d" % number for number in range(12_000)]

    def test_read_with_messages_does_not_wait(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, numbered(1))
        with broker.reader(topic) as reader:
            batch = reader.read(timeout=WAIT_SECONDS)
            assert batch is not None
            assert len(batch) == 1


class FollowingContract(Base):
    def test_reader_follows_across_ledgers(self, broker: Broker, topic: str) -> None:
        with broker.writer(topic) as writer, broker.reader(topic) as reader:
            found: list[PlacedMessage] = []
            for number in range(0, 60, 3):
                put(writer, numbered(3, start=number))
                if number % 12 == 0:
                    broker.roll(topic)
                found += read_count(reader, 3)
        assert [placed.message for placed in found] == numbered(60)

    def test_waiting_reader_is_woken(self, broker: Broker, topic: str) -> None:
        with broker.reader(topic) as reader, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(reader.read, timeout=WAIT_SECONDS)
            (positions,) = fill(broker, topic, numbered(2))
            batch = waiting.result(WAIT_SECONDS)
            assert batch is not None
            assert positions_of(batch) == positions[: len(batch)], "an append may be read in parts"

    def test_reader_whose_source_died_returns_what_exists(
        self, broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill(broker, topic, numbered(3))
        with broker.reader(topic) as reader:
            found = read_count(reader, 3)
            self.lose_source(reader, monkeypatch)
            fill(broker, topic, numbered(2, 3))
            while len(found) < 5:
                found += existing(reader.read(timeout=READ_SECONDS), topic, found[-1].position)
        assert [placed.message for placed in found] == numbered(5)

    def test_callback_is_called_once_and_at_once_for_existing_messages(self, broker: Broker, topic: str) -> None:
        notified = Semaphore(0)
        with broker.writer(topic) as writer, broker.reader(topic) as reader:
            if not isinstance(reader, NotifyingReader):
                return
            reader.notify_when_readable(notified.release)
            assert reader.read() is None
            reader.notify_when_readable(notified.release)
            assert not notified.acquire(timeout=0.2)
            put(writer, numbered(3))
            assert notified.acquire(timeout=WAIT_SECONDS)
            found = read_count(reader, 1)
            if len(found) < 3:
                reader.notify_when_readable(notified.release)
                assert notified.acquire(timeout=WAIT_SECONDS), "the message is already readable"
                found += read_count(reader, 3 - len(found))
            assert [placed.message for placed in found] == numbered(3)
            put(writer, numbered(2, start=3))
            assert not notified.acquire(timeout=0.2), "the callback was registered once only"
            assert [placed.message for placed in read_count(reader, 2)] == numbered(2, start=3)

    def test_messages_that_arrive_during_registration_are_read_in_order(self, broker: Broker, topic: str) -> None:
        found: list[PlacedMessage] = []
        notified = Semaphore(0)
        with ThreadPoolExecutor(1) as pool, broker.writer(topic) as writer, broker.reader(topic) as reader:
            if not isinstance(reader, NotifyingReader):
                return
            pool.submit(lambda: [put(writer, numbered(1, start=number)) for number in range(200)])
            while len(found) < 200:
                reader.notify_when_readable(notified.release)
                assert notified.acquire(timeout=WAIT_SECONDS)
                found += reader.read() or ()
        assert [placed.message for placed in found] == numbered(200)

    def test_read_messages_are_acknowledged(self, broker: Broker, topic: str) -> None:
        with broker.writer(topic) as writer, broker.reader(topic) as reader:
            futures = [writer.append(Batch.of(numbered(5, start=number))) for number in range(0, 500, 5)]
            seen = positions_of(read_count(reader, 500))
            acknowledged = [position for future in futures for position in future.result(WAIT_SECONDS)]
        assert seen == acknowledged

    def test_writers_of_one_topic_in_several_threads(self, broker: Broker, topic: str) -> None:
        def write(name: int) -> list[Position]:
            with broker.writer(topic) as writer:
                futures = [writer.append(Batch.of([Message(b"%d" % name, b"%d" % number)] * 2)) for number in range(40)]
                return [position for future in futures for position in future.result(WAIT_SECONDS)]

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

    def test_readers_in_several_threads_while_the_topic_grows(self, broker: Broker, topic: str) -> None:
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
            assert all(follower.result(WAIT_SECONDS * 2) == expected for follower in followers)
