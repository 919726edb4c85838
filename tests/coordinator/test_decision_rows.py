"""Decisions as columns equal the same decisions as rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from txnbuffer.coordinator.decisions import DecisionRows, Row
from txnbuffer.coordinator.transaction import SettledIds
from txnbuffer.model import MAX_LEAST, Outcome

LOW_WATER_MARK = 20
TOPICS = st.lists(st.sampled_from("abcd"), max_size=3, unique=True).map(tuple)
IDS = st.integers(1, 40) | st.sampled_from([MAX_LEAST - 1, MAX_LEAST])


@st.composite
def decided(draw: st.DrawFn) -> list[Row]:
    rows = []
    for least in draw(st.lists(IDS, max_size=12, unique=True)):
        topics = draw(TOPICS)
        records = tuple(draw(st.lists(st.integers(0, 9), min_size=len(topics), max_size=len(topics))))
        rows.append(Row(least, draw(st.sampled_from(Outcome)), topics, records))
    return rows


@given(decided())
def test_columns_are_the_rows(rows: list[Row]) -> None:
    columns = DecisionRows.of(rows)
    assert list(columns) == rows
    assert len(columns) == len(rows)
    assert DecisionRows.of([*columns]) == columns


@given(decided(), st.sets(IDS))
def test_what_is_settled_is_split_off(rows: list[Row], settled: set[int]) -> None:
    progress = SettledIds(LOW_WATER_MARK, BitMap64(settled))
    aborted, committed, undone = DecisionRows.of(rows).split(progress)
    assert undone == [row for row in rows if row.topics and not progress.has_ended(row.least)]
    done = [row for row in rows if row not in undone]
    assert set(aborted) == {row.least for row in done if row.outcome is Outcome.ABORT}
    assert set(committed) == {row.least for row in done if row.outcome is Outcome.COMMIT}
