"""Reading what is there: from any position, in portions, by several readers."""

# ruff: noqa: S101

from __future__ import annotations

import pytest

from broker_io.port import Broker
from broker_io.position import EARLIEST, LATEST, Position
from broker_io.testing.contract.base import (
    PATIENCE_SECONDS,
    Base,
    fill,
    numbered,
    positions_of,
    put,
    read_all,
    read_count,
    read_on,
    values,
)


class ReadingContract(Base):
    def test_every_position_is_a_place_to_start_at_or_behind(self, broker: Broker, topic: str) -> None:
        groups = fill(broker, topic, numbered(7), numbered(1, 7), numbered(5, 8))
        positions = [position for group in groups for position in group]
        for index, position in enumerate(positions):
            assert positions_of(read_all(broker, topic, position)) == positions[index:]
            assert positions_of(read_all(broker, topic, position, inclusive=False)) == positions[index + 1 :]

    @pytest.mark.parametrize("inclusive", [True, False])
    def test_earliest_takes_everything(self, broker: Broker, topic: str, inclusive: bool) -> None:
        fill(broker, topic, numbered(7), numbered(3, 7))
        assert values(read_all(broker, topic, inclusive=inclusive)) == [b"value-%d" % number for number in range(10)]

    def test_latest_takes_what_comes_after_it_was_opened(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, numbered(5))
        with broker.reader(topic, LATEST, inclusive=False) as reader:
            assert reader.read() is None
            fill(broker, topic, numbered(2, 5))
            assert values(read_count(reader, 2)) == [b"value-5", b"value-6"]

    def test_a_position_past_the_end_of_a_ledger_means_the_next_one(self, broker: Broker, topic: str) -> None:
        groups = fill(broker, topic, numbered(3), numbered(2, 3))
        past = Position(groups[0][-1].ledger, groups[0][-1].entry + 1000)
        for inclusive in (True, False):
            assert positions_of(read_all(broker, topic, past, inclusive=inclusive)) == groups[1]

    @pytest.mark.parametrize("inclusive", [True, False])
    def test_a_start_above_the_end_waits_for_what_comes_there(
        self, broker: Broker, topic: str, inclusive: bool
    ) -> None:
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
    def test_portions_put_together_are_the_whole(self, broker: Broker, topic: str, limit: int) -> None:
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

    def test_a_reader_can_begin_where_another_one_stopped(self, broker: Broker, topic: str) -> None:
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

    def test_reading_ahead_of_the_writer_begins_there(self, broker: Broker, topic: str) -> None:
        (positions,) = fill(broker, topic, numbered(4))
        with broker.reader(topic, positions[-1], inclusive=False) as reader:
            assert reader.read() is None
            with broker.writer(topic) as writer:
                more = put(writer, numbered(3, 4))
            assert positions_of(read_count(reader, 3)) == more

    def test_an_empty_topic_gives_nothing(self, broker: Broker, topic: str) -> None:
        for start in (EARLIEST, LATEST):
            with broker.reader(topic, start) as reader:
                assert reader.read() is None
                assert reader.read(timeout=0.01) is None

    def test_many_messages_come_in_order(self, broker: Broker, topic: str) -> None:
        with broker.writer(topic) as writer:
            for start in range(0, 50_000, 10_000):
                put(writer, numbered(10_000, start=start))
        found = read_all(broker, topic)
        assert values(found) == [b"value-%d" % number for number in range(50_000)]

    def test_a_read_that_finds_something_does_not_wait(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, numbered(1))
        with broker.reader(topic) as reader:
            batch = reader.read(timeout=PATIENCE_SECONDS)
            assert batch is not None
            assert len(batch) == 1
