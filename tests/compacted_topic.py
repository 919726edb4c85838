"""A data topic of an embedded log on a simulated disk, and all that was ever written to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from file_logs import World
from writing import TopicWriter

from broker_io import block
from broker_io.batch import Batch, Blobs, Message
from broker_io.compaction import ROW_BITS, CompactionReport, CompactionRequest, CompactionTasks, LedgerPart, Survivors
from broker_io.environment import use
from broker_io.key_digest import KeyDigest
from broker_io.port import Broker
from broker_io.position import EARLIEST, Position
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.compaction import TransactionRules
from txnbuffer.buffer.state import BufferState
from txnbuffer.buffer.visibility import PinnedVisibility, Sequencer
from txnbuffer.follow import LogFollower, RecordFollower, SequencedFollower
from txnbuffer.recordset import pack_all

T = "orders"


class Written(NamedTuple):
    """A record as it was written."""

    position: Position
    key: bytes | None
    value: bytes | None
    txn: int | None


class Shown(NamedTuple):
    """A visible record with its seqno."""

    seqno: int
    key: bytes | None
    value: bytes | None


def applied(state: dict[bytes, bytes], records: list[Shown]) -> dict[bytes, bytes]:
    """The state of a reader that has read more records."""
    after = dict(state)
    for record in records:
        if record.key is not None and record.value is None:
            after.pop(record.key, None)
        elif record.key is not None and record.value is not None:
            after[record.key] = record.value
    return after


@dataclass
class Topic:
    """A topic of an embedded log on a simulated disk, and all that was written to it."""

    world: World = field(default_factory=World)
    written: list[Written] = field(default_factory=list)
    committed: set[int] = field(default_factory=set)
    open: set[int] = field(default_factory=set)
    next_txn: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    in_tasks: bool = False
    all_compared: bool = True

    def __post_init__(self) -> None:
        self.reopen()

    def reopen(self) -> None:
        self.broker = self.world.own(compacted_prefix="__txnbuffer", **self.options)
        written = getattr(self, "writer", None)
        self.writer = TopicWriter(self.broker, T)
        if written is not None:
            self.writer._written = written._written

    # Writing

    def write(self, key: str | None, value: str | None, txn: int | None = None) -> None:
        self.world.clock.advance(1)
        add = self.writer.plain if txn is None else lambda value, key: self.writer.records(txn, value, key=key)
        position = add(value, key=key).last
        encoded = [None if text is None else text.encode() for text in (key, value)]
        self.written.append(Written(position, encoded[0], encoded[1], txn))

    def write_set(self, key: str, value: str) -> None:
        """A record set of two ordinary records."""
        records = Batch.of([Message(key.encode(), value.encode()), Message(None, b"keyless")])
        position = self.writer._append(pack_all(records, [(None, 0, 2)])).last
        self.written += [Written(position, row.key, row.value, None) for row in records]

    def begin(self) -> int:
        self.open.add(self.next_txn)
        self.next_txn += 1
        return self.next_txn - 1

    def end(self, txn: int, commit: bool) -> None:
        (self.writer.commit if commit else self.writer.abort)(txn)
        self.open.remove(txn)
        self.committed |= {txn} if commit else set()

    # What a reader must see

    def shown(self, upto: Position) -> list[Shown]:
        """All decided visible records, whatever was emptied since."""
        visible = [one for one in self.written if one.txn is None or one.txn in self.committed]
        found = [one for one in visible if one.position <= upto]
        return [Shown(number, one.key, one.value) for number, one in enumerate(found, 1)]

    # Reading

    def replayed(self, broker: Broker | None = None) -> TransactionBuffer:
        buffer = TransactionBuffer(4)
        with LogFollower(broker or self.broker, T, buffer, EARLIEST) as log:
            log.replay()
        return buffer

    def state(self) -> BufferState:
        return self.replayed().snapshot_state()

    def read(self) -> list[Shown]:
        with RecordFollower(self.broker, T, TransactionBuffer(), EARLIEST, decided_after=EARLIEST) as log:
            log.next_seqno = 1
            log.replay()
            return [*taken(log)]

    def seqno_after(self, ledger: int) -> int:
        """The last seqno of the ledgers up to one."""
        buffer, numbers = TransactionBuffer(), Sequencer()
        with SequencedFollower(self.broker, T, buffer, EARLIEST, decided_after=EARLIEST, sequencer=numbers) as log:
            log.replay()
            log.sequence_all()
        return numbers.last_in(ledger)

    # Compaction

    def decided(self, buffer: TransactionBuffer) -> int:
        """The last closed ledger whose messages are all decided."""
        limit = buffer.max_read_position
        found = 0
        for ledger in self.broker.ledgers(T)[:-1]:
            last = Position(ledger.ledger, ledger.entries - 1, -1)
            if limit is not None and (limit >= last or not ledger.entries):
                found = ledger.ledger
        return found

    def compact(self, *, purge: bool = True, least_dead: float = 0.0, grace: int = 0) -> CompactionReport:
        buffer = self.replayed()
        upto = self.decided(buffer)
        now = self.world.clock.now_ms() + 1
        rules = TransactionRules(PinnedVisibility.of(buffer))
        request = CompactionRequest(upto, rules, upto if purge else 0, now - grace, least_dead)
        return self.compact_by(request)

    def compact_by(self, request: CompactionRequest) -> CompactionReport:
        if self.in_tasks:
            return self.broker.compact_in_tasks(T, request, lambda tasks: run_tasks(self.world, tasks))
        return self.broker.compact_records(T, request)

    def check(self) -> None:
        """What is left says what the model says."""
        limit = self.replayed().max_read_position
        everything = [] if limit is None else self.shown(limit)
        found = self.read()
        assert set(found) <= set(everything)
        assert [one.seqno for one in found] == sorted(one.seqno for one in found)
        assert [one for one in everything if one.key is None] == [one for one in found if one.key is None]
        self.check_digests()
        end = applied({}, everything)
        assert applied({}, found) == end
        purged = self.broker.compaction(T).purged
        purge_seqno = self.seqno_after(purged) if purged else 0
        for start in range(purge_seqno, len(everything) + 1):
            assert applied(applied({}, everything[:start]), [one for one in found if one.seqno > start]) == end

    def check_digests(self) -> None:
        """The stored digests have the newest record of each key that has a value, except those in record sets."""
        cleaned, digests = self.broker.key_digests(T)
        ledgers = [one.ledger for one in self.broker.ledgers(T) if one.ledger <= cleaned]
        places = Counter(one.position for one in self.written)
        visible = [one for one in self.written if one.txn is None or one.txn in self.committed]
        newest = {one.key: one for one in visible if one.position.ledger <= cleaned and places[one.position] == 1}
        expected = {ledger: KeyDigest(self.broker.seed) for ledger in ledgers}
        for one in newest.values():
            if one.key is not None and one.value is not None:
                ledger, entry, _ = one.position
                key_hash = np.frombuffer(block.hash_keys(Blobs.of([one.key]), self.broker.seed), ">u8")[:1]
                place = np.array([[ledger], [entry]])
                expected[ledger] = expected[ledger].add(key_hash.astype(np.uint64), *place)
        assert {ledger: expected[ledger] for ledger in digests} == digests
        if self.all_compared:
            assert digests.keys() == expected.keys()


def run_tasks(world: World, tasks: CompactionTasks) -> list[LedgerPart]:
    """Run the tasks of a compaction as a cluster does: in any order, and some of them twice."""
    with use(world.environment):
        newest = [tasks.newest(ledger) for ledger in reversed(range(tasks.count))][::-1]
        first_sets = next((ledger for ledger, found in enumerate(newest) if found.record_sets), tasks.count)
        last: dict[tuple[int, ...], int] = {}
        for found in newest:
            for digest, ordinal in zip(found.digests.tolist(), found.ordinals.tolist(), strict=True):
                last[tuple(digest)] = max(last.get(tuple(digest), 0), ordinal)
        ordinals = np.array(sorted(last.values()), np.int64)
        parts: list[LedgerPart] = []
        for ledger in range(tasks.count):
            one = Survivors.of(ordinals[ordinals >> (ROW_BITS + 1) == ledger])
            one = one if ledger <= first_sets else Survivors(one.newest)
            parts.append([tasks.rewrite(ledger, one, attempt) for attempt in ("7", "8")][ledger % 2])
        return parts


def taken(log: RecordFollower) -> Iterator[Shown]:
    while (visible := log.take_visible(7)) is not None:
        assert visible.seqnos is not None
        for seqno, (_, _, message) in zip(visible.seqnos.tolist(), visible.records, strict=True):
            yield Shown(seqno, message.key, message.value)
