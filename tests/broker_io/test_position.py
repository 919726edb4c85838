"""Positions are ordered, printed and searched like tuples."""

import bisect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_io.position import EARLIEST, LATEST, Position, Positions

SMALL = st.builds(Position, st.integers(0, 3), st.integers(0, 5), st.integers(-1, 2))
ANY = st.builds(Position, st.integers(-1, 2**63 - 1), st.integers(-1, 2**63 - 1), st.integers(-1, 2**31 - 1))


@given(ANY)
def test_printed_positions_are_parsed(position: Position) -> None:
    assert Position.parse(str(position)) == position


@pytest.mark.parametrize("text", ["", "1", "1:2:3:4", "a:b", "1:", ":", "1:2:", "1.5:2", "1-2"])
def test_invalid_position_is_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="is not a position") as caught:
        Position.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("position", "text"), [(Position(3, 5), "3:5"), (Position(3, 5, 0), "3:5:0"), (EARLIEST, "-1:-1")]
)
def test_the_printed_form(position: Position, text: str) -> None:
    assert str(position) == text


@given(ANY)
def test_every_position_is_between_the_extremes(position: Position) -> None:
    assert position >= EARLIEST
    assert position <= LATEST or position[:2] == LATEST[:2]


@given(st.lists(ANY, max_size=20))
def test_columns_round_trip(positions: list[Position]) -> None:
    columns = Positions.of(positions)
    assert len(columns) == len(positions)
    assert [*columns] == positions
    assert [columns[index] for index in range(len(columns))] == positions
    assert all(type(number) is int for position in columns for number in position)
    if positions:
        assert (columns.first, columns.last) == (positions[0], positions[-1])


@given(st.lists(SMALL, max_size=20, unique=True).map(sorted), SMALL)
def test_search_counts_as_bisect_does(positions: list[Position], position: Position) -> None:
    columns = Positions.of(positions)
    assert columns.search(position) == bisect.bisect_left(positions, position)
    assert columns.search(position, right=True) == bisect.bisect_right(positions, position)
    assert columns.search(EARLIEST) == 0
    assert columns.search(LATEST) == len(positions)


@given(st.lists(SMALL, max_size=20), st.data())
def test_take_chooses_as_lists_do(positions: list[Position], data: st.DataObject) -> None:
    columns = Positions.of(positions)
    mask = data.draw(st.lists(st.booleans(), min_size=len(positions), max_size=len(positions)))
    rows = [index for index, chosen in enumerate(mask) if chosen]
    cut = data.draw(st.slices(len(positions)))
    assert [*columns.take(np.array(mask, np.bool_))] == [positions[index] for index in rows]
    assert [*columns.take(np.array(rows, np.intp))] == [positions[index] for index in rows]
    assert [*columns.take(cut)] == positions[cut]


@given(st.integers(0, 2**62), st.integers(0, 2**62), st.integers(0, 50))
def test_a_run_is_one_ledger_in_order(ledger: int, first: int, count: int) -> None:
    assert [*Positions.consecutive(ledger, first, count)] == [
        Position(ledger, first + number) for number in range(count)
    ]
