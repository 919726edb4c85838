"""The journal as a chain of files, open for writing: appends, notes, reads, cuts, and removal of whole files.

The first files that recovery needs, and one after them that must exist, are named by the manifest; more may follow. A
file follows the one before if its head has the mark at the end of that one. A last file without records that does not
is what an unfinished checkpoint has left.

A checkpoint starts a new file, so that the files before can be removed: at once in a log without a pair, and in a
member of a pair once nobody needs their records.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

from broker_io.block import BadBlock
from broker_io.environment import Disk, Environment, File, ReadableFile, read_file
from broker_io.errors import Damaged, StorageError, UnsupportedFormat
from broker_io.filelog.log import layout
from broker_io.filelog.log.journal import (
    FILE_HEAD_BYTES,
    HEAD_BYTES,
    FileHead,
    JournalContent,
    decode_head,
    decode_record,
    encode_file_head,
    encode_head,
    encode_note,
    encode_record,
    read_journal,
)
from broker_io.filelog.log.layout import damage_at
from broker_io.filelog.log.records import Kind, LogRecord, Mark, mark_after, shown_end

STEP_BYTES = 64 * 1024
"""Bytes between records whose offsets are kept in memory."""


def missing_journal(path: str) -> Damaged:
    return Damaged(path, 0, "the journal that the manifest names is missing: restore it from a copy")


@contextlib.contextmanager
def record_damage(path: str) -> Iterator[None]:
    """Convert errors of the content of records to Damaged that names the journal."""
    try:
        yield
    except (UnsupportedFormat, Damaged):
        raise
    except (BadBlock, StorageError) as error:
        raise Damaged(path, 0, str(error)) from None


def journal_identity(disk: Disk, directory: str, manifest: layout.Manifest) -> tuple[int, ...]:
    """Numbers that change with the content of the journal of a log. Raises FileNotFoundError, OSError."""
    sizes: list[int] = []
    tail, number = b"", manifest.journal
    while not sizes or disk.exists(layout.journal_path(directory, number)):
        with closing(disk.open(layout.journal_path(directory, number))) as file:
            sizes.append(file.size())
            tail = file.read(max(0, sizes[-1] - HEAD_BYTES), HEAD_BYTES)  # a note may have replaced another one
        number += 1
    return (*sizes, int.from_bytes(tail, "little"))


@dataclass(eq=False)
class JournalFile:
    """A file of the chain: its head, the mark of its last record, and where the next one goes.

    `places` are the lsns and offsets of some of its records.
    """

    path: str
    head: FileHead
    end: Mark
    size: int = FILE_HEAD_BYTES
    places: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, path: str, content: JournalContent) -> JournalFile:
        file = cls(path, content.head, content.head.before)
        for record, end in zip(content.records, content.ends, strict=True):
            file.add(record.mark, end)
        return file

    def add(self, mark: Mark, end: int) -> None:
        """Note a record that was written after the last one, up to an offset."""
        if not self.places or self.size - self.places[-1][1] >= STEP_BYTES:
            self.places.append((mark.lsn, self.size))
        self.end, self.size = mark, end

    def place_before(self, lsn: int) -> tuple[int, int]:
        """The lsn and offset of a known record at or before an lsn that this file has."""
        return self.places[bisect.bisect_right(self.places, lsn, key=lambda place: place[0]) - 1]


class FoundJournal(NamedTuple):
    """What the files of a chain have: `noted` is the largest commit index in a note.

    Of the last file, what is after the offset `unsynced` may not be durable, and the last `torn` bytes are not whole.
    """

    files: list[JournalFile]
    records: list[LogRecord]
    noted: int
    unsynced: int
    torn: int

    @property
    def end(self) -> Mark:
        return self.files[-1].end

    def shown(self, manifest: layout.Manifest) -> int:
        """The lsn up to which a member of a pair shows and redoes its log."""
        return shown_end(manifest.mark, self.records, max(self.noted, manifest.pair.committed))


def find_journal(disk: Disk, directory: str, manifest: layout.Manifest) -> FoundJournal:
    """Read the files of a chain from the first one that a manifest names.

    Raises Damaged or UnsupportedFormat that names a file, OSError.
    """
    files: list[JournalFile] = []
    records: list[LogRecord] = []
    noted = unsynced = torn = 0
    number = manifest.journal
    while (content := _read_next(disk, directory, number, manifest, files)) is not None:
        files.append(JournalFile.of(layout.journal_path(directory, number), content))
        records += content.records
        noted, unsynced, torn = max(noted, content.noted), content.unsynced, content.torn
        number += 1
    found = FoundJournal(files, records, noted, unsynced, torn)
    marks = {files[0].head.before, *(record.mark for record in records)}
    if manifest.mark not in marks:
        raise Damaged(files[0].path, 0, f"the journal does not have {manifest.mark}, which the manifest names")
    return found


def _read_next(
    disk: Disk, directory: str, number: int, manifest: layout.Manifest, files: list[JournalFile]
) -> JournalContent | None:
    """The content of the next file; None after the last one."""
    path = layout.journal_path(directory, number)
    needed = number <= max(manifest.journal, manifest.last_journal)
    try:
        with closing(disk.open(path)) as file:
            data = read_file(file)
    except FileNotFoundError:
        if needed:
            raise missing_journal(path) from None
        return None
    if not needed and len(data) <= FILE_HEAD_BYTES:
        with contextlib.suppress(Damaged):
            content = read_journal(data, number, path)
            return content if content.head.before == files[-1].end else None
        return None
    content = read_journal(data, number, path)
    if files and content.head.before != files[-1].end:
        raise Damaged(files[-1].path, files[-1].size, f"{path} does not follow the last record here")
    return content


class Journal:
    """A chain of journal files that is open for writing. Calls are safe from any thread; they may raise OSError."""

    def __init__(self, environment: Environment, directory: str, files: list[JournalFile]) -> None:
        self._disk = environment.disk
        self._token: Callable[[int], bytes] = environment.randomness.token
        self._directory = directory
        self._files = files
        self._mutex = environment.threads.lock()
        self._file: File = self._disk.open(files[-1].path, write=True)
        self._noted = 0

    @classmethod
    def create(cls, environment: Environment, directory: str, number: int, before: Mark) -> Journal:
        """A new journal of one file without records, durable except for its name."""
        file = _create(environment.disk, directory, FileHead(number, environment.randomness.token(8), before))
        return cls(environment, directory, [file])

    @classmethod
    def open(cls, environment: Environment, directory: str, found: FoundJournal) -> Journal:
        """The journal that was found, durable as a whole; what is not whole at its end is cut off."""
        journal = cls(environment, directory, found.files)
        try:
            if found.records or found.torn or len(found.files) > 1:  # else a manifest names what there is
                journal._settle(found)
        except BaseException:
            journal.close()
            raise
        return journal

    def _settle(self, found: FoundJournal) -> None:
        """Write again what may not be durable: after a failed sync it is in memory only, and no sync writes it."""
        end = self._file.size() - found.torn
        self._file.truncate(end)
        self._file.write(found.unsynced, [self._file.read(found.unsynced, end - found.unsynced)])
        self._file.sync()

    # --- what it has ---

    @property
    def path(self) -> str:
        """The path of the file that is written."""
        return self._files[-1].path

    @property
    def number(self) -> int:
        return self._files[-1].head.number

    @property
    def size(self) -> int:
        """The bytes of the file that is written."""
        return self._files[-1].size

    @property
    def base(self) -> Mark:
        """The mark before the first record."""
        return self._files[0].head.before

    @property
    def end(self) -> Mark:
        """The mark of the last record."""
        return self._files[-1].end

    def file_after(self, lsn: int) -> int:
        """The number of the file with the record after an lsn, or of the last one."""
        return next((file.head.number for file in self._files if file.end.lsn > lsn), self.number)

    def read(self, first: int, last: int) -> Iterator[LogRecord]:
        """The records after lsn `first` up to `last`, which it has, from the files. Raises Damaged, OSError."""
        with self._mutex:
            files = [file for file in self._files if file.end.lsn > first and file.head.before.lsn < last]
        for file in files:
            with closing(self._disk.open(file.path)) as opened:
                yield from _read_records(opened, file, max(first, file.head.before.lsn), min(last, file.end.lsn))

    # --- writing ---

    def append(self, content: Sequence[bytes | memoryview]) -> Mark:
        """Write one record of a log without a pair, in chunks, and return its mark once it is durable."""
        with self._mutex:
            file = self._files[-1]
            lsn = file.end.lsn + 1
            mark = mark_after(file.end, file.end.epoch, lsn, Kind.DATA, content)
            size = sum(map(len, content))
            head = encode_head(file.head.token, mark, lsn, lsn - 1, size, Kind.DATA)
            self._file.write(file.size, [head, *content])
            self._file.sync()
            file.add(mark, file.size + HEAD_BYTES + size)
            return mark

    def write(self, records: Sequence[LogRecord], synced: int) -> None:
        """Write records of a pair and return once they are durable; `synced` is the lsn up to which all is."""
        with self._mutex:
            file = self._files[-1]
            chunks = [chunk for record in records for chunk in encode_record(file.head.token, record, synced)]
            self._file.write(file.size, chunks)
            self._file.sync()
            for record in records:
                file.add(record.mark, file.size + HEAD_BYTES + len(record.content))

    def note_commit(self, lsn: int) -> None:
        """Write a commit index, not durably."""
        with self._mutex:
            self._note(lsn)

    def _note(self, lsn: int) -> None:
        file = self._files[-1]
        self._file.write(file.size, [encode_note(file.head.token, file.end, lsn)])
        self._noted = lsn

    def undo(self) -> None:
        """Cut off what a failed write may have left."""
        with self._mutex:
            self._file.truncate(self.size)

    # --- files ---

    def roll(self, before: Mark | None = None) -> None:
        """Start a new file, whose name is durable; in another log, if it is not after the last record."""
        with self._mutex:
            head = FileHead(self.number + 1, self._token(8), before or self.end)
            file = _create(self._disk, self._directory, head)
            self._disk.sync_directory(self._directory)
            opened = self._disk.open(file.path, write=True)
            self._file.close()
            self._files.append(file)
            self._file = opened

    def drop(self, lsn: int) -> None:
        """Remove the files whose records are all up to an lsn, but for the last one."""
        with self._mutex:
            while len(self._files) > 1 and self._files[0].end.lsn <= lsn:
                self._disk.remove(self._files.pop(0).path)

    def cut(self, lsn: int) -> None:
        """Remove the records after an lsn, durably; the manifest names no file after that with the lsn as needed."""
        with self._mutex:
            while self._files[-1].head.before.lsn > lsn:
                self._file.close()
                self._disk.remove(self._files.pop().path)
                self._disk.sync_directory(self._directory)
                self._file = self._disk.open(self._files[-1].path, write=True)
            if self.end.lsn <= lsn:
                return
            self._truncate(self._files[-1], lsn)
            if self._noted:
                self._note(min(self._noted, lsn))
            self._file.sync()

    def _truncate(self, file: JournalFile, lsn: int) -> None:
        left = JournalFile(file.path, file.head, file.head.before)
        for record in _read_records(self._file, file, file.head.before.lsn, lsn):
            left.add(record.mark, left.size + HEAD_BYTES + len(record.content))
        self._file.truncate(left.size)
        self._files[-1] = left

    def close(self) -> None:
        self._file.close()


def _create(disk: Disk, directory: str, head: FileHead) -> JournalFile:
    """A new file without records, durable except for its name."""
    path = layout.journal_path(directory, head.number)
    with closing(disk.open(path, write=True, create=True)) as file:
        file.truncate(0)
        file.write(0, [encode_file_head(head)])
        file.sync()
    return JournalFile(path, head, head.before)


def _read_records(opened: ReadableFile, file: JournalFile, first: int, last: int) -> Iterator[LogRecord]:
    """The records of a file after lsn `first` up to `last`, which it has."""
    if first >= last:
        return
    lsn, at = file.place_before(first + 1)
    while lsn <= last:
        with damage_at(file.path, at):
            head = opened.read(at, HEAD_BYTES)
            size = HEAD_BYTES + decode_head(head, 0, file.head.token).length
            if lsn > first:
                yield decode_record(head + opened.read(at + HEAD_BYTES, size - HEAD_BYTES), 0, file.head.token)[0]
        lsn, at = lsn + 1, at + size
