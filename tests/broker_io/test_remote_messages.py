"""Messages of the log service as bytes: golden ones, round trips, and rejection of invalid bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from golden_files import committed
from hypothesis import given
from hypothesis import strategies as st

from broker_io.batch import Batch, Blobs, Labels, Message, PlacedBatch
from broker_io.block import encode_block
from broker_io.errors import (
    Damaged,
    Error,
    Fenced,
    MalformedMessage,
    PositionTrimmed,
    UnsupportedFormat,
)
from broker_io.position import Position, Positions
from broker_io.remote import messages
from broker_io.remote.messages import Answer, Ask, OpenReader, ReaderOpened
from broker_io.rpc import encoding, log_pb2

MESSAGES = [Message(b"k", b"one", {"colour": "red"}, 5), Message(None, None), Message(b"", b"", {"n": "12"})]
PLACED = PlacedBatch(Positions.consecutive(7, 40, 3), np.full(3, 1_700_000_000_000, np.int64), Batch.of(MESSAGES))
SPARSE = PlacedBatch(
    Positions.of([Position(7, 40), Position(7, 41), Position(7, 90)]), np.array([5, 5, 9], np.int64), Batch.of(MESSAGES)
)
INDEXED = PlacedBatch(
    Positions.of([Position(7, 40, 0), Position(7, 40, 1), Position(7, 42)]),
    np.array([5, 5, 5], np.int64),
    SPARSE.messages,
)
DAMAGED = Damaged("topics/1/1-0.log", 4096, "checksum of the block does not fit")


def row(value: Any) -> Any:
    """A value that is comparable with `==`."""
    if isinstance(value, Batch | PlacedBatch | Positions):
        return [*value]
    if isinstance(value, Error):
        return type(value), str(value), vars(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: row(part) for name, part in value._asdict().items()}
    return [*map(row, value)] if isinstance(value, list | tuple) else value


GOLDEN: dict[str, tuple[Any, Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "request": (
        log_pb2.TopicRequest(topic="größe", number=2**62),
        encoding.serialize,
        lambda data: messages.parse(log_pb2.TopicRequest, data),
    ),
    "error": (
        DAMAGED,
        lambda error: encoding.serialize(encoding.encode_error(error)),
        lambda data: messages.decode_error(messages.parse(log_pb2.Error, data)),
    ),
    "open-writer": (
        log_pb2.OpenLogWriter(topic="orders", exclusive=True),
        lambda row: messages.encode_open_writer(row.topic, row.exclusive),
        messages.decode_open_writer,
    ),
    "appends": (
        [Batch.of(MESSAGES), Batch.of(MESSAGES[:1])],
        lambda batches: messages.encode_appends([*map(messages.encode_append, batches)]),
        messages.decode_appends,
    ),
    "appended": (
        [Positions.consecutive(3, 10, 500), Fenced("another one"), Positions.of([Position(3, 510), Position(4, 0)])],
        messages.encode_appended,
        lambda data: messages.decode_appended(data, 502),
    ),
    "appended-none": ([], messages.encode_appended, lambda data: messages.decode_appended(data, 0)),
    "open-reader": (
        OpenReader("orders", "9f", Position(3, 4, 5), False, True),
        messages.encode_open_reader,
        messages.decode_open_reader,
    ),
    "opened": (ReaderOpened("9f", Position(3, 4)), messages.encode_opened, messages.decode_opened),
    "ask": (Ask(65_536, 10_000), messages.encode_ask, messages.decode_ask),
    "answer": (Answer(PLACED, more=True), messages.encode_answer, messages.decode_answer),
    "answer-sparse": (Answer(SPARSE), messages.encode_answer, messages.decode_answer),
    "answer-indexed": (Answer(INDEXED), messages.encode_answer, messages.decode_answer),
    "answer-none": (Answer(), messages.encode_answer, messages.decode_answer),
    "answer-error": (Answer(error=PositionTrimmed("gone")), messages.encode_answer, messages.decode_answer),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str) -> None:
    value, encode, decode = GOLDEN[name]
    found = decode(committed(f"log_service/{name}.bin", encode(value)))
    assert row(found) == row(value)


@pytest.mark.parametrize("name", GOLDEN)
def test_cut_off_bytes_give_no_other_value_of_a_field(name: str) -> None:
    value, encode, decode = GOLDEN[name]
    data = encode(value)
    for size in range(len(data)):
        with contextlib.suppress(MalformedMessage):  # between two fields, the rest is a message too
            found = row(decode(data[:size]))
            assert not isinstance(found, list) or found == row(value)[: len(found)]
    with pytest.raises(MalformedMessage):
        decode(data + b"\0")


def test_unknown_field_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="a ReadRequest has a field that this release does not know"):
        messages.decode_ask(messages.encode_ask(Ask(1, 2)) + b"\xf8\x01\x01")


@pytest.mark.parametrize("decode", [messages.decode_open_writer, messages.decode_appends, messages.decode_opened])
def test_messages_in_the_wrong_order_are_refused(decode: Callable[[bytes], Any]) -> None:
    for data in (b"", messages.encode_ask(Ask(1, 2))):
        with pytest.raises(MalformedMessage):
            decode(data)


@given(st.sampled_from([*GOLDEN]), st.data())
def test_damaged_bytes_are_decoded_or_rejected_without_other_errors(name: str, data: st.DataObject) -> None:
    value, encode, decode = GOLDEN[name]
    good = bytearray(encode(value))
    for _ in range(data.draw(st.integers(1, 3))):
        if good:
            good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    for attempt in (bytes(good), data.draw(st.binary(max_size=80))):
        with contextlib.suppress(MalformedMessage, UnsupportedFormat):
            decode(attempt)


NUMBERS = st.integers(0, 2**40)
POSITIONS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(-1, 2)), max_size=12).map(
    lambda rows: Positions.of([Position(*row) for row in sorted({*rows})])
)
ERRORS = st.builds(PositionTrimmed, st.text(max_size=5))


@given(st.lists(POSITIONS | ERRORS, max_size=6))
def test_outcomes_round_trip(outcomes: list[messages.Outcome]) -> None:
    assert row(messages.decode_appended(messages.encode_appended(outcomes), 10_000)) == row(outcomes)


def test_long_range_of_positions_takes_a_few_bytes() -> None:
    assert len(messages.encode_appended([Positions.consecutive(2, 1_000_000, 100_000)])) < 40


@st.composite
def placed_batches(draw: st.DrawFn) -> PlacedBatch:
    places = sorted(draw(st.sets(st.tuples(st.integers(0, 30), st.integers(-1, 2)), min_size=1, max_size=12)))
    base, ledger = draw(NUMBERS), draw(NUMBERS)
    rows = [draw(st.sampled_from(MESSAGES)) for _ in places]
    times = [draw(st.sampled_from([5, 5, 5, 6])) for _ in places]
    positions = Positions.of([Position(ledger, base + entry, index) for entry, index in places])
    return PlacedBatch(positions, np.array(times, np.int64), Batch.of(rows))


@given(placed_batches())
def test_answers_round_trip(batch: PlacedBatch) -> None:
    found = messages.decode_answer(messages.encode_answer(Answer(batch)))
    assert found.batch is not None
    assert [*found.batch] == [*batch]


def test_block_of_a_client_is_not_decompressed_and_its_labels_are_checked() -> None:
    batch = Batch.of([Message(b"k", b"v" * 1000)] * 5)
    packed = messages.encode_appends(
        [b"".join(encode_block(batch, first_entry=0, publish_time=0, compress=True).chunks)]
    )
    with pytest.raises(MalformedMessage, match="compressed"):
        messages.decode_appends(packed)
    for codes in ([0, 2], [-2, 0]):
        labels = {"p": Labels(np.array(codes, np.int32), ("a", "b"))}
        lying = messages.encode_appends([messages.encode_append(Batch(Blobs.none(2), Blobs.none(2), labels))])
        with pytest.raises(MalformedMessage, match="'p'"):
            messages.decode_appends(lying)


def test_errors_keep_class_message_and_details() -> None:
    found = encoding.decode_error(encoding.encode_error(DAMAGED))
    assert isinstance(found, Damaged)
    assert (str(found), found.path, found.offset, found.what) == (
        str(DAMAGED), DAMAGED.path, DAMAGED.offset, DAMAGED.what,
    )  # fmt: skip
    assert found.exit_code == 4


def test_unknown_error_is_of_its_fault_and_overrides_no_class_attribute() -> None:
    message = log_pb2.Error(
        name="FromTheFuture",
        fault="peer",
        message="gone",
        details=[{"name": "retryable", "number": 1}, {"name": "shard", "number": 3}],
    )
    found = encoding.decode_error(message)
    assert type(found).__name__ == "PeerError"
    assert (found.retryable, vars(found)) == (False, {"shard": 3})
    with pytest.raises(ValueError, match="fault"):
        encoding.decode_error(log_pb2.Error(name="FromTheFuture", fault="nobody"))


def test_long_message_is_cut_to_fit_into_a_trailer() -> None:
    message = encoding.encode_error(Damaged("p" * 50_000, 1, "w" * 50_000))
    assert len(str(encoding.decode_error(message))) == encoding.LONGEST_TEXT
    assert len(encoding.serialize(encoding.encode_error(Damaged("ü" * 50_000, 1, "w" * 50_000)))) < 16_000
