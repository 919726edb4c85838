"""The log of a member of a pair that is alone: everything that its journal has is committed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from log_history import DIRECTORY, Life, State

from broker_io.environment import Environment
from broker_io.filelog.log.broker import FileBroker
from broker_io.filelog.log.layout import Options
from broker_io.filelog.log.log import FileLog
from broker_io.filelog.log.numbers import NumberedOperation
from broker_io.filelog.log.operations import decode_operations, encode_operations, epoch_operations
from broker_io.filelog.log.records import Kind, Mark, make_record
from broker_io.filelog.log.recovery import OpenedLog, open_log
from broker_io.testing import SeededRandomness, SimulatedClock, SimulatedDisk

STORE = b"a store"


class AloneReplicator:
    """Commits each record once the only store has synced it."""

    def __init__(self, log: FileLog, epoch: int) -> None:
        self.log, self.epoch = log, epoch
        self.commit_index = log.journal.end.lsn

    def commit(self, operations: Sequence[NumberedOperation], kind: Kind = Kind.DATA) -> Mark:
        journal = self.log.journal
        content = b"".join(encode_operations(operations))
        record = make_record(journal.end, self.epoch, self.commit_index, content, kind)
        with self.log.guard(journal.path, midway=True):
            journal.write([record], journal.end.lsn)
            self.commit_index = record.lsn
            journal.note_commit(record.lsn)
        return record.mark

    def applied(self, mark: Mark) -> None:
        assert mark.lsn == self.commit_index

    def may_answer(self) -> bool:
        return True


SMALL = Options(segment_bytes=700, journal_bytes=2_500, compacted_prefix="")


def opened_member(environment: Environment) -> OpenedLog:
    """The engine of a member, which is made one if it is not; nothing after the mark of its manifest is applied."""
    opened = open_log(environment, DIRECTORY, SMALL, member=True)
    if not opened.log.manifest.is_member:
        opened.log.found(STORE, b"pair")
    return opened


def promote(opened: OpenedLog, jump: int = 0) -> None:
    """Apply all that a member has, and begin an epoch; a forced one, if there is a jump."""
    log, found = opened.log, opened.found
    records = found.records if found is not None and found.end == log.journal.end else []
    for record in records:
        if record.lsn > log.manifest.mark.lsn:
            log.apply(decode_operations(record.content), record.lsn)
            log.applied = record.mark
    log.replicator = replicator = AloneReplicator(log, log.journal.end.epoch + 1)
    operations = epoch_operations(
        log.manifest._replace(topics=tuple([topic.entry for topic in log.all_topics()])), log.numbers(), jump
    )
    mark = replicator.commit(operations, Kind.FORCED if jump else Kind.EPOCH)
    log.apply(operations, mark.lsn)
    log.applied = mark


def open_member(disk: SimulatedDisk, clock: SimulatedClock | None = None, seed: int = 0) -> FileBroker:
    """A member that is live alone."""
    environment = Environment(clock or SimulatedClock(), disk, SeededRandomness(seed))
    opened = opened_member(environment)
    promote(opened)
    return FileBroker(environment, DIRECTORY, SMALL, committer=False, opened=opened)


class MemberLife(Life):
    """A life of a member; `earlier` is the state before the last change, which is all that a reader may know of."""

    earlier: State | None = None

    def open(self) -> None:
        self.opened += 1
        self.broker = open_member(self.disk, self.clock, self.opened)
        self.is_open = True

    def _change(self, after: State, action: Callable[[], None]) -> None:
        before = self.state
        super()._change(after, action)
        self.earlier = before
