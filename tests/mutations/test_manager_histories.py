"""Any history of a manager, against a topic as a list."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mutations.naive_mutations import Reader, Reads, Topic, check_chain, check_turns

from txnbuffer.mutations.manager import MemoryBudget, MutationManager, SnapshotIndex

NAMES = ("a", "b", "c", "d")
keys = st.sampled_from([None, b"", b"k1", b"k2", b"k3", b"k4", b"k5"])
values = st.one_of(st.none(), st.binary(max_size=8), st.just(b"x" * 3000))
rows = st.lists(st.tuples(keys, values), min_size=1, max_size=12)


class ManagerLife(RuleBasedStateMachine):
    """Mutations are queued, cursors opened, read and closed, memory is freed, the log answers late and is compacted."""

    def __init__(self) -> None:
        super().__init__()
        self.topic = Topic()
        self.budget = MemoryBudget(40_000)
        self.manager = MutationManager(
            index=SnapshotIndex(segment_entries=4),
            backfill_bytes=8_000,
            account=self.budget.account,
            backfill_memory=self.budget.backfill_memory,
        )
        self.budget.add("t", self.manager)
        self.manager.chain.limit = 6_000
        self.reads = Reads(self.topic, self.manager)
        self.readers: dict[str, Reader] = {}
        self.persisted = 0

    @rule(pairs=rows, emptied=st.one_of(st.just(frozenset()), st.frozensets(st.integers(0, 11))))
    def queue(self, pairs: list[tuple[bytes | None, bytes | None]], emptied: frozenset[int]) -> None:
        before = len(self.reads.woken)
        waiting = {
            name
            for name, reader in self.readers.items()
            if reader.cursor.waiting and reader.cursor.backfill is None and reader.cursor.pin is not None
        }
        self.manager.queue_many(self.topic.add(pairs, emptied))
        self.reads.collect()
        assert waiting <= set(self.reads.woken[before:])

    @rule(name=st.sampled_from(NAMES), share=st.floats(0, 1), end=st.one_of(st.none(), st.integers(0, 20)))
    def register(self, name: str, share: float, end: int | None) -> None:
        after = round(share * self.topic.high)
        end = None if end is None else after + end
        self.readers[name] = Reader(self.topic, self.manager.register(name, after, end=end))

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def resume(self, name: str, data: st.DataObject) -> None:
        """A reader reconnects with a partial snapshot."""
        reader = self.readers.get(name)
        if reader is None:
            return
        held, begun = reader.cursor.after, reader.cursor.snapshot
        reader.cursor.close()
        end = held if begun is None else begun[1]
        self.readers[name] = Reader(
            self.topic, self.manager.register(name, held, snapshot_end=end), end if end > held else 0, reader.table
        )

    @rule(name=st.sampled_from(NAMES), limit=st.integers(1, 20), max_bytes=st.sampled_from([1, 20, 4_000, 2**40]))
    def take(self, name: str, limit: int, max_bytes: int) -> None:
        reader = self.readers.get(name)
        if reader is not None:
            had = reader.cursor.has_next()
            reader.take(limit, max_bytes)
            assert (reader.took > 0) == had

    @rule(name=st.sampled_from(NAMES))
    def ask(self, name: str) -> None:
        reader = self.readers.get(name)
        if reader is not None and not reader.cursor.has_next() and not reader.cursor.finished:
            assert reader.cursor.waiting

    @rule(name=st.sampled_from(NAMES))
    def close(self, name: str) -> None:
        reader = self.readers.pop(name, None)
        if reader is not None:
            reader.cursor.close()
            reader.cursor.close()
            assert reader.cursor.finished

    @rule(rows=st.integers(1, 30))
    def answer(self, rows: int) -> None:
        self.reads.answer(rows)

    @rule(share=st.floats(0, 1), beyond=st.booleans())
    def compact(self, share: float, beyond: bool) -> None:
        """A compaction begins, perhaps beyond the end of a snapshot that a cursor reads from the log."""
        bound = self.manager.compaction_bound()
        begun = [one.cursor.snapshot[1] for one in self.readers.values() if one.cursor.backfill and one.cursor.snapshot]
        assert bound == (min(begun) if begun else None)
        seqno = round(share * self.topic.high)
        if bound is not None and not beyond:
            seqno = min(seqno, bound)
        before = self.manager.compacted_to
        self.manager.compacted(seqno)
        assert self.manager.compacted_to == max(seqno, before)

    @rule(which=st.integers(1, 4), number=st.integers(0, 3))
    def empty(self, which: int, number: int) -> None:
        """The compaction that has begun empties records."""
        self.topic.empty(self.manager.compacted_to, lambda seqno: seqno % which == number % which)

    @rule()
    def tick(self) -> None:
        self.budget.backfill_memory.tick()

    @rule()
    def persist(self) -> None:
        for entry in self.manager.persist():
            assert entry.start == self.persisted + 1
            assert entry.rows >= len(self.topic.unique(entry.start, entry.end))
            self.persisted = entry.end
        assert self.persisted == self.topic.high

    @rule(name=st.sampled_from(NAMES))
    def drop(self, name: str) -> None:
        reader = self.readers.get(name)
        if reader is not None:
            self.manager.drop_cursor(reader.cursor)

    @rule(which=st.sampled_from(["passed", "collapse", "evict", "cursors", "all"]), goal=st.integers(1, 50_000))
    def win_back(self, which: str, goal: int) -> None:
        before = self.manager.chain.account.bytes
        match which:
            case "passed":
                self.manager.free_passed()
            case "collapse":
                self.manager.collapse()
            case "evict":
                self.manager.evict(goal)
            case "cursors":
                self.manager.drop_cursors(goal)
            case "all":
                self.budget.recover()
        # A collapsed or closed snapshot may need a little more memory than its parts if nothing is replaced.
        assert self.manager.chain.account.bytes <= before + 1_200

    @invariant()
    def holds_together(self) -> None:
        self.reads.collect()
        check_chain(self.manager)
        check_turns(self.manager)
        for statistics in self.manager.cursor_statistics():
            assert statistics.items_remaining >= 0
            assert statistics.last_read_seqno + statistics.items_remaining <= self.topic.high or statistics.end_seqno

    @precondition(lambda self: self.readers)
    @rule()
    def catch_up(self) -> None:
        for reader in self.readers.values():
            reader.drain(self.reads)
            cursor = reader.cursor
            if cursor.end is None:
                assert cursor.after == self.topic.high
            else:
                assert cursor.finished == (reader.complete >= cursor.end)
                assert cursor.finished or cursor.after == self.topic.high

    def teardown(self) -> None:
        for reader in self.readers.values():
            reader.drain(self.reads)
        for reader in list(self.readers.values()):
            reader.cursor.close()
        self.manager.persist()
        self.reads.collect()
        check_chain(self.manager)
        assert list(self.manager.chain) == [self.manager.chain.open]
        assert self.manager.backfills.bytes == self.manager.leaving.bytes == 0
        assert self.reads.open == {}


TestManagerLife = ManagerLife.TestCase
TestManagerLife.settings = settings(max_examples=min(400, settings.default.max_examples))
