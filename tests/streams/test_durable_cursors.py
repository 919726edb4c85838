"""Durable cursors: valid positions, and what they keep."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnbuffer.errors import ForeignToken, InvalidRequest, SeqnoOutOfRange, StreamBranched
from txnbuffer.streams.failover import FailoverLog, ResumeToken, Version
from txnbuffer.streams.server import TopicInfo, acknowledged, check_cursor_name, first_needed

OLD, NEW = Version(7, 0), Version(9, 50)
FACTS = TopicInfo("c", "i", FailoverLog((NEW, OLD)), 80)


def token(seqno: int, *versions: Version, topic: str = "t", cluster: str = "c", incarnation: str = "i") -> ResumeToken:
    return ResumeToken(topic, cluster, incarnation, versions, seqno, seqno, seqno)


@pytest.mark.parametrize("at", [0, 80, token(0), token(50, OLD), token(80, NEW, OLD), token(20, NEW, OLD)])
def test_a_seqno_or_a_token_of_this_history_is_acknowledged(at: int | ResumeToken) -> None:
    assert acknowledged(at, "t", FACTS) == (at if isinstance(at, int) else at.seqno)


def test_inside_a_snapshot_everything_after_its_start_is_needed() -> None:
    assert acknowledged(ResumeToken("t", "c", "i", (NEW, OLD), 60, 55, 70), "t", FACTS) == 60


@pytest.mark.parametrize(
    ("at", "error"),
    [
        (-1, SeqnoOutOfRange),
        (81, SeqnoOutOfRange),
        (token(90, NEW, OLD), StreamBranched),
        (token(51, OLD), StreamBranched),
        (token(10, Version(8, 0)), StreamBranched),
        (token(10, OLD, topic="other"), ForeignToken),
        (token(10, OLD, cluster="other"), ForeignToken),
        (token(10, OLD, incarnation="other"), ForeignToken),
    ],
)
def test_positions_of_another_history_are_rejected(at: int | ResumeToken, error: type[Exception]) -> None:
    with pytest.raises(error):
        acknowledged(at, "t", FACTS)


@pytest.mark.parametrize("name", ["", "x" * 201, "ä" * 101, "a\nb", 5, None])
def test_invalid_names_are_rejected(name: object) -> None:
    with pytest.raises(InvalidRequest):
        check_cursor_name(name)
    assert check_cursor_name("x" * 200) == "x" * 200


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), max_size=8), st.integers(0, 40))
def test_the_first_ledger_kept_has_the_next_record(steps: list[tuple[int, int]], seqno: int) -> None:
    """Against a list of the ledgers of visible records; an empty ledger has the seqno of the next record."""
    firsts: dict[int, int] = {}
    where: dict[int, int] = {}
    ledger, following = 0, 1
    for gap, records in steps:
        ledger += gap
        firsts[ledger] = following
        where |= dict.fromkeys(range(following, following + records), ledger)
        following += records
    needed = first_needed(seqno, firsts)
    if not firsts:
        assert needed is None
        return
    assert needed is not None
    ahead = [where[one] for one in where if one > seqno]
    assert all(needed <= one for one in ahead)
    behind = [one for one in firsts if one < needed]
    assert all(where[one] >= needed for one in where if one > seqno)
    if ahead:
        assert needed == min(ahead)
    else:
        assert needed == max(firsts)
    assert behind == [] or firsts[needed] <= seqno + 1
