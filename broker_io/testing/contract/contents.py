"""Contract of appends: messages are read exactly as they were written, in order, where they were acknowledged."""

# ruff: noqa: S101

from __future__ import annotations

import numpy as np
import pytest

from broker_io.batch import Batch, Blobs, Labels, Message, Numbers
from broker_io.errors import MessageTooLarge
from broker_io.port import Broker
from broker_io.position import NO_INDEX
from broker_io.testing.contract.base import (
    WAIT_SECONDS,
    Base,
    ascending,
    numbered,
    positions_of,
    put,
    read_all,
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
        with broker.writer(topic) as writer:
            (position,) = put(writer, [message])
        (placed,) = read_all(broker, topic)
        assert placed.message == message
        assert placed.position == position

    def test_different_messages_in_one_batch_are_read_exactly(self, broker: Broker, topic: str) -> None:
        messages = [*ODD_MESSAGES.values(), *reversed(ODD_MESSAGES.values())]
        with broker.writer(topic) as writer:
            positions = put(writer, messages)
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
        with broker.writer(topic) as writer:
            positions = put(writer, numbered(5))
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
