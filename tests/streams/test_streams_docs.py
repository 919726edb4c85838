"""The tables of the documentation are those of the code, and the tables of states are complete."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from txnbuffer.errors import StreamViolation
from txnbuffer.streams.client import ERRORS, end_error
from txnbuffer.streams.messages import EndReason
from txnbuffer.streams.states import CONSUMER_STEPS, PRODUCER_STEPS, Consuming, Event, Producing, next_state

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "stream-protocol.md").read_text()


def table(steps: Mapping[tuple[Any, Event], Any]) -> str:
    rows = [f"| {before.name} | {event.value} | {after.name} |" for (before, event), after in steps.items()]
    return "\n".join(["| state | event | next state |", "|---|---|---|", *rows])


def test_tables_of_states() -> None:
    assert table(PRODUCER_STEPS) in DOCS
    assert table(CONSUMER_STEPS) in DOCS


def test_table_of_end_reasons() -> None:
    for reason in EndReason:
        error = end_error("t", reason)
        name, again = ("none", "no") if error is None else (type(error).__name__, "yes" if error.retryable else "no")
        assert f"| {reason.name} | {name} | {again} |" in DOCS
    assert set(ERRORS) == set(EndReason) - {EndReason.OK}


def test_every_state_can_be_reached_and_left_except_the_last() -> None:
    for steps, first, dead in (
        (PRODUCER_STEPS, Producing.ASKED, Producing.DEAD),
        (CONSUMER_STEPS, Consuming.WAITING, Consuming.DEAD),
    ):
        assert {before for before, _ in steps} == set(type(first)) - {dead}
        assert {*steps.values(), first} == set(type(first))


def test_events_without_a_transition_are_rejected() -> None:
    for state, event in itertools.product(Producing, Event):
        if (state, event) not in PRODUCER_STEPS:
            with pytest.raises(StreamViolation, match=event.value):
                next_state(state, event)
    for before, event in itertools.product(Consuming, Event):
        if (before, event) not in CONSUMER_STEPS:
            with pytest.raises(StreamViolation, match=event.value):
                next_state(before, event)
