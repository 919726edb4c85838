import pytest

from txnbuffer.recovery.followed_topic import ASSUMED_REPLAY_RATE, SnapshotDue, SnapshotPolicy


def account(**policy):
    return SnapshotDue(SnapshotPolicy(**policy), since=100.0)


def test_nothing_applied_is_never_due():
    assert not account().due(1e9)


def test_due_at_the_thousandth_change():
    due = account()
    due.applied(messages=999, changes=999)
    assert not due.due(100.0)
    due.applied(messages=1, changes=1)
    assert due.due(100.0)


def test_due_after_five_seconds_with_any_message():
    due = account()
    due.applied(messages=1, changes=0)
    assert not due.due(104.999)
    assert due.due(105.0)


def test_due_when_a_replay_would_take_too_long():
    due = account(interval_ms=10**9, recovery_target=0.5)
    due.applied(messages=int(ASSUMED_REPLAY_RATE / 2) - 1, changes=0)
    assert not due.due(100.0)
    due.applied(messages=1, changes=0)
    assert due.due(100.0)


def test_the_measured_replay_rate_decides():
    due = account(interval_ms=10**9)
    for _ in range(50):
        due.measured(messages=10_000, seconds=1.0)
    assert due.replay_rate == pytest.approx(10_000, rel=0.01)
    due.applied(messages=10_100, changes=0)
    assert due.due(100.0)


def test_a_replay_too_short_to_measure_changes_no_rate():
    due = account()
    due.measured(messages=999, seconds=10.0)
    due.measured(messages=10_000, seconds=0.0)
    assert due.replay_rate == ASSUMED_REPLAY_RATE


def test_only_what_a_snapshot_covers_is_settled():
    due = account()
    due.applied(messages=1500, changes=1500)
    due.written(110.0, messages=1400, changes=1400)
    assert not due.due(110.0)
    assert due.due(115.0)
    due.applied(messages=900, changes=900)
    assert due.due(110.0)


def test_a_snapshot_that_failed_settles_nothing():
    due = account()
    due.applied(messages=1000, changes=1000)
    assert due.due(100.0)
    assert due.due(100.0)
