"""The log of a service under faults: unavailable, restarted, killed, slow, full, or with forbidden requests."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from log_server import TOPIC, LogServer, Place

from broker_io import open_broker
from broker_io.batch import Batch, PlacedMessage
from broker_io.errors import (
    AppendUnknown,
    Closed,
    Damaged,
    Error,
    Fenced,
    InvalidAddress,
    PeerError,
    PositionTrimmed,
    ProtectedTopic,
    ServiceUnavailable,
    TopicNotFound,
)
from broker_io.memory import MemoryBroker
from broker_io.port import Ledger
from broker_io.position import LATEST
from broker_io.remote.broker import RemoteBroker
from broker_io.remote.reader import _Stream
from broker_io.testing.contract.base import (
    WAIT_SECONDS,
    drain,
    eventually,
    numbered,
    positions_of,
    put,
    read_all,
    read_count,
    read_on,
    values,
)


@pytest.fixture
def place() -> Iterator[Place]:
    there = Place()
    yield there
    there.kill()


@pytest.fixture
def remote(place: Place) -> Iterator[RemoteBroker]:
    with place.open() as broker:
        yield broker


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# --- no service ---


@pytest.mark.parametrize(
    "address",
    ["txnbuf:", "txnbuf://", "txnbuf://host", "txnbuf://host:", "txnbuf://:1", "txnbuf://host:0", "txnbuf://host:x",
     "txnbuf://host:65536", "txnbuf:host:1", "txnbuf://host:1/topic", "txnbuf://me@host:1", "txnbuf://::1:1"],
)  # fmt: skip
def test_invalid_address_is_quoted(address: str) -> None:
    with pytest.raises(InvalidAddress, match=address.replace("me@", "…@")):  # who a user is may be a secret
        open_broker(address)


def test_address_without_a_service_is_named() -> None:
    target = f"127.0.0.1:{unused_port()}"
    with pytest.raises(ServiceUnavailable, match=target):
        open_broker(f"txnbuf://{target}", max_unavailable=0.3)


def test_service_without_a_log_is_distinguished_from_an_unavailable_one() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with pytest.raises(PeerError, match="is not a service of this release") as raised:
        open_broker(f"txnbuf://127.0.0.1:{port}")
    assert not isinstance(raised.value, ServiceUnavailable)
    server.stop(None).wait()


def test_without_grpcio_the_package_to_install_is_named() -> None:
    script = (
        "import sys; sys.modules['grpc'] = None\n"
        "from broker_io import open_broker, serve_broker\n"
        "from broker_io.errors import MissingDependency\n"
        "for act in (lambda: open_broker('txnbuf://127.0.0.1:1'), lambda: serve_broker(None)):\n"
        "    try:\n        act()\n    except MissingDependency as error:\n        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.count("pip install grpcio") == 2


# --- restarts ---


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_reader_continues_after_a_restart_of_the_service(place: Place, remote: RemoteBroker, end: str) -> None:
    with place.log.writer(TOPIC) as writer, remote.reader(TOPIC) as reader:
        put(writer, numbered(10))
        first = reader.read(limit=4)
        assert first is not None
        found = [*first]
        for start in (10, 20, 30):
            getattr(place, end)()
            put(writer, numbered(10, start))
            place.start()
            if start == 30:
                break
            batch = reader.read(limit=3)  # the rest of a batch is requested again
            assert batch is not None
            found += batch
        found += read_on(reader)
    assert [placed.message for placed in found] == numbered(40)


def test_what_a_service_says_of_its_log_is_checked() -> None:
    """The services have the same topics, and do not check which log their clients expect."""
    log = MemoryBroker()
    log.create_topic(TOPIC)
    first = LogServer(log.connect(), identity="one")
    with open_broker(first.address, max_unavailable=0.3) as remote, remote.reader(TOPIC) as reader:
        assert reader.read() is None
        first.stop()
        with LogServer(log.connect(), port=first.port, identity="two"):
            for call in (remote.topics, lambda: remote.reader(TOPIC), lambda: remote.writer(TOPIC), reader.read):
                for _ in range(2):  # a connection that was refused is not used later
                    with pytest.raises(ServiceUnavailable, match="serves another log than this client's"):
                        call()
        with LogServer(log.connect(), port=first.port, identity="one"):
            assert remote.topics() == [TOPIC]
        with LogServer(log.connect(), port=first.port):  # an identity is optional
            assert remote.topics() == [TOPIC]


def test_reader_at_the_end_misses_no_message_of_a_restart(place: Place, remote: RemoteBroker) -> None:
    with place.log.writer(TOPIC) as writer:
        put(writer, numbered(5))
        with remote.reader(TOPIC, LATEST) as reader:
            place.kill()
            put(writer, numbered(5, 5))
            place.start()
            assert [placed.message for placed in read_count(reader, 5)] == numbered(5, 5)


def test_reader_of_an_empty_topic_raises_for_messages_trimmed_meanwhile(place: Place, remote: RemoteBroker) -> None:
    with place.log.writer(TOPIC) as writer, remote.reader(TOPIC, LATEST) as reader:
        place.kill()
        put(writer, numbered(5))
        place.log.roll(TOPIC)
        put(writer, numbered(5, 5))
        place.log.trim(TOPIC, place.log.ledgers(TOPIC)[-1].ledger)
        place.start()
        with pytest.raises(PositionTrimmed):
            reader.read(timeout=WAIT_SECONDS)


def test_waiting_reader_survives_a_restart(place: Place, remote: RemoteBroker) -> None:
    with remote.reader(TOPIC) as reader, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.read, timeout=WAIT_SECONDS)
        eventually(lambda: bool(place.server.service._readings))
        place.restart()
        with place.log.writer(TOPIC) as writer:
            positions = put(writer, numbered(2))
        batch = waiting.result(WAIT_SECONDS)
        assert batch is not None
        assert positions_of(batch) == positions[: len(batch)]


def test_reader_does_not_continue_in_another_incarnation(place: Place, remote: RemoteBroker) -> None:
    with place.log.writer(TOPIC) as writer:
        put(writer, numbered(3))
    with remote.reader(TOPIC) as reader:
        assert reader.read(limit=1) is not None
        place.kill()
        place.log.delete_topic(TOPIC)
        place.log.create_topic(TOPIC)
        with place.log.writer(TOPIC) as writer:
            put(writer, numbered(3, 100))
        place.start()
        found: list[PlacedMessage] = []
        for _ in range(2):
            with pytest.raises(TopicNotFound, match="re-created"):
                drain(reader, found)
        assert [placed.message for placed in found] == numbered(3)[1 : 1 + len(found)]  # it may have been prefetched


def test_calls_wait_for_an_unavailable_service_for_a_limited_time(place: Place) -> None:
    with place.open(max_unavailable=0.2) as remote, remote.reader(TOPIC) as reader:
        place.kill()
        for act in (remote.topics, reader.read, lambda: remote.writer(TOPIC), lambda: remote.reader(TOPIC)):
            with pytest.raises(ServiceUnavailable, match=str(place.port)):
                act()
        assert ServiceUnavailable.retryable
        place.start()
        eventually(lambda: _answers(remote.topics))
        with place.log.writer(TOPIC) as writer:
            put(writer, numbered(2))
        assert len(read_count(reader, 2)) == 2


def _answers(act: Callable[[], object]) -> bool:
    try:
        act()
    except ServiceUnavailable:
        return False
    return True


def test_queries_are_answered_by_the_restarted_service(place: Place, remote: RemoteBroker) -> None:
    for _ in range(2):
        place.restart()
        assert remote.topics() == [TOPIC]
        assert remote.last_position(TOPIC) is None


@pytest.mark.parametrize("landing", [True, False])
def test_pending_append_is_unknown_and_not_repeated(place: Place, remote: RemoteBroker, landing: bool) -> None:
    writer = remote.writer(TOPIC)
    put(writer, numbered(1))
    place.broker.faults.hold(written=landing)
    under_way = [writer.append(Batch.of(numbered(1, number))) for number in (1, 2)]
    eventually(lambda: len(place.broker.faults.held) == 2)
    place.restart()
    for future in under_way:
        error = future.exception(WAIT_SECONDS)
        assert isinstance(error, AppendUnknown)
        assert error.retryable
        assert TOPIC in str(error)
    later = writer.append(Batch.of(numbered(1, 3))).exception(WAIT_SECONDS)
    assert isinstance(later, ServiceUnavailable)
    writer.close()
    assert isinstance(writer.append(Batch.of(numbered(1, 3))).exception(WAIT_SECONDS), ServiceUnavailable)
    with remote.writer(TOPIC) as another:
        put(another, numbered(1, 9))
    assert [placed.message for placed in read_all(place.log, TOPIC)] == [
        *numbered(3 if landing else 1),
        *numbered(1, 9),
    ]


def test_stop_ends_waiting_streams_with_an_error(place: Place) -> None:
    with place.open(max_unavailable=0.0) as remote:
        reader, writer = remote.reader(TOPIC), remote.writer(TOPIC)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(reader.read, timeout=WAIT_SECONDS)
            place.stop()
            assert isinstance(waiting.exception(WAIT_SECONDS), ServiceUnavailable)
        assert isinstance(writer.append(Batch.of(numbered(1))).exception(WAIT_SECONDS), PeerError)


# --- clients that end ---


def test_readers_and_writers_of_a_vanished_client_are_closed(place: Place, remote: RemoteBroker) -> None:
    gone = place.open()
    writer = gone.writer(TOPIC, exclusive=True)
    put(writer, numbered(1))
    reader = gone.reader(TOPIC, LATEST)
    with pytest.raises(Fenced):
        remote.writer(TOPIC)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.read, timeout=WAIT_SECONDS)
        eventually(lambda: bool(place.server.service._readings))
        gone._connection.close()
        error = waiting.exception(WAIT_SECONDS)
        assert isinstance(error, Closed), repr(error)
    eventually(lambda: not place.server.service._readings)
    eventually(lambda: not place.server.service._streams)

    def free() -> bool:
        try:
            remote.writer(TOPIC).close()
        except Fenced:
            return False
        return True

    eventually(free)


def test_cancelled_future_affects_no_other(place: Place, remote: RemoteBroker) -> None:
    with remote.writer(TOPIC) as writer:
        place.broker.faults.hold()
        first, second = writer.append(Batch.of(numbered(1))), writer.append(Batch.of(numbered(1, 1)))
        first.cancel()
        eventually(lambda: len(place.broker.faults.held) == 2)
        place.broker.faults.release()
        assert len(second.result(WAIT_SECONDS)) == 1
        assert len(put(writer, numbered(1, 2))) == 1


# --- queries ---


class Emptied(MemoryBroker):
    """A broker with ledgers of every kind."""

    def ledgers(self, topic: str) -> list[Ledger]:
        kinds = itertools.product((False, True), repeat=3)
        return [Ledger(number, 0, 7, *kind) for number, kind in enumerate(kinds)]


def test_ledgers_are_sent_unchanged() -> None:
    log = Emptied()
    with LogServer(log) as server, open_broker(server.address) as remote:
        assert remote.ledgers(TOPIC) == log.ledgers(TOPIC)


# --- errors ---


class Failing(MemoryBroker):
    """A broker that fails every query with one error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def ledgers(self, topic: str) -> Any:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [Damaged("a/b", 7, "torn"), TopicNotFound("no ü"), PositionTrimmed("gone"), Damaged("p" * 9000, 7, "ü" * 9000)],
)
def test_error_of_the_log_is_the_same_error_for_the_client(error: Error) -> None:
    with LogServer(Failing(error)) as server, open_broker(server.address) as remote:
        with pytest.raises(type(error)) as raised:
            remote.ledgers(TOPIC)
        assert str(raised.value)[:1000] == str(error)[:1000]
        assert {*vars(raised.value)} == {*vars(error)}


def test_unexpected_exception_of_the_service_is_reported() -> None:
    with LogServer(Failing(KeyError("what"))) as server, open_broker(server.address) as remote:
        with pytest.raises(Error, match="KeyError"):
            remote.ledgers(TOPIC)
        assert remote.topics() == []


def test_an_append_that_is_refused_does_not_end_its_writer(place: Place, remote: RemoteBroker) -> None:
    with remote.writer(TOPIC) as writer:
        place.broker.faults.fail_append(ServiceUnavailable("the disk is nearly full"))
        with pytest.raises(ServiceUnavailable, match="nearly full"):
            put(writer, numbered(1))
        put(writer, numbered(1, 1))
    assert values(read_all(place.log, TOPIC)) == [b"value-1"]


def test_failed_read_can_be_retried(place: Place, remote: RemoteBroker) -> None:
    with place.log.writer(TOPIC) as writer:
        put(writer, numbered(3))
    with remote.reader(TOPIC) as reader:
        place.broker.faults.fail_read(Damaged("x", 1, "torn"))
        with pytest.raises(Damaged, match="torn"):
            reader.read()
        assert len(read_on(reader)) == 3


def test_read_that_an_exception_interrupts_loses_no_message(
    place: Place, remote: RemoteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(stream: _Stream, limit: int, wait: float) -> None:
        ask(stream, limit, wait)
        raise KeyboardInterrupt

    ask = _Stream.ask
    with place.log.writer(TOPIC) as writer:
        put(writer, numbered(3))
    with remote.reader(TOPIC) as reader:
        monkeypatch.setattr(_Stream, "ask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reader.read(timeout=WAIT_SECONDS)
        monkeypatch.setattr(_Stream, "ask", ask)
        assert len(read_on(reader)) == 3


def test_protected_topics_are_read_but_not_changed() -> None:
    seen: list[str] = []

    def guard(topic: str, change: str) -> None:
        if change == "read":
            return
        seen.append(change)
        raise ProtectedTopic(f"{topic} is ours")

    place = Place(guard=guard)
    with place.log.writer(TOPIC) as writer:
        put(writer, numbered(2))
    with place.open() as remote:
        changes: list[Callable[[], object]] = [
            lambda: remote.create_topic(TOPIC),
            lambda: remote.delete_topic(TOPIC),
            lambda: remote.writer(TOPIC),
            lambda: remote.writer(TOPIC, exclusive=True),
            lambda: remote.roll(TOPIC),
            lambda: remote.trim(TOPIC, 5),
            lambda: remote.compact(TOPIC),
        ]
        for change in changes:
            with pytest.raises(ProtectedTopic, match="orders is ours"):
                change()
        assert seen == ["create", "delete", "write", "own", "roll", "trim", "compact"]
        assert values(read_all(remote, TOPIC)) == [b"value-0", b"value-1"]
    place.kill()
