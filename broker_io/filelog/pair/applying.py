"""Applying committed records in lanes: different topics in parallel, each in the order of its numbers"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from broker_io.environment import Environment, Threads
from broker_io.errors import StorageError
from broker_io.filelog.log.journal_chain import record_damage
from broker_io.filelog.log.layout import MIB
from broker_io.filelog.log.log import FileLog
from broker_io.filelog.log.numbers import Lanes, NumberedOperation, ObjectNumbers
from broker_io.filelog.log.operations import SwapFiles, decode_operations
from broker_io.filelog.log.records import Fork, Kind, Mark
from broker_io.filelog.pair.prepared import PreparedFiles

APPLY_BYTES = 8 * MIB
"""Bytes of records that are read before they are applied."""


Apply: TypeAlias = Callable[[Sequence[NumberedOperation]], None]


class LaneThreads:
    """As many threads as there are lanes, of which one is the caller's."""

    def __init__(self, threads: Threads, lanes: int, name: str) -> None:
        self._changed = threads.condition()
        self._apply: Apply = lambda _: None
        self._lanes: Lanes | None = None
        self.running = 0
        self._error: BaseException | None = None
        self._closed = False
        self._workers = [
            threads.thread(self._work, name=f"lane {number} of {name}", daemon=True) for number in range(1, lanes)
        ]
        for worker in self._workers:
            worker.start()

    def run(self, lanes: Lanes, apply: Apply) -> None:
        """Apply everything that was added to the lanes; `apply` gets the operations that a lane takes at once.

        Raises what `apply` raised first; what it was to apply is then still in the lanes.
        """
        with self._changed:
            self._lanes, self._apply, self._error = lanes, apply, None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready() or not self.running)
                if not self._ready():
                    break
            self._apply_next(caller=True)
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _ready(self) -> bool:
        return self._lanes is not None and self._error is None and self._lanes.ready

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready() or self._closed)
                if self._closed:
                    return
            self._apply_next(caller=False)

    def _apply_next(self, *, caller: bool) -> None:
        with self._changed:
            lanes = self._lanes
            if lanes is None or not self._ready():
                return  # another thread was faster
            taken = lanes.take()
            self.running += 1
            if self._ready():
                self._changed.notify_all()
        error: BaseException | None = None
        try:
            self._apply([operation for _, operation in taken])
        except BaseException as raised:
            error = raised
        with self._changed:
            if error is None:
                lanes.done(taken)
            else:
                lanes.give_back(taken)
                self._error = self._error or error
            self.running -= 1
            if self._ready() or not (self.running or caller):
                self._changed.notify_all()

    def close(self) -> None:
        """End the threads; nothing runs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for worker in self._workers:
            worker.join()


class Applier:
    """Applies the records of a store's journal. One call at a time, and none while the engine does so by itself."""

    def __init__(self, environment: Environment, directory: str, lanes: int, prepared: PreparedFiles) -> None:
        self._count = lanes
        self._prepared = prepared
        self._log: FileLog | None = None
        self._lanes = Lanes(lanes, ObjectNumbers(), 0)
        self._numbers = self._known = ObjectNumbers()
        self._added: dict[int, Mark] = {}
        self._committed = 0
        self._threads = LaneThreads(environment.threads, lanes, directory)

    @property
    def busy(self) -> int:
        """How many lanes apply something now."""
        return self._threads.running

    def forget(self) -> None:
        """Forget what was added and is not applied."""
        self._log = None

    def close(self) -> None:
        self._threads.close()

    def apply(self, log: FileLog, lsn: int) -> None:
        """Apply the records up to an lsn, which are committed.

        Raises PeerError and TopicNotFound if a prepared file can't be fetched; the call may be repeated. Raises
        DiskFailed and StorageError.
        """
        log.check()
        if log.journal.end.lsn < lsn:
            raise StorageError(f"the journal ends at record {log.journal.end.lsn} before {lsn}: open the log again")
        if self._log is not log or self._lanes.applied != log.applied.lsn:
            self._begin(log)
        while log.applied.lsn < lsn:
            fork = self._add(log, lsn)
            self._committed = lsn
            try:
                self._threads.run(self._lanes, partial(self._apply_group, log))
            finally:
                self._note_applied(log)
            if fork is not None and fork not in log.pair.forks:
                log.change_pair(forks=(*log.pair.forks, fork))  # the manifest keeps it, the journal does not
        if log.is_journal_full:
            log.checkpoint()

    def _begin(self, log: FileLog) -> None:
        """Go on after the last record that the engine has applied, by itself or before it was closed."""
        self._log, self._added = log, {}
        self._numbers, self._known = ObjectNumbers(), log.numbers()
        self._lanes = Lanes(self._count, self._numbers, log.applied.lsn)

    def _add(self, log: FileLog, lsn: int) -> Fork | None:
        """Add records from the journal up to an lsn, of a few bytes or up to one that begins a history: its fork."""
        first, size = max(self._added, default=self._lanes.applied), 0
        before = self._added.get(first, log.applied)
        for record in log.journal.read(first, lsn):
            with record_damage(log.journal.path):
                operations = decode_operations(record.content)
            self._meet(log, operations)
            self._lanes.add(record.lsn, operations)
            self._added[record.lsn] = record.mark
            size += len(record.content)
            if record.kind is Kind.FORCED:
                return Fork(record.mark.epoch, before)
            if size >= APPLY_BYTES:
                break
            before = record.mark
        return None

    def _meet(self, log: FileLog, operations: Sequence[NumberedOperation]) -> None:
        """Note the number of the first operation of each object, which the engine may have applied before it closed.

        Raises StorageError if operations before it are missing.
        """
        known, numbers = self._known, self._numbers
        for _, topic, number, manifest, _ in operations:
            if manifest and not numbers.manifest:
                if manifest > known.manifest + 1:
                    raise StorageError(f"operation {manifest} of the manifest follows {known.manifest}: copy the log")
                numbers.manifest = manifest - 1
            if topic and topic not in numbers.topics:
                if log.current(topic) is not None and number > known.topics.get(topic, 0) + 1:
                    raise StorageError(f"operation {number} of topic {topic} follows others that are missing: copy it")
                numbers.topics[topic] = number - 1

    def _apply_group(self, log: FileLog, operations: Sequence[NumberedOperation]) -> None:
        """Apply what a lane has taken."""
        for operation in operations:
            if isinstance(operation.body, SwapFiles):
                self._prepared.ensure(operation.body.prepared)
        log.apply(operations, self._committed)
        if operations[0].manifest:
            self._prepared.update(log.pair.prepared)

    def _note_applied(self, log: FileLog) -> None:
        lsn = self._lanes.applied
        if lsn in self._added:
            log.applied = self._added[lsn]
            self._added = {each: mark for each, mark in self._added.items() if each > lsn}
