"""A cluster that crashed may repeat messages of the decision log after newer ones, and not all of them.

The repeated messages were never acknowledged, but the next owner reads them, and they count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from broker_io.batch import Message
from broker_io.position import Position
from txnbuffer.coordinator.core import DecisionJournal
from txnbuffer.coordinator.decisions import (
    Consumers,
    DecisionRows,
    Group,
    Lease,
    LowWaterMark,
    Name,
    NamedCommit,
    PositionCommit,
    Row,
    encode,
)
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.transaction import TransactionState
from txnbuffer.model import Outcome, TxnId


def known(messages: list[Message]) -> tuple[Any, ...]:
    """The state that an owner works with."""
    history = History.read(messages)
    names = {name: (state.epoch, state.committed, state.deleted) for name, state in history.names.items()}
    groups = {name: (state.generation, state.positions) for name, state in history.consumers.items()}
    rest = (history.epoch, history.low_water_mark, history.next_group, history.next_mark, sorted(history.leases))
    return names, groups, sorted(history.groups), rest


def compacted(messages: list[Message]) -> list[Message]:
    newest = {message.key: at for at, message in enumerate(messages)}
    return [message for at, message in enumerate(messages) if newest[message.key] == at and message.value is not None]


def commit(number: int, name: int, end: int) -> Message:
    names = (NamedCommit("x", name),) if name else ()
    positions = (PositionCommit("g", "t", Position(1, end)),) if end else ()
    row = Row(number, Outcome.COMMIT, ("t",), (1,))
    return encode(Group(number, 1, 0, DecisionRows.of([row]), (), names, positions))


class Run:
    """The entries of one owner, as its journal writes them, none acknowledged."""

    def __init__(self) -> None:
        self.journal = DecisionJournal(1, 5, 10, 1_000_000, lambda *_: None)
        self.committed, self.places, self.least = 4, {"t": Position(1, 4)}, 0
        self.journal.put(Name("x", 2, 4, deleted=False))
        self.journal.put(Consumers("g", 3, tuple(self.places.items())))

    def do(self, what: str) -> None:
        self.least += 1
        match what:
            case "commit":
                self.committed += 1
                self._decide(names=[NamedCommit("x", self.committed)])
            case "move t" | "move u":
                self.places[what[-1]] = Position(1, 4 + self.least)
                self._decide(positions=[PositionCommit("g", what[-1], self.places[what[-1]])])
            case "repeat":
                self.journal.put(Name("x", 2, self.committed, deleted=False))
                self.journal.put(Consumers("g", 3, tuple(self.places.items())))
            case "lease":
                self.journal.put(Lease(100 * self.least, 100, "s", 0))
            case _:
                self._decide()

    def _decide(self, names: Sequence[NamedCommit] = (), positions: Sequence[PositionCommit] = ()) -> None:
        transaction = TransactionState(TxnId(0, self.least), None, None)
        self.journal.decide([(Row(self.least, Outcome.COMMIT, (), ()), transaction)], names, positions)

    def messages(self) -> list[Message]:
        append = self.journal.take()
        assert append is not None
        return list(append.messages)


OPERATIONS = st.sampled_from(["commit", "move t", "move u", "repeat", "lease", "decide"])


@given(st.lists(OPERATIONS, max_size=12), st.data())
def test_repeated_entries_change_nothing(operations: list[str], data: st.DataObject) -> None:
    run = Run()
    for what in operations:
        run.do(what)
    messages = run.messages()
    first = data.draw(st.integers(0, len(messages)))
    last = data.draw(st.integers(first, len(messages)))
    resent = messages + messages[first:last]
    assert known(resent) == known(messages)
    assert known(compacted(resent)) == known(messages)
    assert (History.read(messages).names["x"].committed, History.read(messages).consumers["g"].positions) == (
        run.committed,
        run.places,
    )


def test_an_older_entry_of_a_name_after_a_commit_does_not_undo_it() -> None:
    older = encode(Name("x", 2, 4, deleted=False, since=7))
    for messages in ([older, commit(7, 5, 0), older], [commit(7, 5, 0), older]):
        state = History.read(messages).names["x"]
        assert (state.epoch, state.committed, state.group) == (2, 5, 7)


def test_an_older_commit_after_the_deletion_of_a_name_does_not_restore_it() -> None:
    deleted = encode(Name("x", 3, 0, deleted=True, since=8))
    state = History.read([commit(7, 5, 0), deleted, commit(7, 5, 0)]).names["x"]
    assert (state.epoch, state.committed, state.deleted) == (3, 0, True)


def test_an_older_entry_of_a_consumer_group_does_not_take_it_back() -> None:
    older = encode(Consumers("g", 3, (("t", Position(1, 4)), ("u", Position(9, 9))), since=7))
    for messages in ([older, commit(7, 0, 5), older], [commit(7, 0, 5), older]):
        state = History.read(messages).consumers["g"]
        assert state.positions == {"t": Position(1, 5), "u": Position(9, 9)}
        assert (state.generation, state.group) == (3, 7)


def test_marks_and_epochs_do_not_go_back() -> None:
    from pyroaring import BitMap64

    marks = [encode(LowWaterMark(number, 10 * number, 0, BitMap64(), BitMap64())) for number in (1, 2, 3)]
    history = History.read([*marks, *marks[:2]])
    assert (history.low_water_mark, history.next_mark) == (30, 4)
