"""What the simulator says of compacted topics: what readers may miss, and that nothing else is missing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from file_logs import World as Files
from sim.checker import behind, followed, progress, violations
from sim.compaction import Superseded, compacted
from sim.history import DELETION, Following, History, Shown
from sim.kinds import run_seed
from sim.readers import Stretch
from sim.reduction import Part
from sim.rules_roles import stretched
from sim.world import World
from writing import TopicWriter

from broker_io.batch import Batch, Message
from broker_io.compaction import CompactionPolicy, CompactionRequest
from broker_io.filelog.log import FileBroker
from broker_io.position import Position
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.compaction import TransactionRules
from txnbuffer.follow import LogFollower
from txnbuffer.model import EARLIEST

LOG = [Shown(number, b"k%d" % (number % 2), b"%d" % number, Position(1, number)) for number in range(1, 5)]
"""Four records, of which the last two replace the first two."""


def superseded(record: Shown) -> bool:
    return record in LOG[:2]


@pytest.mark.parametrize(
    ("found", "passed", "wrong"),
    [
        (LOG, 4, None),
        (LOG[2:], 4, None),
        (LOG[1:], 4, None),
        (LOG[:1], 2, None),
        ([], 2, None),
        (LOG[3:], 2, LOG[3]),
        ([LOG[1], LOG[0]], 2, LOG[0]),
        ([LOG[0], LOG[0]], 2, LOG[0]),
        ([LOG[0], LOG[2]._replace(value=b"other")], 2, LOG[2]._replace(value=b"other")),
    ],
    ids=["all", "newest", "some", "behind", "none", "gap", "order", "twice", "value"],
)
def test_a_reader_of_a_compacted_topic_misses_only_what_it_may(
    found: list[Shown], passed: int, wrong: Shown | None
) -> None:
    assert progress(found, LOG, superseded) == (passed, wrong)


def history(shown: list[Shown]) -> History:
    found = History(lambda: 0.0, pytest.fail)
    found.may_miss = lambda topic, record: superseded(record)
    reading = found.reading("reader", "orders")
    reading.records += shown
    return found


def test_gaps_of_a_reading_are_judged() -> None:
    topics = {"orders": LOG}
    assert violations(history(LOG[2:]), topics) == []
    assert [*behind(history(LOG[2:]), topics)] == []
    assert [*behind(history(LOG[:3]), topics)] == ["reader was shown 3 of the 4 records of orders"]
    (text,) = violations(history([LOG[0], LOG[3]]), topics)
    assert "was shown" in text
    (text,) = violations(history(LOG[3:]), topics)
    assert "which are still there" in text


def compactable() -> tuple[FileBroker, CompactionRequest]:
    """A log with four committed records and an aborted one in a closed ledger, and the request to compact it."""
    broker = Files().own(compacted_prefix="__txnbuffer")
    writer = TopicWriter(broker, "orders")
    for text in ("a", "b", "c"):
        writer.plain(text, key="k")
    writer.records(1, "d", key="k")
    writer.abort(1)
    writer.plain("e", key="other")
    broker.roll("orders")
    buffer = TransactionBuffer()
    with LogFollower(broker, "orders", buffer, EARLIEST) as log:
        log.replay()
    return broker, CompactionRequest(1, TransactionRules(buffer))


def test_what_a_compaction_removes_is_put_back() -> None:
    broker, request = compactable()
    with broker, World(1) as world:
        found = Superseded(world)
        found.record(CompactionPolicy())
        assert broker.compaction("orders").policy == CompactionPolicy()
        assert broker.compact_records("orders", request).emptied == 3
        left = [Shown(3, b"k", b"c", Position(1, 2)), Shown(4, b"other", b"e", Position(1, 5))]
        every = found.put_back("orders", left)
        assert [(record.seqno, record.value) for record in every] == [(1, b"a"), (2, b"b"), (3, b"c"), (4, b"e")]
        assert [found.may_miss("orders", record) for record in every] == [True, True, False, False]
        assert found.put_back("orders", every) == every
        wrong = [left[0]._replace(seqno=7), left[1]]
        assert found.put_back("orders", wrong)[2].seqno == 7, "a wrong number is kept, so that it is found"
        assert world.counts["compacted topic"] == 1


DELETED = [*LOG[:3], Shown(4, b"k0", b"a deletion", Position(1, 4))]
"""The last record deletes the key of the second one."""


@pytest.mark.parametrize(
    ("changes", "start", "wrong"),
    [((1, 2, 3, 4), 0, False), ((1, 3), 0, False), ((1, 2, 3), 0, True), ((3,), 2, False), ((1,), 0, True)],
    ids=["all", "purged", "resurrected", "purged after the start", "another key"],
)
def test_a_stream_may_lack_a_purged_deletion_but_shows_no_older_value(
    changes: tuple[int, ...], start: int, wrong: bool
) -> None:
    found = History(lambda: 0.0, pytest.fail)
    found.may_purge = lambda topic, record: record == DELETED[3]
    following = Following("follower", "orders", 4)
    shown = {number: DELETED[number - 1]._replace(position=None) for number in changes}
    following.changes |= shown
    if not start:
        assert bool([*followed(following, DELETED, found)]) == wrong
    stretch = Stretch("joiner", "orders", start, None, 4, complete=True, changes=shown)
    assert bool([*stretched(stretch, DELETED, lambda record: found.may_purge("orders", record))]) == wrong


def test_deletions_that_may_be_purged_are_known() -> None:
    broker = Files().own(compacted_prefix="__txnbuffer")
    writer = TopicWriter(broker, "orders")
    writer.plain("a", key="k")
    broker.writer("orders").append(Batch.of([Message(b"k", None, {DELETION: "b"})])).result()
    broker.roll("orders")
    buffer = TransactionBuffer()
    with LogFollower(broker, "orders", buffer, EARLIEST) as log:
        log.replay()
    with broker, World(1) as world:
        found = Superseded(world)
        found.record(CompactionPolicy())
        request = CompactionRequest(1, TransactionRules(buffer))
        broker.compact_records("orders", request)
        every = found.put_back("orders", [])
        assert [(record.value, found.may_purge("orders", record)) for record in every] == [(b"a", False)]
        request = replace(request, purge_upto=1, purge_before_ms=1 << 60)
        assert broker.compact_records("orders", request).purged == 1
        every = found.put_back("orders", [])
        assert [(record.value, found.may_purge("orders", record)) for record in every] == [(b"a", False), (b"b", True)]
        assert world.counts["purged deletions"] == 1


def test_roles_that_can_judge_a_compacted_topic_stay() -> None:
    choose = random.Random(1)
    assert compacted(["relay", "follower"], choose) == ["follower", "compaction"]
    roles = compacted(["rivals", "group"], choose)
    assert roles[::2] == ["rivals", "compaction"]
    assert roles[1] in ("reader", "follower", "cursors")


def test_a_seed_with_compaction_has_no_finding() -> None:
    outcome = run_seed(4, part=Part(roles=("follower", "reader", "compaction")))
    assert outcome.finding == ""
    assert outcome.counts["compacted topic"] > 0
