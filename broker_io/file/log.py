"""The engine of the embedded log: appends in, positions out, everything durable; no threads, no waiting.

A flush turns all pending appends into blocks, writes the blocks of all topics as one record of the journal, syncs the
journal, writes the blocks to their segments, and acknowledges the appends. So a segment never shows what is not
durable, and one sync serves all topics. A checkpoint syncs the segments, starts an empty journal and names it in a new
manifest.

The first failed write or sync stops the engine. A failed sync may have dropped what it should have written, so nothing
is retried; recovery at the next open determines what is durable.

Appends are refused before the disk is full, while there is still room to decide, compact, trim and take snapshots.
Records are refused below the watermark. What ends transactions, and appends to the service's own topics, are refused
below half of it, so that transactions whose records were refused can still end.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import Any

from broker_io.batch import Batch
from broker_io.environment import Environment
from broker_io.errors import (
    DiskFailed,
    DiskWatermark,
    TooManyFiles,
    TopicNotFound,
    disk_error,
    disk_failure,
    out_of_files,
)
from broker_io.file import layout
from broker_io.file.commit import FileTopic, LedgerCommit, PendingBatch, build_commit
from broker_io.file.journal_v1 import FILE_HEAD_BYTES, JournalV1, Placed
from broker_io.file.layout import (
    MIB,
    LedgerEntry,
    Lock,
    Manifest,
    Options,
    TopicEntry,
    TopicTexts,
    empty_topic,
    replace_manifest,
)
from broker_io.file.segment import Segment
from broker_io.port import OWN_PREFIX, check_batch
from broker_io.position import Positions

BYTES_BETWEEN = 16 * MIB
SECONDS_BETWEEN = 1.0


class Watermark:
    """Checks the free space every 16 MiB or every second, and each time while there is too little."""

    def __init__(self, environment: Environment, directory: str, watermark_bytes: int) -> None:
        self._disk = environment.disk
        self._clock = environment.clock
        self._directory = directory
        self._watermark_bytes = watermark_bytes
        self.unseen = BYTES_BETWEEN
        """Bytes that were written since the last check."""
        self._seen_at = 0.0
        self._low = False
        self._free = watermark_bytes

    def check(self) -> None:
        """Measure the free space if it may have changed. Raises OSError."""
        now = self._clock.monotonic()
        if self._low or self.unseen >= BYTES_BETWEEN or now - self._seen_at >= SECONDS_BETWEEN:
            self._free = self._disk.free_bytes(self._directory)
            self.unseen, self._seen_at = 0, now
            self._low = self._free < self._watermark_bytes

    def refusal(self, append: PendingBatch) -> DiskWatermark | None:
        """The error for an append that may not be written, by the last check, or None."""
        reserved = append.reserved or append.topic.entry.name.startswith(OWN_PREFIX)
        if not self._low or (reserved and 2 * self._free >= self._watermark_bytes):
            return None
        limit = "half of the watermark" if reserved else "the watermark"
        return DiskWatermark(
            f"{self._directory}: {self._free} bytes are free, fewer than {limit} of {self._watermark_bytes}: "
            "appends are rejected until there are more; free some space"
        )


FLUSH_BYTES = 16 * MIB
"""Bytes of appends in one flush, at most, approximately."""
APPEND_BYTES = 1024
"""Memory that one more append takes besides its content."""
OPEN_SEGMENTS = 256
"""Segment files that are kept open."""

_STOPPED = "the log has stopped; nothing acknowledged is lost: repair the disk or free space, then open the log again"
_UNLOCKED = (
    "its lock file was removed, so the log has stopped: make sure that no other process owns it, then open it again"
)


class FileLog:
    """All topics of one directory. Calls come from one thread at a time."""

    def __init__(
        self,
        environment: Environment,
        directory: str,
        options: Options,
        manifest: Manifest,
        journal: JournalV1,
        lock: Lock,
    ) -> None:
        self.failure: DiskFailed | None = None
        self.pending: deque[PendingBatch] = deque()
        self.pending_bytes = 0
        self._disk = environment.disk
        self._clock = environment.clock
        self._randomness = environment.randomness
        self._directory = directory
        self._options = options
        self._manifest = manifest
        self._texts = TopicTexts()
        self.seed = int(manifest.secret, 16)
        """The seed of the key hashes."""
        self._journal = journal
        self._lock = lock
        self._topics = {entry.number: self._open_topic(entry) for entry in manifest.topics}
        self._numbers = {topic.entry.name: number for number, topic in self._topics.items()}
        self._dirty: dict[int, FileTopic] = {}
        self._watermark = Watermark(environment, directory, options.watermark_bytes)
        self._kept: list[str] | None = None
        """While a backup is written: files that the manifest does not name any more."""

    def _open_topic(self, entry: TopicEntry) -> FileTopic:
        return FileTopic(entry, entry, Segment(self._disk, self._path(entry), entry.ledgers[-1].bytes))

    def _path(self, entry: TopicEntry, ledger: LedgerEntry | None = None) -> str:
        ledger = ledger or entry.ledgers[-1]
        return layout.segment_path(self._directory, entry, ledger)

    # --- topics ---

    def names(self) -> list[str]:
        return sorted(self._numbers)

    def topic(self, name: str) -> FileTopic:
        """Raises TopicNotFound."""
        topic = self._topics.get(self._numbers.get(name, 0))
        if topic is None:
            raise TopicNotFound(f"there is no topic {name!r} in {self._directory}: create it first")
        return topic

    def current(self, number: int) -> TopicEntry | None:
        """The current state of a topic; None if it was deleted."""
        topic = self._topics.get(number)
        return None if topic is None else topic.entry

    def create_topics(self, names: Iterable[str]) -> None:
        """Create topics with one empty ledger each, all in one step; existing topics stay as they are."""
        missing = [name for name in dict.fromkeys(names) if name not in self._numbers]
        if not missing:
            return
        self._check()
        number, first, token = self._manifest.next_topic, self._manifest.next_ledger, self._randomness.token
        entries = [empty_topic(number + place, name, token(16), first) for place, name in enumerate(missing)]
        directory = layout.join(self._directory, layout.TOPICS)
        with self.guard(directory):
            for entry in entries:
                self._disk.make_directory(layout.topic_path(self._directory, entry.number))
                self._make_segment(entry)
            self._disk.sync_directory(directory)
            if number == 1:
                self._disk.sync_directory(self._directory)
            self._replace(next_topic=number + len(entries), topics=[*self._durable(), *entries])
        for entry in entries:
            self._topics[entry.number] = self._open_topic(entry)
            self._numbers[entry.name] = entry.number

    def _make_segment(self, entry: TopicEntry) -> None:
        with closing(self._disk.open(self._path(entry), write=True, create=True)) as file:
            file.truncate(0)
            file.sync()
        self._disk.sync_directory(layout.topic_path(self._directory, entry.number))

    def delete_topic(self, name: str) -> None:
        topic = self.topic(name)
        self._check()
        behind = max(self._manifest.next_ledger, topic.entry.ledgers[-1].ledger + 1)
        with self.guard(self._directory):
            left = [entry for entry in self._durable() if entry.number != topic.entry.number]
            self._replace(topics=left, next_ledger=behind)
        topic.removed = True
        del self._numbers[name], self._topics[topic.entry.number]
        self._dirty.pop(topic.entry.number, None)
        topic.segment.close()
        with self.guard(self._directory):
            self._remove(topic.entry, topic.entry.ledgers)

    def roll(self, topic: FileTopic) -> None:
        """Close the open ledger and start another, unless it is empty."""
        last = topic.entry.ledgers[-1]
        if not last.entries:
            return
        self._check()
        opened = LedgerEntry(last.ledger + 1, first_time=last.last_time, last_time=last.last_time)
        entry = topic.entry._replace(ledgers=(*topic.entry.ledgers, opened))
        with self.guard(self._path(entry)):
            self._make_segment(entry)
            self._checkpoint({entry.number: entry})
        topic.segment.close()
        topic.segment = Segment(self._disk, self._path(entry), 0)

    def trim(self, topic: FileTopic, first_ledger: int) -> None:
        """Drop closed ledgers below a number."""
        old = topic.entry.ledgers
        dropped = tuple(ledger for ledger in old[:-1] if ledger.ledger < first_ledger)
        if not dropped:
            return
        floor = (dropped[-1].ledger, dropped[-1].entries)
        self.change(topic, topic.entry._replace(floor=floor, ledgers=old[len(dropped) :]), dropped)

    def change(self, topic: FileTopic, entry: TopicEntry, dropped: Iterable[LedgerEntry]) -> None:
        """Replace the closed ledgers of a topic in one step, and remove the files of the dropped ones."""
        self._check()
        with self.guard(self._directory):
            durable = entry.with_open(topic.durable.ledgers[-1])
            self._replace(topics=[durable if other is topic.durable else other for other in self._durable()])
            topic.entry, topic.durable = entry, durable
            self._remove(entry, dropped)

    def _remove(self, entry: TopicEntry, ledgers: Iterable[LedgerEntry]) -> None:
        paths = [self._path(entry, ledger) for ledger in ledgers]
        if self._kept is None:
            self._remove_files(paths)
        else:
            self._kept += paths

    def _remove_files(self, segments: Iterable[str]) -> None:
        for path in segments:
            self._disk.remove(path)
            self._disk.remove(layout.index_path(path))

    # --- backups ---

    def begin_backup(self) -> Manifest:
        """Make a checkpoint, and keep all files that its manifest names until `end_backup`."""
        self.checkpoint()
        self._kept = []
        return self._manifest

    def end_backup(self) -> None:
        """Remove the files that only the backup needed."""
        paths, self._kept = self._kept or [], None
        if self.failure is not None:
            return  # the next owner removes them
        with self.guard(self._directory):
            self._remove_files(paths)

    # --- appends ---

    def submit(self, topic: FileTopic, batch: Batch, *, reserved: bool = False) -> Future[Positions]:
        """Queue a batch of at least one message for the next flush. Raises MessageTooLarge or InvalidMessage."""
        future: Future[Positions] = Future()
        future.set_running_or_notify_cancel()
        append = PendingBatch(topic, batch, check_batch(batch, self._options.max_message_bytes), future, reserved)
        if self.failure is not None:
            future.set_exception(self.failure)
        else:
            self.pending.append(append)
            self.pending_bytes += append.size + APPEND_BYTES
        return future

    def take(self) -> list[PendingBatch]:
        """Take the appends of the next flush, oldest first."""
        taken: list[PendingBatch] = []
        size = 0
        while self.pending and (not taken or size + self.pending[0].size <= FLUSH_BYTES):
            taken.append(self.pending.popleft())
            size += taken[-1].size
        self.pending_bytes -= size + APPEND_BYTES * len(taken)
        return taken

    def flush(self) -> None:
        """Write and acknowledge all pending appends."""
        while taken := self.take():
            self.commit(taken)

    def commit(self, taken: list[PendingBatch]) -> None:
        """Write appends durably and acknowledge them; every future is done when this returns or raises."""
        try:
            self._commit(taken)
        except BaseException as error:
            failure = DiskFailed(f"{self._directory}: the commit failed ({error!r}): {_STOPPED}")
            self.stop(failure)
            _fail([append for append in taken if not append.future.done()], failure)
            raise

    def _commit(self, taken: list[PendingBatch]) -> None:
        live = [append for append in taken if not append.topic.removed]
        if len(live) < len(taken):
            gone = [append for append in taken if append.topic.removed]
            _fail(gone, TopicNotFound(f"topic {gone[0].topic.entry.name!r} was deleted: create it first"))
        try:
            self._check()
            with self.guard(self._directory):
                self._watermark.check()
            commits = self._plan(live)
            self._write(commits)
        except (DiskFailed, TooManyFiles) as error:
            _fail([append for append in live if not append.future.done()], error)
            return
        for commit in commits:
            commit.topic.entry = commit.topic.entry.with_open(commit.after)
        for commit in commits:
            for append, positions in commit.answers:
                append.future.set_result(positions)
        self._after(commits)

    def _plan(self, live: list[PendingBatch]) -> list[LedgerCommit]:
        by_topic: dict[int, list[PendingBatch]] = {}
        for append in live:
            if (refusal := self._watermark.refusal(append)) is not None:
                append.future.set_exception(refusal)
                continue
            by_topic.setdefault(append.topic.entry.number, []).append(append)
        now = self._clock.now_ms()
        compress = self._options.compress
        commits: list[LedgerCommit] = []
        for group in by_topic.values():
            try:
                commits.append(build_commit(group[0].topic, group, now, self.seed, compress))
            except Exception as error:  # an inconsistent batch must not leave a future pending
                _fail(group, error)
        return commits

    def _write(self, commits: list[LedgerCommit]) -> None:
        placed = []
        for commit in commits:
            offset = commit.topic.entry.ledgers[-1].bytes
            for block in commit.blocks:
                number, ledger = commit.topic.entry.number, commit.after
                placed.append((Placed(number, ledger.ledger, ledger.generation, offset, block.length), block))
                offset += block.length
                self._watermark.unseen += block.length
        if not placed:
            return
        with self.guard(commits[0].topic.segment.path):
            # Once the journal is written the commit can't be undone, so one descriptor has to be open before.
            commits[0].topic.segment.open(commits[0].topic.entry.ledgers[-1].bytes)
        with self.guard(self._journal.path, midway=True):
            try:
                self._journal.append(placed)
            except OSError:
                with contextlib.suppress(OSError):
                    self._journal.cut()
                raise
        for commit in commits:
            topic = commit.topic
            self._dirty[topic.entry.number] = topic
            with self.guard(topic.segment.path, midway=True):
                self._retry_without_descriptors(
                    partial(topic.segment.write, topic.entry.ledgers[-1].bytes, commit.blocks)
                )
                if len(self._dirty) > OPEN_SEGMENTS:
                    topic.segment.close()

    def _after(self, commits: list[LedgerCommit]) -> None:
        """Roll and checkpoint where it is due; a failure stops the log, but the appends stay acknowledged."""
        with contextlib.suppress(DiskFailed, TooManyFiles):
            for commit in commits:
                if commit.after.bytes >= self._options.segment_bytes:
                    self.roll(commit.topic)
            if self._journal.size >= self._options.journal_bytes:
                self.checkpoint()

    # --- checkpoints ---

    def checkpoint(self) -> None:
        """Make the segments durable and start an empty journal."""
        self._check()
        with self.guard(self._directory):
            self._checkpoint({})

    def _checkpoint(self, replaced: dict[int, TopicEntry]) -> None:
        for topic in self._dirty.values():
            with self.guard(topic.segment.path):
                topic.segment.save_index()
                self._retry_without_descriptors(topic.segment.sync)
                if len(self._topics) > OPEN_SEGMENTS:
                    topic.segment.close()
        number = self._journal.number + 1
        path = layout.journal_path(self._directory, number)
        journal = JournalV1.create(self._disk, path, number, self._randomness.token(8))
        try:
            self._disk.sync_directory(self._directory)
            entries = {number: topic.entry for number, topic in self._topics.items()} | replaced
            self._replace(journal=journal.number, topics=list(entries.values()))
        except BaseException:
            journal.close()
            raise
        old, self._journal = self._journal, journal
        old.close()
        for number, entry in entries.items():
            self._topics[number].entry = self._topics[number].durable = entry
        self._dirty.clear()
        self._disk.remove(old.path)

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

    def _check(self) -> None:
        if self.failure is None and not self._lock.is_in_place():
            self.stop(DiskFailed(f"{self._directory}: {_UNLOCKED}"))
        if self.failure is not None:
            raise self.failure

    @contextlib.contextmanager
    def guard(self, path: str, *, midway: bool = False) -> Iterator[None]:
        """Turn an OSError about a path into DiskFailed and stop the log.

        A lack of descriptors raises TooManyFiles instead and stops nothing, unless `midway` through a change.
        """
        try:
            yield
        except OSError as error:
            if out_of_files(error) and not midway:
                self._close_segments()
                raise disk_error(error, path, "nothing was changed: try again") from error
            failure = disk_failure(error, path, _STOPPED)
            self.stop(failure)
            raise failure from error

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
        self.failure = self.failure or failure

    def close(self) -> None:
        """Flush, checkpoint if the journal is not empty, and release the directory."""
        try:
            self.flush()
            if self.failure is None and self._journal.size > FILE_HEAD_BYTES:
                with contextlib.suppress(TooManyFiles):  # then the next owner does it
                    self.checkpoint()
        finally:
            self._journal.close()
            for topic in self._topics.values():
                topic.segment.close()
            self._lock.close()


def _fail(appends: list[PendingBatch], error: Exception) -> None:
    for append in appends:
        append.future.set_exception(error)
