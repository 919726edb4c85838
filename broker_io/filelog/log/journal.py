"""One file of the journal: records that may not be in synced segments yet, in order.

One flush is one record, written and synced as a whole whatever the number of topics; its blocks then go to their
segments, which are synced at the next checkpoint only. After a crash the records are applied again (redo.py). The files
are a chain (journal_chain.py). All numbers are little-endian. A file starts with 64 bytes:

    offset  size
         0     8  magic `TXJOURN` and the version, 2
         8     8  number of the file
        16     8  token: 8 random bytes that start each record, so that no message can imitate one
        24    24  mark before the first record: its epoch, lsn and chain (broker_io/filelog/log/records.py)
        48    12  zero
        60     4  CRC32C of the 60 bytes before

Records follow, each of a head of 64 bytes and the content, its operations (operations.py):

         0     8  the token
         8    24  mark of the record: epoch, lsn and chain
        32     8  commit: the lsn up to which records were known to be committed when it was built
        40     8  synced: the lsn up to which this journal was synced when the record was written
        48     8  length of the content
        56     4  kind, as `Kind` says, or 255 for a note
        60     4  CRC32C of the 60 bytes before

The chain is a checksum of all of this but `synced`, and of all records before. In a log without a pair the epoch never
changes, and each record says that it is committed itself.

A note is a head without content, with the mark of the record before it. It says that records are committed and synced
up to its `commit`, which is its `synced` too. It is not synced, and the next record is written over it.

An incomplete record was never acknowledged if no head after it says that it was synced: it is a torn tail. Else it is
damage.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from broker_io.block import BadBlock
from broker_io.errors import Damaged, UnsupportedFormat
from broker_io.filelog.log.layout import with_crc
from broker_io.filelog.log.records import Kind, LogRecord, Mark, follows, is_damage

VERSION = 2
FILE_HEAD_BYTES = 64
HEAD_BYTES = 64
NOTE = 255

_MAGIC = b"TXJOURN"
_VERSION_BYTES = 8
_FILE_HEAD = struct.Struct("<7sBQ8sQQQ12x")
_HEAD = struct.Struct("<8sQQQQQQI")
_KINDS = {int(kind): kind for kind in Kind}


class FileHead(NamedTuple):
    """The head of a file; `before` is the mark before its first record."""

    number: int
    token: bytes
    before: Mark


class RecordHead(NamedTuple):
    """The head of a record or note."""

    token: bytes
    epoch: int
    lsn: int
    chain: int
    commit: int
    synced: int
    length: int
    kind: int

    @property
    def mark(self) -> Mark:
        return Mark(self.epoch, self.lsn, self.chain)


class JournalContent(NamedTuple):
    """The content of a file: `ends` are the offsets after its records, `noted` what a note after them says, or 0.

    What is before the offset `unsynced` is known to be durable; `torn` are the bytes after all that.
    """

    head: FileHead
    records: list[LogRecord]
    ends: list[int]
    noted: int
    unsynced: int
    torn: int

    @property
    def end(self) -> Mark:
        """The mark of the last whole record."""
        return self.records[-1].mark if self.records else self.head.before


def encode_file_head(head: FileHead) -> bytes:
    return with_crc(_FILE_HEAD.pack(_MAGIC, VERSION, head.number, head.token, *head.before))


def encode_head(token: bytes, mark: Mark, commit: int, synced: int, length: int, kind: int) -> bytes:
    """The head of a record."""
    return with_crc(_HEAD.pack(token, *mark, commit, synced, length, kind))


def encode_record(token: bytes, record: LogRecord, synced: int) -> list[bytes]:
    """A record as chunks."""
    mark, commit, kind, content = record
    return [encode_head(token, mark, commit, synced, len(content), kind), content]


def encode_note(token: bytes, end: Mark, commit: int) -> bytes:
    return encode_head(token, end, commit, commit, 0, NOTE)


def decode_file_head(data: bytes, number: int, path: str) -> FileHead:
    """The head of a file. Raises Damaged or UnsupportedFormat that names the file."""
    if len(data) >= _VERSION_BYTES and data.startswith(_MAGIC) and data[7] != VERSION:
        raise UnsupportedFormat(
            f"{path}: a journal of format version {data[7]}; this release reads version {VERSION}: use the release "
            "that wrote it, or a newer one"
        )
    head = data[:FILE_HEAD_BYTES]
    if len(head) < FILE_HEAD_BYTES or with_crc(head[:-4]) != head:
        raise Damaged(path, 0, "the head of the journal is damaged")
    magic, _, found, token, *before = _FILE_HEAD.unpack_from(head)
    if magic != _MAGIC or found != number:
        raise Damaged(path, 0, f"this is not journal {number}")
    return FileHead(found, token, Mark(*before))


def decode_head(data: bytes, at: int, token: bytes) -> RecordHead:
    """The head of the record or note at an offset. Raises BadBlock."""
    head = data[at : at + HEAD_BYTES]
    if len(head) < HEAD_BYTES or not head.startswith(token) or with_crc(head[:-4]) != head:
        raise BadBlock("its head is invalid")
    return RecordHead._make(_HEAD.unpack_from(head))


def decode_record(data: bytes, at: int, token: bytes) -> tuple[LogRecord, int]:
    """The record at an offset, whose chain is not checked, and how far the journal was synced. Raises BadBlock."""
    head = decode_head(data, at, token)
    content = data[at + HEAD_BYTES : at + HEAD_BYTES + head.length]
    if len(content) < head.length or head.kind not in _KINDS:
        raise BadBlock("it is incomplete, or of an unknown kind")
    return LogRecord(head.mark, head.commit, _KINDS[head.kind], content), head.synced


def read_journal(data: bytes, number: int, path: str) -> JournalContent:
    """The content of a file. Raises Damaged or UnsupportedFormat that names it."""
    head = decode_file_head(data, number, path)
    records: list[LogRecord] = []
    ends: list[int] = []
    at, end, synced = FILE_HEAD_BYTES, head.before, 0
    while at < len(data):
        try:
            record, said = decode_record(data, at, head.token)
            if not follows(end, record) or said >= record.lsn:
                raise BadBlock("it does not follow the one before")
        except BadBlock as error:
            if is_damage(end.lsn + 1, synced_after(data, at, head.token)):
                raise Damaged(path, at, f"a record of the journal is damaged: {error}") from None
            break
        records.append(record)
        synced = said
        end, at = record.mark, at + HEAD_BYTES + len(record.content)
        ends.append(at)
    noted = _noted(data, at, head.token, end)
    known = synced - head.before.lsn
    unsynced = ends[known - 1] if known > 0 else 0
    return JournalContent(head, records, ends, noted, unsynced, len(data) - at - (HEAD_BYTES if noted else 0))


def _noted(data: bytes, at: int, token: bytes, end: Mark) -> int:
    """What the note after the last record says; 0 if there is none."""
    with suppress(BadBlock):
        note = decode_head(data, at, token)
        if note.kind == NOTE and note.mark == end:
            return note.commit
    return 0


def synced_after(data: bytes, at: int, token: bytes) -> Iterator[int]:
    """How far the journal was synced, as each valid head at or after an offset says."""
    found = data.find(token, at)
    while found >= 0:
        with suppress(BadBlock):
            yield decode_head(data, found, token).synced
        found = data.find(token, found + 1)
