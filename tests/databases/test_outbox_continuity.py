"""Which tables may be published to which logs: each history has its answer."""

from __future__ import annotations

import pytest

from txnbuffer.databases.continuity import LogState, TableState, check_continuity
from txnbuffer.errors import ForeignOutbox

TABLE = TableState("a1", "system 1", "system 1", last_id=20, published=10)


@pytest.mark.parametrize(
    ("table", "log"),
    [
        (TABLE._replace(published=0), LogState(None, 0)),  # new
        (TABLE, LogState("a1", 10)),
        (TABLE, LogState("a1", 15)),  # killed before housekeeping
        (TABLE, LogState("a1", 20)),
    ],
)
def test_a_table_continues(table: TableState, log: LogState) -> None:
    check_continuity("shop", table, log)


@pytest.mark.parametrize(
    ("table", "log", "why"),
    [
        (TABLE._replace(here="system 2"), LogState("a1", 15), "a copy"),
        (TABLE, LogState("b2", 15), "is new, or belongs to another"),
        (TABLE, LogState("a1", 21), "restored to an older state"),
        (TABLE, LogState("a1", 9), "the log has them up to 9 only"),
        (TABLE, LogState(None, 0), "the log has them up to 0 only"),
        (TABLE, LogState(None, 15), "does not say of which table"),
    ],
)
def test_a_table_that_does_not_belong_to_the_log_is_refused(table: TableState, log: LogState, why: str) -> None:
    with pytest.raises(ForeignOutbox, match=why) as caught:
        check_continuity("shop", table, log)
    assert "txnbuf outbox adopt" in str(caught.value)
