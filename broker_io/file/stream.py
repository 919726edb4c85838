"""Blocks of one segment in order, read in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from broker_io.batch import Width
from broker_io.block import HEADER_BYTES, BadBlock, Header, RawBlock, open_block, parse_header
from broker_io.environment import ReadableFile
from broker_io.errors import Damaged, UnsupportedFormat
from broker_io.file.segment import CHUNK_BYTES, FIRST_CHUNK_BYTES
from broker_io.gather import property_names

TAKE_BYTES = 16 * 1024 * 1024
"""Blocks that are looked at together, so that large messages don't fill the memory."""


class Doubt(NamedTuple):
    """Bytes at the end of what another process is writing that are no block, or not yet."""

    offset: int
    data: bytes
    what: str


class BlockStream:
    """Gives whole blocks from an offset on; `doubt` is why it stopped where more bytes stand.

    The file is opened when it is read. Every call may raise OSError.
    """

    def __init__(
        self, open_file: Callable[[], ReadableFile], path: str, offset: int, place: int, skip_below: int = 0
    ) -> None:
        self.path = path
        self.doubt: Doubt | None = None
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
        """Where the next block stands."""
        return self._base + self._at

    def take(self, limit: int, end: int, settled: int) -> list[RawBlock]:
        """Blocks of up to `limit` messages but one block at least, or all below offset `end`.

        About `TAKE_BYTES` at most, and no more names of properties than go well together.

        Bytes below `settled` that are no whole block are Damaged; from there on they may be one that is
        still being written.
        """
        blocks: list[RawBlock] = []
        size, width = 0, Width()
        self.doubt = None
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
            # What stands in front of it is good; whoever reads on meets it again.
            if not blocks:
                raise
        return blocks

    def _next(self, end: int, settled: int, most: int | None) -> RawBlock | None:
        """The next block unless it has more than so many messages; None at the end, too."""
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
        """The next header if its whole block is in the chunk, read further where needed; None at the end."""
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
        """Read a chunk from the next block on; whether it holds at least `need` bytes."""
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
        self.doubt = Doubt(offset, self._data[self._at : self._at + size], what)
        self._data, self._base, self._at = b"", offset, 0

    def _unsupported(self, error: UnsupportedFormat) -> UnsupportedFormat:
        return UnsupportedFormat(f"{self.path}, offset {self.offset}: {error}")

    def unread(self) -> bool:
        """Whether bytes stand behind the last block that was taken, whatever they are."""
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
        """Close the file; it is opened again when more is taken."""
        if self._file is not None:
            self._file.close()
        self._file = None
