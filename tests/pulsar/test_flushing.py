"""Writers that send at once what is alone, and as one entry what was appended together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pulsar
import pytest
from pulsar_cluster import Cluster
from source_tree import ROOT

from broker_io import open_broker
from broker_io.batch import Batch, Message
from broker_io.errors import AppendUnknown, Fenced
from broker_io.port import Broker
from broker_io.position import Position, Positions
from broker_io.pulsar import writer as writer_module
from broker_io.pulsar.cluster import CLOSE_SECONDS, OPERATION_SECONDS
from broker_io.pulsar.writer import Batching, places_in_entry

SECONDS = 120.0
LATE_MS = 600_000


def values(count: int, size: int = 1) -> Batch:
    return Batch.of([Message(None, b"v" * size)] * count)


def all_positions(broker: Broker, topic: str) -> list[Position]:
    """The positions of all messages, as a reader gets them."""
    found: list[Position] = []
    with broker.reader(topic) as reader:
        while (placed := reader.read()) is not None:
            found += placed.positions
    return found


def test_nothing_flushes_while_it_keeps_other_threads_from_python() -> None:
    """The library's `flush_async` does: once in some thousand calls it waits for a thread that waits for Python."""
    calls = [path.name for path in (ROOT / "broker_io/pulsar").glob("*.py") if ".flush_async(" in path.read_text()]
    assert calls == []


def test_the_last_place_in_an_entry_tells_all_others() -> None:
    assert [*(places_in_entry(Position(7, 5, 2), 3) or ())] == [
        Position(7, 5, 0),
        Position(7, 5, 1),
        Position(7, 5, 2),
    ]
    assert [*(places_in_entry(Position(7, 5, 0), 1) or ())] == [Position(7, 5, 0)]


@pytest.mark.parametrize("index", [-1, 0, 1, 3])
def test_an_entry_that_holds_less_or_more_tells_nothing(index: int) -> None:
    assert places_in_entry(Position(7, 5, index), 3) is None


def test_appends_that_are_alone_wait_for_no_timer(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "BATCH_DELAY_MS", LATE_MS)
    monkeypatch.setattr(writer_module, "NEVER_MS", LATE_MS)
    with open_broker(f"{cluster.url}/{namespace}", admin_url=cluster.admin) as broker:
        broker.create_topic("t")
        with broker.writer("t") as writer:
            for size in [*range(1, 100, 3), writer_module.BATCH_MESSAGES]:
                positions = writer.append(values(size)).result(SECONDS)
                assert len({position[:2] for position in positions}) == 1
                assert positions.indexes.tolist() == list(range(size))
            delete = writer.append(Batch.of([Message(b"k", None)]))  # a batch without a byte is full too
            assert len(delete.result(SECONDS)) == 1


def test_any_mixture_of_appends_stands_where_it_was_told(cluster: Cluster, namespace: str) -> None:
    """Entries of their own, appends that go together, and those too large for one, with many of them under way."""
    shape = np.random.default_rng(5)
    counts = [int(count) for count in shape.choice([1, 2, 5, 64, 500, 1001], 120, p=[0.4, 0.2, 0.2, 0.1, 0.05, 0.05])]
    told: list[Position] = []
    with open_broker(f"{cluster.url}/{namespace}", admin_url=cluster.admin) as broker:
        broker.create_topic("t")
        with broker.writer("t") as writer:
            for start in range(0, len(counts), 12):
                under_way = [
                    writer.append(values(count, 1000 if number % 12 == 11 else 10))
                    for number, count in enumerate(counts[start : start + 12], start)
                ]
                for future in under_way:
                    told += future.result(SECONDS)
        assert len(told) == sum(counts)
        assert all_positions(broker, "t") == told


def test_an_append_that_was_split_on_its_way_is_no_success(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_broker(f"{cluster.url}/{namespace}", admin_url=cluster.admin) as broker:
        broker.create_topic("t")
        with broker.writer("t") as writer:
            assert isinstance(writer.append(values(5)).result(SECONDS), Positions)
            whole = Batching.one_entry
            monkeypatch.setattr(writer_module, "NEVER_MS", 1)
            monkeypatch.setattr(Batching, "one_entry", lambda self, messages: whole(self, messages - 1))
            error = writer.append(values(5)).exception(SECONDS)
            assert isinstance(error, AppendUnknown)
            assert "split" in str(error)
            assert writer.append(values(1)).exception(SECONDS) is error


def test_who_does_not_wait_at_the_end_flushes_nothing(cluster: Cluster, namespace: str) -> None:
    """A client has waited before. While a broker hangs flushing would take as long as its patience."""
    calls: list[str] = []

    class Hanging:
        def __init__(self, producer: Any) -> None:
            self._producer = producer

        def flush(self) -> None:
            calls.append("flush")

        def close(self) -> None:
            calls.append("close")
            self._producer.close()

    for close_timeout, wanted in ((0.0, ["close"]), (None, ["flush", "close"])):
        calls.clear()
        with open_broker(f"{cluster.url}/{namespace}", admin_url=cluster.admin, close_timeout=close_timeout) as broker:
            broker.create_topic("t")
            with broker.writer("t") as writer:
                writer._producer = Hanging(writer._producer)  # type: ignore[attr-defined]  # one that tells
        assert calls == wanted


def test_an_append_that_the_library_takes_after_its_end_fails_like_the_others(cluster: Cluster, namespace: str) -> None:
    """It looks whether it has ended before it waits for its lock, behind which the end then fails what it finds."""

    class Late:
        def __init__(self, writer: Any) -> None:
            self._writer, self._producer = writer, writer._producer
            self._under_way: list[Any] = []

        def send_async(self, _: object, callback: Any) -> None:
            self._writer.end(Fenced("another one opened the topic"))
            self._under_way.append(callback)

        def close(self) -> None:
            while self._under_way:
                self._under_way.pop(0)(pulsar.Result.AlreadyClosed, None)
            self._producer.close()

    with open_broker(f"{cluster.url}/{namespace}", admin_url=cluster.admin) as broker:
        broker.create_topic("t")
        with broker.writer("t") as writer:
            writer._producer = Late(writer)  # type: ignore[attr-defined]  # one that takes an append when it has ended
            assert isinstance(writer.append(values(1)).exception(SECONDS), Fenced)


def test_who_leaves_waits_longer_than_the_library_may_take_to_close() -> None:
    """With a broker that hangs it takes an operation's time; its threads abort a Python that has ended by then."""
    assert CLOSE_SECONDS > OPERATION_SECONDS
