"""Readers and writers that the client library never finishes to open: the library waits for ever for a lost answer."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from pulsar_cluster import Cluster

from broker_io import open_broker
from broker_io.batch import Batch, Message
from broker_io.errors import ServiceUnavailable
from broker_io.pulsar.broker import PulsarBroker
from broker_io.pulsar.threads import Flusher

SECONDS = 60.0


class Opened:
    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


def test_handle_that_is_opened_late_is_closed() -> None:
    answer, late = threading.Event(), Opened()

    def opening() -> Opened:
        answer.wait(SECONDS)
        return late

    calls = Flusher()
    with pytest.raises(TimeoutError):
        calls.open(opening, 0.01)
    answer.set()
    assert late.closed.wait(SECONDS)
    calls.wait_idle(SECONDS)


def test_handle_and_error_reach_the_caller() -> None:
    calls, handle = Flusher(), Opened()
    assert calls.open(lambda: handle, SECONDS) is handle
    assert not handle.closed.is_set()

    def fail() -> None:
        raise KeyError("why")

    with pytest.raises(KeyError, match="why"):
        calls.open(fail, SECONDS)


class Losing:
    """An object of the library; the first answer to `method` is lost."""

    def __init__(self, real: Any, method: str) -> None:
        self.real, self.method = real, method
        self.calls = 0
        self.answer = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return self.lose if name == self.method else getattr(self.real, name)

    def lose(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            self.answer.wait(SECONDS)
        return getattr(self.real, self.method)(*args, **options)


def test_next_attempt_opens_after_a_lost_answer(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_broker(f"{cluster.url}/{namespace}", admin_url=cluster.admin, max_unavailable=SECONDS) as broker:
        assert isinstance(broker, PulsarBroker)
        broker.create_topic("orders")
        connection: Any = broker._cluster
        client = connection.client
        readers, writers = Losing(client, "create_reader"), Losing(client._client, "create_producer")
        monkeypatch.setattr(connection, "_opening", 2.0)
        monkeypatch.setattr(client, "_client", writers)
        monkeypatch.setattr(connection, "client", readers)
        with broker.writer("orders") as writer, broker.reader("orders") as reader:
            writer.append(Batch.of([Message(None, b"1")])).result(SECONDS)
            assert reader.read() is not None
        monkeypatch.undo()
        for each in (readers, writers):
            each.answer.set()
            assert each.calls >= 2


def test_opening_that_never_ends_is_an_error_of_the_cluster(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, late = threading.Event(), Opened()

    def opening() -> Opened:
        answer.wait(SECONDS)
        return late

    with open_broker(f"{cluster.url}/{namespace}", admin_url=cluster.admin) as broker:
        assert isinstance(broker, PulsarBroker)
        connection = broker._cluster
        monkeypatch.setattr(connection, "_opening", 0.1)
        with pytest.raises(ServiceUnavailable, match=r"did not open the reader of topic 'orders' within 0\.1 s"):
            connection.opened("orders", "reader", opening, retry=False)
        answer.set()
        assert late.closed.wait(SECONDS)
