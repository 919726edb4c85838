"""The life of a transaction: the one table of its states, from which everything else is derived."""

from __future__ import annotations

import enum
from typing import NamedTuple

from txnbuffer.model import Outcome


class State(enum.Enum):
    """Written as its number, but no number: 0 and 1 are outcomes too, and OPEN must not equal ABORT."""

    OPEN = 0
    COMMITTING = 1
    COMMITTED = 2
    ABORTING = 3
    ABORTED = 4

    __hash__ = object.__hash__  # members are looked up for every transaction, and that of Enum is slow

    def __index__(self) -> int:
        return int(self.value)


class Step(NamedTuple):
    """One way from a state to the next."""

    before: State
    event: str
    after: State


STEPS = (
    Step(State.OPEN, "the commit is accepted", State.COMMITTING),
    Step(State.COMMITTING, "its outcome is durable", State.COMMITTED),
    Step(State.OPEN, "the abort is accepted, or the time is up", State.ABORTING),
    Step(State.ABORTING, "its outcome is durable", State.ABORTED),
)

NEXT = {state: frozenset(step.after for step in STEPS if step.before is state) for state in State}
"""The states that may follow each state."""

TERMINAL = frozenset(state for state, following in NEXT.items() if not following)
"""The states in which the outcome is durable, and for ever the same."""

OUTCOME = {State.COMMITTED: Outcome.COMMIT, State.ABORTED: Outcome.ABORT}
"""What the state of an ended transaction says."""

ENDING = {Outcome.COMMIT: State.COMMITTING, Outcome.ABORT: State.ABORTING}
"""The state of a transaction that is about to end so."""

ENDED = {outcome: state for state, outcome in OUTCOME.items()}

INTENT = {State.COMMITTING: Outcome.COMMIT, State.ABORTING: Outcome.ABORT} | OUTCOME
"""The outcome that a state leads to; OPEN leads to either."""


def table() -> str:
    """The table as Markdown, as the documentation shows it."""
    rows = [f"| {before.name} | {event} | {after.name} |" for before, event, after in STEPS]
    return "\n".join(["| state | event | next state |", "|---|---|---|", *rows])
