"""Contract of ledgers: positions and times, trimming without silent gaps, and compaction."""

# ruff: noqa: S101

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from broker_io.batch import Message, PlacedMessage
from broker_io.errors import PositionTrimmed
from broker_io.port import Broker
from broker_io.position import EARLIEST, LATEST, Position
from broker_io.testing.contract.base import (
    Base,
    ascending,
    drain,
    fill,
    numbered,
    positions_of,
    put,
    read_all,
    read_count,
    values,
)


class LedgersContract(Base):
    def test_new_topic_has_one_empty_open_ledger(self, broker: Broker, topic: str) -> None:
        (ledger,) = broker.ledgers(topic)
        assert (ledger.entries, ledger.closed) == (0, False)
        assert broker.first_position(topic) is None
        assert broker.last_position(topic) is None

    def test_only_the_first_ledger_is_the_original_one_until_it_is_trimmed(self, broker: Broker, topic: str) -> None:
        knows = broker.ledgers(topic)[0].original  # a cluster does not
        groups = fill(broker, topic, numbered(3), numbered(3, 3), numbered(3, 6))
        assert [ledger.original for ledger in broker.ledgers(topic)] == [knows, *[False] * (len(groups) - 1)]
        self.trimmed(broker, topic, groups[1][0].ledger)
        assert not any(ledger.original for ledger in broker.ledgers(topic))

    def test_ledgers_count_their_messages(self, broker: Broker, topic: str) -> None:
        groups = fill(broker, topic, numbered(7), numbered(3, 7), numbered(1, 10))
        counted: dict[int, int] = {}
        for position in (position for group in groups for position in group):
            counted[position.ledger] = max(counted.get(position.ledger, 0), position.entry + 1)
        ledgers = broker.ledgers(topic)
        assert {ledger.ledger: ledger.entries for ledger in ledgers if ledger.entries} == counted
        assert all(ledger.bytes > 0 for ledger in ledgers if ledger.entries)

    def test_ledgers_ascend_and_only_the_newest_is_open(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, numbered(3), numbered(3), numbered(3))
        ledgers = broker.ledgers(topic)
        numbers = [ledger.ledger for ledger in ledgers]
        assert numbers == sorted({*numbers})
        assert [ledger.closed for ledger in ledgers] == [True] * (len(ledgers) - 1) + [False]

    def test_rolling_starts_another_ledger(self, broker: Broker, topic: str) -> None:
        first, second = fill(broker, topic, numbered(3), numbered(3))
        assert first[-1].ledger < second[0].ledger
        assert ascending(first + second)

    def test_rolling_an_empty_ledger_does_nothing(self, broker: Broker, topic: str) -> None:
        before = [ledger.ledger for ledger in broker.ledgers(topic)]
        broker.roll(topic)
        broker.roll(topic)
        assert [ledger.ledger for ledger in broker.ledgers(topic)] == before
        fill(broker, topic, numbered(1))
        broker.roll(topic)
        rolled = [ledger.ledger for ledger in broker.ledgers(topic)]
        broker.roll(topic)
        assert [ledger.ledger for ledger in broker.ledgers(topic)] == rolled

    def test_open_writer_continues_in_the_new_ledger(self, broker: Broker, topic: str) -> None:
        with broker.writer(topic) as writer:
            positions = []
            for number in range(5):
                positions += put(writer, numbered(2, start=2 * number))
                broker.roll(topic)
        assert len({position.ledger for position in positions}) >= 5
        assert positions_of(read_all(broker, topic)) == positions

    def test_first_and_last_position_are_those_of_the_messages_read(self, broker: Broker, topic: str) -> None:
        with broker.writer(topic) as writer:
            for number in range(4):
                put(writer, numbered(3, start=3 * number))
                positions = positions_of(read_all(broker, topic))
                assert broker.first_position(topic) == positions[0]
                assert broker.last_position(topic) == positions[-1]
                broker.roll(topic)
                assert broker.last_position(topic) == positions[-1]

    def test_position_at_a_time_is_that_of_the_next_published_message(self, broker: Broker, topic: str) -> None:
        step, times, firsts = 0.02 + 3 * self.time_slack_ms / 1000, [], []
        with broker.writer(topic) as writer:
            for number in range(6):
                self.pass_time(broker, step)
                times.append(self.now_ms(broker))
                self.pass_time(broker, step)
                firsts.append(put(writer, numbered(3, start=3 * number))[0])
                if number == 2:
                    broker.roll(topic)
        for time, first in zip(times, firsts, strict=True):
            assert broker.position_at(topic, time) == first
        assert broker.position_at(topic, 0) == firsts[0]
        self.pass_time(broker, step)
        assert broker.position_at(topic, self.now_ms(broker)) is None

    def test_position_at_a_time_agrees_with_publish_times(self, broker: Broker, topic: str) -> None:
        with broker.writer(topic) as writer:
            for number in range(30):
                put(writer, numbered(2, start=2 * number))
                self.pass_time(broker, 0.002)
        found = read_all(broker, topic)
        for time in sorted({placed.publish_time + change for placed in found for change in (-1, 0, 1)}):
            expected = next((placed.position for placed in found if placed.publish_time >= time), None)
            assert broker.position_at(topic, time) == expected

    def test_empty_topic_has_no_position_at_any_time(self, broker: Broker, topic: str) -> None:
        assert broker.position_at(topic, 0) is None
        assert broker.position_at(topic, 2**50) is None

    def test_positions_are_printed_and_parsed(self, broker: Broker, topic: str) -> None:
        (positions,) = fill(broker, topic, numbered(3))
        assert [Position.parse(str(position)) for position in positions] == positions


class TrimmingContract(Base):
    def test_trimming_drops_the_ledgers_below(self, broker: Broker, topic: str) -> None:
        groups = fill(broker, topic, numbered(3), numbered(3, 3), numbered(3, 6))
        self.trimmed(broker, topic, groups[1][0].ledger)
        assert positions_of(read_all(broker, topic)) == groups[1] + groups[2]
        assert broker.ledgers(topic)[0].ledger == groups[1][0].ledger
        assert broker.first_position(topic) == groups[1][0]
        assert broker.last_position(topic) == groups[2][-1]

    def test_trimming_again_or_below_the_first_does_nothing(self, broker: Broker, topic: str) -> None:
        groups = fill(broker, topic, numbered(3), numbered(3, 3))
        self.trimmed(broker, topic, groups[1][0].ledger)
        for ledger in (groups[1][0].ledger, groups[0][0].ledger, 0, -1):
            broker.trim(topic, ledger)
        assert positions_of(read_all(broker, topic)) == groups[1]

    def test_the_newest_ledger_always_stays(self, broker: Broker, topic: str) -> None:
        _, second = fill(broker, topic, numbered(3), numbered(3, 3))
        broker.trim(topic, 2**62)
        if self.trims_at_once:
            assert positions_of(read_all(broker, topic)) == second
        (more,) = fill(broker, topic, numbered(1, 6))
        assert positions_of(read_all(broker, topic))[-4:] == second + more

    def test_positions_are_not_reused_after_trimming_everything(self, broker: Broker, topic: str) -> None:
        (positions,) = fill(broker, topic, numbered(3))
        broker.roll(topic)
        self.trimmed(broker, topic, broker.ledgers(topic)[-1].ledger)
        assert read_all(broker, topic) == []
        assert broker.first_position(topic) is None
        assert broker.last_position(topic) == positions[-1]
        with broker.writer(topic) as writer:
            assert put(writer, numbered(1))[0] > positions[-1]

    def test_starting_at_a_trimmed_position_is_an_error(self, broker: Broker, topic: str) -> None:
        groups = fill(broker, topic, numbered(3), numbered(3, 3), numbered(3, 6))
        self.trimmed(broker, topic, groups[2][0].ledger)
        for position in groups[0] + groups[1]:
            with pytest.raises(PositionTrimmed), broker.reader(topic, position) as reader:
                reader.read()
        for position in groups[0] + groups[1][:-1]:
            with pytest.raises(PositionTrimmed), broker.reader(topic, position, inclusive=False) as reader:
                reader.read()

    def test_starting_after_the_last_trimmed_position_misses_nothing(self, broker: Broker, topic: str) -> None:
        first, second = fill(broker, topic, numbered(3), numbered(3, 3))
        self.trimmed(broker, topic, second[0].ledger)
        try:  # a backend that can't decide this raises
            found = read_all(broker, topic, first[-1], inclusive=False)
        except PositionTrimmed:
            return
        assert positions_of(found) == second

    def test_reader_before_the_trimmed_position_raises(self, broker: Broker, topic: str) -> None:
        groups = fill(broker, topic, numbered(3), numbered(3, 3), numbered(3, 6))
        with broker.reader(topic, groups[0][0]) as reader:
            batch = reader.read(limit=1)
            assert batch is not None
            found = [*batch]
            self.trimmed(broker, topic, groups[2][0].ledger)
            with pytest.raises(PositionTrimmed):
                drain(reader, found)
        # Prefetched messages may still be read, without a gap.
        assert [placed.message for placed in found] == numbered(9)[: len(found)]

    def test_reader_after_the_trimmed_position_continues(self, broker: Broker, topic: str) -> None:
        with broker.writer(topic) as writer, broker.reader(topic) as reader:
            put(writer, numbered(3))
            read_count(reader, 3)
            broker.roll(topic)
            second = put(writer, numbered(3, 3))
            assert positions_of(read_count(reader, 3)) == second
            self.trimmed(broker, topic, second[0].ledger)
            more = put(writer, numbered(2, 6))
            assert positions_of(read_count(reader, 2)) == more

    def test_earliest_and_latest_are_always_valid(self, broker: Broker, topic: str) -> None:
        groups = fill(broker, topic, numbered(3), numbered(3, 3))
        self.trimmed(broker, topic, groups[1][0].ledger)
        assert positions_of(read_all(broker, topic, EARLIEST)) == groups[1]
        assert positions_of(read_all(broker, topic, EARLIEST, inclusive=False)) == groups[1]
        with broker.reader(topic, LATEST, inclusive=False) as reader:
            assert reader.read() is None

    def test_time_before_the_first_message_is_its_position(self, broker: Broker, topic: str) -> None:
        groups = fill(broker, topic, numbered(3), numbered(3, 3))
        self.trimmed(broker, topic, groups[1][0].ledger)
        assert broker.position_at(topic, 0) == groups[1][0]

    def test_trimming_is_durable(self, broker: Broker, topic: str) -> None:
        groups = fill(broker, topic, numbered(3), numbered(3, 3))
        self.trimmed(broker, topic, groups[1][0].ledger)
        with self.reopen(broker) as again:
            assert positions_of(read_all(again, topic)) == groups[1]
            with pytest.raises(PositionTrimmed), again.reader(topic, groups[0][0]) as reader:
                reader.read()


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
            (more,) = fill(broker, topic, [Message(b"key-0", None), Message(None, b"x"), Message(b"new", b"y")])
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
        ((position,),) = fill(broker, topic, numbered(1))
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
