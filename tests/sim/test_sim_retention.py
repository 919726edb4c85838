"""Retention in a simulated world: what it dropped may be missing, and nothing else."""

from __future__ import annotations

import random

import pytest
from sim.apps import Setting
from sim.checker import behind, violations
from sim.group_apps import HELD_SECONDS, GroupPlan, Member
from sim.history import Fate, Following, History, Shown
from sim.kinds import run_seed
from sim.reduction import Part
from sim.retention import TRIM, Trims, before, retained
from sim.scenario import Size
from sim.world import World

from broker_io.errors import PositionTrimmed
from txnbuffer.model import Position

LOG = [Shown(number, b"k%d" % number, b"%d" % number, Position(number, 0)) for number in range(1, 5)]
"""Four records, each in a ledger of its own."""
DROPPED_AT = 5.0


def history_of(*, dropped: int) -> History:
    """A history in which the log was written, and retention dropped so many records later."""
    history = History(lambda: 0.0, pytest.fail)
    attempt = history.attempt("writer")
    for record in LOG:
        history.sent(attempt, "a", record.value)
    history.ended(attempt, Fate.COMMITTED)
    history.dropped = lambda topic, record, time: time >= DROPPED_AT and record in LOG[:dropped]
    return history


@pytest.mark.parametrize(
    ("first", "dropped", "began", "text"),
    [
        (0, 0, 0.0, ""),
        (2, 2, DROPPED_AT, ""),
        (1, 2, DROPPED_AT, ""),
        (2, 2, 0.0, "which are still there"),
        (2, 1, DROPPED_AT, "which are still there"),
    ],
    ids=["all", "dropped", "more than necessary", "too early", "too much"],
)
def test_a_reader_misses_only_what_was_dropped_before_it_began(
    first: int, dropped: int, began: float, text: str
) -> None:
    history = history_of(dropped=dropped)
    reading = history.reading("reader", "a")
    reading.began, reading.records = began, LOG[first:]
    found = "\n".join(violations(history, {"a": LOG}))
    assert text in found
    assert bool(found) == bool(text)
    assert [*behind(history, {"a": LOG})] == []
    reading.records = LOG[first:3]
    assert [*behind(history, {"a": LOG})] == ["reader was shown 3 of the 4 records of a"]


def test_a_reader_that_leaves_something_out_in_the_middle_is_found() -> None:
    history = history_of(dropped=3)
    reading = history.reading("reader", "a")
    reading.began, reading.records = DROPPED_AT, [LOG[0], LOG[3]]
    assert "as record 2 of a" in "\n".join(violations(history, {"a": LOG}))


@pytest.mark.parametrize(("began", "text"), [(DROPPED_AT, ""), (0.0, "lacks {b'k1': b'1'}")])
def test_a_stream_misses_only_what_was_dropped_before_it_began(began: float, text: str) -> None:
    history = history_of(dropped=1)
    following = Following("follower", "a")
    history.followings.append(following)
    following.seqno, following.began = 4, began
    following.changes = {record.seqno or 0: record._replace(position=None) for record in LOG[1:]}
    found = "\n".join(violations(history, {"a": LOG}))
    assert text in found
    assert bool(found) == bool(text)


def test_trims_are_known_with_their_times() -> None:
    with World(1) as world:
        trims = Trims(world)
        assert not trims.dropped("a", LOG[0], 0.0)
        trims._note("a", 3, counts=True)
        assert [trims.dropped("a", record, world.now) for record in LOG] == [True, True, False, False]
        assert not trims.dropped("a", LOG[0], world.now - 1.0)
        assert not trims.dropped("b", LOG[0], world.now)
        assert world.counts[TRIM] == 1


def test_a_group_does_not_find_the_position_trimmed_that_it_has_committed() -> None:
    with World(1) as world:
        history = History(lambda: world.now, pytest.fail)
        setting = Setting("", history, (), lambda who, text: None)
        member = Member("member", world.host("beta"), setting, random.Random(1), GroupPlan(()))
        member._check_held(PositionTrimmed("2:23 of 'a'"))
        world.run(2 * HELD_SECONDS)
        member._check_held(PositionTrimmed("2:24 of 'a'"))
        assert world.failure is None
        member._check_held(PositionTrimmed("2:23 of 'a'"))
        assert "a group holds what it has not processed" in (world.failure or "")


def test_something_holds_data_in_each_seed_with_retention() -> None:
    choose = random.Random(1)
    assert retained(["relay", "group"], choose) == ["group", "retention"]
    assert retained(["reader", "cursors"], choose) == ["reader", "cursors", "retention"]
    added = {tuple(retained(["reader", "sink"], choose)) for _ in range(20)}
    assert added == {("reader", "group", "retention"), ("reader", "cursors", "retention")}


def test_the_archive_has_what_is_before_the_first_record() -> None:
    assert before(LOG, LOG[2]) == LOG[:2]
    assert before([], LOG[2]) == []


@pytest.mark.parametrize("kind", ["embedded", "cluster"])
def test_a_seed_with_retention_drops_something_and_loses_nothing(kind: str) -> None:
    outcome = run_seed(3, kind, Size(2, 15, 3, 10.0), part=Part(roles=("reader", "cursors", "group", "retention")))
    assert outcome.finding == ""
    assert outcome.counts[TRIM] > 0
