"""The files that compactions have prepared: a member that lacks one fetches it from its peer

The primary has written a file before the log names it. Its backup fetches the bytes, because they are what the log
says, and computing them twice would cost more. What a file has is checked by its length and digest before it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

import xxhash

from broker_io.environment import Environment
from broker_io.errors import Damaged, PeerError, TopicNotFound, as_error, disk_error
from broker_io.filelog.log import layout
from broker_io.filelog.log.backup import CHUNK_BYTES
from broker_io.filelog.log.layout import PreparedFile
from broker_io.filelog.log.segment import file_digest
from broker_io.filelog.pair.copying import name_of
from broker_io.filelog.pair.tasks import WorkThread
from broker_io.filelog.replication.messages import RewriteFinished

RETRY_SECONDS = 0.5
"""Seconds between attempts to fetch a file."""


def rewrite_of(files: Sequence[PreparedFile]) -> RewriteFinished:
    """What a member reports once it has all files of one compaction."""
    digest = xxhash.xxh3_128_digest("".join([file.digest for file in files]).encode())
    return RewriteFinished(files[0].number, sum(file.bytes for file in files), digest)


class PreparedFiles(WorkThread):
    """Fetches prepared files in a thread, which exists only while some are missing.

    `fetch` returns bytes of a file of the peer; `finished` learns what is complete, `failed` of an error of the disk.
    """

    def __init__(
        self,
        environment: Environment,
        directory: str,
        fetch: Callable[[str, int, int], bytes],
        finished: Callable[[RewriteFinished], None],
        failed: Callable[[Exception], None],
    ) -> None:
        super().__init__(environment.threads, f"prepare {directory}")
        self._disk = environment.disk
        self._directory = directory
        self._fetch, self._finished, self._failed = fetch, finished, failed
        self._wanted: dict[int, list[PreparedFile]] = {}
        self._complete: set[int] = set()
        self._working = environment.threads.lock()

    def update(self, prepared: Sequence[PreparedFile]) -> None:
        """These are all files that are prepared; those that are new are fetched, unless they are here."""
        with self._changed:
            self._wanted = {}
            for file in prepared:
                self._wanted.setdefault(file.number, []).append(file)
            self._complete &= self._wanted.keys()
            if not self._complete.issuperset(self._wanted):
                self._wake()
            self._changed.notify_all()

    def forget(self) -> None:
        """Forget all files, and return once none is written any more."""
        self.update(())
        with self._working:
            pass

    def ensure(self, number: int) -> None:
        """Return once the files of a compaction are here.

        Raises PeerError if they can't be fetched now, TopicNotFound if the peer does not have them, DiskFailed.
        """
        with self._changed:
            files = self._wanted.get(number, [])
        if number not in self._complete and files:
            self._complete_files(number, files)

    def _complete_files(self, number: int, files: Sequence[PreparedFile]) -> None:
        with self._working:
            if number in self._complete or number not in self._wanted:
                return
            try:
                for file in files:
                    self._complete_file(file)
                for topic in dict.fromkeys([file.topic for file in files]):
                    self._disk.sync_directory(layout.topic_path(self._directory, topic))
            except OSError as error:
                raise disk_error(error, self._directory, "a file of a compaction was not stored") from error
            with self._changed:
                self._complete.add(number)
        self._finished(rewrite_of(files))

    def _complete_file(self, file: PreparedFile) -> None:
        path = layout.prepared_path(self._directory, file)
        name = name_of(self._directory, path)
        whole = (file.bytes, file.digest)
        if self._disk.exists(path) and file_digest(self._disk, path) == whole:
            return
        with closing(self._disk.open(path, write=True, create=True)) as written:
            written.truncate(0)
            at = 0
            while at < file.bytes:
                with self._changed:
                    if self._closed or file.number not in self._wanted:
                        raise PeerError(f"{self._directory} is being closed or replaced: open it again")
                data = self._fetch(name, at, min(CHUNK_BYTES, file.bytes - at))
                if not data:
                    break
                written.write(at, [data])
                at += len(data)
            written.sync()
        if file_digest(self._disk, path) != whole:
            self._disk.remove(path)
            raise Damaged(path, 0, "the file that was fetched from the other member is not what the log says")

    def _work(self) -> None:
        while True:
            with self._changed:
                missing = [number for number in self._wanted if number not in self._complete]
                if self._closed or not missing:
                    self._thread = None
                    return
            try:
                for number in missing:
                    self.ensure(number)
            except (PeerError, TopicNotFound, Damaged):
                with self._changed:
                    if not self._closed:
                        self._changed.wait(RETRY_SECONDS)
            except BaseException as error:
                self._failed(as_error(error))
                with self._changed:
                    self._thread = None
                return
