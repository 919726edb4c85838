"""Readers of the embedded log: blocks of a segment in order, messages of a topic, first and last positions and times.

The owner of the log and other processes read with the same code; the `SegmentSource` differs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from broker_io.batch import PlacedBatch, Width
from broker_io.block import (
    HEADER_BYTES,
    BadBlock,
    Header,
    RawBlock,
    decode_blocks,
    decode_entries,
    decode_publish_times,
    open_block,
    parse_header,
    property_names,
)
from broker_io.environment import ReadableFile
from broker_io.errors import Closed, Damaged, PositionTrimmed, UnsupportedFormat
from broker_io.file import layout
from broker_io.file.layout import LedgerEntry, TopicEntry, disk_error
from broker_io.file.recovery import missing_segment
from broker_io.file.segment import CHUNK_BYTES, FIRST_CHUNK_BYTES, FoundBlock, headers, read_block, verified_index
from broker_io.file.source import REPAIR_HINT, TORN_TAIL_SECONDS, UNFINISHED, OfflineJournal, SegmentSource
from broker_io.position import EARLIEST, LATEST, NO_INDEX, Position, Positions

TAKE_BYTES = 16 * 1024 * 1024
"""Bytes of blocks that are decoded together, so that large messages don't fill the memory."""


class TornTail(NamedTuple):
    """Bytes at the end of a segment that another process writes, which are not a block, or not yet."""

    offset: int
    data: bytes
    what: str


class BlockStream:
    """Reads whole blocks from an offset on; `torn_tail` says why it stopped before the end of the file.

    The file is opened at the first read. Every call may raise OSError.
    """

    def __init__(
        self, open_file: Callable[[], ReadableFile], path: str, offset: int, place: int, skip_below: int = 0
    ) -> None:
        self.path = path
        self.torn_tail: TornTail | None = None
        self._open_file = open_file
        self._file: ReadableFile | None = None
        self._place = place
        self._skip_below = skip_below
        self._data = b""
        self._base = offset
        self._at = 0
        self._chunk = FIRST_CHUNK_BYTES

    @property
    def offset(self) -> int:
        """The offset of the next block."""
        return self._base + self._at

    def take(self, limit: int, end: int, settled: int) -> list[RawBlock]:
        """Blocks of up to `limit` messages, but at least one block, or all below offset `end`.

        At most about `TAKE_BYTES`, and no wider than `Width` allows.

        Bytes below `settled` that are not a whole block are Damaged; from there on they may be a block that is still
        being written.
        """
        blocks: list[RawBlock] = []
        size, width = 0, Width()
        self.torn_tail = None
        try:
            while (
                size < TAKE_BYTES
                and not width.full
                and (block := self._next(end, settled, limit - width.rows if blocks else None)) is not None
            ):
                blocks.append(block)
                width.add(property_names(block), block.header.rows)
                size += len(block.part) + len(block.values)
        except (Damaged, UnsupportedFormat):
            # The blocks before it are good; the next call raises the error.
            if not blocks:
                raise
        return blocks

    def _next(self, end: int, settled: int, most: int | None) -> RawBlock | None:
        """The next block; None if it has more than `most` messages, or at the end."""
        while (header := self._header(end, settled)) is not None:
            if header.first_entry + header.span <= self._skip_below:
                self._at += header.length
                continue
            if most is not None and header.rows > most:
                return None
            try:
                block = open_block(self._data, self._at, header)
            except BadBlock as error:
                self._fail(str(error), header.length, settled)
                return None
            except UnsupportedFormat as error:
                raise self._unsupported(error) from None
            self._at += header.length
            return block
        return None

    def _header(self, end: int, settled: int) -> Header | None:
        """The next header, once its whole block is read into the chunk; None at the end."""
        if len(self._data) - self._at < HEADER_BYTES and not self._fill(HEADER_BYTES, end, settled):
            return None
        try:
            header = parse_header(self._data, self._at, self._place)
        except BadBlock as error:
            self._fail(str(error), HEADER_BYTES, settled)
            return None
        except UnsupportedFormat as error:
            raise self._unsupported(error) from None
        if len(self._data) - self._at < header.length and not self._fill(header.length, end, settled):
            return None
        return header

    def _fill(self, need: int, end: int, settled: int) -> bool:
        """Read a chunk from the next block on; return whether it has at least `need` bytes."""
        offset = self.offset
        size = min(max(self._chunk, need), end - offset)
        self._data = self._opened().read(offset, size) if size > 0 else b""
        self._base, self._at = offset, 0
        if len(self._data) == self._chunk:
            self._chunk = min(2 * self._chunk, CHUNK_BYTES)
        if len(self._data) >= need:
            return True
        if offset < settled:
            raise Damaged(self.path, offset, f"a block ends after {len(self._data)} bytes instead of {need}")
        self._data = b""
        return False

    def _fail(self, what: str, size: int, settled: int) -> None:
        offset = self.offset
        if offset < settled:
            raise Damaged(self.path, offset, what)
        self.torn_tail = TornTail(offset, self._data[self._at : self._at + size], what)
        self._data, self._base, self._at = b"", offset, 0

    def _unsupported(self, error: UnsupportedFormat) -> UnsupportedFormat:
        return UnsupportedFormat(f"{self.path}, offset {self.offset}: {error}")

    def unread(self) -> bool:
        """Whether there are bytes after the last block that was taken."""
        return self._opened().size() > self.offset

    @property
    def is_open(self) -> bool:
        """Whether the file is open."""
        return self._file is not None

    def _opened(self) -> ReadableFile:
        if self._file is None:
            self._file = self._open_file()
        return self._file

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        if self._file is not None:
            self._file.close()
        self._file = None


SHORTEST_PAUSE, LONGEST_PAUSE = 0.001, 0.010
ENDLESS = 2**62


class FileReader:
    """Reads a topic from a position on; belongs to one thread at a time."""

    def __init__(self, source: SegmentSource, topic: TopicEntry, start: Position, *, inclusive: bool) -> None:
        self._source = source
        self._seen = topic
        self._earliest = start == EARLIEST
        self._ledger, self._entry = _start(source, topic, start, inclusive)
        self._stream: BlockStream | None = None
        self._reading: LedgerEntry | None = None
        self._rest: PlacedBatch | None = None
        self._torn_tail: tuple[TornTail, float] | None = None
        self._offline: OfflineJournal | None = None
        self._closed = False
        self._holds_file = False
        self._check_floor(topic)

    def read(self, *, limit: int = 65_536, timeout: float = 0.0) -> PlacedBatch | None:
        clock = self._source.environment.clock
        deadline = clock.monotonic() + timeout
        pause = SHORTEST_PAUSE
        while True:
            try:
                batch = self._next(max(limit, 1))
            finally:
                self._release_file()
            if batch is not None:
                return batch
            remaining = deadline - clock.monotonic()
            # A torn tail is no end: even a read without a timeout waits until it is a block or damage.
            if remaining <= 0 and self._torn_tail is None:
                return None
            self._source.wait(self._seen, pause, remaining if remaining > 0 else pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _next(self, limit: int) -> PlacedBatch | None:
        """The messages that are there now. Raises as `read` does."""
        if self._closed:
            raise Closed(f"the reader of topic {self._seen.name!r} was closed: open another")
        while True:
            topic = self._seen = self._source.numbered(self._seen.number, self._seen.name)
            self._check_floor(topic)
            try:
                return self._from(topic, limit)
            except FileNotFoundError as error:
                # Trimmed or rewritten meanwhile, or missing though the log still names it.
                self._close_stream()
                if self._source.numbered(topic.number, topic.name) is topic:
                    raise missing_segment(str(error.filename)) from None
            except OSError as error:
                raise disk_error(error, self._source.directory, "the topic can't be read") from error

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
                f"topic {topic.name!r}: the messages from {self._ledger}:{self._entry} on were trimmed, "
                f"the log begins after {topic.floor[0]}:{topic.floor[1] - 1}: start from EARLIEST or from a snapshot"
            )
        self._close_stream()
        self._ledger, self._entry = topic.floor

    def _enter(self, topic: TopicEntry, ledger: LedgerEntry) -> None:
        """Open the file of a ledger at the next entry, unless it is open."""
        if ledger.ledger > self._ledger:
            self._close_stream()
            self._ledger, self._entry = ledger.ledger, 0
        current = self._reading
        if current is not None and current[:2] == ledger[:2]:
            return
        self._close_stream()
        self._stream = open_stream(self._source, topic, ledger, self._entry)
        self._reading = ledger

    def _fill(self, ledger: LedgerEntry, *, closed: bool, limit: int) -> bool:
        """Read the next messages of a ledger; False if there are none now."""
        stream = self._stream
        if stream is None:
            raise AssertionError("no file is open")
        live = self._source.read_only and not closed
        blocks = stream.take(limit, ENDLESS if live else ledger.bytes, ledger.bytes)
        if not blocks:
            if not closed:
                return live and self._continues_in_journal(stream)
            self._close_stream()
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

    def _continues_in_journal(self, stream: BlockStream) -> bool:
        """Whether to continue after the end of the open ledger with the journal, because the log has no owner.

        Raises Damaged for bytes that can't become a block.
        """
        unread = stream.unread()
        offline = self._source.offline_journal()
        if offline is None:
            self._check_torn_tail(stream)
            return False
        if offline is not self._offline:
            self._close_stream()
            self._offline = offline
            return True
        if unread:
            what = UNFINISHED if stream.torn_tail is None else stream.torn_tail.what
            raise Damaged(stream.path, stream.offset, f"{what}; {REPAIR_HINT}")
        return False

    def _check_torn_tail(self, stream: BlockStream) -> None:
        """Raise Damaged for bytes that were not a block for too long."""
        clock = self._source.environment.clock
        if stream.torn_tail is None:
            self._torn_tail = None
        elif self._torn_tail is None or self._torn_tail[0] != stream.torn_tail:
            self._torn_tail = stream.torn_tail, clock.monotonic()
        elif clock.monotonic() - self._torn_tail[1] >= TORN_TAIL_SECONDS:
            raise Damaged(stream.path, stream.torn_tail.offset, f"{stream.torn_tail.what}; {REPAIR_HINT}")

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

    def _release_file(self) -> None:
        """Close the file unless this reader may keep it open until the next read."""
        if self._stream is not None and self._stream.is_open and not self._holds_file:
            self._holds_file = self._source.open_files.take()
            if not self._holds_file:
                self._stream.close()

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
        if self._holds_file:
            self._source.open_files.give_back()
            self._holds_file = False
        self._stream = self._reading = self._rest = self._torn_tail = None

    def close(self) -> None:
        self._close_stream()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _start(source: SegmentSource, topic: TopicEntry, start: Position, inclusive: bool) -> tuple[int, int]:
    """The first (ledger, entry) to read."""
    if start == EARLIEST:
        return topic.floor
    if start >= LATEST:
        last = source.grown(topic).ledgers[-1]
        return last.ledger, last.entries
    entry = start.entry if inclusive and start.batch <= NO_INDEX else start.entry + 1
    return start.ledger, max(entry, 0)


def open_stream(source: SegmentSource, topic: TopicEntry, ledger: LedgerEntry, entry: int) -> BlockStream:
    """The blocks of a ledger, from the block of an entry on."""
    disk = source.environment.disk
    path = layout.segment_path(source.directory, topic.number, ledger.ledger, ledger.generation)
    place = topic.place(ledger)
    open_file = partial(source.segment, topic, ledger)
    if entry == 0:
        return BlockStream(open_file, path, 0, place)
    file = open_file()
    try:
        known = verified_index(disk, file, path, ledger.bytes, entry).at_entry(entry)
    finally:
        file.close()
    return BlockStream(open_file, path, 0 if known is None else known.offset, place, entry)


def first_position(source: SegmentSource, topic: TopicEntry) -> Position | None:
    """Position of the first message that still exists."""
    with FileReader(source, topic, EARLIEST, inclusive=True) as reader:
        batch = reader.read(limit=1)
    return None if batch is None else batch.positions.first


def last_position(topic: TopicEntry) -> Position | None:
    """Position of the last message ever appended, whether or not it still exists."""
    for ledger in reversed(topic.ledgers):
        if ledger.entries:
            return Position(ledger.ledger, ledger.entries - 1)
    return Position(topic.floor[0], topic.floor[1] - 1) if topic.floor[1] else None


def position_at(source: SegmentSource, topic: TopicEntry, time_ms: int) -> Position | None:
    """Position of the first message published at or after a time. Raises Damaged, or OSError."""
    filled = [ledger for ledger in topic.ledgers if ledger.bytes]
    older = [index for index, ledger in enumerate(filled) if ledger.first_time < time_ms]
    for ledger in filled[older[-1] if older else 0 :]:
        entry = _entry_at(source, topic, ledger, time_ms)
        if entry is not None:
            return Position(ledger.ledger, entry)
    return None


def _entry_at(source: SegmentSource, topic: TopicEntry, ledger: LedgerEntry, time_ms: int) -> int | None:
    disk = source.environment.disk
    path = layout.segment_path(source.directory, topic.number, ledger.ledger, ledger.generation)
    file = source.segment(topic, ledger)
    try:
        known = verified_index(disk, file, path, ledger.bytes, time_ms=time_ms).before_time(time_ms)
        older: FoundBlock | None = None
        for found in headers(file, path, 0 if known is None else known.offset, ledger.bytes, topic.place(ledger)):
            if found.header.publish_time >= time_ms:
                inside = None if older is None else _within(read_block(file, path, older, values=False), time_ms)
                return found.header.first_entry if inside is None else inside
            older = found
        return None if older is None else _within(read_block(file, path, older, values=False), time_ms)
    finally:
        file.close()


def _within(block: RawBlock, time_ms: int) -> int | None:
    """The first entry of a block that was published at or after a time."""
    rows = block.header.rows
    late = np.flatnonzero(decode_publish_times([block], [rows]) >= time_ms)
    return int(decode_entries([block], [rows])[late[0]]) if len(late) else None
