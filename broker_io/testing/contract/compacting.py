"""Contract of compaction: the newest message of each key keeps its position; more may stay."""

# ruff: noqa: S101

from __future__ import annotations

import random
from collections.abc import Iterable

from broker_io.batch import Message, PlacedMessage
from broker_io.port import Broker
from broker_io.position import Position
from broker_io.testing.contract.base import (
    Base,
    ascending,
    fill,
    numbered,
    positions_of,
    put,
    read_all,
    read_count,
    values,
)


def newest(found: Iterable[PlacedMessage]) -> dict[bytes, PlacedMessage]:
    """The map that a reader of a compacted topic builds: the newest message of each key without deletes."""
    table: dict[bytes, PlacedMessage] = {}
    for placed in found:
        key = placed.message.key
        if key is not None and placed.message.value is None:
            table.pop(key, None)
        elif key is not None:
            table[key] = placed
    return table


def compacted_map(broker: Broker, topic: str) -> dict[bytes, PlacedMessage]:
    return newest(read_all(broker, topic, compacted=True))


def settled(broker: Broker, topic: str) -> None:
    """Compact so that every message that exists now may be dropped."""
    broker.roll(topic)
    broker.compact(topic)


class CompactingContract(Base):
    def test_newest_message_of_each_key_keeps_its_position(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, numbered(20), numbered(20, 20), numbered(3, 40))
        before = newest(read_all(broker, topic))
        settled(broker, topic)
        assert compacted_map(broker, topic) == before

    def test_compaction_adds_no_message(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, numbered(20), numbered(20, 20))
        before = {placed.position: placed for placed in read_all(broker, topic)}
        settled(broker, topic)
        for compacted in (True, False):
            found = read_all(broker, topic, compacted=compacted)
            assert ascending(positions_of(found))
            assert all(before[placed.position] == placed for placed in found)
        if not self.destructive_compaction:
            assert read_all(broker, topic) == [*before.values()]

    def test_older_messages_of_a_key_are_dropped(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, numbered(700))
        settled(broker, topic)
        assert len(read_all(broker, topic, compacted=True)) == 7

    def test_deleted_keys_are_dropped(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, [Message(b"a", b"1"), Message(b"b", b"1")], [Message(b"a", None), Message(b"c", None)])
        settled(broker, topic)
        assert {*compacted_map(broker, topic)} == {b"b"}
        settled(broker, topic)
        assert values(read_all(broker, topic, compacted=True)) == [b"1"]

    def test_key_written_after_its_delete_stays(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, [Message(b"a", b"1"), Message(b"a", None), Message(b"a", b"2")])
        settled(broker, topic)
        assert values(read_all(broker, topic, compacted=True)) == [b"2"]

    def test_messages_without_a_key_are_dropped(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, [Message(None, b"1"), Message(b"a", b"2"), Message(None, None)])
        settled(broker, topic)
        assert values(read_all(broker, topic, compacted=True)) == [b"2"]

    def test_empty_value_is_a_value_or_a_delete(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, [Message(b"a", b"1"), Message(b"b", b"2"), Message(b"a", b"")])
        settled(broker, topic)
        left = [b"2", b""] if self.keeps_empty_values else [b"2"]
        assert values(read_all(broker, topic, compacted=True)) == left

    def test_properties_and_event_time_survive(self, broker: Broker, topic: str) -> None:
        message = Message(b"\x00\xff", b"v" * 5000, {"tb.kind": "part", "ü": "ß"}, 12345)
        fill(broker, topic, [Message(b"\x00\xff", b"old"), message, Message(b"other", b"x")])
        (_, placed, _) = read_all(broker, topic)
        settled(broker, topic)
        assert compacted_map(broker, topic)[b"\x00\xff"] == placed
        assert placed.message == message

    def test_everything_is_read_before_the_first_compaction(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, numbered(10), [Message(b"key-0", None), Message(None, b"x")])
        assert read_all(broker, topic, compacted=True) == read_all(broker, topic)

    def test_later_messages_follow_the_compacted_ones(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, numbered(20))
        settled(broker, topic)
        with broker.reader(topic, compacted=True) as reader:
            first = read_count(reader, 7)
            with broker.writer(topic) as writer:
                more = put(writer, [Message(b"key-0", None), Message(None, b"x"), Message(b"new", b"y")])
            assert positions_of(read_count(reader, 3)) == more
        assert len(first) == 7
        assert {*compacted_map(broker, topic)} == {b"key-%d" % number for number in range(1, 7)} | {b"new"}

    def test_reader_may_start_anywhere_in_a_compacted_topic(self, broker: Broker, topic: str) -> None:
        groups = fill(broker, topic, numbered(20), numbered(20, 20))
        settled(broker, topic)
        left = read_all(broker, topic, compacted=True)
        for position in (position for group in groups for position in group):
            for inclusive in (True, False):
                found = read_all(broker, topic, position, inclusive=inclusive, compacted=True)
                assert found == [placed for placed in left if _behind(placed.position, position, inclusive)]

    def test_topic_whose_keys_are_all_deleted_is_empty_and_ends(self, broker: Broker, topic: str) -> None:
        (positions,) = fill(broker, topic, [Message(b"a", b"1"), Message(b"a", None)])
        settled(broker, topic)
        assert compacted_map(broker, topic) == {}
        with broker.writer(topic) as writer:
            assert put(writer, numbered(1))[0] > positions[-1]
        assert {*compacted_map(broker, topic)} == {b"key-0"}

    def test_compacting_an_empty_topic_does_nothing(self, broker: Broker, topic: str) -> None:
        settled(broker, topic)
        assert read_all(broker, topic, compacted=True) == []

    def test_compaction_does_not_move_the_end(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, numbered(10), [Message(b"key-0", None)])
        last = broker.last_position(topic)
        settled(broker, topic)
        assert broker.last_position(topic) == last
        with broker.writer(topic) as writer:
            (position,) = put(writer, numbered(1))
        assert last is not None
        assert position > last

    def test_open_reader_misses_no_message_that_survives_compaction(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, numbered(30), numbered(30, 30), numbered(30, 60))
        survivors = newest(read_all(broker, topic))
        for compacted in (True, False):
            with broker.reader(topic, compacted=compacted) as reader:
                batch = reader.read(limit=5)
                assert batch is not None
                found = [*batch]
                settled(broker, topic)
                while (more := reader.read(limit=5)) is not None:
                    found += more
            assert newest(found) == survivors
            assert ascending(positions_of(found))

    def test_alternating_writes_and_compactions_keep_the_map(self, broker: Broker, topic: str) -> None:
        choose = random.Random(1)  # noqa: S311
        expected: dict[bytes, bytes] = {}
        with broker.writer(topic) as writer:
            for turn in range(12):
                keys = [b"k%d" % choose.randrange(25) for _ in range(15)]
                messages = [
                    Message(key, b"%d-%d" % (turn, number) if choose.random() < 0.7 else None)
                    for number, key in enumerate(keys)
                ]
                put(writer, messages)
                for message in messages:
                    expected.pop(message.key or b"", None)
                    if message.value is not None:
                        expected[message.key or b""] = message.value
                if turn % 3 == 2:
                    settled(broker, topic)
                elif turn % 3 == 1:
                    broker.compact(topic)
                found = compacted_map(broker, topic)
                assert {key: placed.message.value for key, placed in found.items()} == expected

    def test_compaction_is_durable(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, numbered(40), [Message(b"key-1", None)])
        settled(broker, topic)
        left = read_all(broker, topic, compacted=True)
        with self.reopen(broker) as again:
            assert read_all(again, topic, compacted=True) == left


def _behind(position: Position, start: Position, inclusive: bool) -> bool:
    return position > start or (inclusive and position == start)
