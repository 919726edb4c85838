"""The copy of a topic that a relay has written, to be audited against the topic

The target may be compacted by its broker: then its compacted view has the latest value of each key, and the raw log
those that retention has left. A deletion that compaction dropped equals the missing key. Because the last message may
be such a deletion, the raw log says where the relay was.

The seqnos of the source are those of the records. If the history of the source branched, the first message of the new
history says which earlier ones are void; they are left out, for which the copy is read again from its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from broker_io.batch import PlacedBatch
from broker_io.compacted import CompactedReader
from broker_io.port import Broker
from broker_io.position import Int64s, Position
from txnbuffer.errors import InvalidRequest, RelayTargetTaken
from txnbuffer.protocol import numbers, present
from txnbuffer.recovery.audit import NO_SEQNO, CommittedLog, record_in
from txnbuffer.recovery.newest_records import NewestRecords, hashed_rows
from txnbuffer.sinks.relay_targets import ROLLBACK, SEQNO, SOURCE, RelayMark, last_mark
from txnbuffer.streams.failover import MAX_SEQNO


class RelayedCopy:
    """The records of a topic in the target of its relay; it is an `AuditCopy`.

    `source` and `incarnation`: the topic that was relayed. `compacted`: read the view of the broker's compaction, up to
    what the relay has written now, so that a log that is opened later has all of it.
    """

    def __init__(self, broker: Broker, topic: str, source: str, incarnation: str, *, compacted: bool) -> None:
        """Raises RelayTargetTaken, and what reading raises."""
        self.topic = topic
        self.start = 1
        self.cleaned = 0
        self._broker = broker
        self._source = source, incarnation
        self._emptied = False
        self._compacted = compacted
        self._mark = last_mark(broker, topic) if compacted else None

    def collect(self, found: NewestRecords, seed: int, limit: int, on_records: Callable[[int], object]) -> int:
        """See `AuditCopy`. Raises RelayTargetTaken for a message that no relay of the topic wrote."""
        if self._compacted:
            limit = self._checked(self._mark, limit)
        void: list[tuple[Position, int]] = []
        while True:
            found.clear()
            last, rollback = self._collect(found, seed, limit, void, on_records)
            if rollback is None:
                return limit if self._compacted else self._checked(last, limit)
            void.append(rollback)

    def _checked(self, mark: RelayMark | None, limit: int) -> int:
        """The seqno of the last message, at most `limit`. Raises RelayTargetTaken, InvalidRequest."""
        if mark is None:
            return 0
        topic, incarnation = self._source
        if (mark.source.topic, mark.source.incarnation) != (topic, incarnation):
            raise RelayTargetTaken(
                f"topic {self.topic!r} is the copy of {mark.source.topic!r} ({mark.source.incarnation}), not of "
                f"{topic!r} ({incarnation}): give the topic that was relayed"
            )
        if mark.seqno is None:
            raise InvalidRequest(
                f"topic {topic} had had no transactions when it was relayed, so its records have no seqnos in "
                f"{self.topic}: they can't be compared"
            )
        if mark.seqno > limit and (self._compacted or self._emptied):
            raise InvalidRequest(
                f"the copy ends at seqno {mark.seqno}, beyond {limit}, and compaction may have removed what it had "
                "there: compare it with the log that is relayed, at its end"
            )
        return min(mark.seqno, limit)

    def _collect(
        self,
        found: NewestRecords,
        seed: int,
        limit: int,
        void: list[tuple[Position, int]],
        on_records: Callable[[int], object],
    ) -> tuple[RelayMark | None, tuple[Position, int] | None]:
        """The mark of the last record, or the first rollback that is not in `void` although it voids records."""
        first = last = None
        highest = count = 0
        for placed in self._messages():
            if not len(placed):
                continue
            seqnos = self._seqnos(placed)
            rollbacks = numbers(placed.messages.properties.get(ROLLBACK), len(placed), MAX_SEQNO)
            for row in np.flatnonzero(present(placed.messages.properties.get(ROLLBACK), len(placed))).tolist():
                at, seqno = placed.positions[row], max(int(rollbacks[row]), 0)
                before = max(highest, int(seqnos[:row].max(initial=0)))
                if before > seqno and (at, seqno) not in void:
                    on_records(-count)
                    return None, (at, seqno)
            kept = seqnos <= limit
            for at, seqno in void:
                older = slice(placed.positions.search(at))
                kept[older] &= seqnos[older] <= seqno
            found.add(hashed_rows(placed.take(kept), seqnos[kept], seed))
            on_records(int(kept.sum()))
            count += int(kept.sum())
            last = RelayMark.of(self.topic, placed.messages[len(placed) - 1].properties)
            highest = max(highest, int(seqnos.max()))
            first = int(seqnos[0]) if first is None else first
        if not self._compacted and first is not None:
            self.start = max(first, 1)
        return last, None

    def _messages(self) -> Iterator[PlacedBatch]:
        if self._compacted:
            end = self._broker.last_position(self.topic)
            with CompactedReader(self._broker, self.topic) as reader:
                yield from reader.read_to_end(end)
            return
        log = CommittedLog(self._broker, self.topic)
        self._emptied = log.cleaned > 0
        last = log.end
        for records, seqnos in log.records():
            last = int(seqnos[-1]) if len(seqnos) else last
            yield records
        if last < log.end:
            raise InvalidRequest(
                f"the last records of topic {self.topic} were removed by compaction, so it is unknown where the relay "
                "was: relay at least one more record"
            )

    def _seqnos(self, placed: PlacedBatch) -> Int64s:
        """The seqnos of the source, NO_SEQNO for records that were relayed before its first transaction."""
        properties, count = placed.messages.properties, len(placed)
        seqnos = numbers(properties.get(SEQNO), count, MAX_SEQNO)
        marked = present(properties.get(SOURCE), count) & (seqnos >= NO_SEQNO)
        if not marked.all():
            where = placed.positions[int(np.flatnonzero(~marked)[0])]
            raise RelayTargetTaken(f"the message at {where} of topic {self.topic!r} was not written by a relay")
        return seqnos

    def record_at(self, position: Position) -> tuple[bytes | None, bytes | None]:
        """See `AuditCopy`."""
        before = Position(position.ledger, position.entry - 1)
        with CompactedReader(self._broker, self.topic, before, compacted=self._compacted) as reader:
            return record_in(reader.read_to(position), position)
