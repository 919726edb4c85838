"""The commit of pending appends: the watermark refuses them, the others become blocks, which a pair may commit

Small appends are merged, huge ones are split. Appends are refused before the disk is full, while there is still room to
decide, compact and trim: records below the watermark; what ends transactions, and appends to the service's own topics,
below half of it, so that transactions whose records were refused can still end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from broker_io.batch import Batch
from broker_io.block import EncodedBlock, encode_block
from broker_io.environment import Environment
from broker_io.errors import DiskWatermark, Error, TopicNotFound
from broker_io.filelog.log.layout import MIB, LedgerEntry, TopicEntry
from broker_io.filelog.log.numbers import Change, NumberedOperation, as_operation
from broker_io.filelog.log.operations import AppendBlocks
from broker_io.filelog.log.records import Mark
from broker_io.filelog.log.segment import Segment
from broker_io.port import MAX_PROPERTIES, OWN_PREFIX, TogetherResult, check_batch
from broker_io.position import Positions, maker

LOG = logging.getLogger(__name__)
BLOCK_BYTES = 1024 * 1024
"""Target size of a block; one message may be larger."""
MAX_BLOCK_MESSAGES = 65_536
CELL_BYTES = 8
"""Bytes of a message in a column of properties, at most, even if it lacks the property."""


@dataclass(slots=True, eq=False)
class FileTopic:
    """A topic of the engine: `entry` is what readers may see, `durable` what the manifest has."""

    entry: TopicEntry
    durable: TopicEntry
    segment: Segment
    removed: bool = False


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch of `rows` messages to be written; `size` is about its bytes.

    `outcome`: its positions, or why it alone is refused.
    """

    topic: FileTopic
    batch: Batch
    rows: int
    size: int
    outcome: Positions | Error | None

    @classmethod
    def checked(cls, topic: FileTopic, batch: Batch, limit: int) -> PendingBatch:
        """Raises MessageTooLarge or InvalidMessage."""
        rows = len(batch.values.offsets) - 1
        return cls(topic, batch, rows, check_batch(batch, limit), None if rows else Positions.of([]))


class PendingUnit:
    """Appends that one operation writes, all or nothing; `done` is called once with their result.

    Those that are not `alone` may use the reserve below the watermark: their caller has asked for space before.
    """

    __slots__ = ("_done", "alone", "appends", "completed", "size")

    def __init__(
        self, appends: Sequence[PendingBatch], done: Callable[[TogetherResult], None], *, alone: bool = False
    ) -> None:
        self.appends = appends
        self.alone = alone
        self.completed = False
        self.size = 0
        for append in appends:
            self.size += append.size
        self._done = done

    @property
    def reserved(self) -> bool:
        """Whether it may use the reserve: the service's own topics may always."""
        return not self.alone or self.appends[0].topic.entry.name.startswith(OWN_PREFIX)

    def complete(self, error: Exception | None = None) -> None:
        """Report the outcomes of all appends, or the error of all; what `done` raises does not stop the log."""
        self.completed = True
        try:
            self._done(error or [append.outcome for append in self.appends if append.outcome is not None])
        except Exception:
            LOG.exception("the result of an append was not taken")


def lone_unit(append: PendingBatch) -> tuple[PendingUnit, Future[Positions]]:
    """A unit of one append, and the future of its positions."""
    future: Future[Positions] = Future()
    future.set_running_or_notify_cancel()  # it can't be cancelled

    def done(result: TogetherResult) -> None:
        outcome = result[0] if isinstance(result, list) else result
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    return PendingUnit([append], done, alone=True), future


def fail_units(units: Iterable[PendingUnit], error: Exception) -> None:
    """Fail those units that are not completed."""
    for unit in units:
        if not unit.completed:
            unit.complete(error)


BYTES_BETWEEN = 16 * MIB
SECONDS_BETWEEN = 1.0


class Watermark:
    """Checks the free space every 16 MiB or every second, and each time while there is too little."""

    def __init__(self, environment: Environment, directory: str, watermark_bytes: int) -> None:
        self._disk = environment.disk
        self._clock = environment.clock
        self._directory = directory
        self._watermark_bytes = watermark_bytes
        self.unseen = BYTES_BETWEEN
        """Bytes that were written since the last check."""
        self._seen_at = 0.0
        self.is_crossed = False
        """Whether there was less free space at the last check."""
        self._free = watermark_bytes

    @property
    def due(self) -> bool:
        """Whether the free space may have changed since the last check."""
        late = self._clock.monotonic() - self._seen_at >= SECONDS_BETWEEN
        return late or self.is_crossed or self.unseen >= BYTES_BETWEEN

    def check(self) -> None:
        """Measure the free space. Raises OSError."""
        self._free = self._disk.free_bytes(self._directory)
        self.unseen, self._seen_at = 0, self._clock.monotonic()
        self.is_crossed = self._free < self._watermark_bytes

    def refusal(self, *, reserved: bool) -> DiskWatermark | None:
        """The error for appends that may use the reserve, or may not, by the last check; None if there is space."""
        if not self.is_crossed or (reserved and 2 * self._free >= self._watermark_bytes):
            return None
        limit = "half of the watermark" if reserved else "the watermark"
        return DiskWatermark(
            f"{self._directory}: {self._free} bytes are free, fewer than {limit} of {self._watermark_bytes}: "
            "appends are rejected until there are more; free some space"
        )


def admitted(units: Iterable[PendingUnit], watermark: Watermark) -> list[PendingUnit]:
    """The units of which something is to be written; the others fail, or are completed."""
    left = []
    for unit in units:
        decided = True
        for append in unit.appends:
            if append.topic.removed:
                append.outcome = TopicNotFound(f"topic {append.topic.entry.name!r} was deleted: create it first")
            decided = decided and append.outcome is not None
        if decided:
            unit.complete()
        elif watermark.is_crossed and (refusal := watermark.refusal(reserved=unit.reserved)) is not None:
            unit.complete(refusal)
        else:
            left.append(unit)
    return left


class Replicator(Protocol):
    """The pair, as the engine of its primary sees it: changes are records that are committed before they are applied.

    One thread calls it at a time.
    """

    def commit(self, operations: Sequence[NumberedOperation]) -> Mark:
        """The mark of a record with these operations, once it is committed; it is not applied here yet.

        Raises NotLive or DiskWatermark if nothing was sent, and AppendUnknown if it may be committed later, or never.
        """

    def applied(self, mark: Mark) -> None:
        """The engine has applied the record with this mark, and is about to answer."""

    def may_answer(self) -> bool:
        """Whether clients may still be answered; if not, what became of their requests counts as unknown."""


class LedgerCommit(NamedTuple):
    """The commit of one topic in a flush.

    `operation`, with its body, is the append to the topic as it is; `blocks` are those of the body with their offsets,
    and `after` is the open ledger with them.
    """

    topic: FileTopic
    operation: NumberedOperation
    body: AppendBlocks
    blocks: list[tuple[int, EncodedBlock]]
    after: LedgerEntry
    answers: list[tuple[PendingBatch, Positions]]


as_commit = maker(LedgerCommit)


def plan_commits(
    units: Iterable[PendingUnit], now_ms: int, seed: int, compress: bool
) -> tuple[list[PendingUnit], list[LedgerCommit]]:
    """The units that can be written, and the commits of their topics; the others fail as a whole."""
    units = [*units]
    while True:
        commits: list[LedgerCommit] = []
        by_topic: dict[int, list[PendingBatch]] = {}
        for unit in units:
            for append in unit.appends:
                if append.outcome is None:
                    by_topic.setdefault(append.topic.entry.number, []).append(append)
        for number, group in by_topic.items():
            try:
                commits.append(build_commit(group[0].topic, group, now_ms, seed, compress))
            except Exception as error:  # an inconsistent batch must not leave a future pending
                touched = [unit for unit in units if any(each.topic.entry.number == number for each in unit.appends)]
                fail_units(touched, error)
                units = [unit for unit in units if unit not in touched]
                break
        else:
            return units, commits


def build_commit(topic: FileTopic, appends: list[PendingBatch], now_ms: int, seed: int, compress: bool) -> LedgerCommit:
    """The blocks for all pending appends of one topic."""
    entry = topic.entry
    ledger = entry.ledgers[-1]
    time_ms, place = max(now_ms, ledger.last_time), entry.place(ledger)
    blocks, chunks = list[tuple[int, EncodedBlock]](), list[bytes]()
    first, offset = ledger.entries, ledger.bytes
    small = len(appends) == 1 and appends[0].size <= BLOCK_BYTES
    for batch in [appends[0].batch] if small else _in_block_sizes(appends):
        block = encode_block(batch, first_entry=first, publish_time=time_ms, seed=seed, place=place, compress=compress)
        blocks.append((offset, block))
        chunks += block.chunks
        first += block.rows
        offset += block.length
    answers: list[tuple[PendingBatch, Positions]] = []
    start = ledger.entries
    for append in appends:
        answers.append((append, Positions.consecutive(ledger.ledger, start, append.rows, time_ms)))
        start += append.rows
    body = AppendBlocks(ledger.ledger, ledger.generation, ledger.bytes, offset - ledger.bytes, chunks)
    operation = as_operation((Change.APPEND, entry.number, entry.operations + 1, 0, body))
    after = ledger.grown(first - ledger.entries, body.length, time_ms, time_ms)
    return as_commit((topic, operation, body, blocks, after, answers))


def _in_block_sizes(appends: list[PendingBatch]) -> Iterator[Batch]:
    group: list[Batch] = []
    size, rows, names = 0, 0, set[str]()
    for append in appends:
        count = append.rows
        named = names.union(append.batch.properties)
        if group:
            # Earlier batches get cells for properties that only this one has, and this one for those it lacks.
            wider = (len(named) - len(names)) * rows + (len(named) - len(append.batch.properties)) * count
            if size + append.size + CELL_BYTES * wider > BLOCK_BYTES or len(named) > MAX_PROPERTIES:
                yield Batch.concat(group)
                group, size, rows, named = [], 0, 0, set(append.batch.properties)
            else:
                size += CELL_BYTES * wider
        if append.size > 2 * BLOCK_BYTES:
            yield from split(append.batch)
            names = set()
            continue
        group.append(append.batch)
        size, rows = size + append.size, rows + count
        names = named
    if group:
        yield Batch.concat(group)


def split(batch: Batch) -> Iterator[Batch]:
    """A batch in slices of about a block each."""
    ends = batch.keys.offsets[1:].astype(np.int64) + batch.values.offsets[1:]
    start, base = 0, int(batch.keys.offsets[0]) + int(batch.values.offsets[0])
    while start < len(batch):
        stop = max(start + 1, int(np.searchsorted(ends, base + BLOCK_BYTES, side="right")))
        stop = min(stop, start + MAX_BLOCK_MESSAGES)
        yield batch.take(slice(start, stop))
        start, base = stop, int(ends[stop - 1])
