"""The checker finds each kind of violation."""

from __future__ import annotations

import asyncio
import random
from typing import Any
from unittest.mock import AsyncMock

import pytest
from sim.apps import Setting, Writer
from sim.checker import violations
from sim.history import Attempt, Fate, Following, History, Shown
from sim.rules_roles import processed
from sim.world import World

from broker_io.errors import Error, ServiceUnavailable
from txnbuffer.errors import SendUnknown
from txnbuffer.model import Position, TxnId


def records(*values: bytes) -> list[Shown]:
    return [Shown(number + 1, b"k", value, Position(1, number)) for number, value in enumerate(values)]


class Case:
    """A history of transactions, each with a record on two topics, and what is left of them."""

    def __init__(self) -> None:
        self.reported: list[str] = []
        self.now = 0.0
        self.history = History(lambda: self.now, self.reported.append)

    def attempt(self, fate: Fate, *values: bytes, topics: str = "ab", **options: Any) -> Attempt:
        attempt = self.history.attempt("app", **options)
        for value in values:
            for topic in topics:
                self.now += 1.0
                self.history.sent(attempt, topic, topic.encode() + value)
        self.history.ended(attempt, fate)
        return attempt

    def found(self, a: list[Shown], b: list[Shown]) -> str:
        return "\n".join(violations(self.history, {"a": a, "b": b}))


def test_what_is_as_it_should_be_is_no_violation() -> None:
    case = Case()
    case.attempt(Fate.COMMITTED, b"1", b"2")
    case.attempt(Fate.ABORTED, b"3")
    case.attempt(Fate.ASKED, b"4")
    case.attempt(Fate.OPEN, b"5")
    case.attempt(Fate.ABORTED, b"6", producer=("name", 1))
    case.attempt(Fate.COMMITTED, b"6", producer=("name", 1))
    reading = case.history.reading("reader", "a")
    reading.records += records(b"a1", b"a2")
    assert case.found(records(b"a1", b"a2", b"a6"), records(b"b1", b"b2", b"b6")) == ""


def test_an_id_that_comes_back_is_found() -> None:
    case = Case()
    for number, fate in enumerate((Fate.LOST, Fate.COMMITTED, Fate.OPEN)):
        case.attempt(fate, b"%d" % number).txn = TxnId(0, 7 + number // 2)
    found = case.found(records(b"a1"), records(b"b1"))
    assert "app's 0:7 (committed) and app's 0:7 (lost) have one id" in found
    assert found.count("one id") == 1


@pytest.mark.parametrize(
    ("fates", "a", "b", "text"),
    [
        ([Fate.COMMITTED], [b"a0"], [], "and the topics have"),
        ([Fate.ASKED], [], [b"b0"], "in part"),
        ([Fate.ABORTED], [b"a0"], [b"b0"], "must not be visible"),
        ([Fate.OPEN], [b"a0"], [b"b0"], "must not be visible"),
        ([Fate.COMMITTED], [b"a0", b"a0"], [b"b0"], "2 times"),
        ([Fate.COMMITTED, Fate.COMMITTED], [b"a1", b"a0"], [b"b0", b"b1"], "began after its commit"),
    ],
)
def test_a_log_that_contradicts_the_answers_is_found(fates: list[Fate], a: Any, b: Any, text: str) -> None:
    case = Case()
    for number, fate in enumerate(fates):
        case.attempt(fate, b"%d" % number)
    assert text in case.found(records(*a), records(*b))


def test_records_out_of_their_order_are_found() -> None:
    case = Case()
    case.attempt(Fate.COMMITTED, b"1", b"2", topics="a")
    assert "and the topics have" in case.found(records(b"a2", b"a1"), [])


def test_wrong_numbers_and_positions_are_found() -> None:
    case = Case()
    case.attempt(Fate.COMMITTED, b"1", b"2", topics="a")
    first, second = records(b"a1", b"a2")
    assert "seqnos" in case.found([first, second._replace(seqno=3)], [])
    unnumbered = [first._replace(seqno=None), second._replace(seqno=None)]
    assert "seqnos" not in case.found(unnumbered, [])
    case.history.numbered = True
    assert "seqnos" in case.found(unnumbered, [])
    assert "do not grow" in case.found([first, second._replace(position=Position(1, 0))], [])


def test_what_a_reader_was_shown_is_compared() -> None:
    case = Case()
    case.attempt(Fate.COMMITTED, b"1", b"2", topics="a")
    reading = case.history.reading("reader", "a")
    reading.records += records(b"a2")
    assert "was shown" in case.found(records(b"a1", b"a2"), [])


def test_what_a_stream_left_out_is_found() -> None:
    case = Case()
    case.attempt(Fate.COMMITTED, b"1", b"2", topics="a")
    final = [Shown(1, b"k", b"a1"), Shown(2, b"l", b"a2")]
    following = Following("follower", "a", 2, changes={2: final[1]})
    case.history.followings.append(following)
    assert "lacks" in case.found(final, [])
    following.changes[1] = final[0]
    assert case.found(final, []) == ""
    following.changes[1] = Shown(1, b"k", b"other")
    assert "was shown" in case.found(final, [])


def test_what_a_stream_lacked_for_a_while_is_found() -> None:
    case = Case()
    case.attempt(Fate.COMMITTED, b"1", b"2", b"3", topics="a")
    final = [Shown(1, b"k", b"a1"), Shown(2, b"k", b"a2"), Shown(3, b"k", b"a3")]
    following = Following("follower", "a", 2, changes={1: final[0]})
    case.history.followings.append(following)
    following.note_state()
    following.changes[3], following.seqno = final[2], 3
    assert "at seqno 2" in case.found(final, [])
    following.rolled_back(1)
    following.note_state()
    following.changes[3], following.seqno = final[2], 3
    assert case.found(final, []) == ""


def test_what_a_group_left_out_or_did_twice_is_found() -> None:
    case = Case()
    case.attempt(Fate.COMMITTED, b"1", b"2", topics="a")
    for source in (b"a1", b"a2"):
        case.history.derive(source, b">" + source)
    final, poison = records(b"a1", b"a2"), records(b"a1", b"a2", b"a3")

    def found(source: list[Shown], results: list[Shown], rejects: list[Shown]) -> str:
        def kind(value: bytes) -> str:
            return "reject" if value == b"a3" else "result"

        return "\n".join(processed({"a": source}, results, rejects, case.history.source, kind))

    assert found(final, records(b">a1", b">a2"), []) == ""
    assert "made no result of [b'a2']" in found(final, records(b">a1"), [])
    assert "too many of [b'a2']" in found(final[:1], records(b">a1", b">a2"), [])
    assert "the results of a are [b'a2', b'a1']" in found(final, records(b">a2", b">a1"), [])
    assert found(poison, records(b">a1", b">a2"), records(b"a3")) == ""
    assert "made no reject of [b'a3']" in found(poison, records(b">a1", b">a2"), [])


def test_a_decided_position_that_goes_back_is_found() -> None:
    case = Case()
    reading = case.history.reading("reader", "a")
    reading.records += records(b"a1", b"a2")
    case.history.decided(reading, Position(1, 5))
    assert case.reported == []
    case.history.decided(reading, Position(1, 4))
    assert "decided up to" in case.reported[0]


def test_a_record_that_nobody_asked_to_commit_must_not_be_shown() -> None:
    case = Case()
    case.attempt(Fate.OPEN, b"1", topics="a")
    case.history.shown("reader", "a", records(b"a1"))
    assert "was shown" in case.reported[0]


def test_a_record_that_a_group_handled_twice_is_a_lost_update() -> None:
    case = Case()
    case.attempt(Fate.COMMITTED, b"1", topics="a")
    case.history.derive(b"a1", b">a1")
    assert "anomaly" not in case.found(records(b"a1"), records(b">a1"))
    assert "anomaly G-single" in case.found(records(b"a1"), records(b">a1", b">a1"))


def test_the_last_reader_of_an_aborted_transaction_is_an_anomaly() -> None:
    case = Case()
    case.attempt(Fate.ABORTED, b"1", topics="a")
    assert "anomaly" not in case.found([], [])
    assert "anomaly G1a of the reader at the end, app's send (aborted) by a read" in case.found(records(b"a1"), [])


def test_a_commit_that_was_requested_after_all_before_it_was_decided_is_found() -> None:
    case = Case()
    early, late = (case.history.attempt("app") for _ in range(2))
    for now, attempt in ((1.0, early), (3.0, late)):
        case.now = now
        case.history.sent(attempt, "a", b"a%d" % now)
        case.history.asked(attempt)
        case.history.ended(attempt, Fate.COMMITTED)
    final = records(b"a1", b"a3")
    case.now = 2.0
    case.history.shown("reader", "a", final[:1])
    assert case.found(final, []) == ""
    case.history.decided(case.history.reading("second reader", "a"), Position(1, 1))
    assert "after second reader knew" in case.found(final, [])


def test_an_epoch_that_two_lives_of_a_service_have_is_found() -> None:
    case = Case()
    for shard, epoch, process in ((0, 1, "alpha#1"), (1, 1, "omega#2"), (0, 3, "omega#4"), (0, 2, "alpha#3")):
        case.history.took_over(shard, epoch, process)
    assert case.reported == []
    case.history.took_over(0, 3, "alpha#5")
    assert case.reported == ["alpha#5 owns shard 0 in epoch 3, as omega#4 did"]


@pytest.mark.parametrize(("error", "text"), [(ServiceUnavailable(), "must not be visible"), (SendUnknown(), "")])
def test_only_a_send_whose_outcome_is_unknown_may_be_there_after_an_error(error: Error, text: str) -> None:
    with World(1) as world:
        history = History(lambda: world.now, pytest.fail)
        setting = Setting("", history, ("a",), lambda who, text: None)
        writer = Writer("writer", world.host("beta"), setting, random.Random(1), 1)
        asyncio.run(writer._send(AsyncMock(send=AsyncMock(side_effect=error))))
    found = "\n".join(violations(history, {"a": records(b"writer.1")}))
    assert text in found
    assert bool(found) == bool(text)
