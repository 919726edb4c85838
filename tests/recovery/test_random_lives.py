"""Random lives of owners: whatever they do and wherever they stop, their snapshots agree with the log."""

from hypothesis import example, given
from hypothesis import strategies as st
from recovery.owner_life import KINDS, Life, T
from snapshot_driver import assert_true

from txnbuffer.recovery.restore import load

steps = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5)), max_size=40)


@given(steps)
@example([("roll", 0), ("snapshot", 0), ("trim", 1), ("begin", 0), ("snapshot", 0)])  # all that is numbered is gone
def test_snapshots_always_lead_to_what_the_log_says(life):
    one = Life()
    for step, number in life:
        one.do(step, number)
    one.owner.pump()
    if not one.trimmed:
        assert_true(one.owner, one.broker, T)
    before = one.owner.buffer(T).snapshot_state(), one.owner.buffer(T).aborted.ids()
    successor = one.new_owner()
    assert successor.problems == {}
    assert successor.notes == []
    after = successor.buffer(T).snapshot_state(), successor.buffer(T).aborted.ids()
    assert set(before[1]) <= set(after[1])  # what trimmed ledgers needed may be dropped only later
    if not one.trimmed:
        assert after[0].differences(before[0]) == []
    assert successor.followed(T).numbered.next_seqno == one.owner.followed(T).numbered.next_seqno
    loaded = load(one.broker, T)
    assert set(loaded.buffer.aborted.ids()) <= set(after[1])
