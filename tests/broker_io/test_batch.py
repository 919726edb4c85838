"""Columns have the content of their rows, also after slicing and concatenation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_io.batch import Batch, Blobs, Labels, Message, Numbers, PlacedBatch, as_numbers, property_column
from broker_io.errors import InvalidMessage
from broker_io.position import Position, Positions

TEXT = st.one_of(
    st.sampled_from(
        ["", "0", "-0", "007", "1", "2", "-5", "1e3", " 1", "٣", "9223372036854775807", "99999999999999999999"]
    ),
    st.integers(-(2**70), 2**70).map(str),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
)
STRING = st.none() | st.binary(max_size=6)
MESSAGE = st.builds(
    Message,
    STRING,
    STRING,
    st.dictionaries(st.sampled_from(["a", "b", "ключ"]), TEXT, max_size=3),
    st.sampled_from([0, 1, -1, 1_700_000_000_000, 2**62]),
)
MESSAGES = st.lists(MESSAGE, max_size=12)


@given(MESSAGES)
def test_rows_round_trip(messages: list[Message]) -> None:
    batch = Batch.of(messages)
    assert len(batch) == len(messages)
    assert [*batch] == messages
    assert [batch[index] for index in range(len(batch))] == messages
    assert batch.times().tolist() == [message.event_time for message in messages]


@given(MESSAGES, st.data())
def test_take_chooses_as_lists_do(messages: list[Message], data: st.DataObject) -> None:
    batch = Batch.of(messages)
    mask = data.draw(st.lists(st.booleans(), min_size=len(messages), max_size=len(messages)))
    rows = [index for index, chosen in enumerate(mask) if chosen]
    cut = data.draw(st.slices(len(messages)))
    assert [*batch.take(np.array(mask, np.bool_))] == [messages[index] for index in rows]
    assert [*batch.take(np.array(rows, np.intp))] == [messages[index] for index in rows]
    assert [*batch.take(cut)] == messages[cut]


@given(MESSAGES, st.data())
def test_take_of_a_take(messages: list[Message], data: st.DataObject) -> None:
    batch, expected = Batch.of(messages), messages
    for _ in range(2):
        start = data.draw(st.integers(0, len(expected)))
        stop = data.draw(st.integers(0, len(expected)))
        batch, expected = batch.take(slice(start, stop)), expected[start:stop]
    assert [*batch] == expected
    assert [*batch.values.packed()] == [message.value for message in expected]
    assert len(batch.values.packed().data) == sum(len(message.value or b"") for message in expected)


@given(st.lists(st.tuples(MESSAGES, st.booleans()), max_size=5))
def test_concat_keeps_the_order(parts: list[tuple[list[Message], bool]]) -> None:
    batches = [Batch.of(rows).take(slice(1, None)) if cut else Batch.of(rows) for rows, cut in parts]
    whole = Batch.concat(batches)
    expected = [message for rows, cut in parts for message in (rows[1:] if cut else rows)]
    assert [*whole] == expected
    assert len(whole) == len(expected)


@given(MESSAGES)
def test_sizes_count_bytes(messages: list[Message]) -> None:
    expected = [
        len(message.key or b"")
        + len(message.value or b"")
        + sum(len(name.encode()) + len(text.encode()) for name, text in message.properties.items())
        for message in messages
    ]
    assert Batch.of(messages).sizes().tolist() == expected
    assert Batch.of(messages).take(slice(1, None)).sizes().tolist() == expected[1:]


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, 9, 10, -9, -10, -(2**63)]), max_size=20))
def test_sizes_of_numbers_are_those_of_their_texts(numbers: list[int]) -> None:
    count = len(numbers)
    present = np.arange(count) % 3 != 1
    for mask in (None, present):
        column = Numbers(np.array(numbers, np.int64), mask)
        batch = Batch(Blobs.none(count), Blobs.none(count), {"ü": column})
        assert batch.sizes().tolist() == [0 if text is None else 2 + len(text) for text in column.to_list()]


@given(st.lists(STRING, max_size=20))
def test_a_column_of_strings(strings: list[bytes | None]) -> None:
    column = Blobs.of(strings)
    assert column.to_list() == [*column] == [column[index] for index in range(len(column))] == strings
    assert column.lengths().tolist() == [len(string or b"") for string in strings]
    assert column.absent_mask().tolist() == [string is None for string in strings]


def test_a_column_of_none() -> None:
    assert Blobs.none(3).to_list() == [None, None, None]
    assert Blobs.none(0).to_list() == []


@given(st.lists(st.none() | TEXT, max_size=20))
def test_property_has_the_same_texts_in_either_form(texts: list[str | None]) -> None:
    for column in (property_column(texts), Labels.of(texts)):
        assert len(column) == len(texts)
        assert column.to_list() == [column.get(index) for index in range(len(texts))] == texts
        assert column.take(slice(1, None)).to_list() == texts[1:]


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, unique=True))
def test_numbers_that_differ_are_kept_as_numbers(numbers: list[int]) -> None:
    column = property_column([str(number) for number in numbers if len(str(number)) < 19])
    assert isinstance(column, Numbers) or len(column) == 0


@given(
    st.lists(st.none() | st.sampled_from(["0", "1", "-7", "007", "+1", "-0", "", "x", "9" * 18, "9" * 19]), max_size=9)
)
def test_labels_are_numbers_if_each_is_written_as_one(texts: list[str | None]) -> None:
    numbers = as_numbers(Labels.of(texts))
    plain = {"0", "1", "-7", "9" * 18}
    assert (numbers is None) == (not set(texts) <= {None, *plain})
    assert numbers is None or numbers.to_list() == texts


def test_a_constant_property_is_one_text() -> None:
    column = property_column(["1"] * 5)
    assert isinstance(column, Labels)
    assert column.values == ("1",)
    assert Labels.constant("1", 5).to_list() == column.to_list()


@given(MESSAGES, st.data())
def test_placed_rows_stay_together(messages: list[Message], data: st.DataObject) -> None:
    positions = Positions.consecutive(7, 3, len(messages))
    times = np.arange(len(messages), dtype=np.int64) * 10
    placed = PlacedBatch(positions, times, Batch.of(messages))
    rows = [(Position(7, 3 + index), 10 * index, message) for index, message in enumerate(messages)]
    assert [tuple(row) for row in placed] == rows
    cut = data.draw(st.slices(len(messages)))
    assert [tuple(row) for row in placed.take(cut)] == rows[cut]
    assert len(placed) == len(messages)


@pytest.mark.parametrize("time", [2**63, -(2**63) - 1, 10**30])
def test_event_time_out_of_range_is_rejected(time: int) -> None:
    with pytest.raises(InvalidMessage, match=f"event time {time} is out of range"):
        Batch.of([Message(b"k", b"v"), Message(b"k", b"v", {}, time)])
    assert Batch.of([Message(event_time=2**63 - 1)])[0].event_time == 2**63 - 1
