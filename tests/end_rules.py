"""When a log has been read to its end: the tests of each rule, for any backend.

A backend runs them with subclasses that have the fixture `broker`. Readers that are dead, or of a broker that has just
restarted, are made by `cut_readers`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from cut_readers import cut_short
from writing import TopicWriter

from broker_io import compacted
from broker_io.batch import Message, PlacedBatch
from broker_io.compacted import CompactedReader
from broker_io.errors import PositionTrimmed, ServiceUnavailable, TopicNotFound
from broker_io.port import OWN_PREFIX, Broker, PolicyBroker
from broker_io.position import EARLIEST, Position
from broker_io.testing.contract.base import eventually, fill, put
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.errors import ReplayStalled
from txnbuffer.follow import LogFollower, RecordFollower, visible_records

ABC = [Message(b"a", b"1"), Message(b"b", b"1"), Message(b"c", b"1")]
TOMBSTONE = Message(b"d", None)


def rows(batches: Sequence[PlacedBatch]) -> list[bytes | None]:
    return [placed.message.key for batch in batches for placed in batch]


def last(broker: Broker, topic: str) -> Position:
    end = broker.last_position(topic)
    assert end is not None
    return end


class CompactedEnds:
    """The end of a compacted topic."""

    end_timeout = 0.01
    """Seconds without a message after which a reader of this backend counts as silent."""

    @pytest.fixture(autouse=True)
    def _timeouts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compacted, "END_TIMEOUT", self.end_timeout)

    @pytest.fixture
    def topic(self, broker: Broker) -> str:
        name = f"{OWN_PREFIX}-ends-{uuid.uuid4().hex}"
        broker.create_topic(name)
        return name

    def test_an_end_taken_before_is_the_end_although_the_topic_grows(self, broker: Broker, topic: str) -> None:
        with broker.writer(topic) as writer, CompactedReader(broker, topic) as reader:
            put(writer, ABC)
            end = last(broker, topic)
            found = []
            for placed in reader.read_to_end(end):
                found.append(placed)
                put(writer, [Message(b"new", b"%d" % len(found))])
                assert len(found) < 10, "it reads what comes after the end"
            assert rows(found)[:3] == [b"a", b"b", b"c"]
            assert [*reader.read_to_end(end)] == []
            assert (reader.unproven, reader.at >= end) == (None, True)

    def test_an_empty_topic_is_read_at_once(self, broker: Broker, topic: str) -> None:
        with CompactedReader(broker, topic) as reader:
            assert [*reader.read_to_end(broker.last_position(topic))] == []
            assert (reader.at, reader.unproven) == (EARLIEST, None)

    def test_a_tail_that_was_compacted_away_is_not_awaited(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, [*ABC, TOMBSTONE])
        end = last(broker, topic)
        broker.roll(topic)
        broker.compact(topic)
        with CompactedReader(broker, topic) as reader:
            assert rows([*reader.read_to_end(end)])[:3] == [b"a", b"b", b"c"]

    def test_a_tail_that_was_trimmed_is_not_awaited(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, ABC)
        broker.roll(topic)
        broker.trim(topic, broker.ledgers(topic)[-1].ledger)
        with CompactedReader(broker, topic) as reader:
            assert rows([*reader.read_to_end(broker.last_position(topic))]) in ([], [b"a", b"b", b"c"])

    @pytest.mark.parametrize("given", [0, 1, 2])
    def test_the_silence_of_a_dead_reader_is_no_end(
        self, broker: Broker, topic: str, given: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill(broker, topic, ABC)
        cut_short(monkeypatch, broker, given, honest=True)
        with CompactedReader(broker, topic) as reader:
            assert rows([*reader.read_to_end(last(broker, topic))]) == [b"a", b"b", b"c"]

    @pytest.mark.parametrize("given", [0, 1, 2])
    def test_what_silent_readers_keep_back_is_read_or_noticed_later(
        self, broker: Broker, topic: str, given: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A raw log that compaction leaves as it is shows it at once, else a message that is written afterwards."""
        fill(broker, topic, ABC)
        end = last(broker, topic)
        with monkeypatch.context() as silent, CompactedReader(broker, topic) as started:
            cut_short(silent, broker, given)
            with CompactedReader(broker, topic) as reader:
                found = rows([*reader.read_to_end(end)])
            if isinstance(broker, PolicyBroker):
                assert (found, reader.unproven) == ([b"a", b"b", b"c"], None)
                return
            assert (found, reader.unproven) == (rows([*started.read_to_end(end)])[:given], reader.at)
        with broker.writer(topic) as writer:
            (own,) = put(writer, [Message(b"own", b"1")])
        with CompactedReader(broker, topic, reader.at) as reader:
            assert rows([*reader.read_to(own)]) == [b"a", b"b", b"c", b"own"][given:]

    def test_what_was_compacted_is_not_sought_in_a_log_without_its_beginning(
        self, broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill(broker, topic, ABC[:2], ABC[2:])
        broker.compact(topic)
        broker.trim(topic, broker.ledgers(topic)[-1].ledger)
        with CompactedReader(broker, topic) as reader:
            whole = rows([*reader.read_to_end(last(broker, topic))])
        assert whole == [b"a", b"b", b"c"] or not isinstance(broker, PolicyBroker)
        cut_short(monkeypatch, broker, *[0] * (3 if isinstance(broker, PolicyBroker) else 1), honest=True)
        with CompactedReader(broker, topic) as reader:
            assert rows([*reader.read_to_end(last(broker, topic))]) == whole

    def test_silence_is_no_end_while_what_was_read_can_not_be_all(
        self, broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill(broker, topic, ABC)
        found: list[PlacedBatch] = []
        cut_short(monkeypatch, broker, 1, 0, 0, 0, honest=True)
        with CompactedReader(broker, topic) as reader:
            batches = reader.read_to_end(last(broker, topic), lambda: len(found) > 1)
            found.extend(batches)
            assert reader.unproven is None
        assert rows(found) == [b"a", b"b", b"c"]

    def test_a_wait_for_what_can_not_be_all_ends(
        self, broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill(broker, topic, ABC)
        broker.roll(topic)
        broker.trim(topic, broker.ledgers(topic)[-1].ledger)
        cut_short(monkeypatch, broker)
        with CompactedReader(broker, topic) as reader:
            assert [*reader.read_to_end(broker.last_position(topic), lambda: False)] == []
            assert reader.unproven == EARLIEST

    def test_messages_that_exist_and_do_not_come_are_an_error(
        self, broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill(broker, topic, ABC)
        end = last(broker, topic)
        with monkeypatch.context() as silent:
            cut_short(silent, broker, 1, which=lambda _: True)
            with (
                CompactedReader(broker, topic) as reader,
                pytest.raises(ServiceUnavailable, match=r"nothing came within .* try again"),
            ):
                [*reader.read_to(end)]
        with monkeypatch.context() as silent:
            cut_short(silent, broker, 1, which=lambda _: True)
            with CompactedReader(broker, topic) as reader:
                if isinstance(broker, PolicyBroker):
                    with pytest.raises(ServiceUnavailable, match=r"nothing came within .* try again") as caught:
                        [*reader.read_to_end(end)]
                    assert caught.value.retryable
                else:
                    assert rows([*reader.read_to_end(end)]) == [b"a"]
        with CompactedReader(broker, topic) as reader:
            assert rows([*reader.read_to_end(end)]) == [b"a", b"b", b"c"]

    def test_what_was_read_from_the_raw_log_is_not_read_again(
        self, broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill(broker, topic, ABC)
        cut_short(monkeypatch, broker, 1, 0, honest=True)
        with CompactedReader(broker, topic) as reader:
            found = rows([*reader.read_to_end(last(broker, topic))])
            slow: Any = reader._reader
            slow._left = 9  # it is silent no more
            with broker.writer(topic) as writer:
                (own,) = put(writer, [Message(b"own", b"1")])
            assert found + rows([*reader.read_to(own)]) == [b"a", b"b", b"c", b"own"]

    def test_a_topic_that_is_deleted_and_created_again_is_another_one(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, ABC)
        with CompactedReader(broker, topic) as reader:
            assert rows([*reader.read_to_end(last(broker, topic))]) == [b"a", b"b", b"c"]
            broker.delete_topic(topic)
            broker.create_topic(topic)
            with pytest.raises(TopicNotFound):
                reader.read(10.0)


class LogEnds:
    """The end of the log of a data topic, for the log follower."""

    wait_seconds = 60.0
    """Seconds that a message which was written may take to arrive."""

    @pytest.fixture
    def topic(self, broker: Broker) -> str:
        name = f"ends-{uuid.uuid4().hex}"
        broker.create_topic(name)
        return name

    def read(self, log: LogFollower) -> bool:
        return log.read(self.wait_seconds) is not None

    def test_a_replay_stops_exactly_at_an_end_taken_before_although_the_log_grows(
        self, broker: Broker, topic: str
    ) -> None:
        writer = TopicWriter(broker, topic)
        writer.records(1, "a", "b")
        middle = writer.commit(1)
        writer.plain("c", "d")
        with follower_of(broker, topic) as log:
            for _ in range(2):
                log.replay(middle, exactly=True)
                assert (log.at, log.buffer.max_read_position) == (middle, middle)
            assert taken(log) == [b"a", b"b"]
            writer.plain("e")
            log.replay()
            assert log.at == broker.last_position(topic)
            assert taken(log) == [b"c", b"d", b"e"]

    def test_an_empty_log_is_replayed_at_once(self, broker: Broker, topic: str) -> None:
        with follower_of(broker, topic) as log:
            assert log.replay(timeout=0.0) == []
            TopicWriter(broker, topic).plain("a")
            log.replay()
            assert taken(log) == [b"a"]

    def test_a_log_that_was_trimmed_to_its_end_is_replayed_at_once(self, broker: Broker, topic: str) -> None:
        writer = TopicWriter(broker, topic)
        end = writer.plain("a").last
        broker.roll(topic)
        broker.trim(topic, broker.ledgers(topic)[-1].ledger)
        assert broker.last_position(topic) == end
        with follower_of(broker, topic, resume=end) as log:
            assert log.replay(timeout=0.0) == []
        writer.plain("b")
        with follower_of(broker, topic, resume=Position(broker.ledgers(topic)[-1].ledger, -1)) as log:
            log.replay()
            assert taken(log) == [b"b"]

    def test_a_replay_whose_next_messages_were_trimmed_is_an_error(self, broker: Broker, topic: str) -> None:
        writer = TopicWriter(broker, topic)
        resume = writer.plain("a").last
        writer.plain("b")
        broker.roll(topic)
        writer.plain("c")
        first = broker.ledgers(topic)[-1].ledger
        broker.trim(topic, first)
        eventually(lambda: broker.ledgers(topic)[0].ledger >= first)
        with pytest.raises(PositionTrimmed), follower_of(broker, topic, resume=resume) as log:
            log.replay()

    @pytest.mark.parametrize("given", [0, 1])
    def test_messages_that_exist_and_do_not_come_are_an_error_until_they_come(
        self, broker: Broker, topic: str, given: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        TopicWriter(broker, topic).plain("a", "b", "c")
        cut_short(monkeypatch, broker, given, which=lambda _: True)
        with follower_of(broker, topic) as log:
            slow: Any = log.open()
            with pytest.raises(ReplayStalled, match=r"nothing came after .* within 7 s.* try again") as caught:
                log.replay(timeout=7.0)
            assert caught.value.retryable
            assert taken(log) == []  # nothing is visible before the end
            slow._left = 9
            log.replay()
            assert taken(log) == [b"a", b"b", b"c"]

    def test_a_log_that_ends_with_a_marker_is_read_to_the_marker(self, broker: Broker, topic: str) -> None:
        writer = TopicWriter(broker, topic)
        writer.records(1, "a")
        writer.records(2, "b")
        writer.commit(1)
        end = writer.abort(2)
        with follower_of(broker, topic) as log:
            log.replay()
            assert (log.at, log.buffer.max_read_position, len(log.buffer.ongoing)) == (end, end, 0)

    def test_a_log_that_ends_with_a_ledger_continues_in_the_next_one(self, broker: Broker, topic: str) -> None:
        writer = TopicWriter(broker, topic)
        end = writer.plain("a").last
        broker.roll(topic)
        with follower_of(broker, topic) as log:
            log.replay()
            assert (log.at, taken(log)) == (end, [b"a"])
            assert log.replay(timeout=0.0) == []
            writer.plain("b")
            assert self.read(log)
            broker.roll(topic)
            writer.plain("c")
            log.replay()
            assert taken(log) == [b"b", b"c"]

    def test_a_topic_that_is_deleted_and_created_again_is_another_one(self, broker: Broker, topic: str) -> None:
        TopicWriter(broker, topic).plain("a", "b")
        with follower_of(broker, topic) as log:
            log.replay()
            broker.delete_topic(topic)
            TopicWriter(broker, topic).plain("other")
            with pytest.raises(TopicNotFound):
                self.read(log)

    @pytest.mark.parametrize("row", [0, 1, 3])
    def test_a_follower_resumes_in_the_middle_of_a_batch(self, broker: Broker, topic: str, row: int) -> None:
        placed = TopicWriter(broker, topic).plain("0", "1", "2", "3", "4")
        with follower_of(broker, topic, resume=placed[row]) as log:
            log.replay(placed[row])
            assert log.at == placed[row]
            log.replay(placed[row + 1], exactly=True)
            assert log.at == placed[row + 1]
            log.replay()
            assert taken(log) == [b"%d" % number for number in range(row + 1, 5)]

    def test_a_follower_continues_with_a_buffer_that_replaces_its_own(self, broker: Broker, topic: str) -> None:
        writer = TopicWriter(broker, topic)
        writer.records(1, "a")
        with follower_of(broker, topic) as log, follower_of(broker, topic) as newer:
            for one in (log, newer):
                one.replay()
            log.buffer = newer.buffer
            writer.commit(1)
            writer.plain("b")
            log.replay()
            assert log.buffer is newer.buffer
            assert log.at == newer.at == broker.last_position(topic)
            assert taken(log) == [b"a", b"b"]

    def test_visible_records_are_counted_up_to_a_position(
        self, broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        writer = TopicWriter(broker, topic)
        first = writer.plain("a").last
        writer.records(1, "b", "c")
        writer.records(2, "d")
        writer.commit(1)
        writer.abort(2)
        last = writer.plain("e", "f").first
        with follower_of(broker, topic) as log:
            log.replay()
            assert log.count_visible(EARLIEST, last, timeout=self.wait_seconds) == 4
            assert log.count_visible(first, last, timeout=self.wait_seconds) == 3
            assert log.count_visible(last, last, timeout=0.0) == 0
            cut_short(monkeypatch, broker, 1, which=lambda _: True)
            with pytest.raises(ReplayStalled, match="nothing came after"):
                log.count_visible(EARLIEST, last, timeout=0.0)


@contextmanager
def follower_of(broker: Broker, topic: str, resume: Position = EARLIEST) -> Iterator[RecordFollower]:
    with RecordFollower(broker, topic, TransactionBuffer(), resume, decided_after=resume) as log:
        yield log


def taken(log: LogFollower) -> list[bytes | None]:
    """The values of the records among the messages that are decided and were not taken yet."""
    found: list[bytes | None] = []
    while (placed := log.take()) is not None:
        found += visible_records(placed, log.buffer).messages.values
    return found
