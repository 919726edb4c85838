"""Backfills that are too many for their memory take turns."""

from __future__ import annotations

from mutations.naive_mutations import Reader, Reads, Topic, check_chain, check_turns

from txnbuffer.mutations.cursor import TURN_BYTES, TURN_TICKS
from txnbuffer.mutations.manager import MemoryBudget, MutationManager

ROW = 1_000
TURNS = 4


class Crowd:
    """A topic of 400 mutations of 1,000 bytes, all in the log, whose cursors have memory for four turns."""

    def __init__(self, cursors: int) -> None:
        self.topic = Topic()
        rows = self.topic.add([(b"%d" % number, b"x" * ROW) for number in range(400)])
        self.budget = MemoryBudget(2 * TURNS * TURN_BYTES)
        self.memory = self.budget.backfill_memory
        self.manager = MutationManager(account=self.budget.account, backfill_memory=self.memory)
        self.budget.add("t", self.manager)
        self.manager.queue_many(rows)
        self.manager.persist()
        self.reads = Reads(self.topic, self.manager)
        self.readers = [self.open(f"c{number}") for number in range(cursors)]
        for reader in self.readers:
            reader.take()

    def open(self, name: str) -> Reader:
        return Reader(self.topic, self.manager.register(name, 0))

    def asked(self) -> list[str]:
        """The cursors for which the log is read."""
        self.reads.collect()
        check_chain(self.manager)
        check_turns(self.manager)
        return [read.cursor for read in self.reads.open.values()]

    def answer(self) -> None:
        """Answer the oldest read with as much as it asks for."""
        read = self.reads.open[min(self.reads.open)]
        self.reads.answer(max(read.max_bytes // ROW, 1))

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.memory.tick()


def test_no_read_is_tiny_however_many_cursors_there_are() -> None:
    crowd = Crowd(cursors=100)
    crowd.asked()
    reads = 0
    while crowd.reads.open:
        reads += 1
        assert all(read.max_bytes >= TURN_BYTES // 4 for read in crowd.reads.open.values())
        crowd.answer()
        assert crowd.manager.backfills.bytes <= crowd.memory.bytes
        for reader in crowd.readers:
            reader.take()
        crowd.asked()
    assert all(reader.complete == crowd.topic.high for reader in crowd.readers)
    assert reads <= 100 * (1 + 400 * ROW // (TURN_BYTES // 4))


def test_turns_come_in_the_order_of_requests() -> None:
    crowd = Crowd(cursors=6)
    assert crowd.asked() == ["c0", "c1", "c2", "c3"]
    crowd.answer()
    crowd.readers[0].take()
    assert crowd.asked() == ["c1", "c2", "c3", "c4"]
    crowd.answer()
    crowd.readers[1].take()
    assert crowd.asked() == ["c2", "c3", "c4", "c5"]
    crowd.answer()
    crowd.readers[2].take()
    assert crowd.asked() == ["c3", "c4", "c5", "c0"]


def test_a_cursor_reads_nothing_ahead_while_others_wait() -> None:
    crowd = Crowd(cursors=TURNS)
    crowd.asked()
    crowd.answer()
    assert sorted(crowd.asked()) == ["c0", "c1", "c2", "c3"], "no other cursor waits, so this one reads on"
    crowd = Crowd(cursors=TURNS + 1)
    crowd.asked()
    crowd.answer()
    assert crowd.asked() == ["c1", "c2", "c3"]


def test_a_turn_ends_when_its_cursor_is_closed_and_a_closed_one_needs_none() -> None:
    crowd = Crowd(cursors=7)
    crowd.readers[4].cursor.close()
    crowd.readers[0].cursor.close()
    assert crowd.asked() == ["c1", "c2", "c3", "c5"]


def test_cursors_that_take_nothing_lose_their_turns() -> None:
    crowd = Crowd(cursors=TURNS + 1)
    crowd.asked()
    for _ in range(TURNS):
        crowd.answer()
    crowd.tick(TURN_TICKS)
    assert crowd.asked() == []
    crowd.tick()
    assert crowd.asked() == [f"c{TURNS}"]
    assert crowd.manager.backfills.bytes == 0


def test_a_turn_is_not_lost_while_the_log_is_read_or_nobody_waits() -> None:
    crowd = Crowd(cursors=TURNS + 1)
    crowd.asked()
    crowd.tick(10 * TURN_TICKS)
    assert crowd.asked() == ["c0", "c1", "c2", "c3"]
    crowd = Crowd(cursors=TURNS)
    crowd.asked()
    crowd.answer()
    held = crowd.manager.backfills.bytes
    crowd.tick(10 * TURN_TICKS)
    assert crowd.manager.backfills.bytes == held > 0


def test_a_cursor_that_loses_its_turn_within_a_snapshot_gets_the_rest_of_it() -> None:
    crowd = Crowd(cursors=TURNS + 1)
    slow, *_, waiting = crowd.readers
    crowd.asked()
    crowd.answer()
    assert slow.take(10) == 10
    began = slow.cursor.snapshot
    crowd.tick(TURN_TICKS + 1)
    assert waiting.cursor.name in crowd.asked()
    for reader in (*crowd.readers[1:], slow):
        reader.drain(crowd.reads)
        assert reader.complete == crowd.topic.high
    assert slow.snapshots[0] == began


def test_a_cursor_that_always_comes_late_gets_longer_turns_until_it_takes_something() -> None:
    crowd = Crowd(cursors=1)
    late = crowd.readers[0].cursor
    turns = [late.turn_ticks]
    for _ in range(4):
        late.lose_turn(took=False)
        turns.append(late.turn_ticks)
    assert turns == [TURN_TICKS, 2 * TURN_TICKS, 4 * TURN_TICKS, 8 * TURN_TICKS, 16 * TURN_TICKS]
    for reader in (crowd.readers[0], *(crowd.open(f"o{number}") for number in range(TURNS))):
        reader.take()
    crowd.asked()
    crowd.answer()
    assert crowd.readers[0].take(1) == 1
    crowd.tick(16 * TURN_TICKS)
    assert late.backfill in crowd.memory.turns
    crowd.tick()
    assert late.backfill not in crowd.memory.turns
    assert late.turn_ticks == TURN_TICKS
    assert len(crowd.asked()) == TURNS
