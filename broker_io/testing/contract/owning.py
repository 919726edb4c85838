"""Contract of shared and exclusive writers, and of fencing."""

# ruff: noqa: S101

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from broker_io.batch import Batch
from broker_io.errors import Fenced, NotSupported, StillHeld
from broker_io.port import Broker, Writer
from broker_io.position import Position, Positions
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
        with broker.writer(topic) as writer:
            put(writer, numbered(1, 1))
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
        with broker.writer(topic) as writer:
            put(writer, numbered(1))
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
