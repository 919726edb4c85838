"""The embedded log as a broker: its owner with the commit thread, and the writers to its topics.

The work lock is held while files are written: one flush, or one change of structure, at a time. The queue lock
guards the pending appends and is never held during a write, so that appends queue up during a flush and the next
flush takes all of them.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Literal, overload

from broker_io.batch import Batch
from broker_io.compaction import (
    CompactionPolicy,
    CompactionReport,
    CompactionRequest,
    CompactionTasks,
    LedgerPart,
)
from broker_io.environment import Environment, Mutex, Thread, current
from broker_io.errors import (
    CallerError,
    Closed,
    Damaged,
    DiskWatermark,
    Error,
    Fenced,
    StillHeld,
    UnsupportedFormat,
    disk_error,
)
from broker_io.filelog.log import layout
from broker_io.filelog.log.backup import write_backup
from broker_io.filelog.log.commit import FileTopic, PendingBatch, PendingUnit, lone_unit
from broker_io.filelog.log.compaction import Compaction, Compactor, ledgers_of
from broker_io.filelog.log.compaction_tasks import LedgerTasks, adopted
from broker_io.filelog.log.following import FollowingBroker
from broker_io.filelog.log.layout import MIB, LedgerEntry, Options, TopicEntry, TopicFiles
from broker_io.filelog.log.operations import SetPolicy, SwapFiles
from broker_io.filelog.log.reader import ReadingBroker
from broker_io.filelog.log.recovery import OpenedLog, open_log
from broker_io.filelog.log.rewriting import discard
from broker_io.filelog.log.segment import check_blocks
from broker_io.port import (
    MAX_MESSAGE_BYTES,
    OWN_PREFIX,
    BackupProgress,
    BackupReport,
    Resource,
    TogetherAppend,
    TogetherResult,
    check_compaction,
    check_data_topic,
    check_together,
    check_topic_name,
)
from broker_io.position import Positions

CHECK_SECONDS = 0.5
"""Seconds between checks whether the log has stopped, while an append waits for room."""

LONGEST_WAIT = 3600.0

MAX_PENDING_BYTES = 64 * MIB
"""Bytes of pending appends; above this limit `append` blocks."""


@dataclass(slots=True, eq=False)
class Fence:
    """The fence of a topic: an exclusive writer fences all writers before it. `held`: one is open."""

    held: bool = False
    _number: int = 0

    def enter(self, name: str, *, exclusive: bool) -> int:
        """The ticket of a new writer. Raises Fenced for a shared writer while an exclusive one is open."""
        if exclusive:
            self._number += 1
            self.held = True
        elif self.held:
            raise Fenced(f"topic {name!r} is held by an exclusive writer: close it, or open an exclusive writer")
        return self._number

    def check(self, name: str, ticket: int) -> None:
        """Raises Fenced if an exclusive writer was opened after the ticket was issued."""
        if ticket != self._number:
            raise Fenced(f"another exclusive writer has opened topic {name!r}: this writer can't append any more")

    def leave(self, ticket: int, *, exclusive: bool) -> None:
        if exclusive and ticket == self._number:
            self.held = False


@dataclass(eq=False)
class FileWriter(Resource):
    """A writer to a topic; any thread may append. `ticket` is that of the topic's fence."""

    broker: FileBroker
    topic: FileTopic
    ticket: int
    exclusive: bool
    closed: bool = False

    def append(self, batch: Batch) -> Future[Positions]:
        return self.broker.append_alone((self, batch))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.broker._leave(self)


class FileBroker(ReadingBroker):
    """The owner of an embedded log, created by `FileBroker.open`. All calls are safe from any thread.

    `opened`: its engine, if it is open already.
    """

    read_only = False

    def __init__(
        self,
        environment: Environment,
        directory: str,
        options: Options,
        *,
        committer: bool,
        opened: OpenedLog | None = None,
    ) -> None:
        super().__init__(environment, directory, options.max_message_bytes)
        opened = opened or open_log(environment, directory, options)
        self._log, self.report = opened.log, opened.report
        self._damage_listeners: list[Callable[[], object]] = []
        self._heed_damage()
        self.last_compaction = CompactionReport()
        """What the last compaction of a topic without transactions did."""
        self._options = options
        threads = environment.threads
        self._grew = threads.condition()
        self._waiting = 0
        self._work = threads.reentrant_lock()
        self._queue = threads.condition()
        self._compacting: defaultdict[str, Mutex] = defaultdict(threads.lock)
        self._backup = threads.lock()
        self._backing_up = False
        self._fences: defaultdict[int, Fence] = defaultdict(Fence)
        self._idle = False
        self._closing = False
        self._committer: Thread | None = None
        if committer:
            self._committer = threads.thread(self._commit_loop, name=f"commit {directory}", daemon=True)
            self._committer.start()

    @overload
    @staticmethod
    def open(directory: str, environment: Environment | None = ..., *, read_only: Literal[True]) -> FollowingBroker: ...

    @overload
    @staticmethod
    def open(
        directory: str,
        environment: Environment | None = ...,
        *,
        read_only: Literal[False] = ...,
        committer: bool = ...,
        segment_bytes: int = ...,
        journal_bytes: int = ...,
        compression: str | None = ...,
        watermark_bytes: int = ...,
        max_message_bytes: int = ...,
        compacted_prefix: str = ...,
        compaction_bytes: int = ...,
    ) -> FileBroker: ...

    @staticmethod
    def open(
        directory: str,
        environment: Environment | None = None,
        *,
        read_only: bool = False,
        committer: bool = True,
        segment_bytes: int = 64 * MIB,
        journal_bytes: int = 64 * MIB,
        compression: str | None = None,
        watermark_bytes: int = 256 * MIB,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        compacted_prefix: str = OWN_PREFIX,
        compaction_bytes: int = 128 * MIB,
    ) -> FileBroker | FollowingBroker:
        """Open a log, creating it if it is missing; sizes are in bytes, `compression` is "zstd" or None.

        `read_only` follows a log that another process may own, and writes nothing. Without `committer` there is no
        thread: each append is written before it returns. Topics whose names begin with `compacted_prefix` may be
        compacted, which remembers keys in `compaction_bytes` at most. `report` of the broker lists the repairs of
        recovery, a sentence each. Raises Locked, ForeignDirectory, UnsupportedFormat, Damaged, DiskFull or DiskFailed,
        and CallerError for an invalid option.
        """
        environment = environment or current()
        if read_only:
            return FollowingBroker(environment, directory)
        options = Options.checked(
            segment_bytes,
            journal_bytes,
            compression,
            watermark_bytes,
            max_message_bytes,
            compacted_prefix,
            compaction_bytes,
        )
        return FileBroker(environment, directory, options, committer=committer)

    # --- reading ---

    @property
    def seed(self) -> int:
        return self._log.seed

    def topics(self) -> list[str]:
        self.check()
        return self._log.names()

    def named(self, name: str) -> TopicEntry:
        self.check()
        return self._log.topic(name).entry

    def current(self, number: int) -> TopicEntry | None:
        return self._log.current(number)

    def wait(self, seen: TopicEntry, pause: float, remaining: float) -> None:
        if self._committer is None:
            super().wait(seen, pause, remaining)
            return
        with self._grew:
            self._waiting += 1
            try:
                self._grew.wait_for(
                    lambda: self.closed or self.current(seen.number) is not seen, min(remaining, LONGEST_WAIT)
                )
            finally:
                self._waiting -= 1

    def _notify(self) -> None:
        """Wake waiting readers; one that begins to wait now sees what has changed."""
        if self._waiting:
            with self._grew:
                self._grew.notify_all()

    def _check_writable(self) -> None:
        """Raises what prevents changes now."""
        self.check()

    # --- structure ---

    def create_topic(self, topic: str) -> None:
        self.create_topics([topic])

    def create_topics(self, topics: Iterable[str]) -> None:
        """See `BulkBroker`."""
        names = [check_topic_name(topic) for topic in topics]
        with self._work:
            self._check_writable()
            self._log.create_topics(names)

    def delete_topic(self, topic: str) -> None:
        with self._unchanged(topic), self._work:
            self._check_writable()
            self._flush()
            self._log.delete_topic(topic)
        self._notify()

    def roll(self, topic: str) -> None:
        with self._work:
            self._check_writable()
            self._flush()
            self._log.roll(self._log.topic(topic))
        self._notify()

    def trim(self, topic: str, first_ledger: int) -> None:
        with self._unchanged(topic), self._work:
            self._check_writable()
            self._log.trim(self._log.topic(topic), first_ledger)
        self._notify()

    def compact(self, topic: str) -> None:
        """Compact all ledgers; the newest is closed first. Appends continue meanwhile.

        A delete that is the newest message of its key is dropped at once.
        """
        self.named(topic)
        check_compaction(topic, self._options.compacted_prefix)
        self.roll(topic)
        self.last_compaction = self._compact(topic, None, self._compactor(None))

    def compact_records(self, topic: str, request: CompactionRequest) -> CompactionReport:
        """See `CompactingBroker`."""
        check_data_topic(topic, self._options.compacted_prefix)
        request = self._leaving_room(topic, request)
        return self._compact(topic, request, self._compactor(request))

    def compact_in_tasks(
        self, topic: str, request: CompactionRequest, run: Callable[[CompactionTasks], Sequence[LedgerPart]]
    ) -> CompactionReport:
        """See `TaskingBroker`. The tasks need this directory at the same path."""
        check_data_topic(topic, self._options.compacted_prefix)
        request, disk = self._leaving_room(topic, request), self.environment.disk

        def work(files: TopicFiles) -> Compaction:
            request.progress(0)
            tasks = LedgerTasks(files, request, self._options.compaction_bytes)
            try:
                return adopted(disk, tasks, request, run(tasks))
            finally:
                with contextlib.suppress(OSError):  # the next owner of the log removes them
                    layout.remove_attempts(disk, files.path)

        return self._compact(topic, request, work)

    def set_compaction_policy(self, topic: str, policy: CompactionPolicy | None) -> None:
        """See `CompactingBroker`."""
        check_data_topic(topic, self._options.compacted_prefix)
        with self._work:
            self._check_writable()
            found = self._log.topic(topic)
            self._log.set_policy(found, SetPolicy(policy))

    @property
    def _least_free(self) -> int:
        """The free bytes that a compaction or a backup leaves."""
        return self._options.watermark_bytes * 5 // 4

    def _wait_for_backup(self, request: CompactionRequest) -> None:
        """Let a compaction wait while a backup is written. Raises what the request raises."""
        while self._backing_up and not self._closing:
            with self._queue:
                if self._backing_up:
                    self._queue.wait(CHECK_SECONDS)
            request.progress(0)

    def _leaving_room(self, topic: str, request: CompactionRequest) -> CompactionRequest:
        """The request of a compaction that ends before it takes the free space that appends need."""
        least = self._least_free

        def progress(moved: int) -> None:
            self._wait_for_backup(request)
            free = self.environment.disk.free_bytes(self.directory)
            if free < least:
                raise DiskWatermark(
                    f"{self.directory}: {free} bytes are free, and compaction needs {least} (the watermark and 25 %): "
                    "free some space"
                )
            request.progress(moved)

        return replace(request, progress=progress)

    def _compactor(self, request: CompactionRequest | None) -> Callable[[TopicFiles], Compaction]:
        disk, map_bytes = self.environment.disk, self._options.compaction_bytes
        return lambda files: Compactor(disk, files, request, map_bytes).run()

    def _compact(
        self, topic: str, request: CompactionRequest | None, work: Callable[[TopicFiles], Compaction]
    ) -> CompactionReport:
        self._check_writable()
        with self._unchanged(topic):
            files = TopicFiles(self.directory, self.named(topic), self._log.seed, self._options.compress)
            try:
                with self._noting_damage():
                    done = work(files)
                if request is not None:
                    self._confirm(files, request, done)
            except OSError as error:
                which = "" if request is not None else f"topic {topic!r} was not compacted; "  # else the caller says so
                raise disk_error(error, self.directory, f"{which}nothing changed") from error
            self._swap(files, request, done)
        return done.report

    def _confirm(self, files: TopicFiles, request: CompactionRequest, done: Compaction) -> None:
        try:
            request.before_swap(done.purged)
        except BaseException:
            discard(self.environment.disk, files, done.rewrites)
            raise

    def _swap(self, files: TopicFiles, request: CompactionRequest | None, done: Compaction) -> None:
        """Replace the rewritten ledgers, of which none was trimmed meanwhile."""
        with self._work:
            self.check()
            found = self._log.topic(files.topic.name)
            body = self._swap_of(found.entry, [] if request is None else ledgers_of(files, request), done)
            if body is not None:
                self._log.swap(found, body)
        if done.rewrites:
            self._notify()

    def _swap_of(self, entry: TopicEntry, seen: list[LedgerEntry], done: Compaction) -> SwapFiles | None:
        """What a compaction that has seen these ledgers changes."""
        rewritten = {rewrite.old: rewrite.new for rewrite in done.rewrites}
        state = entry.compaction
        digests: dict[LedgerEntry, str] = {}
        if seen:
            cleaned = max(state.cleaned, seen[-1].ledger)
            state = state._replace(cleaned=cleaned, purged=max(state.purged, done.purged))
            if seen[-1].ledger == cleaned:  # else the digests are not of all ledgers up to there
                digests = dict(zip(seen, done.digests, strict=True))
        ledgers = [rewritten.get(old, old)._replace(digest=digests.get(old, old.digest)) for old in entry.ledgers]
        changed = tuple([new for old, new in zip(entry.ledgers, ledgers, strict=True) if new != old])
        if not changed and state == entry.compaction:
            return None
        return SwapFiles(0, changed, state.cleaned, state.purged)

    @contextlib.contextmanager
    def _unchanged(self, topic: str) -> Iterator[None]:
        """No ledger of the topic is trimmed or compacted meanwhile. Raises Closed."""
        with self._queue:
            self._check_open()
            lock = self._compacting[topic]
        with lock:
            yield

    def back_up(self, path: str, progress: BackupProgress) -> BackupReport:
        """See `BackupBroker`."""
        if posixpath.abspath(path).startswith(posixpath.abspath(self.directory) + "/"):
            raise CallerError(f"{path} is in the directory of the log: write the backup elsewhere")
        if not self._backup.acquire(blocking=False):
            raise CallerError(f"a backup of {self.directory} is being written: wait for its end")
        try:
            with self._queue:
                self._check_open()
                self._backing_up = True
            with self._work:
                self._check_writable()
                self._flush()
                manifest = self._log.begin_backup()
            try:
                disk, progress = self.environment.disk, self._unless_closing(progress)
                with self._noting_damage():
                    return write_backup(disk, self.directory, manifest, path, progress)
            finally:
                with self._work:
                    self._log.end_backup()
        finally:
            with self._queue:
                self._backing_up = False
                self._queue.notify_all()
            self._backup.release()

    def _unless_closing(self, progress: BackupProgress) -> BackupProgress:
        """The progress of a backup that ends when the log is closed, or when it takes the space that appends need."""
        free = self.environment.disk.free_bytes
        least = min(self._least_free, free(self.directory))

        def called(done: int, total: int) -> None:
            with self._queue:
                self._check_open()
            if (left := free(self.directory)) < least:
                raise DiskWatermark(
                    f"{self.directory}: {left} bytes are free, and a backup leaves {least}: free some space, or write "
                    "it to another disk"
                )
            progress(done, total)

        return called

    def _check_open(self) -> None:
        """Raises Closed, also if the log is being closed."""
        self.check()
        if self._closing:
            raise Closed(f"the log {self.directory} is being closed: open it again")

    # --- damage ---

    def note_damage(self, error: Error, path: str = "") -> bool:
        return self._log.damage.found(error, path)

    @contextlib.contextmanager
    def _noting_damage(self) -> Iterator[None]:
        try:
            yield
        except Damaged as error:
            self.note_damage(error)
            raise

    @property
    def repaired(self) -> tuple[str, ...]:
        """See `VerifyingBroker`."""
        return tuple(self._log.damage.repaired)

    def damaged_topics(self) -> dict[str, Error]:
        """See `VerifyingBroker`."""
        return self._log.damage.topics()

    def on_damage(self, notify: Callable[[], object]) -> Callable[[], object]:
        """See `VerifyingBroker`."""
        listeners = self._damage_listeners
        listeners.append(notify)
        return lambda: listeners.remove(notify)

    def _heed_damage(self) -> None:
        """Tell the listeners of this broker of damage of its engine."""
        self._log.damage.listeners = self._damage_listeners

    def check_stored(self, topic: str, ledger: int, start: int = 0, size: int | None = None) -> int:
        """See `VerifyingBroker`."""

        def check(entry: TopicEntry) -> int:
            stored = entry.find(ledger)
            if stored is None or stored.ledger != ledger:
                return 0
            path = layout.segment_path(self.directory, entry, stored)
            try:
                at = check_blocks(self.environment.disk, path, stored.bytes, entry.place(stored), start, size)
            except UnsupportedFormat as error:
                self.note_damage(error, path)
                raise
            return at if at < stored.bytes else 0

        return self._ask(topic, check)

    # --- writing ---

    def writer(
        self, topic: str, *, exclusive: bool = False, wait: float | None = None, unbatched: bool = False
    ) -> FileWriter:
        if exclusive and wait is not None:
            self._wait_for_owner(topic, wait)
        with self._work:
            self._check_writable()
            found = self._log.topic(topic)
            with self._queue:
                ticket = self._fences[found.entry.number].enter(topic, exclusive=exclusive)
            # Appends that older writers queued are in the log before this one opens.
            self._flush()
        return self._make_writer(found, ticket, exclusive)

    def _make_writer(self, topic: FileTopic, ticket: int, exclusive: bool) -> FileWriter:
        return FileWriter(self, topic, ticket, exclusive)

    def _wait_for_owner(self, topic: str, seconds: float) -> None:
        """Raises StillHeld if an exclusive writer is open, which can only be one of this process."""
        clock = self.environment.clock
        deadline = clock.monotonic() + seconds
        while True:
            with self._work:
                self.check()
                fence = self._fences[self._log.topic(topic).entry.number]
            with self._queue:
                if not fence.held:
                    return
                if (missing := deadline - clock.monotonic()) <= 0:
                    raise StillHeld(f"topic {topic!r} is held by an exclusive writer that is still open: wait longer")
                self._queue.wait(min(missing, CHECK_SECONDS))

    def append_together(self, appends: Sequence[TogetherAppend], done: Callable[[TogetherResult], None]) -> None:
        """See `AtomicBroker`."""
        unit = PendingUnit([*map(self._pending, appends)], done)
        if len(unit.appends) > 1:
            check_together(unit.size)
        self._append(unit, appends)

    def space_refusal(self) -> DiskWatermark | None:
        """See `AtomicBroker`."""
        return self._log.space_refusal()

    def append_alone(self, append: TogetherAppend) -> Future[Positions]:
        """See `Writer.append`."""
        unit, future = lone_unit(self._pending(append))
        self._append(unit, [append])
        return future

    def _append(self, unit: PendingUnit, appends: Sequence[TogetherAppend]) -> None:
        try:
            with self._queue:
                while True:
                    for writer, _ in appends:
                        self._check_writer(writer)  # type: ignore[arg-type]  # `_pending` has checked that
                    if self._log.failure is not None or self._log.pending_bytes <= MAX_PENDING_BYTES:
                        break
                    self._queue.wait(CHECK_SECONDS)
                self._log.submit_unit(unit)
                if self._idle:
                    self._queue.notify_all()
        except (Closed, Fenced) as error:
            unit.complete(error)
            return
        if self._committer is None:
            with self._work:
                self._flush()
            self._notify()

    def _pending(self, append: TogetherAppend) -> PendingBatch:
        """Raises MessageTooLarge, InvalidMessage, and CallerError for a writer of another broker."""
        writer, batch = append
        if not isinstance(writer, FileWriter) or writer.broker is not self:
            raise CallerError(f"{writer!r} is not a writer of the log {self.directory}: open one with this broker")
        return PendingBatch.checked(writer.topic, batch, self.max_message_bytes)

    def _check_writer(self, writer: FileWriter) -> None:
        name = writer.topic.entry.name
        if writer.closed or self._closing:
            self.check()
            raise Closed(f"the writer of topic {name!r} was closed: open another")
        self._fences[writer.topic.entry.number].check(name, writer.ticket)

    def _leave(self, writer: FileWriter) -> None:
        with self._work:
            if not self.closed:
                self._flush()
        with self._queue:
            self._fences[writer.topic.entry.number].leave(writer.ticket, exclusive=writer.exclusive)
            self._queue.notify_all()

    def _flush(self) -> None:
        """Write all pending appends; the caller holds the work lock."""
        while self._log.pending:
            self._flush_once()

    def _flush_once(self) -> None:
        with self._queue:
            full = self._log.pending_bytes > MAX_PENDING_BYTES
            taken = self._log.take()
            if full:
                self._queue.notify_all()
        if taken:
            self._log.commit(taken)

    def _commit_loop(self) -> None:
        while True:
            with self._queue:
                self._idle = True
                while not (self._log.pending or self._closing):
                    self._queue.wait()
                self._idle = False
                if self._closing:
                    return
            # A failure has stopped the log and failed its appends; readers are notified below.
            with contextlib.suppress(BaseException), self._work:
                self._flush_once()
            self._notify()

    def close(self) -> None:
        """Write pending appends, make the segments durable, release the directory."""
        with self._queue:
            if self._closing:
                return
            self._closing = True
            self._queue.notify_all()
        if self._committer is not None:
            self._committer.join()
        with self._queue:
            running = [*self._compacting.values(), self._backup]
        for lock in running:
            with lock:  # until the compaction or the backup has ended
                pass
        with self._work:
            self.closed = True
            try:
                self._close_log()
            finally:
                self._notify()

    def _close_log(self) -> None:
        self._log.close()
