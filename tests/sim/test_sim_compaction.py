"""What the simulator says of compacted topics: what readers may miss, and that nothing else is missing."""

from __future__ import annotations

import random

import pytest
from file_logs import World as Files
from sim.checker import behind, progress, violations
from sim.compaction import Superseded, compacted
from sim.history import History, Shown
from sim.reduction import Part
from sim.scenario import run_seed
from sim.world import World
from writing import TopicWriter

from broker_io.compaction import CompactionPolicy, CompactionRequest
from broker_io.file import FileBroker
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
