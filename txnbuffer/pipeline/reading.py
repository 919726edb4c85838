"""Reading of a range by a task: its records, filtered by the pinned visibility of their topic"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from broker_io.batch import PlacedBatch
from broker_io.errors import PositionTrimmed, TopicNotFound
from broker_io.port import Broker, Reader
from broker_io.position import NO_INDEX, Int64s, Position
from snapshots.errors import SnapshotMissing
from snapshots.format import reaches
from txnbuffer.buffer.visibility import PinnedVisibility, visible_counts
from txnbuffer.errors import LogTruncated, ReplayStalled
from txnbuffer.follow import visible_records
from txnbuffer.pipeline.pinned import MESSAGE_TIMEOUT, check_log_end, check_same
from txnbuffer.pipeline.ranges import RecordRange, after
from txnbuffer.protocol import MARKER, RECORDS, TXN, any_transactional, present, removed_rows, transaction_codes
from txnbuffer.recordset import batch_slices, expand, without_content
from txnbuffer.recovery.restore import LOST

BATCH_ROWS = 16_384
"""Messages of one read, and about the records of one result."""

DOUBT = 5.0
"""Seconds without a message after which the reader checks whether the log became shorter."""


class RecordOutcome(enum.IntEnum):
    """The outcome of a record; late, duplicate and undecodable records are suppressed."""

    COMMITTED = 0
    ABORTED = 1
    SUPPRESSED = 2


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Filters the records of a topic by `visibility`, or not at all if `isolated` is False.

    `registered`: the topic may have transactions; `keep_hidden` also passes records that are not visible.
    """

    topic: str
    incarnation: str
    visibility: PinnedVisibility
    registered: bool
    isolated: bool = True
    keep_hidden: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RecordRows:
    """n records of a topic, of which `mask` (None: all) chooses the result.

    `seqnos` int64[n] is 0 where a record has none, None where no record has; `outcomes` int8[n].
    """

    topic: str
    placed: PlacedBatch
    mask: NDArray[np.bool_] | None
    seqnos: Int64s | None
    outcomes: NDArray[np.int8] | None

    def __len__(self) -> int:
        return len(self.placed)


def read_range(
    broker: Broker, one: RecordRange, record_filter: RecordFilter, *, fail_on_data_loss: bool = True
) -> Iterator[RecordRows]:
    """The records of a range in log order.

    Raises PositionTrimmed or LogTruncated if some of them are lost, and TopicNotFound if the topic is; without
    `fail_on_data_loss` the rest follows without seqnos. Raises ReplayStalled, Damaged, UndecodableRecordSet,
    SnapshotMissing.
    """
    seqno, at = one.seqno, one.begin
    messages = _messages(broker, one, record_filter, at)
    while True:
        try:
            placed = next(messages, None)
        except (TopicNotFound, LogTruncated):
            if fail_on_data_loss:
                raise
            return
        except PositionTrimmed:
            if fail_on_data_loss:
                check_same(broker, one.topic, record_filter.incarnation)
                raise
            left = _left(broker, one.topic)
            if left is None or left >= one.stop:
                return
            if left <= at:  # the missing messages are not at the start of the log
                raise
            messages, seqno, at = _messages(broker, one, record_filter, left), None, left
            continue
        if placed is None:
            return
        at = placed.positions.last
        for part in batch_slices(placed, BATCH_ROWS):
            rows, visible = _filtered(part, record_filter, seqno)
            seqno = None if seqno is None else seqno + visible
            rows = _between(rows, one.first, one.stop)
            if len(rows) and (rows.mask is None or rows.mask.any()):
                yield rows


def _left(broker: Broker, topic: str) -> Position | None:
    """The first message of a log; None if there is none."""
    try:
        return broker.first_position(topic)
    except TopicNotFound:
        return None


def _messages(broker: Broker, one: RecordRange, record_filter: RecordFilter, begin: Position) -> Iterator[PlacedBatch]:
    """The messages of a range from a position on; the last record set is complete."""
    with broker.reader(one.topic, begin) as reader:
        check_same(broker, one.topic, record_filter.incarnation)
        at = begin
        while at < one.stop:
            placed = _next(broker, reader, one, at)
            last = placed.positions.last
            # More messages of the same broker batch may follow.
            at = last if last.batch > NO_INDEX else after(last)
            if last.ledger > one.stop.ledger:
                check_same(broker, one.topic, record_filter.incarnation)
            if last >= one.stop:
                placed, at = placed.take(slice(placed.positions.search(one.stop))), one.stop
            if reaches(last, one.last) and one.last is not None:
                at = one.stop
            if len(placed):
                yield placed


def _next(broker: Broker, reader: Reader, one: RecordRange, at: Position) -> PlacedBatch:
    left = one.stop.entry - at.entry + 1 if one.stop.ledger == at.ledger else BATCH_ROWS
    for max_unavailable in (DOUBT, MESSAGE_TIMEOUT):
        placed = reader.read(limit=max(min(left, BATCH_ROWS), 1), timeout=max_unavailable)
        if placed is not None:
            return placed
        check_log_end(broker, one.topic, one.stop)
    raise ReplayStalled(
        f"topic {one.topic}: no message arrived from {at} on, although the log goes up to {one.stop}; try again"
    )


def _filtered(placed: PlacedBatch, record_filter: RecordFilter, seqno: int | None) -> tuple[RecordRows, int]:
    """The records of messages, without markers, and how many of them are visible, emptied ones included."""
    if not record_filter.isolated:
        records = expand(placed.take(~without_content(placed)))
        return RecordRows(record_filter.topic, records, None, None, None), len(records)
    if not record_filter.registered and any_transactional(placed.messages):
        raise SnapshotMissing(record_filter.topic, LOST)
    outcomes = None
    if record_filter.keep_hidden:
        records = expand(_without_markers(placed))
        outcomes = _outcomes(records, record_filter.visibility)
        visible = outcomes == RecordOutcome.COMMITTED
    elif RECORDS in placed.messages.properties:
        records = visible_records(placed, record_filter.visibility)
        visible = np.ones(len(records), np.bool_)
    else:
        records, visible = placed, visible_counts(placed, record_filter.visibility) > 0
    seqnos = None if seqno is None else np.where(visible, seqno - 1 + np.cumsum(visible), 0)
    removed = removed_rows(records.messages)
    shown = np.ones(len(records), np.bool_) if record_filter.keep_hidden else visible
    if removed is not None:
        shown = shown & ~removed
    mask = None if shown.all() else shown
    return RecordRows(record_filter.topic, records, mask, seqnos, outcomes), int(np.count_nonzero(visible))


def _without_markers(placed: PlacedBatch) -> PlacedBatch:
    markers = present(placed.messages.properties.get(MARKER), len(placed))
    return placed.take(~markers) if markers.any() else placed


def _outcomes(records: PlacedBatch, visibility: PinnedVisibility) -> NDArray[np.int8]:
    outcomes = np.full(len(records), RecordOutcome.COMMITTED, np.int8)
    if TXN in records.messages.properties:
        codes, table = transaction_codes(records.messages.properties[TXN], len(records))
        outcomes[visibility.aborted.mask(table.most, table.least)[codes]] = RecordOutcome.ABORTED
    outcomes[visibility.suppressed.mask(records.positions)] = RecordOutcome.SUPPRESSED
    return outcomes


def _between(rows: RecordRows, first: Position, stop: Position) -> RecordRows:
    """The records between two positions."""
    positions = rows.placed.positions
    low = positions.search(first) if len(positions) and positions.first < first else 0
    high = positions.search(stop) if len(positions) and positions.last >= stop else len(positions)
    if low == 0 and high == len(positions):
        return rows
    wanted = slice(low, max(low, high))
    return RecordRows(
        rows.topic,
        rows.placed.take(wanted),
        None if rows.mask is None else rows.mask[wanted],
        None if rows.seqnos is None else rows.seqnos[wanted],
        None if rows.outcomes is None else rows.outcomes[wanted],
    )
