"""The embedded log of a member of a pair, as a broker

It is the broker of an embedded log whose changes are records of the pair (`NodeReplicator`). While this member is live
it can be written to. What it has applied can be read in every role; `check_answer` says whether that is the newest.

A writer belongs to the term, the epoch of this primary, in which it was opened: it is fenced once that has ended, also
if this member is live again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from broker_io.compaction import CompactionRequest
from broker_io.environment import Environment, current
from broker_io.errors import (
    AppendUnknown,
    Error,
    Fenced,
    LockUnavailable,
    NotLive,
    StillHeld,
    StorageError,
    TopicNotFound,
)
from broker_io.filelog.log.broker import CHECK_SECONDS, FileBroker, FileWriter
from broker_io.filelog.log.commit import FileTopic, fail_units
from broker_io.filelog.log.compaction import Compaction, ledgers_of
from broker_io.filelog.log.layout import MIB, Options, TopicEntry, TopicFiles, segment_path
from broker_io.filelog.log.log import FileLog
from broker_io.filelog.log.numbers import NumberedOperation, ObjectNumbers
from broker_io.filelog.log.operations import PrepareFiles, SwapFiles, WrittenFile, count_operations, encode_operations
from broker_io.filelog.log.reader import FileReader
from broker_io.filelog.log.records import Mark, Store
from broker_io.filelog.log.recovery import OpenedLog
from broker_io.filelog.log.rewriting import discard
from broker_io.filelog.log.segment import file_digest
from broker_io.filelog.pair import open_lock, pair_name
from broker_io.filelog.pair.node import PairNode
from broker_io.filelog.pair.port import PairLock, Transport
from broker_io.filelog.pair.repairing import Repairer
from broker_io.filelog.pair.store import DirectoryStore
from broker_io.filelog.replication.lease import Terms
from broker_io.filelog.replication.member import SECOND, Settings
from broker_io.filelog.replication.messages import RewriteFinished
from broker_io.filelog.replication.serving import Gate
from broker_io.port import MAX_MESSAGE_BYTES, OWN_PREFIX
from broker_io.position import EARLIEST, Position

CLOSE_SECONDS = 5.0
"""How long pending appends may take when a primary is closed: its backup may not answer."""
_COPYING = "this member of the pair gets a copy of the log: connect to the other one, or wait until it is complete"
_NOT_LIVE = "this member of the pair is not live: connect to the other one"


class PairOptions(NamedTuple):
    """How a directory takes part in a pair.

    - `lock`: the address of the lock (`broker_io.filelog.pair.open_lock`).
    - `listen`: HOST:PORT for the other member. `peer`: its HOST:PORT.
    - `found`: found a pair with this directory, if the lock has none.
    - `min_in_sync`: how many members must have an append; with 2 a primary alone takes none.
    - `lease_seconds`: the time after which a primary that does not renew its lease may be replaced.
    - `lanes`: how many topics a backup applies to in parallel.
    - `window_bytes`: what may be sent and not applied. `keep_bytes`: what is kept for a backup that is behind.
    - `tls_cert`, `tls_key`, `tls_ca`: files for TLS between the members.
    - `peer_name`: the name in the certificate of the other one, or the host of `peer`.
    """

    lock: str
    listen: str
    peer: str
    found: bool = False
    min_in_sync: int = 1
    lease_seconds: float = 10.0
    lanes: int = 2
    window_bytes: int = 64 * MIB
    keep_bytes: int = 1024 * MIB
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    peer_name: str = ""

    def settings(self) -> Settings:
        """Members and locks may be silent for a share of the lease."""
        lease = round(self.lease_seconds * SECOND)
        return Settings(
            Terms(lease),
            self.min_in_sync,
            self.found,
            member_timeout=lease // 5,
            answer_timeout=lease // 10,
            window_bytes=self.window_bytes,
            keep_bytes=self.keep_bytes,
        )


@dataclass(eq=False)
class PairWriter(FileWriter):
    """A writer of one term."""

    term: int = 0


class PairReader(FileReader):
    """A reader that fails once a copy has replaced the log: what it has read may not be in it any more."""

    def __init__(self, broker: PairBroker, topic: TopicEntry, start: Position, *, inclusive: bool) -> None:
        self._pair, self._log = broker, broker.log
        super().__init__(broker, topic, start, inclusive=inclusive)

    def _check_floor(self, topic: TopicEntry) -> None:
        if self._pair.log is not self._log:
            raise NotLive(f"topic {topic.name!r} was replaced by the copy from the active member: open a new reader")
        super()._check_floor(topic)


class NodeReplicator:
    """The pair as the engine of a primary sees it (`broker_io.filelog.log.commit.Replicator`)."""

    def __init__(self, node: PairNode, log: FileLog) -> None:
        self._node = node
        self._log = log

    def commit(self, operations: Sequence[NumberedOperation]) -> Mark:
        content = b"".join(encode_operations(operations))
        return self._node.commit(content, lambda: self._follows(operations))

    def _follows(self, operations: Sequence[NumberedOperation]) -> bool:
        """Whether these are the next operations of all that they change, and so were made from the present state."""
        log = self._log
        counts = {}
        for topic in {operation.topic for operation in operations}:
            if topic and (entry := log.current(topic)) is not None:
                counts[topic] = entry.operations
        try:
            ObjectNumbers(counts, log.pair.structures).after(operations)
        except StorageError:
            return False
        return True

    def applied(self, mark: Mark) -> None:
        del mark
        self._node.applied()

    def may_answer(self) -> bool:
        return self._node.may_answer()


@dataclass(eq=False)
class PendingSwap:
    """Files of a compaction that wait until both members have them. `outcome`: None once they are in place."""

    topic: FileTopic
    body: SwapFiles
    done: bool = False
    error: Error | None = None


class PairBroker(FileBroker):
    """A member of a pair; `open` returns at once, as a backup. It implements `ReplicatedBroker`."""

    def __init__(
        self,
        environment: Environment,
        directory: str,
        options: Options,
        settings: Settings,
        lock: PairLock,
        transport: Transport,
        *,
        lanes: int = 2,
    ) -> None:
        self._store = DirectoryStore(directory, options, environment, founder=settings.founder, lanes=lanes)
        self._node = PairNode(
            environment,
            settings,
            self._store,
            lock,
            transport,
            on_role=self._role_changed,
            on_applied=self._notify,
            on_swap=self._append_swap,
            count=count_operations,
        )
        self._lanes = lanes
        self._ending = environment.threads.lock()
        self._listeners: list[Callable[[], None]] = []
        self._fenced_term = 0
        self._swaps: dict[int, PendingSwap] = {}
        try:
            self._node.open()
        except BaseException:
            self._node.close()
            raise
        opened = OpenedLog(self._store.log, self._store.report, None)
        super().__init__(environment, directory, options, committer=True, opened=opened)
        self._repairer = Repairer(environment, self._store, self._node.fetch, self._node.compared_link, self._node.post)
        self.on_damage(self._repairer.wake)
        self._store.changed = self._replaced
        self._use(self._store.log)
        try:
            self._node.start()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def open_member(
        directory: str,
        environment: Environment | None = None,
        *,
        pair: PairOptions,
        segment_bytes: int = 64 * MIB,
        journal_bytes: int = 64 * MIB,
        compression: str | None = None,
        watermark_bytes: int = 256 * MIB,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        compacted_prefix: str = OWN_PREFIX,
        compaction_bytes: int = 128 * MIB,
    ) -> PairBroker:
        """Open the log of a member, with the options of `FileBroker.open`.

        Raises InvalidAddress, EnvironmentFault if it can't listen, and what `DirectoryStore.open_log` raises.
        """
        from broker_io.filelog.pair.transport import GrpcTransport, LinkSettings

        options = Options.checked(
            segment_bytes,
            journal_bytes,
            compression,
            watermark_bytes,
            max_message_bytes,
            compacted_prefix,
            compaction_bytes,
        )
        settings = pair.settings()
        link = LinkSettings(
            pair_name(pair.lock),
            pair.listen,
            pair.peer,
            pair.tls_cert,
            pair.tls_key,
            pair.tls_ca,
            pair.peer_name,
            settings.member_timeout / SECOND,
        )
        lock = open_lock(pair.lock)
        return PairBroker(
            environment or current(), directory, options, settings, lock, GrpcTransport(link), lanes=pair.lanes
        )

    # --- the pair ---

    @property
    def log(self) -> FileLog:
        """The engine; another one once a copy has replaced the log."""
        return self._log

    def _use(self, log: FileLog) -> None:
        log.replicator = NodeReplicator(self._node, log)
        log.on_stopped = self._node.failed
        self._heed_damage()

    def _replaced(self) -> None:
        """A copy has replaced the log, or an empty one; this member is not live."""
        with self._work, self._queue:
            old, self._log = self._log, self._store.log
            self._use(self._log)
            self._fences.clear()
            while taken := old.take():
                fail_units(taken, Fenced(f"{self.directory} was replaced by a copy: nothing was written"))
            self._queue.notify_all()
        self._notify()
        self._repairer.wake()  # the damage of the former log is gone

    def _role_changed(self, live: bool) -> None:
        del live
        with self._queue:
            self._queue.notify_all()
        for notify in [*self._listeners]:
            notify()

    @property
    def live(self) -> bool:
        return self._node.live

    @property
    def term(self) -> int:
        """The epoch in which this member is live; 0 if it is not."""
        return self._node.term

    @property
    def failure(self) -> Error | None:
        return self._node.failure

    def check_answer(self) -> None:
        """See `ReplicatedBroker`."""
        if self._node.reads() is not Gate.SEND:
            raise NotLive(_NOT_LIVE)

    def on_role(self, notify: Callable[[], None]) -> None:
        """See `ReplicatedBroker`."""
        self._listeners.append(notify)

    def status(self) -> Mapping[str, Any]:
        """As `status_of` and `PairNode.status` say; `lanes_busy` of `lanes` apply something now.

        `damaged`: what is wrong with the files of this member, by topic; `repaired`: how many files were since the
        start of the process.
        """
        found, damaged = self._node.status(), self.damaged_topics()
        problems = [found["problem"], *[f"topic {name!r} is damaged here: {why}" for name, why in damaged.items()]]
        problems += [f"it is not repaired: {why}"] if damaged and (why := self._repairer.problem) else []
        return {
            **found,
            "problem": "; ".join(filter(None, problems)),
            "lanes": self._lanes,
            "lanes_busy": self._store.lanes_busy,
            "damaged": {name: str(why) for name, why in damaged.items()},
            "repaired": len(self.repaired),
        }

    def switch(self) -> None:
        """See `ReplicatedBroker`."""
        self._node.switch()

    def promote(self) -> None:
        """See `ReplicatedBroker`."""
        self._node.force()

    def wait_live(self, seconds: float) -> bool:
        """Wait until this member is live; whether it is."""
        return self._node.wait_live(seconds)

    def leave(self) -> Store:
        """End the part that this member, which is live, takes in its pair; the log stays open. Its store.

        A checkpoint then has everything. Raises LockUnavailable if this member has to be live once more for that.
        """
        self._node.close()
        log = self._store.log
        log.checkpoint()
        if log.applied != log.journal.end:
            raise LockUnavailable("the last record of this member is not committed: try again")
        return log.pair.store

    def _check_writable(self) -> None:
        """Raises NotLive, or what has stopped the node."""
        self.check()
        if self._node.failure is not None:
            raise self._node.failure.with_traceback(None)
        if not self._node.live:
            raise NotLive(_NOT_LIVE)

    # --- as a broker ---

    def missing(self, error: FileNotFoundError) -> Error:
        """Files are moved, and are no damage, while a copy replaces the log."""
        return NotLive(_COPYING) if self._store.replacing else super().missing(error)

    def named(self, name: str) -> TopicEntry:
        """As the base; a topic that an incomplete copy lacks raises NotLive, because the primary may have it."""
        with self._while_copying():
            return super().named(name)

    def numbered(self, number: int, name: str) -> TopicEntry:
        with self._while_copying():
            return super().numbered(number, name)

    @contextmanager
    def _while_copying(self) -> Iterator[None]:
        try:
            yield
        except TopicNotFound:
            if self._store.replacing or self._log.pair.partial:
                raise NotLive(_COPYING) from None
            raise

    def reader(
        self, topic: str, start: Position = EARLIEST, *, inclusive: bool = True, compacted: bool = False
    ) -> FileReader:
        """As the port, in every role. It raises NotLive once a copy has replaced the log."""
        del compacted
        return self._ask(topic, lambda entry: PairReader(self, entry, start, inclusive=inclusive))

    def create_topics(self, topics: Iterable[str]) -> None:
        """See `BulkBroker`; a member that is not live raises NotLive for topics that do not exist."""
        names = [*topics]
        if not self._node.live and set(names) <= set(self._log.names()):
            self.check()
            return
        super().create_topics(names)

    def writer(
        self, topic: str, *, exclusive: bool = False, wait: float | None = None, unbatched: bool = False
    ) -> FileWriter:
        """As the port. With `wait` an exclusive writer also waits until this member is live and can be written to.

        A primary that lacks the backup which `min_in_sync` asks for can't be: the first append would wait for it.
        """
        if exclusive and wait is not None:
            clock = self.environment.clock
            deadline = clock.monotonic() + wait
            if not self._node.wait_writable(wait):
                raise StillHeld("this member of the pair is not live yet, or lacks its backup: wait longer")
            wait = max(0.0, deadline - clock.monotonic())
        self._check_writable()
        with self._queue:
            self._begin_term()
        return super().writer(topic, exclusive=exclusive, wait=wait, unbatched=unbatched)

    def _make_writer(self, topic: FileTopic, ticket: int, exclusive: bool) -> FileWriter:
        return PairWriter(self, topic, ticket, exclusive, term=self._fenced_term)

    def _begin_term(self) -> None:
        """Forget the fences of a former term; the caller holds the lock of the queue."""
        term = self._node.term
        if term and term != self._fenced_term:
            self._fenced_term = term
            self._fences.clear()

    def _check_writer(self, writer: FileWriter) -> None:
        if not isinstance(writer, PairWriter) or writer.term != self._node.term:
            if self._node.failure is not None:
                raise Fenced(f"this member of the pair has stopped: {self._node.failure}")
            name = writer.topic.entry.name
            raise Fenced(f"this member of the pair lost its role: open a new writer of {name!r}")
        super()._check_writer(writer)

    def _leave(self, writer: FileWriter) -> None:
        if isinstance(writer, PairWriter) and writer.term == self._node.term:
            super()._leave(writer)

    def delete_topic(self, topic: str) -> None:
        super().delete_topic(topic)
        self._store.update_prepared()

    # --- compaction ---

    def _swap(self, files: TopicFiles, request: CompactionRequest | None, done: Compaction) -> None:
        """Let both members have the rewritten ledgers, and put them in place then. Raises AppendUnknown."""
        if not done.rewrites:
            super()._swap(files, request, done)
            return
        disk, directory, topic = self.environment.disk, self.directory, files.topic
        written = []
        for rewrite in done.rewrites:
            size, digest = file_digest(disk, segment_path(directory, topic, rewrite.new))
            written.append(WrittenFile(rewrite.new.ledger, rewrite.new.generation, size, digest))
        try:
            pending = self._prepare(files, request, done, tuple(written))
        except (NotLive, Fenced):
            discard(disk, files, done.rewrites)
            raise
        self._wait_for_swap(pending)
        self._notify()

    def _prepare(
        self, files: TopicFiles, request: CompactionRequest | None, done: Compaction, written: tuple[WrittenFile, ...]
    ) -> PendingSwap:
        with self._work:
            self._check_writable()
            found = self._log.topic(files.topic.name)
            body = self._swap_of(found.entry, [] if request is None else ledgers_of(files, request), done)
            number = self._log.prepare(found, PrepareFiles(written))
            pending = PendingSwap(found, (body or SwapFiles(0, (), 0, 0))._replace(prepared=number))
            with self._queue:
                self._swaps[number] = pending
            self._store.update_prepared()
        return pending

    def _wait_for_swap(self, pending: PendingSwap) -> None:
        number, term = pending.body.prepared, self._node.term
        with self._queue:
            while not pending.done and self._node.term == term and term:
                self._queue.wait(CHECK_SECONDS)
            self._swaps.pop(number, None)
        if pending.error is not None:
            raise pending.error
        if not pending.done:
            raise AppendUnknown(
                f"topic {pending.topic.entry.name!r}: this member lost its role; the compaction may be undone"
            )

    def _append_swap(self, result: RewriteFinished) -> None:
        """Put the files of a compaction in place, in the thread of the node that applies."""
        with self._queue:
            pending = self._swaps.get(result.number)
        if pending is None:
            return
        try:
            with self._work:
                self._log.swap(pending.topic, pending.body)
                self._store.update_prepared()
            pending.done = True
        except Error as error:
            pending.error, pending.done = error, True
        with self._queue:
            self._queue.notify_all()

    # --- the end ---

    def close(self) -> None:
        """Write pending appends, if the backup answers soon; end the node and its lease, release the directory."""
        with self._ending:
            if self.closed:
                return
            timer = self.environment.threads.timer(CLOSE_SECONDS, self._node.close)
            timer.start()
            try:
                with self._work:
                    self._flush()
            finally:
                timer.cancel()
            self._node.close()
            super().close()

    def _close_log(self) -> None:
        self._repairer.close()
        self._store.close()
