"""Contract of topics: names and life cycle; shared and exclusive writers, and fencing."""

# ruff: noqa: S101

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from broker_io.batch import Batch, PlacedMessage
from broker_io.errors import (
    Closed,
    Error,
    Fenced,
    InvalidTopicName,
    NotSupported,
    PositionTrimmed,
    StillHeld,
    TopicNotFound,
)
from broker_io.port import Broker, Writer
from broker_io.position import Position, Positions
from broker_io.testing.contract.base import (
    WAIT_SECONDS,
    Base,
    drain,
    fill,
    new_topic,
    numbered,
    positions_of,
    put,
    read_all,
    values,
)

CALLS: dict[str, Callable[[Broker, str], object]] = {
    "delete_topic": lambda broker, topic: broker.delete_topic(topic),
    "incarnation": lambda broker, topic: broker.incarnation(topic),
    "writer": lambda broker, topic: broker.writer(topic),
    "exclusive writer": lambda broker, topic: broker.writer(topic, exclusive=True),
    "reader": lambda broker, topic: broker.reader(topic),
    "ledgers": lambda broker, topic: broker.ledgers(topic),
    "first_position": lambda broker, topic: broker.first_position(topic),
    "last_position": lambda broker, topic: broker.last_position(topic),
    "position_at": lambda broker, topic: broker.position_at(topic, 0),
    "roll": lambda broker, topic: broker.roll(topic),
    "trim": lambda broker, topic: broker.trim(topic, 1),
    "compact": lambda broker, topic: broker.compact(topic),
}
"""The calls that require an existing topic."""

NAMES = ["a", "a" * 330, "ü" * 180, "a b", "a/b", "..", "../x", "a\\b", "ä€😀", "A", "-end", "%2F", "a:b", "nul", "'\""]


class TopicsContract(Base):
    def test_data_topic_is_not_compacted(self, broker: Broker) -> None:
        topic = f"orders-{uuid.uuid4().hex}"
        broker.create_topic(topic)
        fill(broker, topic, numbered(20))
        broker.roll(topic)
        with pytest.raises(NotSupported, match=f"{topic}.* transactions"):
            broker.compact(topic)
        assert len(read_all(broker, topic)) == 20
        assert read_all(broker, topic, compacted=True) == read_all(broker, topic)

    def test_new_topic_is_listed_among_sorted_names(self, broker: Broker) -> None:
        names = [new_topic(broker) for _ in range(3)]
        listed = broker.topics()
        assert listed == sorted(listed)
        assert {*names} <= {*listed}

    def test_creating_a_topic_again_changes_nothing(self, broker: Broker, topic: str) -> None:
        incarnation = broker.incarnation(topic)
        fill(broker, topic, numbered(3))
        broker.create_topic(topic)
        assert broker.incarnation(topic) == incarnation
        assert values(read_all(broker, topic)) == [b"value-0", b"value-1", b"value-2"]

    def test_re_created_topic_is_another_one(self, broker: Broker, topic: str) -> None:
        seen = set()
        for _ in range(3):
            seen.add(broker.incarnation(topic))
            fill(broker, topic, numbered(3))
            broker.delete_topic(topic)
            assert topic not in broker.topics()
            broker.create_topic(topic)
            assert read_all(broker, topic) == []
            assert broker.first_position(topic) is None
            assert broker.last_position(topic) is None
        assert len(seen) == 3

    def test_position_of_a_deleted_topic_is_invalid_after_re_creation(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, numbered(3))
        old = broker.last_position(topic)
        assert old is not None
        broker.delete_topic(topic)
        broker.create_topic(topic)
        fill(broker, topic, numbered(5))
        first = broker.first_position(topic)
        assert first is not None
        assert first.ledger > old.ledger
        with pytest.raises(PositionTrimmed), broker.reader(topic, old) as reader:
            reader.read(timeout=WAIT_SECONDS)

    def test_no_two_topics_share_an_incarnation(self, broker: Broker) -> None:
        assert len({broker.incarnation(new_topic(broker)) for _ in range(5)}) == 5

    @pytest.mark.parametrize("name", ["", " ", " a", "a ", "a\n", "a\0b", "\t", "a" * 401, "ü" * 201, "a\u2028b"])
    def test_invalid_name_is_rejected(self, broker: Broker, name: str) -> None:
        before = broker.topics()
        with pytest.raises(InvalidTopicName):
            broker.create_topic(name)
        assert broker.topics() == before

    @pytest.mark.parametrize("name", NAMES)
    def test_any_printable_name_is_valid(self, broker: Broker, name: str) -> None:
        mark = uuid.uuid4().hex
        topic = f"{name}-{mark}" if name[0] != "." else name + mark
        broker.create_topic(topic)
        fill(broker, topic, numbered(2))
        assert topic in broker.topics()
        assert values(read_all(broker, topic)) == [b"value-0", b"value-1"]

    def test_names_that_differ_only_in_case_are_two_topics(self, broker: Broker, topic: str) -> None:
        upper = topic.upper()
        broker.create_topic(upper)
        fill(broker, topic, numbered(1))
        fill(broker, upper, numbered(1, start=5))
        assert values(read_all(broker, topic)) == [b"value-0"]
        assert values(read_all(broker, upper)) == [b"value-5"]

    def test_topics_do_not_mix(self, broker: Broker) -> None:
        first, second = new_topic(broker), new_topic(broker)
        with broker.writer(first) as one, broker.writer(second) as two:
            for number in range(0, 20, 2):
                put(one, numbered(1, start=number))
                put(two, numbered(1, start=number + 1))
        assert values(read_all(broker, first)) == [b"value-%d" % number for number in range(0, 20, 2)]
        assert values(read_all(broker, second)) == [b"value-%d" % number for number in range(1, 20, 2)]

    @pytest.mark.parametrize("call", CALLS)
    def test_error_names_the_missing_topic(self, broker: Broker, call: str) -> None:
        missing = f"contract-{uuid.uuid4().hex}"
        with pytest.raises(TopicNotFound, match=missing):
            CALLS[call](broker, missing)
        assert missing not in broker.topics()

    def test_writer_ends_with_its_topic(self, broker: Broker, topic: str) -> None:
        writer = broker.writer(topic)
        put(writer, numbered(1))
        broker.delete_topic(topic)
        broker.create_topic(topic)
        assert isinstance(writer.append(Batch.of(numbered(1))).exception(WAIT_SECONDS), Error)
        assert read_all(broker, topic) == []

    def test_reader_ends_with_its_topic(self, broker: Broker, topic: str) -> None:
        fill(broker, topic, numbered(10))
        reader = broker.reader(topic)
        assert reader.read(limit=2) is not None
        broker.delete_topic(topic)
        broker.create_topic(topic)
        fill(broker, topic, numbered(10, start=100))
        found: list[PlacedMessage] = []
        with pytest.raises(Error):
            drain(reader, found)
        # Prefetched messages may still be read; those of the other topic never are.
        assert [placed.message for placed in found] == numbered(10)[2 : 2 + len(found)]

    @pytest.mark.parametrize("call", [*CALLS, "topics", "create_topic"])
    def test_closed_broker_raises_closed(self, broker: Broker, topic: str, call: str) -> None:
        broker.close()
        broker.close()
        calls = {**CALLS, "topics": lambda broker, _: broker.topics(), "create_topic": Broker.create_topic}
        with pytest.raises(Closed):
            broker.create_topic(topic) if call == "create_topic" else calls[call](broker, topic)

    def test_closing_the_broker_closes_readers_and_writers(self, broker: Broker, topic: str) -> None:
        writer, reader = broker.writer(topic), broker.reader(topic)
        broker.close()
        assert isinstance(writer.append(Batch.of(numbered(1))).exception(WAIT_SECONDS), Closed)
        with pytest.raises(Closed):
            reader.read()
        writer.close()
        reader.close()

    def test_closed_writer_and_reader_raise_closed(self, broker: Broker, topic: str) -> None:
        with broker.writer(topic) as writer, broker.reader(topic) as reader:
            put(writer, numbered(1))
        assert isinstance(writer.append(Batch.of(numbered(1))).exception(WAIT_SECONDS), Closed)
        with pytest.raises(Closed):
            reader.read()
        writer.close()
        reader.close()
        assert len(read_all(broker, topic)) == 1

    def test_closing_the_broker_loses_nothing(self, broker: Broker, topic: str) -> None:
        incarnation = broker.incarnation(topic)
        positions = [position for group in fill(broker, topic, numbered(20), numbered(20, 20)) for position in group]
        before, ledgers = read_all(broker, topic), broker.ledgers(topic)
        with self.reopen(broker) as again:
            assert topic in again.topics()
            assert again.incarnation(topic) == incarnation
            assert read_all(again, topic) == before
            assert [placed.position for placed in before] == positions
            assert [ledger.ledger for ledger in again.ledgers(topic)][: len(ledgers)] == [
                ledger.ledger for ledger in ledgers
            ]
            last: Position | None = positions[-1]
            assert again.last_position(topic) == last
            with again.writer(topic) as writer:
                assert put(writer, numbered(1))[0] > positions[-1]

    def test_pending_appends_are_durable_after_close(self, broker: Broker, topic: str) -> None:
        with broker.writer(topic) as writer:
            futures = [writer.append(Batch.of(numbered(1, start=number))) for number in range(50)]
        assert all(future.done() for future in futures)
        with self.reopen(broker) as again:
            assert values(read_all(again, topic)) == [b"value-%d" % number for number in range(50)]


def failure(writer: Writer) -> BaseException | None:
    return writer.append(Batch.of(numbered(1, start=999))).exception(WAIT_SECONDS)


class OwningContract(Base):
    def test_shared_writers_share(self, broker: Broker, topic: str) -> None:
        with broker.writer(topic) as one, broker.writer(topic) as two:
            positions = [put(writer, numbered(1, number))[0] for number, writer in enumerate([one, two, one, two])]
        found = read_all(broker, topic)
        assert positions_of(found) == positions
        assert [placed.message for placed in found] == numbered(4)

    @pytest.mark.parametrize("exclusive", [False, True])
    def test_exclusive_writer_fences_every_older_one(self, broker: Broker, topic: str, exclusive: bool) -> None:
        older = [broker.writer(topic, exclusive=exclusive)]
        if not exclusive:
            older.append(broker.writer(topic))
        for writer in older:
            put(writer, numbered(1))
        with broker.writer(topic, exclusive=True) as owner:
            for writer in older:
                assert isinstance(failure(writer), Fenced)
            put(owner, numbered(1, 5))
            for writer in older:
                assert isinstance(failure(writer), Fenced)
        assert values(read_all(broker, topic)) == [b"value-0"] * len(older) + [b"value-5"]

    def test_fenced_writers_stay_fenced_after_the_exclusive_one_closes(self, broker: Broker, topic: str) -> None:
        older = broker.writer(topic)
        broker.writer(topic, exclusive=True).close()
        assert isinstance(failure(older), Fenced)
        with broker.writer(topic) as fresh:
            put(fresh, numbered(1))
        assert isinstance(failure(older), Fenced)
        older.close()
        assert values(read_all(broker, topic)) == [b"value-0"]

    def test_no_shared_writer_opens_alongside_an_exclusive_one(self, broker: Broker, topic: str) -> None:
        with broker.writer(topic, exclusive=True) as owner:
            with pytest.raises(Fenced, match=topic):
                broker.writer(topic)
            put(owner, numbered(1))
        fill(broker, topic, numbered(1, 1))
        assert values(read_all(broker, topic)) == [b"value-0", b"value-1"]

    def test_closing_a_fenced_writer_admits_no_shared_one(self, broker: Broker, topic: str) -> None:
        older = broker.writer(topic, exclusive=True)
        with broker.writer(topic, exclusive=True) as owner:
            older.close()
            with pytest.raises(Fenced):
                broker.writer(topic)
            put(owner, numbered(1))

    def test_fencing_affects_one_topic_only(self, broker: Broker, topic: str) -> None:
        other = new_topic(broker)
        with broker.writer(other) as writer, broker.writer(topic, exclusive=True):
            put(writer, numbered(1))
        assert len(read_all(broker, other)) == 1

    def test_each_owner_fences_the_one_before(self, broker: Broker, topic: str) -> None:
        owners, positions = [], []
        for number in range(6):
            owners.append(broker.writer(topic, exclusive=True))
            positions += put(owners[-1], numbered(1, number))
            assert all(isinstance(failure(writer), Fenced) for writer in owners[:-1])
        assert positions_of(read_all(broker, topic)) == positions

    def test_re_created_topic_has_no_owner(self, broker: Broker, topic: str) -> None:
        owner = broker.writer(topic, exclusive=True)
        broker.delete_topic(topic)
        broker.create_topic(topic)
        fill(broker, topic, numbered(1))
        owner.close()
        assert len(read_all(broker, topic)) == 1

    def test_waiting_writer_fences_no_other(self, broker: Broker, topic: str) -> None:
        with broker.writer(topic, exclusive=True) as owner:
            if not self.waits_for_owners:
                with pytest.raises(NotSupported):
                    broker.writer(topic, exclusive=True, wait=0.0)
                return
            for wait in (0.0, 0.05):
                with pytest.raises(StillHeld, match=topic) as caught:
                    broker.writer(topic, exclusive=True, wait=wait)
                assert caught.value.retryable
            put(owner, numbered(1))
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(broker.writer, topic, exclusive=True, wait=WAIT_SECONDS)
                put(owner, numbered(1, 1))
                owner.close()
                with waiting.result(WAIT_SECONDS) as next_owner:
                    put(next_owner, numbered(1, 2))
                    with pytest.raises(Fenced, match=topic):
                        broker.writer(topic)
        with broker.writer(topic, exclusive=True, wait=0.0) as writer:
            put(writer, numbered(1, 3))
        assert [placed.message for placed in read_all(broker, topic)] == numbered(4)

    def test_no_message_of_a_fenced_writer_follows_those_of_the_new_owner(self, broker: Broker, topic: str) -> None:
        """Of pending appends a prefix may be in the log, in order, before all messages of the new owner."""
        started, sent = threading.Event(), []

        def write() -> None:
            with broker.writer(topic) as writer:
                for number in range(2000):
                    sent.append(writer.append(Batch.of(numbered(1, number))))
                    started.set()
                    if number % 50 == 49 and sent[-1].exception(WAIT_SECONDS) is not None:
                        return

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            started.wait(WAIT_SECONDS)
            owner = broker.writer(topic, exclusive=True)
            (boundary,) = put(owner, numbered(1, 10_000))
            writing.result(WAIT_SECONDS)
        owner.close()
        found = read_all(broker, topic)
        assert found[-1].position == boundary
        assert [placed.message for placed in found[:-1]] == numbered(len(found) - 1)
        self._check_acknowledged(sent, positions_of(found))

    def _check_acknowledged(self, sent: list[Future[Positions]], found: list[Position]) -> None:
        failures = [future.exception(WAIT_SECONDS) for future in sent]
        acknowledged = [future.result() for future, failed in zip(sent, failures, strict=True) if failed is None]
        assert all(isinstance(failed, Fenced) for failed in failures[len(acknowledged) :])
        assert [positions.first for positions in acknowledged] == found[: len(acknowledged)]
