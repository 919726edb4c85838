"""Writers send a single append at once, and an append as one entry."""

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


def test_flush_does_not_hold_the_global_lock() -> None:
    """The library's `flush_async` can deadlock with a thread that waits for Python's global lock."""
    calls = [path.name for path in (ROOT / "broker_io/pulsar").glob("*.py") if ".flush_async(" in path.read_text()]
    assert calls == []


def test_last_position_of_an_entry_gives_all_others() -> None:
    assert [*(places_in_entry(Position(7, 5, 2), 3) or ())] == [
        Position(7, 5, 0),
        Position(7, 5, 1),
        Position(7, 5, 2),
    ]
    assert [*(places_in_entry(Position(7, 5, 0), 1) or ())] == [Position(7, 5, 0)]


@pytest.mark.parametrize("index", [-1, 0, 1, 3])
def test_entry_of_another_size_gives_no_positions(index: int) -> None:
    assert places_in_entry(Position(7, 5, index), 3) is None


def test_single_appends_do_not_wait_for_the_timer(
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
            delete = writer.append(Batch.of([Message(b"k", None)]))  # a batch of zero bytes is full too
            assert len(delete.result(SECONDS)) == 1


def test_any_mixture_of_appends_is_at_the_acknowledged_positions(cluster: Cluster, namespace: str) -> None:
    """Appends in separate entries, in shared ones, and too large for one entry, with many pending."""
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


def test_split_append_is_an_error(cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_close_without_a_timeout_does_not_flush(cluster: Cluster, namespace: str) -> None:
    """While a broker hangs a flush would take as long as `max_unavailable`."""
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
                writer._producer = Hanging(writer._producer)  # type: ignore[attr-defined]  # it records its calls
        assert calls == wanted


def test_append_accepted_after_the_end_fails_like_the_others(cluster: Cluster, namespace: str) -> None:
    """The library checks for the end before it takes its lock, under which the end fails the pending appends."""

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
            writer._producer = Late(writer)  # type: ignore[attr-defined]  # it accepts an append after its end
            assert isinstance(writer.append(values(1)).exception(SECONDS), Fenced)


def test_exit_waits_longer_than_the_library_takes_to_close() -> None:
    """With a hanging broker closing takes as long as an operation; its threads would abort an ended Python."""
    assert CLOSE_SECONDS > OPERATION_SECONDS
