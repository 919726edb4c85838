"""The ledger in which the log continues after the applied position, if the ledgers prove it."""

from __future__ import annotations

import pytest

from broker_io.port import Ledger
from broker_io.position import Position
from txnbuffer.recovery.codec import UNKNOWN_LEDGER
from txnbuffer.recovery.followed_topic import _following

LEDGERS = [Ledger(3, 5, 100, closed=True), Ledger(7, 2, 100, closed=False)]


@pytest.mark.parametrize(
    ("applied", "following"),
    [
        (Position(3, 4), 7),
        (Position(3, 3), UNKNOWN_LEDGER),
        (Position(7, 1), UNKNOWN_LEDGER),
        (Position(3, 4, 2), UNKNOWN_LEDGER),  # perhaps not the last member of its set
        (Position(2, 4), UNKNOWN_LEDGER),
        (None, UNKNOWN_LEDGER),
    ],
)
def test_the_next_ledger_is_known_only_after_a_whole_one(applied: Position | None, following: int) -> None:
    assert _following(applied, LEDGERS) == following


def test_a_ledger_that_may_give_place_to_another_is_not_the_next_one() -> None:
    """Pulsar replaces an empty ledger when it loads the topic; then nothing would prove where the log continues."""
    open_one = Ledger(7, 0, 0, closed=False, lasting=False)
    assert _following(Position(3, 4), [LEDGERS[0], open_one]) == UNKNOWN_LEDGER
    assert _following(Position(3, 4), [LEDGERS[0], Ledger(9, 1, 10, closed=False)]) == 9
