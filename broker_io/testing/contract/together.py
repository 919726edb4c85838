"""Contract of brokers that append to several topics in one operation (`AtomicBroker`)."""

# ruff: noqa: S101

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from broker_io.batch import Batch, Message
from broker_io.errors import CallerError, Closed, Error, Fenced, InvalidMessage, MessageTooLarge, TopicNotFound
from broker_io.port import MAX_TOGETHER_BYTES, AtomicBroker, Broker, TogetherAppend, TogetherResult, Writer
from broker_io.position import Positions
from broker_io.testing.contract.base import (
    WAIT_SECONDS,
    Base,
    new_topic,
    numbered,
    positions_of,
    put,
    read_all,
    values,
)


def batch(*texts: str) -> Batch:
    return Batch.of([Message(b"k", text.encode()) for text in texts])


def append_together(broker: Broker, appends: Sequence[TogetherAppend]) -> Future[list[Positions | Error]]:
    """Append, with the result in a future, which checks that there is only one."""
    assert isinstance(broker, AtomicBroker)
    future: Future[list[Positions | Error]] = Future()

    def done(result: TogetherResult) -> None:
        if isinstance(result, list):
            future.set_result(result)
        else:
            future.set_exception(result)

    broker.append_together(appends, done)
    return future


class AtomicContract(Base):
    """For backends that implement `AtomicBroker`."""

    @pytest.fixture
    def topics(self, broker: Broker) -> list[str]:
        return [new_topic(broker) for _ in range(3)]

    @pytest.fixture
    def writers(self, broker: Broker, topics: list[str]) -> Iterator[list[Writer]]:
        writers = [broker.writer(topic, exclusive=True) for topic in topics]
        yield writers
        for writer in writers:
            writer.close()

    def together(self, broker: Broker, *appends: TogetherAppend) -> list[Positions]:
        """Append and return the positions."""
        outcomes = append_together(broker, appends).result(WAIT_SECONDS)
        assert len(outcomes) == len(appends)
        found = [outcome for outcome in outcomes if isinstance(outcome, Positions)]
        assert len(found) == len(outcomes), outcomes
        return found

    def contents(self, broker: Broker, topics: list[str]) -> list[bytes]:
        return [b"".join(value or b"" for value in values(read_all(broker, topic))) for topic in topics]

    def test_appends_to_several_topics_are_read_where_they_were_acknowledged(
        self, broker: Broker, topics: list[str], writers: list[Writer]
    ) -> None:
        appends = [(writer, Batch.of(numbered(n))) for n, writer in enumerate(writers, 1)]
        positions = self.together(broker, *appends)
        for number, topic in enumerate(topics, 1):
            found = read_all(broker, topic)
            assert [placed.message for placed in found] == numbered(number)
            assert positions_of(found) == [*positions[number - 1]]

    def test_appends_together_and_alone_keep_their_order(
        self, broker: Broker, topics: list[str], writers: list[Writer]
    ) -> None:
        first, second, _ = writers
        done: list[object] = []
        futures: list[Future[Any]] = []
        for number in range(0, 90, 3):
            alone, both, after = (batch(f"{number + n:02}") for n in range(3))
            one, two = (first, both), (second, both)
            futures += [first.append(alone), append_together(broker, [one, two]), second.append(after)]
            for future in futures[-3:]:
                future.add_done_callback(done.append)
        for future in futures:
            future.result(WAIT_SECONDS)
        assert done == futures
        wanted = ["".join(f"{n:02}" for n in range(90) if n % 3 != skipped).encode() for skipped in (2, 0)]
        assert self.contents(broker, topics[:2]) == wanted

    def test_several_appends_to_one_topic_keep_their_order(
        self, broker: Broker, topics: list[str], writers: list[Writer]
    ) -> None:
        first, other, _ = writers
        pairs = [(first, "a"), (other, "x"), (first, "b"), (first, "c")]
        positions = self.together(broker, *[(writer, batch(text)) for writer, text in pairs])
        assert self.contents(broker, topics[:2]) == [b"abc", b"x"]
        assert positions[0].last < positions[2].first <= positions[2].last < positions[3].first

    def test_empty_batches_have_no_positions(self, broker: Broker, topics: list[str], writers: list[Writer]) -> None:
        empty, one = (writers[0], batch()), (writers[1], batch("a"))
        assert [len(positions) for positions in self.together(broker, empty, one)] == [0, 1]
        assert [len(positions) for positions in self.together(broker, empty)] == [0]
        assert self.together(broker) == []
        assert self.contents(broker, topics) == [b"", b"a", b""]

    def test_only_the_append_to_a_deleted_topic_is_refused(
        self, broker: Broker, topics: list[str], writers: list[Writer]
    ) -> None:
        broker.delete_topic(topics[1])
        future = append_together(broker, [(writer, batch("a", "b")) for writer in writers])
        first, gone, third = future.result(WAIT_SECONDS)
        assert isinstance(gone, TopicNotFound)
        assert topics[1] in str(gone)
        found = [positions_of(read_all(broker, topic)) for topic in (topics[0], topics[2])]
        assert [[*each] for each in (first, third) if isinstance(each, Positions)] == found
        assert [len(positions) for positions in found] == [2, 2]

    def test_nothing_is_written_with_a_message_over_the_limit(
        self, broker: Broker, topics: list[str], writers: list[Writer]
    ) -> None:
        large = Batch.of([Message(None, bytes(self.max_message_bytes + 1))])
        small = batch("a")
        with pytest.raises(MessageTooLarge):
            append_together(broker, [(writers[0], small), (writers[1], large)])
        torn = Batch(small.keys, Batch.of(numbered(2)).values)
        with pytest.raises(InvalidMessage):
            append_together(broker, [(writers[0], small), (writers[1], torn)])
        assert put(writers[0], numbered(1))
        assert self.contents(broker, topics) == [b"value-0", b"", b""]

    def test_nothing_is_written_of_more_than_fits(
        self, broker: Broker, topics: list[str], writers: list[Writer]
    ) -> None:
        value = bytes(min(self.max_message_bytes, 1024 * 1024) - 1000)
        large = Batch.of([Message(None, value)] * (MAX_TOGETHER_BYTES // len(value) + 1))
        with pytest.raises(MessageTooLarge, match=str(MAX_TOGETHER_BYTES)):
            append_together(broker, [(writers[0], batch("a")), (writers[1], large)])
        assert self.contents(broker, topics) == [b"", b"", b""]
        (positions,) = self.together(broker, (writers[1], large))
        assert len(positions) == len(large)

    def test_nothing_is_written_by_a_closed_writer(
        self, broker: Broker, topics: list[str], writers: list[Writer]
    ) -> None:
        writers[1].close()
        future = append_together(broker, [(writer, batch("a")) for writer in writers])
        with pytest.raises(Closed):
            future.result(WAIT_SECONDS)
        assert self.contents(broker, topics) == [b"", b"", b""]

    def test_nothing_is_written_by_a_fenced_writer(
        self, broker: Broker, topics: list[str], writers: list[Writer]
    ) -> None:
        with broker.writer(topics[2], exclusive=True) as newer:
            future = append_together(broker, [(writer, batch("a")) for writer in writers])
            with pytest.raises(Fenced):
                future.result(WAIT_SECONDS)
            self.together(broker, (writers[0], batch("b")), (newer, batch("c")))
        assert self.contents(broker, topics) == [b"b", b"", b"c"]

    def test_a_writer_of_no_broker_is_refused(self, broker: Broker, topics: list[str], writers: list[Writer]) -> None:
        class Other(Writer):
            def append(self, batch: Batch) -> Future[Positions]:
                return writers[0].append(batch)

            def close(self) -> None:
                return None

        with pytest.raises(CallerError, match="Other"):
            append_together(broker, [(writers[0], batch("a")), (Other(), batch("a"))])
        assert self.contents(broker, topics) == [b"", b"", b""]

    def test_all_topics_have_what_was_acknowledged_after_a_restart(
        self, broker: Broker, topics: list[str], writers: list[Writer]
    ) -> None:
        for number in range(20):
            self.together(broker, *[(writer, batch(f"{number:02}")) for writer in writers])
        with self.reopen(broker) as again:
            assert self.contents(again, topics) == ["".join(f"{n:02}" for n in range(20)).encode()] * 3
