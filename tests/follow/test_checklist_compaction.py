"""Behaviours that released log cleaners check, by the rows of CHECKLIST.md next to this file."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from compacted_topic import T, Topic, applied
from file_logs import rows
from source_tree import ROOT

from broker_io.compaction import CompactionReport, CompactionRequest, CompactionState
from broker_io.position import Position
from txnbuffer.buffer.compaction import TransactionRules
from txnbuffer.buffer.visibility import PinnedVisibility
from txnbuffer.protocol import MARKER, REMOVED

PAGE = Path(__file__).with_name("CHECKLIST.md")


def closed(topic: Topic, *pairs: tuple[str | None, str | None]) -> Topic:
    """Write records to a ledger of their own."""
    for key, value in pairs:
        topic.write(key, value)
    topic.broker.roll(T)
    return topic


def left(topic: Topic) -> list[tuple[int, bytes | None, bytes | None]]:
    return [tuple(record) for record in topic.read()]


def everything(topic: Topic) -> CompactionRequest:
    """A request for all closed ledgers."""
    return CompactionRequest(
        topic.broker.ledgers(T)[-2].ledger, TransactionRules(PinnedVisibility.of(topic.replayed()))
    )


def test_row_07_the_newest_position_of_a_key_wins() -> None:
    topic = closed(closed(Topic(), ("a", "1"), ("b", "2")), ("a", "3"), ("a", "4"))
    topic.compact()
    assert left(topic) == [(2, b"b", b"2"), (4, b"a", b"4")]


def test_row_10_keys_with_newer_records_vanish_and_all_bytes_are_read_and_counted() -> None:
    topic = closed(Topic(), *[(f"k{number % 10}", "x" * 100) for number in range(40)])
    moved: list[int] = []
    request = everything(topic)
    report = topic.broker.compact_records(T, CompactionRequest(request.upto, request.rules, progress=moved.append))
    assert [seqno for seqno, _, _ in left(topic)] == [*range(31, 41)]
    assert report.bytes_before < report.bytes_read == sum(moved) - report.bytes_written


def test_row_11_deleted_keys_are_absent() -> None:
    topic = closed(Topic(), *[(f"k{number}", "x") for number in range(6)], ("k0", None), ("k2", None), ("k4", None))
    topic.compact()
    assert [key for _, key, _ in left(topic)] == [b"k1", b"k3", b"k5"]


def test_row_12_statistics() -> None:
    topic = closed(Topic(), ("a", "1"), ("b", "2"), ("a", "3"), (None, "4"), ("c", None))
    report = topic.compact()
    assert report == CompactionReport(
        records=5, emptied=1, purged=1, ledgers=1, rewritten=1, passes=1, bytes_before=report.bytes_before,
        bytes_after=topic.broker.ledgers(T)[0].bytes, bytes_read=report.bytes_read,
        bytes_written=topic.broker.ledgers(T)[0].bytes,
    )  # fmt: skip
    assert topic.compact() == CompactionReport(
        records=3, ledgers=1, passes=1, bytes_before=report.bytes_after, bytes_after=report.bytes_after,
        bytes_read=report.bytes_after,
    )  # fmt: skip


def test_row_16_what_is_beyond_the_bound_is_not_touched() -> None:
    topic = closed(closed(Topic(), ("a", "1"), ("a", "2")), ("a", "3"), ("a", "4"))
    rules = everything(topic).rules
    topic.broker.compact_records(T, CompactionRequest(1, rules))
    assert left(topic) == [(2, b"a", b"2"), (3, b"a", b"3"), (4, b"a", b"4")]


def test_row_17_records_without_a_key_stay() -> None:
    topic = closed(Topic(), (None, "1"), (None, "2"), ("a", "3"), (None, None))
    assert topic.compact().emptied == 0
    assert left(topic) == [(1, None, b"1"), (2, None, b"2"), (3, b"a", b"3"), (4, None, None)]


def test_row_20_a_ledger_of_which_nothing_is_left_keeps_the_end_of_the_log() -> None:
    topic = closed(Topic(), ("a", "1"), ("a", None))
    before, ledgers = topic.broker.last_position(T), [one.entries for one in topic.broker.ledgers(T)]
    topic.compact()
    assert left(topic) == []
    assert topic.broker.last_position(T) == before == Position(1, 1)
    assert [one.entries for one in topic.broker.ledgers(T)] == ledgers
    topic.write("b", "3")
    assert left(topic) == [(3, b"b", b"3")]


def test_row_21_gaps_in_the_log_are_passed() -> None:
    topic = closed(closed(closed(Topic(), ("a", "1")), ("b", "2")), ("a", "3"))
    topic.broker.trim(T, 2)
    topic.compact()
    assert [row.message.value for row in rows(topic.broker, T, Position(2, 0))] == [b"2", b"3"]
    assert topic.broker.compaction(T).cleaned == 3


@pytest.mark.parametrize("size", [1, 1_000, 4_000_000])
def test_row_23_records_of_any_size(size: int) -> None:
    topic = closed(Topic(), ("a", "x" * size), ("b", "y" * size), ("a", "z" * size))
    topic.compact()
    assert left(topic) == [(2, b"b", b"y" * size), (3, b"a", b"z" * size)]


def test_row_27_a_ledger_is_not_trimmed_while_it_is_compacted() -> None:
    topic = closed(closed(Topic(), ("a", "1"), ("a", "2")), ("a", "3"))
    request = everything(topic)
    trims: list[threading.Thread] = []

    def trim(moved: int) -> None:
        if not trims:
            trims.append(threading.Thread(target=topic.broker.trim, args=(T, 2)))
            trims[0].start()
        assert topic.broker.ledgers(T)[0].ledger == 1

    topic.broker.compact_records(T, CompactionRequest(request.upto, request.rules, progress=trim))
    trims[0].join(60)
    assert [one.ledger for one in topic.broker.ledgers(T)] == [2, 3]
    assert len([path for path in topic.world.disk.files() if path.endswith(".log")]) == 2


def test_row_29_a_deletion_stays_for_its_time_over_several_runs() -> None:
    topic = closed(Topic(), ("a", "1"), ("a", None), ("b", "2"))
    for _ in range(3):
        topic.compact(grace=60_000)
        closed(topic, ("b", "3"))
        assert (2, b"a", None) in left(topic)
    topic.world.clock.advance(60)
    topic.compact(grace=60_000)
    assert [key for _, key, _ in left(topic)] == [b"b"]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_row_30_compression_changes_nothing(compression: str | None) -> None:
    topic = Topic(options={"compression": compression})
    closed(topic, *[(f"k{number % 5}", "x" * number) for number in range(1, 50)])
    size = topic.broker.ledgers(T)[0].bytes
    topic.compact()
    topic.check()
    assert topic.broker.ledgers(T)[0].bytes < size


def test_row_30_a_topic_that_is_deleted_loses_its_progress() -> None:
    topic = closed(Topic(), ("a", "1"), ("a", "2"))
    topic.compact()
    assert topic.broker.compaction(T) == CompactionState(1, 0)
    topic.broker.delete_topic(T)
    topic.broker.create_topic(T)
    assert topic.broker.compaction(T) == CompactionState()


def test_row_31_only_committed_records_compete() -> None:
    topic = Topic()
    first, second = topic.begin(), topic.begin()
    topic.write("a", "1", first)
    topic.write("b", "2", second)
    topic.write("b", "3", first)
    topic.write("a", "4", second)
    topic.end(first, commit=True)
    topic.end(second, commit=False)
    topic.broker.roll(T)
    topic.compact()
    assert left(topic) == [(1, b"a", b"1"), (2, b"b", b"3")]


def test_rows_32_to_35_markers_stay() -> None:
    topic = Topic()
    for number in range(6):
        txn = topic.begin()
        topic.write("a", f"{number}", txn)
        topic.end(txn, commit=number % 2 == 0)
    topic.broker.roll(T)
    topic.world.clock.advance(10**6)
    for _ in range(2):
        topic.compact()
        stored = [row.message.properties for row in rows(topic.broker, T)]
        assert [MARKER in properties for properties in stored] == [False, True] * 6
        assert [REMOVED in properties for properties in stored[::2]] == [True, True, True, True, False, True]


def test_row_36_an_aborted_transaction_in_several_ledgers() -> None:
    topic = Topic()
    txn = topic.begin()
    for number in range(3):
        topic.write("a", f"{number}", txn)
        closed(topic, ("b", f"{number}"))
    topic.end(txn, commit=False)
    topic.broker.roll(T)
    before = topic.state()
    assert topic.compact().rewritten == 3
    assert left(topic) == [(3, b"b", b"2")]
    assert topic.state().differences(before) == []


def test_row_37_the_marker_of_an_abort_stays() -> None:
    topic = Topic()
    txn = topic.begin()
    topic.write("a", "1", txn)
    topic.end(txn, commit=False)
    topic.broker.roll(T)
    topic.compact()
    emptied, marker = rows(topic.broker, T)
    assert REMOVED in emptied.message.properties
    assert MARKER in marker.message.properties


def test_row_40_a_duplicate_after_compaction_is_suppressed() -> None:
    topic = Topic()
    txn = topic.begin()
    topic.write("a", "1", txn)
    topic.write("a", "2", txn)
    topic.broker.roll(T)
    topic.writer.records(txn, "2", key="a", first_seq=2)
    topic.end(txn, commit=True)
    topic.broker.roll(T)
    topic.compact()
    assert left(topic) == [(2, b"a", b"2")]
    assert topic.replayed().counters.duplicates == 1


def test_row_41_a_key_like_the_bytes_of_a_marker() -> None:
    topic = Topic()
    txn = topic.begin()
    topic.write("\x00\x00", "1", txn)
    topic.end(txn, commit=True)
    closed(topic, ("\x00\x00", "2"))
    topic.compact()
    assert left(topic) == [(2, b"\x00\x00", b"2")]
    assert len(rows(topic.broker, T)) == 3


def test_row_43_a_bound_beyond_the_log_is_its_last_closed_ledger() -> None:
    topic = closed(Topic(), ("a", "1"), ("a", "2"))
    topic.write("a", "3")
    topic.broker.compact_records(T, CompactionRequest(99, everything(topic).rules))
    assert topic.broker.compaction(T).cleaned == 1
    assert left(topic) == [(2, b"a", b"2"), (3, b"a", b"3")]


def test_row_44_undecided_records_and_the_open_ledger_are_left_alone() -> None:
    topic = closed(Topic(), ("a", "1"), ("a", "2"))
    txn = topic.begin()
    topic.write("a", "3", txn)
    closed(topic, ("a", "4"))
    topic.write("a", "5")
    topic.compact()
    assert topic.broker.compaction(T).cleaned == 1
    topic.end(txn, commit=False)
    topic.compact()
    assert topic.broker.compaction(T).cleaned == 2
    assert [value for _, _, value in left(topic)] == [b"4", b"5"]


def test_row_61_state_is_rebuilt_from_compacted_data() -> None:
    topic = Topic()
    for number in range(20):
        txn = topic.begin()
        topic.write(f"k{number % 3}", f"{number}", txn)
        topic.end(txn, commit=number % 4 != 0)
        if number % 5 == 4:
            topic.broker.roll(T)
    hanging = topic.begin()
    topic.write("k0", "open", hanging)
    before = topic.state()
    topic.compact()
    assert topic.state().differences(before) == []
    topic.broker.close()
    topic.reopen()
    assert topic.state().differences(before) == []


def test_row_68_nobody_who_was_away_sees_a_deleted_or_an_aborted_record() -> None:
    """A reader that was away has everything up to some seqno, and sees only what is left after it."""
    topic = closed(Topic(), ("a", "1"), ("b", "2"))
    away = topic.shown(Position(9, 0, 0))
    txn = topic.begin()
    topic.write("b", "aborted", txn)
    topic.end(txn, commit=False)
    closed(topic, ("a", None), ("c", "3"))
    topic.compact(purge=False)
    rest = [record for record in topic.read() if record.seqno > len(away)]
    assert applied(applied({}, away), rest) == {b"b": b"2", b"c": b"3"}
    topic.compact()
    purged = topic.seqno_after(topic.broker.compaction(T).purged)
    assert purged > len(away), "a token from before the deletion is told to start over"
    assert applied({}, topic.read()) == {b"b": b"2", b"c": b"3"}


NAMED = re.compile(r"`(test_\w+)(?:\.py)?`")
TESTS = {
    name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
}


def table() -> list[tuple[set[int], str, str]]:
    """The rows of the page: their numbers, where they are checked, and why not."""
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0][:1].isdigit():
            numbers: set[int] = set()
            for part in cells[0].split(","):
                first, _, last = part.partition("–")
                numbers |= {*range(int(first), int(last or first) + 1)}
            found.append((numbers, cells[2], cells[3]))
    return found


def test_every_row_is_checked_or_has_a_reason() -> None:
    assert set().union(*(numbers for numbers, _, _ in table())) == {*range(1, 69)}
    own = set()
    for name in re.findall(r"def (test_rows?_\w+)", Path(__file__).read_text()):
        first, last = re.match(r"test_rows?_(\d+)(?:_to_(\d+))?", name).groups()  # type: ignore[union-attr]  # it matches
        own |= {*range(int(first), int(last or first) + 1)}
    for numbers, where, why in table():
        assert where != "–" or why
        if "test_checklist_compaction.py" in where:
            assert numbers <= own, numbers
        for name in NAMED.findall(where):
            assert name in TESTS or list((ROOT / "tests").rglob(f"{name}.py")), name
