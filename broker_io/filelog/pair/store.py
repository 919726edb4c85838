"""The store of a member: a directory with its engine, as the node of the pair drives it

The engine (`broker_io.filelog.log.log`) applies operations; this adds what only members do: they keep records that are
not committed yet, apply committed ones in lanes, copy files to and from the peer, and set a store aside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from broker_io.environment import Environment, current
from broker_io.errors import CallerError, Closed, Damaged, DiskFailed, TopicNotFound, disk_error
from broker_io.filelog.log import layout
from broker_io.filelog.log.commit import Watermark
from broker_io.filelog.log.damage import DamagedSegment
from broker_io.filelog.log.journal_chain import Journal
from broker_io.filelog.log.layout import Manifest, Options, PairEntry, replace_manifest
from broker_io.filelog.log.log import FileLog
from broker_io.filelog.log.operations import encode_operations, epoch_operations, random_jump
from broker_io.filelog.log.records import START, Fork, LogRecord, Mark, Store, StoreLog
from broker_io.filelog.log.recovery import open_locked, open_log
from broker_io.filelog.log.repair import discard_fetched, put_in_place
from broker_io.filelog.pair.applying import Applier
from broker_io.filelog.pair.aside import finish_aside, set_aside
from broker_io.filelog.pair.copying import CopyFiles, DirectoryCopy, is_segment_name, name_of
from broker_io.filelog.pair.port import CopyChunk, StoreEvents
from broker_io.filelog.pair.prepared import PreparedFiles
from broker_io.filelog.replication.messages import BuildEpoch, DiskSpace, ReplacedFiles
from broker_io.port import Resource

STORE_BYTES = 16
PAIR_BYTES = 16
SPACE_SECONDS = 1.0
"""Seconds between checks of the free space while there is too little."""


class DirectoryStore(Resource):
    """See `PairStore`. `log` is the engine, another one after a copy; `changed` is called after that.

    A `founder` turns a directory with a log of its own into the first store of a pair.
    """

    def __init__(
        self,
        directory: str,
        options: Options,
        environment: Environment | None = None,
        *,
        founder: bool = False,
        lanes: int = 2,
    ) -> None:
        self.directory = directory
        self.report: list[str] = []
        self.replacing = False
        """Whether what the directory has is being replaced, so that files of `log` may be missing."""
        self.changed: Callable[[], None] = lambda: None
        self._environment = environment or current()
        self._disk = self._environment.disk
        self._options = options
        self._founder = founder
        self.lanes = lanes
        self._opened: FileLog | None = None
        self._events: StoreEvents
        self._prepared: PreparedFiles
        self._applier: Applier
        self._mending = self._environment.threads.lock()
        self._copies = self._environment.threads.lock()
        self._copying = 0
        self._removed: list[str] = []
        self._watermark = Watermark(self._environment, directory, options.watermark_bytes)
        self._full = False

    @property
    def log(self) -> FileLog:
        if self._opened is None:
            raise Closed(f"the store {self.directory} is closed: open it again")
        return self._opened

    @property
    def lanes_busy(self) -> int:
        """How many lanes apply something now."""
        return self._applier.busy if self._opened is not None else 0

    # --- opening ---

    def open_log(self, events: StoreEvents) -> StoreLog:
        """See `PairStore`. Raises CallerError for a log of its own that does not found the pair."""
        self._events = events
        environment, directory = self._environment, self.directory
        finish = partial(finish_aside, self._disk, directory)
        self._opened, self.report, found = open_log(environment, directory, self._options, member=True, locked=finish)
        log = self.log
        try:
            if not log.manifest.is_member:
                self._join()
                found = None
            records, noted = (found.records, found.noted) if found is not None else ([], 0)
            pair, noted = log.pair, max(noted, log.pair.committed)
            opened = StoreLog.open(
                *(pair.store, log.applied, log.journal.base, records, noted, pair.forks),
                partial=pair.partial,
                pair=pair.id,
            )
        except BaseException:
            log.close()
            raise
        self._prepared = PreparedFiles(environment, directory, events.fetch, events.post, events.failed)
        self._applier = Applier(environment, directory, self.lanes, self._prepared)
        self._begin()
        return opened

    def _join(self) -> None:
        """Make an ordinary log that of a member."""
        log, store = self.log, self._environment.randomness.token(STORE_BYTES)
        if self._founder:
            log.found(store, self._environment.randomness.token(PAIR_BYTES))
        elif log.names() or log.applied.lsn:
            raise CallerError(
                f"{self.directory} has a log that is not of this pair: found the pair with it, or name an empty "
                "directory for the backup"
            )
        else:
            log.follow(store)

    def _begin(self) -> None:
        """The engine is another one."""
        self._applier.forget()
        self.log.on_replaced = self._replaced
        self.log.on_checkpointed = self._events.checkpointed
        self.update_prepared()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turn an OSError into DiskFailed or TooManyFiles."""
        try:
            yield
        except OSError as error:
            raise disk_error(
                error, self.directory, "the member of the pair stops", "repair the disk or free space"
            ) from error

    # --- journal and files ---

    def write(self, records: Sequence[LogRecord], synced: int) -> None:
        """See `PairStore`."""
        log = self.log
        with log.guard(log.journal.path, midway=True):
            log.journal.write(records, synced)
            self._watermark.unseen += sum([len(record.content) for record in records])
            self._check_space()

    def _check_space(self) -> None:
        self._watermark.check()
        if self._watermark.is_crossed != self._full:
            self._full = self._watermark.is_crossed
            self._events.post(DiskSpace(self._full))
            if self._full:
                self._check_again()

    def _check_again(self) -> None:
        """A store that is full gets no records, so nothing else would notice that there is space again."""

        def check() -> None:
            with contextlib.suppress(OSError):
                self._check_space()
            if self._full and self._opened is not None:
                self._check_again()

        self._environment.threads.timer(SPACE_SECONDS, check).start()

    def note_commit(self, lsn: int) -> None:
        """See `PairStore`."""
        log = self.log
        with log.guard(log.journal.path, midway=True):
            log.journal.note_commit(lsn)

    def cut(self, lsn: int) -> None:
        """See `PairStore`."""
        self.log.cut(lsn)
        self._applier.forget()

    def drop_journal(self, lsn: int) -> None:
        """See `PairStore`."""
        log = self.log
        with log.guard(self.directory, midway=True):
            log.journal.drop(lsn)

    def mark_partial(self, partial: bool) -> None:
        """See `PairStore`."""
        self.log.change_pair(partial=partial)

    def replace(self) -> Store:
        """See `PairStore`."""
        token = self._environment.randomness.token
        log, store = self.log, token(STORE_BYTES)
        empty = Manifest(
            token(16).hex(), token(8).hex(), log.journal.number + 1, 1, (), pair=PairEntry(store, partial=True)
        )
        with self._reopening():
            self._create_journal(empty.journal, START)
            set_aside(self._disk, self.directory, empty, token(8).hex())
        return store

    def receive(self) -> DirectoryReceiver:
        """See `PairStore`."""
        pair, number = self.log.pair, self.log.journal.number + 1
        empty = self.log.manifest._replace(
            journal=number, last_journal=number, topics=(), mark=START, pair=PairEntry(pair.store, partial=True)
        )
        with self._reopening():
            self._begin_journal(empty, START)
        return DirectoryReceiver(self, CopyFiles(self._disk, self.directory))

    def _begin_journal(self, manifest: Manifest, before: Mark) -> None:
        """Replace the manifest by one whose journal is a new one."""
        self._create_journal(manifest.journal, before)
        replace_manifest(self._disk, self.directory, manifest)

    def _create_journal(self, number: int, before: Mark) -> None:
        Journal.create(self._environment, self.directory, number, before).close()
        self._disk.sync_directory(self.directory)

    @contextlib.contextmanager
    def _reopening(self) -> Iterator[None]:
        """Replace what the directory has; the engine is opened again after that, under the same lock."""
        self._prepared.forget()
        log = self.log
        with self._mending:
            self.replacing = True  # until nobody sees this log any more
        log.close_files()
        try:
            with self._guarded():
                yield
                reopened = open_locked(self._environment, self.directory, self._options, log.lock, member=True)
        except BaseException as error:
            log.stop(DiskFailed(f"{self.directory}: its files were being replaced: open the log again ({error})"))
            raise
        self._opened, self.report, _ = reopened
        self._begin()
        self.changed()
        self.replacing = False

    def finish_copy(self, files: CopyFiles, mark: Mark, forks: tuple[Fork, ...]) -> None:
        """Put a copy in place, as `CopyReceiver.finish` says."""
        with self._guarded():
            copied = files.finish()
        if copied.mark != mark or not copied.is_member:
            raise Damaged(self.directory, 0, f"the copy is that of {copied.mark}, not of {mark}: it begins again")
        number = self.log.journal.number + 1
        pair = copied.pair._replace(store=self.log.pair.store, partial=True, committed=mark.lsn, forks=forks)
        with self._reopening():
            self._begin_journal(copied._replace(journal=number, last_journal=number, pair=pair), mark)

    def remove_files(self, names: Sequence[str]) -> None:
        """See `PairStore`."""
        with self._copies:
            if self._copying:
                self._removed += names
                return
        log = self.log
        with log.guard(self.directory, midway=True):
            log.remove_files([layout.join(self.directory, name) for name in names])

    def _replaced(self, paths: Sequence[str]) -> None:
        files = [(name_of(self.directory, path), self._size(path)) for path in paths]
        self._events.post(ReplacedFiles(tuple(files)))

    def _size(self, path: str) -> int:
        with contextlib.suppress(OSError), contextlib.closing(self._disk.open(path)) as file:
            return file.size()
        return 0

    # --- state ---

    def apply(self, lsn: int) -> None:
        """See `PairStore`."""
        self._applier.apply(self.log, lsn)

    def epoch_content(self, effect: BuildEpoch) -> bytes:
        """See `PairStore`."""
        log = self.log
        jump = random_jump(self._environment.randomness) if effect.forced else 0
        topics = tuple([topic.entry for topic in log.all_topics()])
        return b"".join(encode_operations(epoch_operations(log.manifest._replace(topics=topics), log.numbers(), jump)))

    def update_prepared(self) -> None:
        """The engine has changed by itself what is prepared."""
        self._prepared.update(self.log.pair.prepared)

    def mend(self, log: FileLog, segment: DamagedSegment, fetched: str) -> None:
        """Let a damaged segment of a log have the bytes of a verified file, unless a copy replaces that log."""
        with self._mending:
            if self.replacing or self._opened is not log:
                discard_fetched(self._disk, fetched)
                return
            put_in_place(log, self._disk, self.directory, segment, fetched)

    # --- for the peer ---

    def read(self, first: int, last: int) -> Iterator[LogRecord]:
        """See `PairStore`."""
        with self._guarded():
            yield from self.log.journal.read(first, last)

    def begin_copy(self) -> DirectoryCopy:
        """See `PairStore`."""
        with self._copies:
            self._copying += 1
        try:
            log = self.log
            with log.changing:
                log.checkpoint()
                manifest = log.manifest
        except BaseException:
            self._end_copy()
            raise
        return DirectoryCopy(self._disk, self.directory, manifest, self._end_copy, log.damage.found)

    def _end_copy(self) -> None:
        with self._copies:
            self._copying -= 1
            names, self._removed = ([], self._removed) if self._copying else (self._removed, [])
        if names:
            self.remove_files(names)

    def read_prepared(self, name: str, offset: int, size: int) -> bytes:
        """See `PairStore`."""
        missing = f"there is no file {name!r} in {self.directory} any more: copy the log"
        if not is_segment_name(name):
            raise TopicNotFound(missing)
        with self._guarded():
            try:
                file = self._disk.open(layout.join(self.directory, name))
            except FileNotFoundError:
                raise TopicNotFound(missing) from None
            with contextlib.closing(file):
                return file.read(offset, size)

    def close(self) -> None:
        """End all threads; write a checkpoint, and release the directory."""
        log, self._opened = self._opened, None
        if log is not None:
            self._prepared.close()
            self._applier.close()
            log.close()


class DirectoryReceiver(Resource):
    """See `CopyReceiver`."""

    def __init__(self, store: DirectoryStore, files: CopyFiles) -> None:
        self._store, self._files = store, files

    def add(self, chunk: CopyChunk) -> None:
        try:
            self._files.add(chunk)
        except OSError as error:
            raise disk_error(error, self._store.directory, "the copy begins again") from error

    def finish(self, mark: Mark, forks: tuple[Fork, ...]) -> None:
        self._store.finish_copy(self._files, mark, forks)

    def close(self) -> None:
        self._files.close()
