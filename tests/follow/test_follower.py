"""The log follower: what is decided comes in order and once, whatever is held, shed and read again; its end."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import example, given
from hypothesis import strategies as st
from writing import TopicWriter

from broker_io.batch import PlacedBatch
from broker_io.memory import MemoryBroker
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.state import Effect
from txnbuffer.buffer.visibility import Sequencer
from txnbuffer.follow import DecidedFollower, LogFollower, RecordFollower, SequencedFollower
from txnbuffer.model import EARLIEST, Position

T = "orders"
steps = st.lists(
    st.tuples(st.sampled_from(["begin", "end", "plain", "read", "take", "take one", "replay"]), st.integers(0, 3)),
    max_size=60,
)


F = TypeVar("F", bound=DecidedFollower)


def limited(log: F, held_limit: int) -> F:
    log.held_limit = held_limit
    return log


def sequenced(broker: MemoryBroker, held_limit: int) -> SequencedFollower:
    buffer, numbers = TransactionBuffer(), Sequencer()
    log = SequencedFollower(broker, T, buffer, EARLIEST, decided_after=EARLIEST, sequencer=numbers)
    return limited(log, held_limit)


AHEAD = ["plain", "read", "plain", "take one", "take one", "read", "read", "take"]
HELD_AHEAD = ["plain", "plain", "plain", "read", "plain", "take", "read", "take"]
"""The reader that reads again is ahead of what is applied."""


@given(steps, st.sampled_from([0, 300, 2**20]), st.integers(1, 6))
@example([(step, 0) for step in AHEAD], 0, 3)
@example([(step, 0) for step in HELD_AHEAD], 300, 50)
def test_decided_messages_come_in_order_and_once(
    history: list[tuple[str, int]], held_limit: int, ledger_entries: int
) -> None:
    broker = MemoryBroker(ledger_entries=ledger_entries)
    writer = TopicWriter(broker, T)
    positions: list[Position] = []
    taken: list[Position] = []
    running: dict[int, int] = {}
    begun = 0
    with limited(DecidedFollower(broker, T, TransactionBuffer(), EARLIEST, decided_after=EARLIEST), held_limit) as log:
        for step, number in history:
            if step == "begin" and number not in running:
                running[number] = begun = begun + 1
                positions += writer.records(begun, "r")
            elif step == "end" and number in running:
                positions.append(writer.commit(running.pop(number)))
            elif step == "plain":
                positions += writer.plain("p", "q")
            elif step == "read":
                log.read()
            elif step == "replay":
                log.replay()
            elif step == "take one" and (found := log.take(1)) is not None:
                taken += found.positions
            elif step == "take":
                while (found := log.take()) is not None:
                    taken += found.positions
            limit = log.buffer.max_read_position
            assert taken == [one for one in positions if one <= (taken or [EARLIEST])[-1]]
            assert not taken or (limit is not None and taken[-1] <= limit)
        for least in running.values():
            positions.append(writer.abort(least))
        log.replay()
        while (found := log.take(2)) is not None:
            taken += found.positions
        assert taken == positions
        assert not log.lagging


class OneByOne(LogFollower):
    """Applies each message by itself; `seen` has the position up to which all were visible after each."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker, T, TransactionBuffer(), EARLIEST)
        self.seen: list[Position | None] = []

    def apply(self, placed: PlacedBatch) -> list[Effect]:
        effects: list[Effect] = []
        for row in range(len(placed)):
            effects += super().apply(placed.take(slice(row, row + 1)))
            self.seen.append(self.buffer.max_read_position)
        return effects


def test_nothing_is_visible_before_the_end_of_a_replay() -> None:
    broker = MemoryBroker()
    writer = TopicWriter(broker, T)
    writer.plain("p", "q")
    writer.records(1, "r")
    end = writer.commit(1)
    with OneByOne(broker) as log:
        log.replay()
        assert log.seen == [None, None, None, end]


def test_messages_that_are_read_again_get_the_same_numbers() -> None:
    broker = MemoryBroker(ledger_entries=3)
    writer = TopicWriter(broker, T)
    for number in range(1, 30):
        writer.records(number, "a", "b")
        writer.plain("c")
        (writer.commit if number % 2 else writer.abort)(number)
    with sequenced(broker, 2**20) as one, sequenced(broker, 0) as other:
        for log in (one, other):
            log.replay()
            log.sequence_all()
        assert one.numbered.next_seqno == other.numbered.next_seqno == 1 + 29 + 2 * 15
        assert one.numbered.first_seqnos == other.numbered.first_seqnos


@given(st.sampled_from([0, 300, 2**20]), st.integers(1, 6), st.sampled_from([None, 1, 7]))
def test_records_for_a_reader_are_numbered_as_for_the_owner(held_limit: int, limit: int, first: int | None) -> None:
    broker = MemoryBroker()
    writer = TopicWriter(broker, T)
    with RecordFollower(broker, T, TransactionBuffer(), EARLIEST, decided_after=EARLIEST) as log:
        log.held_limit = held_limit
        log.next_seqno = first
        found: list[int] = []
        count = 0
        for begun in range(1, 20):
            writer.plain("p", "q")
            writer.records(begun, "r", "s")
            writer.commit(begun) if begun % 2 else writer.abort(begun)
            count += 4 if begun % 2 else 2
            log.replay()
            if begun % 3 == 0:
                while (visible := log.take_visible(limit)) is not None:
                    assert visible.broken is None
                    assert (visible.seqnos is None) == (first is None)
                    found += [0] * len(visible.records) if visible.seqnos is None else visible.seqnos.tolist()
        while (visible := log.take_visible(limit)) is not None:
            found += [0] * len(visible.records) if visible.seqnos is None else visible.seqnos.tolist()
    assert found == ([0] * count if first is None else [*range(first, first + count)])
