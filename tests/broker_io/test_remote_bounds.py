"""Limits of a log service: many streams, many pending appends, large answers, invalid bytes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from log_server import TOPIC, LogServer, Place

from broker_io.batch import Batch, Blobs, Labels, Message
from broker_io.errors import AppendUnknown, Fenced, InvalidMessage, MalformedMessage, TooManyStreams
from broker_io.memory import MemoryBroker
from broker_io.position import EARLIEST
from broker_io.remote import messages
from broker_io.remote import service as log_service
from broker_io.remote import service as service_module
from broker_io.remote import writer as writer_module
from broker_io.remote.broker import RemoteBroker
from broker_io.remote.messages import Ask, OpenReader
from broker_io.remote.service import ServedReader
from broker_io.rpc.log_pb2 import Error
from broker_io.testing.contract.base import (
    WAIT_SECONDS,
    eventually,
    numbered,
    positions_of,
    put,
    read_all,
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


def test_number_of_streams_is_limited(place: Place, remote: RemoteBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_READERS", 2)
    monkeypatch.setattr(service_module, "MAX_WRITERS", 1)
    with remote.reader(TOPIC) as reader, remote.reader(TOPIC), remote.writer(TOPIC) as writer:
        for act in (lambda: remote.reader(TOPIC), lambda: remote.writer(TOPIC)):
            with pytest.raises(TooManyStreams, match="as many as the service has"):
                act()
        put(writer, numbered(1))
        assert reader.read() is not None

    def free() -> bool:
        try:
            remote.reader(TOPIC).close()
        except TooManyStreams:
            return False
        return True

    eventually(free)


def test_many_waiting_readers_block_no_other_call(place: Place, remote: RemoteBroker) -> None:
    readers = [remote.reader(TOPIC) for _ in range(40)]
    with ThreadPoolExecutor(len(readers)) as pool:
        waiting = [pool.submit(reader.read, timeout=WAIT_SECONDS) for reader in readers]
        eventually(lambda: len(place.server.service._readings) == len(readers))
        with remote.writer(TOPIC) as writer:
            positions = put(writer, numbered(3))
        for future in waiting:
            batch = future.result(WAIT_SECONDS)
            assert batch is not None
            assert positions_of(batch) == positions


def test_pending_appends_of_a_service_are_limited(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_service, "STREAM_BYTES", 20_000)
    monkeypatch.setattr(writer_module, "MAX_PENDING_BYTES", 100_000)
    monkeypatch.setattr(writer_module, "FRAME_BYTES", 1)
    message, sent = Message(b"k", b"v" * 900), []
    with place.open() as remote, remote.writer(TOPIC) as writer, ThreadPoolExecutor(1) as pool:
        place.broker.faults.hold(written=False)

        def send() -> None:
            sent.extend(writer.append(Batch.of([message._replace(key=b"%d" % number)])) for number in range(300))

        sending = pool.submit(send)
        eventually(lambda: len(place.broker.faults.held) >= 15)
        threading.Event().wait(0.1)
        assert len(place.broker.faults.held) <= 21
        assert len(sent) < 120
        while not sending.done() or not all(future.done() for future in sent):
            place.broker.faults.release()
            threading.Event().wait(0.001)
        assert [future.result().first for future in sent] == positions_of(read_all(place.log, TOPIC))
    assert place.server.service._budget.used == 0


def test_client_that_vanishes_while_waiting_keeps_no_budget(
    place: Place, remote: RemoteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_service, "STREAM_BYTES", 1)
    monkeypatch.setattr(writer_module, "FRAME_BYTES", 1)
    place.broker.faults.hold(written=False)
    gone = place.open()
    writer = gone.writer(TOPIC, exclusive=True)
    futures = [writer.append(Batch.of(numbered(1, number))) for number in range(3)]
    eventually(lambda: len(place.broker.faults.held) == 1)  # the second append waits for the first one
    gone._connection.close()
    assert all(isinstance(future.exception(WAIT_SECONDS), AppendUnknown) for future in futures)

    def free() -> bool:
        try:
            remote.writer(TOPIC).close()
        except Fenced:
            return False
        return True

    eventually(free)
    place.broker.faults.release()
    eventually(lambda: place.server.service._budget.used == 0)
    assert [placed.message for placed in read_all(place.log, TOPIC)] in ([], numbered(1))


def test_append_over_the_limit_of_the_service_is_rejected() -> None:
    place = Place(max_message_bytes=10_000, max_append_bytes=30_000)
    with place.open() as remote, remote.writer(TOPIC) as writer:
        with pytest.raises(InvalidMessage, match="30000"):
            writer.append(Batch.of([Message(b"k", b"v" * 9_000)] * 4))
        with pytest.raises(InvalidMessage, match="Unicode"):
            writer.append(Batch(Blobs.none(1), Blobs.none(1), {"p": Labels.constant("\ud800", 1)}))
        put(writer, [Message(b"k", b"v" * 9_000)] * 3)
    assert len(read_all(place.log, TOPIC)) == 3
    place.kill()


def opening(start: Any = EARLIEST) -> OpenReader:
    return OpenReader(TOPIC, "", start, True, False)


@pytest.mark.parametrize("size", [10, 10_000, 400_000, 3_000_000])
def test_answer_is_limited_in_bytes_and_has_at_least_one_message(size: int) -> None:
    broker = MemoryBroker()
    broker.create_topic(TOPIC)
    with broker.writer(TOPIC) as writer:
        rows = [Message(b"%d" % number, b"v" * size, {"p": "x" * 20 + str(number)}) for number in range(9)] * 3
        put(writer, rows)
    reading, found = ServedReader(broker, opening()), []
    while (answer := reading.answer(Ask(1000, 0))).batch is not None:
        data = messages.encode_answer(answer)
        assert len(answer.batch) == 1 or len(data) <= log_service.ANSWER_BYTES + 100_000
        assert answer.more == (len(found) + len(answer.batch) < len(rows))
        found += [placed.message for placed in answer.batch]
    assert found == rows
    assert answer.error is None


def test_an_answer_has_only_the_labels_of_its_messages() -> None:
    broker = MemoryBroker()
    broker.create_topic(TOPIC)
    texts = [None if number % 3 == 0 else f"0:{number}" for number in range(5000)]
    with broker.writer(TOPIC) as writer:
        writer.append(Batch(Blobs.none(5000), Blobs.of([b"v"] * 5000), {"tb.txn": Labels.of(texts)})).result()
    reading, found = ServedReader(broker, opening()), []
    while (batch := reading.answer(Ask(10, 0)).batch) is not None:
        column = batch.messages.properties["tb.txn"]
        assert isinstance(column, Labels)
        assert len(column.values) <= 10
        found += column.to_list()
    assert found == texts


def test_large_topic_is_read_in_order_in_many_answers(place: Place, remote: RemoteBroker) -> None:
    rows = [Message(b"%d" % number, bytes(5_000)) for number in range(1_500)]
    with remote.writer(TOPIC) as writer:
        for start in range(0, 1_500, 500):
            put(writer, rows[start : start + 500])
    assert [placed.message for placed in read_all(remote, TOPIC)] == rows


# --- invalid bytes ---


def stream_of(server: LogServer, method: str, *frames: bytes) -> list[bytes]:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        return [*channel.stream_stream(f"/{messages.SERVICE}/{method}")(iter(frames), timeout=WAIT_SECONDS)]


@pytest.mark.parametrize("method", ["Append", "Read", "Hello", "Ledgers"])
@pytest.mark.parametrize("data", [b"\xff" * 40, b"GET / HTTP/1.1\r\n\r\n"])
def test_invalid_bytes_are_rejected_without_other_effects(
    place: Place, remote: RemoteBroker, method: str, data: bytes
) -> None:
    prelude = {
        "Append": [messages.encode_open_writer(TOPIC, False)],
        "Read": [messages.encode_open_reader(opening())],
    }
    attempts = [[data], *([[*prelude[method], data]] if method in prelude else [])]
    for frames in attempts:
        with pytest.raises(grpc.RpcError) as failed:
            if method in prelude:
                stream_of(place.server, method, *frames)
            else:
                with grpc.insecure_channel(f"127.0.0.1:{place.port}") as channel:
                    channel.unary_unary(f"/{messages.SERVICE}/{method}")(data, timeout=WAIT_SECONDS)
        call: Any = failed.value
        assert call.code() == grpc.StatusCode.INVALID_ARGUMENT
        trailer = dict(call.trailing_metadata())["txnbuffer-error-bin"]
        assert isinstance(messages.decode_error(messages.parse(Error, trailer)), MalformedMessage)
    with remote.writer(TOPIC) as writer:
        put(writer, numbered(1))
    assert len(read_all(remote, TOPIC)) == 1


def test_silent_client_is_disconnected(place: Place) -> None:
    assert stream_of(place.server, "Append") == []
    assert stream_of(place.server, "Read") == []


def test_appends_before_invalid_bytes_stay(place: Place) -> None:
    good = messages.encode_append(Batch.of(numbered(2)))
    with pytest.raises(grpc.RpcError):
        stream_of(
            place.server,
            "Append",
            messages.encode_open_writer(TOPIC, False),
            messages.encode_appends([good, good]),
            messages.encode_appends([good, good + b"noise"]),
        )
    assert [placed.message for placed in read_all(place.log, TOPIC)] == numbered(2) * 2


def test_grpc_does_not_touch_forked_children() -> None:
    code = "import broker_io.remote.connection, os; print(os.environ['GRPC_ENABLE_FORK_SUPPORT'])"
    environment = {key: value for key, value in os.environ.items() if key != "GRPC_ENABLE_FORK_SUPPORT"}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout == "0\n"


@pytest.mark.parametrize(("chosen", "verbosity"), [({}, "NONE"), ({"GRPC_VERBOSITY": "INFO"}, "INFO")])
def test_grpc_writes_nothing_to_stderr_unless_the_environment_asks_for_it(
    chosen: dict[str, str], verbosity: str
) -> None:
    code = """
import os
from broker_io.rpc.channel import Endpoint
Endpoint("127.0.0.1:1").channel().close()
print(os.environ["GRPC_VERBOSITY"])
"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GRPC_")}
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, env=environment | chosen, capture_output=True, text=True, check=True)
    assert output.stdout == f"{verbosity}\n"
