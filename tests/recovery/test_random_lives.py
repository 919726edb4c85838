"""Random lives of owners: whatever they do and wherever they stop, their snapshots agree with the log."""

import contextlib

from hypothesis import example, given
from hypothesis import strategies as st
from snapshot_driver import SMALL, assert_true, manager_on
from writing import TopicWriter

from broker_io.errors import DiskFailed
from broker_io.memory import MemoryBroker
from snapshots.errors import OwnershipLost
from snapshots.format import SNAPSHOT_TOPIC
from txnbuffer.recovery.restore import load

T = "t"

KINDS = ["begin", "end", "end", "abort", "plain", "again", "lwm", "roll", "pump", "snapshot", "snapshot", "fault"]
KINDS += ["restart", "crash", "rival", "compact", "trim"]
steps = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5)), max_size=40)


class Life:
    def __init__(self):
        self.broker = MemoryBroker(ledger_entries=7)
        self.owner = self.new_owner()
        self.owner.register(T)
        self.writer = TopicWriter(self.broker, T)
        self.writer.plain("p")
        self.open = []
        self.next_id = 1
        self.trimmed = False

    def new_owner(self):
        self.broker.faults.appends.clear()
        return manager_on(self.broker, max_entry_bytes=SMALL)

    def do(self, step, number):
        try:
            getattr(self, step)(number)
        except (OwnershipLost, DiskFailed):
            # A fault hit the settling of another one: the last epoch is unknown, so this owner is replaced.
            self.owner = self.new_owner()

    def _begin(self):
        self.next_id += 1
        self.writer.records(self.next_id, "x")
        return self.next_id

    def begin(self, number):
        self.open.append(self._begin())

    def end(self, number):
        if self.open:
            txn = self.open.pop(number % len(self.open))
            (self.writer.commit if number % 2 else self.writer.abort)(txn)

    def abort(self, number):
        self.writer.abort(*[self._begin() for _ in range(number + 1)])

    def plain(self, number):
        self.writer.plain(*["p"] * (number + 1))

    def again(self, number):
        """A record once more, late or a duplicate."""
        if self.next_id > 1:
            self.writer.records(max(2, self.next_id - number), "x", first_seq=1)

    def lwm(self, number):
        self.writer.low_water_mark = min([*self.open, self.next_id + 1]) - 1

    def roll(self, number):
        self.broker.roll(T)

    def pump(self, number):
        self.owner.pump()

    def snapshot(self, number):
        self.owner.pump()
        self.owner.snapshot(T)

    def fault(self, number):
        """A snapshot that fails after some of its messages were written, at once or at a later step of it."""
        self.owner.pump()
        self.broker.faults.fail_append(DiskFailed("the disk is gone"), written=number, topic=SNAPSHOT_TOPIC)
        with contextlib.suppress(DiskFailed):
            self.owner.snapshot(T)

    def restart(self, number):
        self.owner.close()
        self.owner = self.new_owner()

    def crash(self, number):
        self.owner = self.new_owner()

    def rival(self, number):
        rival = self.new_owner()
        try:
            self.owner.snapshot(T)
        except OwnershipLost:
            self.owner = rival
        else:
            raise AssertionError("a fenced owner wrote")

    def compact(self, number):
        self.broker.compact(SNAPSHOT_TOPIC)

    def trim(self, number):
        self.owner.pump()
        ledgers = self.broker.ledgers(T)
        self.owner.trim(T, ledgers[number % len(ledgers)].ledger)
        self.trimmed = self.broker.ledgers(T)[0].ledger != ledgers[0].ledger or self.trimmed


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
