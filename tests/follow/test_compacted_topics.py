"""Data topics of an embedded log that are compacted, against a model that knows all that was ever written.

A compaction empties aborted records and those whose key has a newer visible one. The state of the transaction buffer,
positions and seqnos stay; every reader that has the state of some seqno reaches the state of the end, unless deletions
above that seqno were purged.
"""

from __future__ import annotations

import errno
import pickle
from contextlib import closing
from itertools import takewhile

import pytest
from compacted_topic import Shown, T, Topic, applied, run_tasks, taken
from file_logs import DIRECTORY, World, rows
from hypothesis import given, settings
from hypothesis import strategies as st

from broker_io import block
from broker_io.batch import Batch, Message
from broker_io.compaction import (
    CompactionPolicy,
    CompactionRequest,
    CompactionState,
    CompactionTasks,
    LedgerPart,
    Survivors,
)
from broker_io.environment import use
from broker_io.errors import Damaged, DiskFull, NotSupported
from broker_io.filelog.log import key_columns
from broker_io.position import EARLIEST, Position
from broker_io.testing import Crash, Unsynced
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.compaction import TransactionRules
from txnbuffer.buffer.visibility import PinnedVisibility
from txnbuffer.errors import InvalidRequest
from txnbuffer.follow import RecordFollower
from txnbuffer.model import TxnId
from txnbuffer.recordset import pack_all

KEYS = ["a", "b", "c", "d", None]

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "plain",
                "plain",
                "record",
                "record",
                "begin",
                "commit",
                "abort",
                "set",
                "roll",
                "roll",
                "compact",
                "reopen",
            ]
        ),
        st.sampled_from(KEYS),
        st.sampled_from(["x", "y", "", None]),
        st.booleans(),
    ),
    max_size=40,
)


def run(topic: Topic, steps: list[tuple[str, str | None, str | None, bool]]) -> None:
    for number, (step, key, value, flag) in enumerate(steps):
        text = None if value is None else f"{value}{number}"
        if step == "plain":
            topic.write(key, text)
        elif step == "set":
            topic.write_set(key or "a", text or "z")
        elif step == "begin":
            topic.begin()
        elif topic.open and step == "record":
            topic.write(key, text, max(topic.open))
        elif topic.open and step in ("commit", "abort"):
            topic.end(min(topic.open) if flag else max(topic.open), step == "commit")
        elif step == "roll":
            topic.broker.roll(T)
        elif step == "reopen":
            topic.broker.close()
            topic.reopen()
        elif step == "compact":
            before, positions = topic.state(), [row.position for row in rows(topic.broker, T)]
            topic.compact(purge=flag, least_dead=0.4 if key else 0.0, grace=5_000 if value else 0)
            assert topic.state().differences(before) == []
            assert [row.position for row in rows(topic.broker, T)] == positions
            topic.check()


@pytest.mark.parametrize("in_tasks", [False, True])
@given(steps=STEPS)
@settings(max_examples=100)
def test_a_compacted_topic_says_what_the_full_log_says(
    in_tasks: bool, steps: list[tuple[str, str | None, str | None, bool]]
) -> None:
    topic = Topic(in_tasks=in_tasks)
    run(topic, [*steps, ("roll", None, None, True), ("compact", None, None, True)])
    topic.broker.close()
    topic.reopen()
    topic.check()
    with topic.world.follow() as follower:
        assert follower.compaction(T) == topic.broker.compaction(T)
        assert topic.replayed(follower).snapshot_state().differences(topic.state()) == []


@given(STEPS)
@settings(max_examples=100)
def test_tasks_empty_what_one_process_empties(steps: list[tuple[str, str | None, str | None, bool]]) -> None:
    """The compactions among the steps keep ledgers as they are if few of their records go."""
    topics = Topic(), Topic()
    found = []
    for topic in topics:
        run(topic, [*steps, ("roll", None, None, True)])
    for topic, topic.in_tasks in zip(topics, (False, True), strict=True):
        report = topic.compact()
        counts = report.ledgers, report.rewritten, report.records, report.emptied, report.purged
        files = {path for path in topic.world.disk.files() if path.endswith((".log", ".index"))}
        found.append((rows(topic.broker, T), topic.broker.compaction(T), counts, report.bytes_after, files))
    assert found[0] == found[1]


def test_rows_of_a_ledger_are_numbered_across_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_columns, "CHUNK_ROWS", 3)
    topic = Topic(in_tasks=True)
    for number in range(20):
        topic.write(f"{number % 7}", f"{number}")
    topic.broker.roll(T)
    assert topic.compact().emptied == 13
    assert [one.value for one in topic.read()] == [b"%d" % number for number in range(13, 20)]


@given(STEPS)
@settings(max_examples=50)
def test_keys_with_one_hash_do_not_hide_each_other(steps: list[tuple[str, str | None, str | None, bool]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (block, key_columns):
            patch.setattr(module, "hash_keys", lambda keys, seed: bytes(16) * len(keys))
        run(Topic(all_compared=False), [*steps, ("roll", None, None, True), ("compact", None, None, True)])


def test_only_the_newest_visible_record_of_a_key_stays() -> None:
    topic = Topic()
    topic.write("a", "old")
    first, second = topic.begin(), topic.begin()
    topic.write("a", "committed", first)
    topic.write("a", "aborted", second)
    topic.write(None, "keyless")
    topic.end(second, commit=False)
    topic.end(first, commit=True)
    topic.broker.roll(T)
    report = topic.compact()
    assert topic.read() == [Shown(2, b"a", b"committed"), Shown(3, None, b"keyless")]
    assert (report.records, report.emptied, report.purged, report.rewritten) == (6, 2, 0, 1)
    stored = rows(topic.broker, T)
    assert [row.message.properties.get("tb.removed") for row in stored] == ["1", None, "1", None, None, None]
    assert [row.message.value for row in stored[:3]] == [None, b"committed", None]


def test_an_undecided_ledger_is_not_touched() -> None:
    topic = Topic()
    topic.write("a", "1")
    topic.broker.roll(T)
    txn = topic.begin()
    topic.write("a", "2", txn)
    topic.broker.roll(T)
    topic.write("a", "3")
    topic.broker.roll(T)
    topic.compact()
    assert topic.broker.compaction(T).cleaned == 1
    assert [one.value for one in topic.read()] == [b"1"]
    rules = TransactionRules(PinnedVisibility.of(topic.replayed()))
    with pytest.raises(InvalidRequest, match="not decided yet"):
        topic.broker.compact_records(T, CompactionRequest(2, rules))
    topic.end(txn, commit=True)
    topic.compact()
    assert [one.value for one in topic.read()] == [b"3"]


def test_a_deletion_stays_for_its_grace_and_above_the_purge_limit() -> None:
    topic = Topic()
    topic.write("a", "1")
    topic.write("a", None)
    topic.write("b", "2")
    topic.broker.roll(T)
    topic.compact(purge=False)
    assert topic.read() == [Shown(2, b"a", None), Shown(3, b"b", b"2")]
    topic.compact(grace=10_000)
    assert topic.read() == [Shown(2, b"a", None), Shown(3, b"b", b"2")]
    assert topic.broker.compaction(T) == CompactionState(1, 0)
    topic.world.clock.advance(10)
    assert topic.compact(grace=10_000).purged == 1
    assert topic.read() == [Shown(3, b"b", b"2")]
    assert topic.broker.compaction(T) == CompactionState(1, 1)


def test_no_deletion_is_purged_after_a_record_set() -> None:
    topic = Topic()
    topic.write("b", None)
    topic.broker.roll(T)
    topic.write_set("a", "1")
    topic.broker.roll(T)
    topic.write("a", None)
    topic.broker.roll(T)
    assert topic.compact().purged == 1
    assert topic.read() == [Shown(2, b"a", b"1"), Shown(3, None, b"keyless"), Shown(4, b"a", None)]


def test_an_aborted_record_set_is_emptied() -> None:
    topic = Topic()
    txn = topic.begin()
    records = Batch.of([Message(b"a", b"1"), Message(b"b", b"2")])
    topic.writer._append(pack_all(records, [(TxnId(0, txn), 1, 2)]))
    topic.writer._written[txn] = 2
    topic.end(txn, commit=False)
    topic.write("a", None)
    topic.broker.roll(T)
    before = topic.state()
    assert topic.compact().purged == 1, "an aborted set hides no keys"
    assert rows(topic.broker, T)[0].message.properties["tb.records"] == "2"
    assert topic.read() == []
    assert topic.state().differences(before) == []


def filled(topic: Topic, ledgers: int, *, fresh: int, per_ledger: int = 10) -> None:
    """Ledgers that each overwrite the same keys, except for `fresh` keys of their own."""
    for ledger in range(ledgers):
        for number in range(per_ledger):
            own = number < fresh
            topic.write(f"{ledger} {number}" if own else f"{number}", f"{ledger}")
        topic.broker.roll(T)


def test_a_ledger_with_few_dead_records_is_not_rewritten() -> None:
    topic = Topic()
    filled(topic, 2, fresh=8)
    assert topic.compact(least_dead=0.3).rewritten == 0
    assert topic.broker.compaction(T).cleaned == 2
    assert topic.compact(least_dead=0.2).rewritten == 1
    topic.check()


def test_no_deletion_is_purged_above_a_ledger_that_keeps_superseded_records() -> None:
    topic = Topic()
    filled(topic, 1, fresh=0)
    topic.write("3", None)
    for number in range(9):
        topic.write(f"new {number}", "1")
    topic.broker.roll(T)
    report = topic.compact(least_dead=0.2)
    assert (report.rewritten, report.purged) == (0, 0)
    topic.check()
    report = topic.compact()
    assert (report.rewritten, report.purged) == (2, 1)
    topic.check()


def test_many_deletions_make_all_ledgers_be_rewritten() -> None:
    topic = Topic()
    filled(topic, 2, fresh=9)
    for number in range(9):
        topic.write(f"gone {number}", None)
    topic.broker.roll(T)
    report = topic.compact(least_dead=0.25)
    assert (report.rewritten, report.purged) == (2, 9)
    topic.check()


@pytest.mark.parametrize("in_tasks", [False, True])
@pytest.mark.parametrize("unsynced", list(Unsynced))
def test_a_crash_at_any_step_leaves_the_topic_before_or_after(unsynced: Unsynced, in_tasks: bool) -> None:
    stopped, outcomes = True, set()
    for operation in range(1, 200):
        topic = Topic(options={"segment_bytes": 400}, in_tasks=in_tasks)
        for number in range(12):
            topic.write(f"{number % 5}", f"{number}" if number % 4 else None)
        topic.broker.roll(T)
        before, state = topic.read(), topic.state()
        topic.world.disk.stop_at(operation, written=operation % 90)
        try:
            topic.compact()
        except Crash:
            stopped = True
        else:
            stopped = False
        for disk in (topic.world.disk.crash(unsynced, operation), topic.world.disk.kill()):
            again = Topic(World(disk), topic.written)
            found = again.read()
            assert again.state().differences(state) == []
            assert (found == before) == (again.broker.compaction(T) == CompactionState())
            assert stopped or found != before
            again.check()
            again.compact()
            again.check()
            outcomes.add(len(found))
            named = again.broker.ledgers(T)
            assert len([path for path in disk.files() if path.endswith(".log")]) == len(named)
        if not stopped:
            break
    assert not stopped
    assert len(outcomes) == 2


@pytest.mark.parametrize("in_tasks", [False, True])
def test_damage_and_a_full_disk_change_nothing(in_tasks: bool) -> None:
    topic, other = Topic(in_tasks=in_tasks), Topic(in_tasks=in_tasks)
    for one in (topic, other):
        filled(one, 3, fresh=1)
    start = len(other.world.disk.history)
    assert other.compact().rewritten == 2
    steps = [*takewhile(lambda one: "manifest" not in one.path, other.world.disk.history[start:])]
    failing = [
        number for number, one in enumerate(steps, 1) if one.kind != "remove" and not one.path.endswith(".index")
    ]  # a ledger needs no index
    assert len({steps[number - 1].path for number in failing}) >= 3
    before, files = rows(topic.broker, T), set(topic.world.disk.files())
    for operation in failing:
        topic.world.disk.fail_at(operation, errno.ENOSPC)
        with pytest.raises(DiskFull, match=r"No space left on device: nothing changed$"):
            topic.compact()
        assert set(topic.world.disk.files()) == files
        assert rows(topic.broker, T) == before
    assert topic.broker.compaction(T) == CompactionState()
    buffer = topic.replayed()
    path = f"{DIRECTORY}/topics/1/1-0.log"
    topic.world.disk.flip(path, (topic.world.disk.files()[path] - 20) * 8)
    with pytest.raises(Damaged, match=r"1-0.log"):
        topic.compact_by(CompactionRequest(3, TransactionRules(PinnedVisibility.of(buffer))))
    assert set(topic.world.disk.files()) == files


@pytest.mark.parametrize("change", ["flip", "cut", "remove"])
def test_files_that_are_not_what_a_task_wrote_are_not_adopted(change: str) -> None:
    topic = Topic()
    filled(topic, 2, fresh=1)
    before, files, disk = rows(topic.broker, T), set(topic.world.disk.files()), topic.world.disk

    def run_badly(tasks: CompactionTasks) -> list[LedgerPart]:
        parts = run_tasks(topic.world, tasks)
        (path,) = (one for one in disk.files() if one.endswith("/1-1-7.log"))
        if change == "flip":
            disk.flip(path, 700)
        elif change == "remove":
            disk.remove(path)
        else:
            with closing(disk.open(path, write=True)) as file:
                file.truncate(file.size() - 1)
        return parts

    rules = TransactionRules(PinnedVisibility.of(topic.replayed()))
    with pytest.raises(Damaged, match=r"1-1-7.log"):
        topic.broker.compact_in_tasks(T, CompactionRequest(2, rules), run_badly)
    assert rows(topic.broker, T) == before
    assert set(disk.files()) == files
    assert topic.broker.compaction(T) == CompactionState()


def test_an_attempt_that_ends_after_the_compaction_changes_nothing() -> None:
    topic = Topic()
    filled(topic, 2, fresh=1)
    disk, rules = topic.world.disk, TransactionRules(PinnedVisibility.of(topic.replayed()))
    kept: list[CompactionTasks] = []

    def run_and_keep(tasks: CompactionTasks) -> list[LedgerPart]:
        kept.append(tasks)
        return run_tasks(topic.world, tasks)

    topic.broker.compact_in_tasks(T, CompactionRequest(2, rules), run_and_keep)
    after = rows(topic.broker, T)
    with use(topic.world.environment):
        with pytest.raises(Damaged, match=r"1-0.log.*missing"):
            kept[0].rewrite(0, Survivors(), "9")
        kept[0].rewrite(1, Survivors(), "9")
    assert rows(topic.broker, T) == after
    topic.broker.close()
    topic.reopen()
    assert rows(topic.broker, T) == after
    assert not any(path.endswith("-9.log") for path in disk.files())


def test_a_task_can_be_sent_to_another_process() -> None:
    """A task can be sent to another process, without the progress of the request."""
    topic = Topic()
    filled(topic, 2, fresh=1)
    rules = TransactionRules(PinnedVisibility.of(topic.replayed()))

    def run_copies(tasks: CompactionTasks) -> list[LedgerPart]:
        return run_tasks(topic.world, pickle.loads(pickle.dumps(tasks)))

    seen: list[int] = []
    report = topic.broker.compact_in_tasks(T, CompactionRequest(2, rules, progress=seen.append), run_copies)
    assert sum(seen) == report.bytes_written > 0


class Ended(Exception):
    """What the progress of a compaction raises."""


def test_progress_counts_all_bytes_and_can_end_a_compaction() -> None:
    topic = Topic()
    filled(topic, 3, fresh=2)
    files = set(topic.world.disk.files())
    rules = TransactionRules(PinnedVisibility.of(topic.replayed()))

    def end(moved: int) -> None:
        raise Ended

    with pytest.raises(Ended):
        topic.broker.compact_records(T, CompactionRequest(3, rules, progress=end))
    assert set(topic.world.disk.files()) == files
    moved: list[int] = []
    report = topic.broker.compact_records(T, CompactionRequest(3, rules, progress=moved.append))
    assert sum(moved) == report.bytes_read + report.bytes_written
    assert report.bytes_after < report.bytes_before


def test_a_reader_continues_in_a_ledger_that_is_compacted_meanwhile() -> None:
    topic = Topic()
    filled(topic, 3, fresh=2)
    with RecordFollower(topic.broker, T, TransactionBuffer(), EARLIEST, decided_after=EARLIEST) as log:
        log.next_seqno = 1
        log.replay()
        log.held_limit = 0
        first = log.take_visible(4)
        assert first is not None
        topic.compact()
        rest = [*taken(log)]
    everything = topic.shown(Position(9, 0, 0))
    assert set(rest) <= set(everything)
    assert applied(applied({}, everything[:4]), rest) == applied({}, everything)


def test_policies_are_stored_with_the_topic() -> None:
    topic = Topic()
    policy = CompactionPolicy(0.25, 1000, 60_000, 3_600_000)
    topic.broker.set_compaction_policy(T, policy)
    topic.broker.close()
    topic.reopen()
    assert topic.broker.compaction(T) == CompactionState(0, 0, policy)
    topic.broker.set_compaction_policy(T, None)
    assert topic.broker.compaction(T) == CompactionState()
    topic.broker.delete_topic(T)
    topic.broker.create_topic(T)
    assert topic.broker.compaction(T) == CompactionState()
    topic.broker.create_topic("__txnbuffer_x")
    with pytest.raises(NotSupported, match="has no transactions"):
        topic.broker.set_compaction_policy("__txnbuffer_x", policy)
    with pytest.raises(NotSupported, match="has no transactions"):
        topic.broker.compact_records("__txnbuffer_x", CompactionRequest(1, TransactionRules(topic.replayed())))
