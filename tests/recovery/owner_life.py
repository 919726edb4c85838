"""The life of an owner of one topic, and of the topic's writers, step by step."""

import contextlib

from snapshot_driver import SMALL, manager_on
from writing import TopicWriter

from broker_io.errors import DiskFailed
from broker_io.memory import MemoryBroker
from snapshots.errors import OwnershipLost
from snapshots.format import SNAPSHOT_TOPIC

T = "t"

KINDS = ["begin", "end", "end", "abort", "plain", "again", "lwm", "roll", "pump", "snapshot", "snapshot", "fault"]
KINDS += ["restart", "crash", "rival", "compact", "trim"]


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
