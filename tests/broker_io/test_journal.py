"""A file of the journal: records in order, notes, torn tails and damage distinguished, its golden file."""

import google_crc32c
import pytest
from golden_files import GOLDEN, committed

from broker_io.errors import Damaged, StorageError, UnsupportedFormat
from broker_io.filelog.log.journal import (
    FILE_HEAD_BYTES,
    HEAD_BYTES,
    FileHead,
    JournalContent,
    encode_file_head,
    encode_note,
    encode_record,
    read_journal,
)
from broker_io.filelog.log.records import MAX_NUMBER, Kind, LogRecord, Mark, make_record

TOKEN = b"\x01token\x02\x03"
HEAD = FileHead(5, TOKEN, Mark(3, 40, 2**63 + 7))
PATH = "/log/journal-5"


def chained(before: Mark, *contents: bytes) -> list[LogRecord]:
    """Records after a mark; the second one begins an epoch."""
    records = []
    for number, content in enumerate(contents):
        kind = Kind.FORCED if number == 1 else Kind.DATA
        records.append(make_record(before, before.epoch + (number == 1), before.lsn - 1, content, kind))
        before = records[-1].mark
    return records


RECORDS = chained(HEAD.before, b"first", b"second, longer", b"")


def journal(records: list[LogRecord] = RECORDS, synced: int | None = None) -> tuple[bytes, list[int]]:
    """A journal in which each record was synced before the next one was written, and where each record ends."""
    data = encode_file_head(HEAD)
    ends = []
    for record in records:
        data += b"".join(encode_record(TOKEN, record, record.lsn - 1 if synced is None else synced))
        ends.append(len(data))
    return data, ends


def read(data: bytes) -> JournalContent:
    return read_journal(data, 5, PATH)


def test_golden() -> None:
    data, ends = journal()
    noted = committed("broker_io/journal.bin", data + encode_note(TOKEN, RECORDS[-1].mark, 42))
    assert read(noted) == JournalContent(HEAD, RECORDS, ends, 42, ends[1], 0)


def test_version_1_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedFormat, match="journal-5: a journal of format version 1"):
        read((GOLDEN / "broker_io/journal-v1.bin").read_bytes())


def test_largest_number_of_a_record_is_the_last_one() -> None:
    """A journal with it is read, what stands after it is a torn tail, and nothing can be written after it."""
    head = HEAD._replace(before=Mark(3, MAX_NUMBER - 1, 7))
    last = make_record(head.before, MAX_NUMBER, MAX_NUMBER, b"last")
    follower = last._replace(mark=last.mark._replace(lsn=0))
    data = encode_file_head(head) + b"".join(encode_record(TOKEN, last, MAX_NUMBER - 1))
    after = b"".join(encode_record(TOKEN, follower, 0))
    found = read(data + after)
    assert (found.records, found.torn) == ([last], len(after))
    assert read(data + encode_note(TOKEN, last.mark, MAX_NUMBER)).noted == MAX_NUMBER
    with pytest.raises(StorageError, match="no record can follow"):
        make_record(last.mark, 3, 0, b"")
    with pytest.raises(StorageError, match="no record can follow"):
        make_record(HEAD.before, MAX_NUMBER + 1, 0, b"")


def test_truncated_journal_has_all_whole_records() -> None:
    data, ends = journal()
    for size in range(FILE_HEAD_BYTES, len(data)):
        whole = [end for end in ends if end <= size]
        found = read(data[:size])
        assert (found.records, found.ends) == (RECORDS[: len(whole)], whole)
        assert (found.noted, found.torn) == (0, size - [FILE_HEAD_BYTES, *whole][-1])


def test_without_its_head_it_is_damaged() -> None:
    data, _ = journal()
    for size in range(FILE_HEAD_BYTES):
        with pytest.raises(Damaged, match="journal-5"):
            read(data[:size])
    with pytest.raises(Damaged, match="not journal 6"):
        read_journal(data, 6, PATH)


def test_flipped_bit_is_damage_except_in_the_last_record() -> None:
    data, ends = journal()
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        if bit // 8 < ends[-2]:
            with pytest.raises((Damaged, UnsupportedFormat)):
                read(bytes(flipped))
        else:
            assert read(bytes(flipped)).records in (RECORDS, RECORDS[:-1])


def test_damage_in_the_middle_is_found_without_the_head_of_the_record() -> None:
    data, ends = journal()
    for start, end in ((ends[0], ends[0] + 40), (ends[0] + 20, ends[1]), (FILE_HEAD_BYTES, ends[1])):
        with pytest.raises(Damaged, match=f"offset {FILE_HEAD_BYTES if start < ends[0] else ends[0]}"):
            read(data[:start] + bytes(end - start) + data[end:])


def test_a_missing_record_is_damage() -> None:
    data, ends = journal()
    with pytest.raises(Damaged):
        read(data[: ends[0]] + data[ends[1] :])


def test_a_hole_between_records_that_were_written_before_one_sync_is_a_torn_tail() -> None:
    data, ends = journal(synced=HEAD.before.lsn)
    lost = data[: ends[0]] + bytes(ends[1] - ends[0]) + data[ends[1] :]
    found = read(lost)
    assert (found.records, found.unsynced) == (RECORDS[:1], 0)
    assert found.torn == len(data) - ends[0]


def test_a_note_tells_damage_of_what_was_synced() -> None:
    data, ends = journal()
    for commit, is_damage in ((RECORDS[-1].lsn - 1, False), (RECORDS[-1].lsn, True)):
        noted = bytearray(data + encode_note(TOKEN, RECORDS[-1].mark, commit))
        assert read(bytes(noted)).noted == commit
        noted[ends[1] + 3] ^= 1
        if is_damage:
            with pytest.raises(Damaged):
                read(bytes(noted))
        else:
            assert read(bytes(noted)).records == RECORDS[:-1]


def test_a_note_that_is_torn_or_of_another_record_says_nothing() -> None:
    data, _ = journal()
    note = encode_note(TOKEN, RECORDS[-1].mark, 42)
    for size in range(1, HEAD_BYTES):
        found = read(data + note[:size])
        assert (found.records, found.noted, found.torn) == (RECORDS, 0, size)
    assert read(data + encode_note(TOKEN, RECORDS[0].mark, 42)).noted == 0
    assert read(data + note + b"xyz").torn == 3


def test_a_record_of_another_epoch_or_history_does_not_follow() -> None:
    earlier = make_record(RECORDS[0].mark, RECORDS[0].mark.epoch - 1, 0, b"x")
    other = make_record(RECORDS[1].mark, RECORDS[1].mark.epoch, 0, b"x")
    for record in (earlier, other._replace(mark=other.mark._replace(lsn=RECORDS[0].lsn + 1)), RECORDS[0]):
        assert read(journal([RECORDS[0], record])[0]).records == RECORDS[:1]


def test_journal_in_a_message_is_not_parsed() -> None:
    """Else a message could make a torn tail look like damage."""
    inner = b"".join(encode_record(b"guessed!", RECORDS[2]._replace(mark=Mark(9, 99, 9)), 98))
    data, ends = journal(chained(HEAD.before, b"first", inner))
    assert read(data[:-1]).ends == ends[:1]


def test_a_newer_version_is_named() -> None:
    head = bytearray(encode_file_head(HEAD))
    head[7] = 3
    head[60:] = google_crc32c.value(bytes(head[:60])).to_bytes(4, "little")
    with pytest.raises(UnsupportedFormat, match="version 3"):
        read(bytes(head))
