"""The engine of the embedded log: appends in, positions out, everything durable; no threads, no waiting.

A flush turns all pending appends into blocks, writes the blocks of all topics as one record of the journal, syncs the
journal, writes the blocks to their segments, and acknowledges the appends. So a segment never shows what is not
durable, and one sync serves all topics. A checkpoint syncs the segments, starts an empty journal and names it in a new
manifest.

The first failed write or sync stops the engine. A failed sync may have dropped what it should have written, so nothing
is retried; recovery at the next open determines what is durable.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from operator import attrgetter
from typing import Any

from broker_io.environment import Environment
from broker_io.errors import (
    AppendUnknown,
    CallerError,
    Damaged,
    DiskFailed,
    DiskWatermark,
    NotLive,
    TooManyFiles,
    TopicNotFound,
    disk_error,
    disk_failure,
    out_of_files,
)
from broker_io.filelog.log import layout
from broker_io.filelog.log.commit import (
    FileTopic,
    LedgerCommit,
    PendingUnit,
    Replicator,
    Watermark,
    admitted,
    fail_units,
    plan_commits,
)
from broker_io.filelog.log.damage import DamageRecord
from broker_io.filelog.log.journal import FILE_HEAD_BYTES
from broker_io.filelog.log.journal_chain import Journal, record_damage
from broker_io.filelog.log.layout import (
    ALONE,
    MIB,
    LedgerEntry,
    Lock,
    Manifest,
    Options,
    PairEntry,
    TopicEntry,
    TopicTexts,
    replace_manifest,
)
from broker_io.filelog.log.numbers import Change, NumberedOperation, ObjectNumbers
from broker_io.filelog.log.operations import (
    AppendBlocks,
    DeleteTopic,
    MakeTopic,
    PrepareFiles,
    RollTopic,
    SetPolicy,
    SwapFiles,
    TrimTopic,
    encode_operations,
)
from broker_io.filelog.log.records import FOUNDED_EMPTY, START, Mark, Store
from broker_io.filelog.log.redo import LogPlan, grown_ledger, planned
from broker_io.filelog.log.segment import Segment

FLUSH_BYTES = 16 * MIB
"""Bytes of appends in one flush, at most, approximately."""
APPEND_BYTES = 1024
"""Memory that one more append takes besides its content."""
OPEN_SEGMENTS = 256
"""Segment files that are kept open."""

_OPERATION = attrgetter("operation")
_REFUSALS = (DiskFailed, TooManyFiles, DiskWatermark, NotLive, AppendUnknown)
"""Why appends and changes are not done, or not known to be; all else is a defect."""
_STOPPED = "the log has stopped until it is opened again; nothing acknowledged is lost"
_REMEDY = "repair the disk or free space"
_UNLOCKED = (
    "its lock file was removed, so the log has stopped: make sure that no other process owns it, then open it again"
)


class FileLog:
    """All topics of one directory. Calls come from one thread at a time, unless they say something else."""

    def __init__(
        self,
        environment: Environment,
        directory: str,
        options: Options,
        manifest: Manifest,
        journal: Journal,
        lock: Lock,
    ) -> None:
        self.failure: DiskFailed | None = None
        self.pending: deque[PendingUnit] = deque()
        self.pending_bytes = 0
        self.journal = journal
        self.applied = manifest.mark
        """The mark of the last record that is applied as a whole."""
        self.replicator: Replicator | None = None
        """Set while this log is the primary of a pair."""
        self.on_replaced: Callable[[list[str]], None] | None = None
        """Called in a member of a pair with segments that nothing needs here any more, which `remove_files` removes."""
        self.on_checkpointed: Callable[[Mark], object] = lambda _: None
        """Called with the mark of each checkpoint."""
        self.changing = environment.threads.reentrant_lock()
        """Held while records are applied, but for appends of a backup, and while anything else is changed. So another
        thread can make a checkpoint while the primary of a pair waits until a record is committed.
        """
        self.on_stopped: Callable[[DiskFailed], object] = lambda _: None
        """Called with what has stopped this log."""
        self.damage = DamageRecord(directory, self.current, environment.threads.lock())
        self._disk = environment.disk
        self._clock = environment.clock
        self._randomness = environment.randomness
        self._directory = directory
        self._options = options
        self._manifest = manifest
        self._texts = TopicTexts()
        self.seed = int(manifest.secret, 16)
        """The seed of the key hashes."""
        self.lock = lock
        self._topics = {entry.number: self._open_topic(entry) for entry in manifest.topics}
        self._numbers = {topic.entry.name: number for number, topic in self._topics.items()}
        self._dirty: dict[int, FileTopic] = {}
        self._watermark = Watermark(environment, directory, options.watermark_bytes)
        self._closed = False
        self._kept: list[str] | None = None
        """While a backup is written: files that the manifest does not name any more."""

    def _open_topic(self, entry: TopicEntry) -> FileTopic:
        return FileTopic(entry, entry, Segment(self._disk, self._path(entry), entry.ledgers[-1].bytes))

    def _path(self, entry: TopicEntry, ledger: LedgerEntry | None = None) -> str:
        ledger = ledger or entry.ledgers[-1]
        return layout.segment_path(self._directory, entry, ledger)

    @property
    def manifest(self) -> Manifest:
        """What is stored; topics may have grown since."""
        return self._manifest

    # --- topics ---

    def names(self) -> list[str]:
        return sorted(self._numbers)

    def topic(self, name: str) -> FileTopic:
        """Raises TopicNotFound."""
        topic = self._topics.get(self._numbers.get(name, 0))
        if topic is None:
            raise TopicNotFound(f"there is no topic {name!r} in {self._directory}: create it first")
        return topic

    def all_topics(self) -> list[FileTopic]:
        return list(self._topics.values())

    def current(self, number: int) -> TopicEntry | None:
        """The current state of a topic; None if it was deleted."""
        topic = self._topics.get(number)
        return None if topic is None else topic.entry

    def create_topics(self, names: Iterable[str]) -> None:
        """Create topics with one empty ledger each, all in one step; existing topics stay as they are."""
        missing = [name for name in dict.fromkeys(names) if name not in self._numbers]
        number, first = self._manifest.next_topic, self._manifest.next_ledger
        made = [MakeTopic(name, self._incarnation(at), first) for at, name in enumerate(missing, number)]
        self._change([(Change.MAKE, number + place, body) for place, body in enumerate(made)])

    def _incarnation(self, number: int) -> str:
        """That of a new topic; the first one has the identity of the log."""
        return self._manifest.log if number == 1 else self._randomness.token(16).hex()

    def delete_topic(self, name: str) -> None:
        entry = self.topic(name).entry
        behind = max(self._manifest.next_ledger, entry.ledgers[-1].ledger + 1)
        self._change([(Change.DELETE, entry.number, DeleteTopic(behind))])

    def roll(self, topic: FileTopic) -> None:
        """Close the open ledger and start another, unless it is empty."""
        last = topic.entry.ledgers[-1]
        if last.entries:
            self._change([(Change.ROLL, topic.entry.number, RollTopic(last.ledger + 1, last.last_time))])

    def trim(self, topic: FileTopic, first_ledger: int) -> None:
        """Drop closed ledgers below a number."""
        dropped = [ledger for ledger in topic.entry.ledgers[:-1] if ledger.ledger < first_ledger]
        if dropped:
            self._change([(Change.TRIM, topic.entry.number, TrimTopic(dropped[-1].ledger, dropped[-1].entries))])

    def set_policy(self, topic: FileTopic, body: SetPolicy) -> None:
        self._change([(Change.POLICY, topic.entry.number, body)])

    def prepare(self, topic: FileTopic, body: PrepareFiles) -> int:
        """Note files that replace closed ledgers once both members of a pair have them; their number."""
        self._change([(Change.PREPARE, topic.entry.number, body)])
        return self.pair.structures

    def swap(self, topic: FileTopic, body: SwapFiles) -> None:
        """Put rewritten ledgers in place, in one step, and remove the files of the former ones."""
        self._change([(Change.SWAP, topic.entry.number, body)])

    # --- changes of structure ---

    @property
    def pair(self) -> PairEntry:
        """What the manifest says of a pair."""
        return self._manifest.pair

    def numbers(self) -> ObjectNumbers:
        """The numbers of the last operations that are applied."""
        counts = {number: topic.entry.operations for number, topic in self._topics.items()}
        return ObjectNumbers(counts, self.pair.structures)

    def _change(self, changes: list[tuple[Change, int, object]]) -> None:
        """Change the structure in one step, by operations that are committed before in a pair."""
        if not changes:
            return
        self.check()
        if not self._manifest.is_member:
            # Only the manifest has them, and it has the appends before them later: they draw no numbers.
            self.apply([NumberedOperation(change, topic, 0, 0, body) for change, topic, body in changes])
            return
        numbers = self.numbers()
        operations = [numbers.draw(*change) for change in changes]
        mark = self._committed(operations)
        with self.changing:
            self.apply(operations, mark.lsn)
            error = self._answer(mark)
        if error is not None:
            raise error

    def _committed(self, operations: Sequence[NumberedOperation]) -> Mark:
        if self.replicator is None:
            raise NotLive(f"{self._directory} is the store of a backup: change the log through the primary of its pair")
        return self.replicator.commit(operations)

    def _answer(self, mark: Mark) -> AppendUnknown | None:
        """Note that a record is applied; the error for its clients if they may not be answered."""
        self.applied = mark
        if self.replicator is None:
            return None
        self.replicator.applied(mark)
        if self.replicator.may_answer():
            return None
        return AppendUnknown(
            f"{self._directory}: its lease ended, so the backup may lack this: start both members of the pair and stop "
            "them cleanly first"
        )

    def apply(self, operations: Sequence[NumberedOperation], lsn: int = 0) -> None:
        """Apply operations in order, which record `lsn` has and which are committed; some may be applied already.

        Several threads may apply appends to different topics, and one at a time other operations; no checkpoint may be
        made meanwhile. Raises DiskFailed, and StorageError if an operation does not follow from the state.
        """
        for is_append, group in itertools.groupby(operations, lambda operation: operation.change is Change.APPEND):
            if is_append:
                for operation in group:
                    self._apply_append(operation)
            else:
                with self.changing:
                    self._apply_structure(list(group), lsn)

    def _apply_append(self, operation: NumberedOperation) -> None:
        topic, body = self._topics.get(operation.topic), operation.body
        if operation.topic >= self._manifest.next_topic:
            raise Damaged(self.journal.path, 0, f"the journal names topic {operation.topic}, which was never created")
        if topic is None or operation.number <= topic.entry.operations or not isinstance(body, AppendBlocks):
            return
        with record_damage(self.journal.path):
            ledger, headers = grown_ledger(topic.entry, body)
        self._dirty[operation.topic] = topic
        with self.guard(topic.segment.path, midway=True):
            write = partial(topic.segment.write, body.offset, body.chunks, headers)
            if not self._manifest.is_member:
                self._retry_without_descriptors(write)
            else:
                write()  # other threads may write to the segments that would be closed
            if len(self._dirty) > OPEN_SEGMENTS:
                topic.segment.close()
        topic.entry = topic.entry.with_open(ledger)._replace(operations=operation.number)

    def _apply_structure(self, operations: list[NumberedOperation], lsn: int) -> None:
        self.check()
        with record_damage(self.journal.path):
            plan = planned(self._manifest, self.current, operations)
        with self.guard(self._directory, midway=self._manifest.is_member):
            rolled = self._make_files(plan)
            if rolled and not self._manifest.is_member:
                self._checkpoint(plan.topics)
            else:
                for topic in rolled:
                    topic.segment.sync()
                self._store(plan, lsn)
        self._take_over(plan)
        with self.guard(self._directory):
            self._remove([self._path(entry, ledger) for entry, ledger in plan.dropped])
            self._remove([layout.prepared_path(self._directory, file) for file in plan.unprepared])

    def _make_files(self, plan: LogPlan) -> list[FileTopic]:
        """Make the files of ledgers that are opened; the topics that had another one open."""
        rolled = []
        for entry, ledger in plan.opened:
            directory = layout.topic_path(self._directory, entry.number)
            if entry.number in self._topics:
                rolled.append(self._topics[entry.number])
            else:
                self._disk.make_directory(directory)
            with closing(self._disk.open(self._path(entry, ledger), write=True, create=True)) as file:
                file.truncate(0)
                file.sync()
            self._disk.sync_directory(directory)
        if len(rolled) < len(plan.opened):
            self._disk.sync_directory(layout.join(self._directory, layout.TOPICS))
            if self._manifest.next_topic == 1:
                self._disk.sync_directory(self._directory)
        return rolled

    def _store(self, plan: LogPlan, lsn: int) -> None:
        """Replace the manifest by one with a plan, which the records up to an lsn have."""
        durable = {number: plan.durable(number, topic.durable) for number, topic in self._topics.items()}
        made = {number: entry for number, entry in plan.topics.items() if number not in durable}
        topics = [entry for entry in (durable | made).values() if entry is not None]
        pair = plan.pair._replace(committed=max(plan.pair.committed, lsn))
        self._replace(topics=topics, next_topic=plan.next_topic, next_ledger=plan.next_ledger, pair=pair)

    def _take_over(self, plan: LogPlan) -> None:
        """Show what a plan has changed."""
        for number, entry in plan.topics.items():
            topic = self._topics.get(number)
            if entry is None:
                self._forget(number)
            elif topic is None:
                self._topics[number] = self._open_topic(entry)
                self._numbers[entry.name] = number
            else:
                stored = plan.durable(number, topic.durable) or entry
                if topic.segment.path != self._path(entry):
                    topic.segment.close()
                    topic.segment = Segment(self._disk, self._path(entry), 0)
                    self._dirty.pop(number, None)
                topic.entry, topic.durable = entry, stored

    def _forget(self, number: int) -> None:
        topic = self._topics.pop(number, None)
        if topic is not None:
            topic.removed = True
            del self._numbers[topic.entry.name]
            self._dirty.pop(number, None)
            topic.segment.close()

    def _remove(self, paths: list[str]) -> None:
        """Remove segments that nothing needs any more; in a member of a pair a copy may need them."""
        if self._kept is not None:
            self._kept += paths
        elif self.on_replaced is None:
            self.remove_files(paths)
        elif paths:
            self.on_replaced(paths)

    def remove_files(self, segments: Iterable[str]) -> None:
        """Remove segments and their indexes. Raises OSError."""
        for path in segments:
            self._disk.remove(path)
            self._disk.remove(layout.index_path(path))

    # --- backups ---

    def begin_backup(self) -> Manifest:
        """Make a checkpoint, and keep all files that its manifest names until `end_backup`."""
        with self.changing:
            self.checkpoint()
            self._kept = []
            return self._manifest

    def end_backup(self) -> None:
        """Remove the files that only the backup needed."""
        paths, self._kept = self._kept or [], None
        if self.failure is not None:
            return  # the next owner removes them
        with self.guard(self._directory):
            self._remove(paths)

    # --- members of a pair ---

    def found(self, store: Store, pair: bytes) -> None:
        """Make this log the first store of a pair with an id, durably.

        The mark of its journal is a random one, so that another store gets all of it, or nothing. Its lsn says whether
        the log is empty: topics need no records.
        """
        mark = self._random_mark()
        if self.names():
            mark = mark._replace(lsn=mark.lsn + FOUNDED_EMPTY)
        self._restart_journal(mark, PairEntry(store, id=pair))

    def follow(self, store: Store) -> None:
        """Make this log, which is empty, a store of a pair that others have founded, durably."""
        self._restart_journal(START, PairEntry(store))

    def leave(self) -> None:
        """Make this log, of which every record is applied, one without a pair, durably. Raises CallerError.

        The mark of its journal is a random one: it is no log of the pair any more.
        """
        if self.applied != self.journal.end:
            raise CallerError(f"{self._directory} has records that are not applied: let its pair end as primary first")
        self._restart_journal(self._random_mark(), ALONE)

    def _random_mark(self) -> Mark:
        return Mark(0, self.applied.lsn + 1, int.from_bytes(self._randomness.token(8), "little"))

    def _restart_journal(self, before: Mark, pair: PairEntry) -> None:
        """Continue with an empty journal after a mark, and with another membership."""
        self.checkpoint()
        with self.guard(self._directory, midway=True):
            self.journal.roll(before)
            number = self.journal.number
            self._replace(topics=self._durable(), journal=number, last_journal=number, mark=before, pair=pair)
            self.applied = before
            self.journal.drop(before.lsn)

    def change_pair(self, **values: Any) -> None:
        """Store what the manifest says of a pair, durably; in any thread."""
        self.check()
        with self.changing:
            self._replace(topics=self._durable(), pair=self.pair._replace(**values))

    def cut(self, lsn: int) -> None:
        """Remove the records after an lsn from the journal, durably; none of them is applied. In any thread."""
        self.check()
        last = self.journal.file_after(lsn)
        with self.changing:
            if self._manifest.last_journal > last:
                self._replace(topics=self._durable(), last_journal=last)
        with self.guard(self.journal.path, midway=True):
            self.journal.cut(lsn)

    # --- appends ---

    def submit_unit(self, unit: PendingUnit) -> None:
        """Queue a unit, whose batches are checked, for the next flush."""
        if self.failure is not None:
            unit.complete(self.failure)
        else:
            self.pending.append(unit)
            self.pending_bytes += unit.size + APPEND_BYTES * len(unit.appends)

    def take(self) -> list[PendingUnit]:
        """Take the units of the next flush, oldest first."""
        taken: list[PendingUnit] = []
        size = count = 0
        while self.pending and (not taken or size + self.pending[0].size <= FLUSH_BYTES):
            taken.append(self.pending.popleft())
            size += taken[-1].size
            count += len(taken[-1].appends)
        self.pending_bytes -= size + APPEND_BYTES * count
        return taken

    def space_refusal(self) -> DiskWatermark | None:
        """Why a batch that is submitted alone is refused now. In any thread."""
        watermark = self._watermark
        if watermark.due:
            with contextlib.suppress(OSError):  # the next commit reports it
                watermark.check()
        return watermark.refusal(reserved=False) if watermark.is_crossed else None

    def flush(self) -> None:
        """Write and acknowledge all pending appends."""
        while self.pending:
            self.commit(self.take())

    def commit(self, taken: list[PendingUnit]) -> None:
        """Write units durably and acknowledge them; every one is completed when this returns or raises."""
        try:
            self._commit(taken)
        except BaseException as error:
            failure = DiskFailed(f"{self._directory}: the commit failed ({error!r}): {_STOPPED}")
            self.stop(failure)
            fail_units(taken, failure)
            raise

    def _commit(self, taken: list[PendingUnit]) -> None:
        try:
            self.check()
            if self._watermark.due:
                with self.guard(self._directory):
                    self._watermark.check()
            units = admitted(taken, self._watermark)
            units, commits = plan_commits(units, self._clock.now_ms(), self.seed, self._options.compress)
            if not commits:
                return
            mark = self._record_appends(commits)
            with self.changing:
                self._write(commits)
                unknown = self._answer(mark)
        except _REFUSALS as error:
            fail_units(taken, error)
            return
        if unknown is not None:
            fail_units(units, unknown)
        else:
            for commit in commits:
                for append, positions in commit.answers:
                    append.outcome = positions
            for unit in units:
                unit.complete()
        self._after(commits)

    def _record_appends(self, commits: list[LedgerCommit]) -> Mark:
        """Return once a record with appends is durable, or committed by a pair; its mark."""
        topic = commits[0].topic
        try:
            # Once the journal is written the commit can't be undone, so one descriptor has to be open before.
            topic.segment.open(topic.entry.ledgers[-1].bytes)
        except OSError as error:
            raise self.failed(error, topic.segment.path) from error
        operations = [*map(_OPERATION, commits)]
        if self._manifest.is_member:
            return self._committed(operations)
        try:
            return self.journal.append(encode_operations(operations))
        except OSError as error:
            with contextlib.suppress(OSError):
                self.journal.undo()
            raise self.failed(error, self.journal.path, midway=True) from error

    def _write(self, commits: list[LedgerCommit]) -> None:
        """Write the appends of a record to their segments."""
        for topic, _, body, blocks, _, _ in commits:
            self._watermark.unseen += body.length
            self._dirty[topic.entry.number] = topic
            try:
                self._retry_without_descriptors(partial(topic.segment.write, body.offset, body.chunks, blocks))
                if len(self._dirty) > OPEN_SEGMENTS:
                    topic.segment.close()
            except OSError as error:
                raise self.failed(error, topic.segment.path, midway=True) from error
        for commit in commits:
            commit.topic.entry = commit.topic.entry.appended(commit.after)

    def _after(self, commits: list[LedgerCommit]) -> None:
        """Roll and checkpoint where it is due; a failure stops the log, but the appends stay acknowledged."""
        for commit in commits:
            if commit.after.bytes >= self._options.segment_bytes:
                with contextlib.suppress(*_REFUSALS):
                    self.roll(commit.topic)
        if self.journal.size >= self._options.journal_bytes:
            with contextlib.suppress(*_REFUSALS):
                self.checkpoint()

    # --- checkpoints ---

    @property
    def is_journal_full(self) -> bool:
        return self.journal.size >= self._options.journal_bytes

    def checkpoint(self) -> None:
        """Make the segments durable, as of the last record that is applied, and start a new file of the journal.

        In a member of a pair the former files stay until the caller drops them. In any thread.
        """
        self.check()
        with self.changing, self.guard(self._directory):
            self._checkpoint({})

    def _checkpoint(self, replaced: Mapping[int, TopicEntry | None]) -> None:
        for topic in self._dirty.values():
            with self.guard(topic.segment.path):
                topic.segment.save_index()
                self._retry_without_descriptors(topic.segment.sync)
                if len(self._topics) > OPEN_SEGMENTS:
                    topic.segment.close()
        if self.journal.size > FILE_HEAD_BYTES:
            self.journal.roll()
        mark, pair = self.applied, self.pair._replace(committed=max(self.pair.committed, self.applied.lsn))
        entries = {number: replaced.get(number) or topic.entry for number, topic in self._topics.items()}
        first, last = self.journal.file_after(mark.lsn), self.journal.number
        self._replace(topics=list(entries.values()), journal=first, last_journal=last, mark=mark, pair=pair)
        for number, entry in entries.items():
            self._topics[number].entry = self._topics[number].durable = entry
        self._dirty.clear()
        if not self._manifest.is_member:
            self.journal.drop(mark.lsn)
        self.on_checkpointed(mark)

    def _durable(self) -> list[TopicEntry]:
        """The topics as the manifest has them, without what is only in the journal."""
        return [topic.durable for topic in self._topics.values()]

    def _replace(self, *, topics: list[TopicEntry], **numbers: Any) -> None:
        manifest = self._manifest._replace(topics=tuple(topics), **numbers)
        with self.guard(self._directory, midway=True):
            self._retry_without_descriptors(
                partial(replace_manifest, self._disk, self._directory, manifest, self._texts)
            )
        self._manifest = manifest

    # --- the end ---

    def check(self) -> None:
        """Raises DiskFailed if the log has stopped."""
        if self.failure is None and not self.lock.is_in_place():
            self.stop(DiskFailed(f"{self._directory}: {_UNLOCKED}"))
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    @contextlib.contextmanager
    def guard(self, path: str, *, midway: bool = False) -> Iterator[None]:
        """Turn an OSError about a path into what `failed` returns."""
        try:
            yield
        except OSError as error:
            raise self.failed(error, path, midway=midway) from error

    def failed(self, error: OSError, path: str, *, midway: bool = False) -> DiskFailed | TooManyFiles:
        """Stop the log after an OSError about a path; the error to raise.

        A lack of descriptors is TooManyFiles and stops nothing, unless `midway` through a change.
        """
        if out_of_files(error) and not midway:
            self._close_segments()
            return disk_error(error, path, "nothing was changed: try again")
        failure = disk_failure(error, path, _STOPPED, _REMEDY)
        self.stop(failure)
        return failure

    def _retry_without_descriptors(self, act: Callable[[], None]) -> None:
        """Run an idempotent action; if no descriptor is left, close the segments and run it again."""
        try:
            act()
        except OSError as error:
            if not out_of_files(error):
                raise
            self._close_segments()
            act()

    def _close_segments(self) -> None:
        for topic in self._topics.values():
            topic.segment.close()

    def stop(self, failure: DiskFailed) -> None:
        """Reject everything but reads from now on; pending appends fail in the next flush."""
        if self.failure is None:
            self.failure = failure
            self.on_stopped(failure)

    def close(self) -> None:
        """Flush, checkpoint if records are applied since the last one, and release the directory."""
        try:
            self.flush()
            if self.failure is None and self.applied != self._manifest.mark:
                with contextlib.suppress(TooManyFiles):  # then the next owner does it
                    self.checkpoint()
        finally:
            self.close_files()
            self.lock.close()

    def close_files(self) -> None:
        """Close everything but the lock, and write nothing; once."""
        if not self._closed:
            self._closed = True
            self.journal.close()
            self._close_segments()
