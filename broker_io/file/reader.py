"""Reading a topic of the embedded log, by its owner and by other processes alike."""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import Self

import numpy as np

from broker_io.batch import PlacedBatch
from broker_io.block import BadBlock
from broker_io.errors import Closed, Damaged, PositionTrimmed
from broker_io.file import layout
from broker_io.file.abandoned import Abandoned
from broker_io.file.manifest import LedgerEntry, TopicEntry
from broker_io.file.options import disk_error
from broker_io.file.recovery import missing_segment
from broker_io.file.segment import sound_index
from broker_io.file.source import DOUBT_SECONDS, MENDS, UNFINISHED, Source
from broker_io.file.stream import BlockStream, Doubt
from broker_io.gather import decode_blocks
from broker_io.position import EARLIEST, LATEST, NO_INDEX, Position, Positions

SHORTEST_PAUSE, LONGEST_PAUSE = 0.001, 0.010
ENDLESS = 2**62


class FileReader:
    """Reads on from one place of one topic; belongs to one thread at a time."""

    def __init__(self, source: Source, topic: TopicEntry, start: Position, *, inclusive: bool) -> None:
        self._source = source
        self._seen = topic
        self._earliest = start == EARLIEST
        self._ledger, self._entry = _start(source, topic, start, inclusive)
        self._stream: BlockStream | None = None
        self._reading: LedgerEntry | None = None
        self._rest: PlacedBatch | None = None
        self._doubt: tuple[Doubt, float] | None = None
        self._abandoned: Abandoned | None = None
        self._closed = False
        self._keeps = False
        self._check_floor(topic)

    def read(self, *, limit: int = 65_536, timeout: float = 0.0) -> PlacedBatch | None:
        clock = self._source.environment.clock
        deadline = clock.monotonic() + timeout
        pause = SHORTEST_PAUSE
        while True:
            try:
                batch = self._next(max(limit, 1))
            finally:
                self._let_file_go()
            if batch is not None:
                return batch
            remaining = deadline - clock.monotonic()
            # Bytes that may be damage are no end: what comes of them is told even to those who don't wait.
            if remaining <= 0 and self._doubt is None:
                return None
            self._source.wait(self._seen, pause, remaining if remaining > 0 else pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _next(self, limit: int) -> PlacedBatch | None:
        """What there is to read now. Raises as `read` does."""
        if self._closed:
            raise Closed(f"the reader of topic {self._seen.name!r} was closed: open another")
        while True:
            topic = self._seen = self._source.numbered(self._seen.number, self._seen.name)
            self._check_floor(topic)
            try:
                return self._from(topic, limit)
            except FileNotFoundError as error:
                # Trimmed or rewritten since we looked, or missing though the log still names it.
                self._leave()
                if self._source.numbered(topic.number, topic.name) is topic:
                    raise missing_segment(str(error.filename)) from None
            except OSError as error:
                raise disk_error(error, self._source.directory, "the topic can't be read on") from error

    def _from(self, topic: TopicEntry, limit: int) -> PlacedBatch | None:
        while True:
            if self._rest is not None:
                return self._deliver(limit)
            ledger = topic.find(self._ledger)
            if ledger is None:
                return None
            self._enter(topic, ledger)
            if not self._fill(ledger, closed=ledger is not topic.ledgers[-1], limit=limit):
                return None

    def _check_floor(self, topic: TopicEntry) -> None:
        if (self._ledger, self._entry) >= topic.floor:
            return
        if not self._earliest:
            raise PositionTrimmed(
                f"topic {topic.name!r}: what follows {self._ledger}:{self._entry} was trimmed, "
                f"the log begins behind {topic.floor[0]}:{topic.floor[1] - 1}: start from EARLIEST or from a snapshot"
            )
        self._leave()
        self._ledger, self._entry = topic.floor

    def _enter(self, topic: TopicEntry, ledger: LedgerEntry) -> None:
        """Open the file of a ledger at the next entry, unless it is open."""
        if ledger.ledger > self._ledger:
            self._leave()
            self._ledger, self._entry = ledger.ledger, 0
        current = self._reading
        if current is not None and current[:2] == ledger[:2]:
            return
        self._leave()
        self._stream = open_stream(self._source, topic, ledger, self._entry)
        self._reading = ledger

    def _fill(self, ledger: LedgerEntry, *, closed: bool, limit: int) -> bool:
        """Read on in a ledger; False if nothing is to be had now."""
        stream = self._stream
        if stream is None:
            raise AssertionError("no file is open")
        live = self._source.follows and not closed
        blocks = stream.take(limit, ENDLESS if live else ledger.bytes, ledger.bytes)
        if not blocks:
            if not closed:
                return live and self._turns_to_journal(stream)
            self._leave()
            self._ledger, self._entry = self._ledger + 1, 0
            return True
        try:
            decoded = decode_blocks(blocks)
        except BadBlock as error:
            raise Damaged(stream.path, stream.offset, str(error)) from None
        count = len(decoded.entries)
        ledgers, indexes = np.full(count, self._ledger, np.int64), np.full(count, NO_INDEX, np.int64)
        batch = PlacedBatch(Positions(ledgers, decoded.entries, indexes), decoded.publish_times, decoded.messages)
        if decoded.entries[0] < self._entry:
            batch = batch.take(decoded.entries >= self._entry)
        self._rest = batch if len(batch) else None
        return True

    def _turns_to_journal(self, stream: BlockStream) -> bool:
        """Whether to read on where the open ledger of another process ended, for its owner is gone.

        Then the journal may have more of it. Raises Damaged for bytes that can't become a block.
        """
        unread = stream.unread()
        abandoned = self._source.abandoned()
        if abandoned is None:
            self._weigh(stream)
            return False
        if abandoned is not self._abandoned:
            self._leave()
            self._abandoned = abandoned
            return True
        if unread:
            what = UNFINISHED if stream.doubt is None else stream.doubt.what
            raise Damaged(stream.path, stream.offset, f"{what}; {MENDS}")
        return False

    def _weigh(self, stream: BlockStream) -> None:
        """Raise Damaged for bytes that were no block for too long."""
        clock = self._source.environment.clock
        if stream.doubt is None:
            self._doubt = None
        elif self._doubt is None or self._doubt[0] != stream.doubt:
            self._doubt = stream.doubt, clock.monotonic()
        elif clock.monotonic() - self._doubt[1] >= DOUBT_SECONDS:
            raise Damaged(stream.path, stream.doubt.offset, f"{stream.doubt.what}; {MENDS}")

    def _deliver(self, limit: int) -> PlacedBatch:
        batch = self._rest
        if batch is None:
            raise AssertionError("nothing is left to deliver")
        self._rest = None
        if len(batch) > limit:
            self._rest = batch.take(slice(limit, None))
            batch = batch.take(slice(0, limit))
        self._earliest = False
        self._entry = int(batch.positions.entries[-1]) + 1
        return batch

    def _let_file_go(self) -> None:
        """Keep the file open until the next read only if not too many readers do."""
        if self._stream is not None and self._stream.is_open and not self._keeps:
            self._keeps = self._source.kept.take()
            if not self._keeps:
                self._stream.close()

    def _leave(self) -> None:
        if self._stream is not None:
            self._stream.close()
        if self._keeps:
            self._source.kept.give_back()
            self._keeps = False
        self._stream = self._reading = self._rest = self._doubt = None

    def close(self) -> None:
        self._leave()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _start(source: Source, topic: TopicEntry, start: Position, inclusive: bool) -> tuple[int, int]:
    """The first (ledger, entry) to be read."""
    if start == EARLIEST:
        return topic.floor
    if start >= LATEST:
        last = source.grown(topic).ledgers[-1]
        return last.ledger, last.entries
    entry = start.entry if inclusive and start.batch <= NO_INDEX else start.entry + 1
    return start.ledger, max(entry, 0)


def open_stream(source: Source, topic: TopicEntry, ledger: LedgerEntry, entry: int) -> BlockStream:
    """The blocks of a ledger from the one that holds an entry on."""
    disk = source.environment.disk
    path = layout.segment_path(source.directory, topic.number, ledger.ledger, ledger.generation)
    place = topic.place(ledger)
    open_file = partial(source.segment, topic, ledger)
    if entry == 0:
        return BlockStream(open_file, path, 0, place)
    file = open_file()
    try:
        known = sound_index(disk, file, path, ledger.bytes, entry).at_entry(entry)
    finally:
        file.close()
    return BlockStream(open_file, path, 0 if known is None else known.offset, place, entry)
