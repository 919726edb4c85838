"""The copy of a store for its peer: reading it, and writing it

A copy has each segment that the manifest names, as far as the manifest says, the files that compactions have prepared,
and the manifest last. The sender verifies the checksums of all blocks, the receiver those of the parts, and that it has
all of what the manifest names. The journal is not copied: it was empty of what is not in the segments.

A segment that is damaged is sent as it is, with zeros for what can't be read: all other topics get their second copy,
and the damage is as visible in the copy, by the checksums of its blocks.

While it receives, the directory has a manifest without topics that says that the store is partial. A crash leaves this,
and files that it does not name. The manifest of the copy takes its place once all files are durable.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from contextlib import closing

import google_crc32c

from broker_io.environment import Disk, File
from broker_io.errors import Damaged, Error, UnsupportedFormat, disk_error
from broker_io.filelog.log import layout
from broker_io.filelog.log.backup import CHUNK_BYTES, checked_chunks
from broker_io.filelog.log.layout import (
    MIB,
    LedgerEntry,
    Manifest,
    TopicEntry,
    decode_manifest,
    encode_manifest,
    readable,
)
from broker_io.filelog.log.records import Fork, Mark
from broker_io.filelog.log.recovery import open_segment
from broker_io.filelog.log.segment import SparseIndex, complete_index
from broker_io.filelog.pair.port import CopyChunk
from broker_io.port import Resource

SYNC_BYTES = 16 * MIB
"""A file that is received is synced after so many bytes, so that the disk is never busy with more at once."""

_NAME = re.compile(r"topics/[1-9]\d*/[1-9]\d*-(?:0|[1-9]\d*)\.log")


def is_segment_name(name: str) -> bool:
    """Whether a name can be that of a segment in a directory of a log."""
    return _NAME.fullmatch(name) is not None


def name_of(directory: str, path: str) -> str:
    """The name that both members use for a file in the directory of a log."""
    return path.removeprefix(layout.join(directory, ""))


def chunk_of(name: str, offset: int, data: bytes) -> CopyChunk:
    return CopyChunk(name, offset, data, google_crc32c.value(data))


class DirectoryCopy(Resource):
    """The files that a manifest names, none of which is removed until `close`, which calls `ended`.

    `damaged` is called with what is wrong with a segment, and its path.
    """

    def __init__(
        self,
        disk: Disk,
        directory: str,
        manifest: Manifest,
        ended: Callable[[], None],
        damaged: Callable[[Error, str], object],
    ) -> None:
        self._disk, self._directory, self._manifest = disk, directory, manifest
        self._ended, self._damaged = ended, damaged
        self._closed = False

    @property
    def mark(self) -> Mark:
        return self._manifest.mark

    @property
    def forks(self) -> tuple[Fork, ...]:
        return self._manifest.pair.forks

    def __iter__(self) -> Iterator[CopyChunk]:
        """Read and verify the files. Raises DiskFailed."""
        try:
            for topic in self._manifest.topics:
                for ledger in topic.ledgers:
                    yield from self._segment(topic, ledger)
            for file in self._manifest.pair.prepared:
                yield from self._as_stored(layout.prepared_path(self._directory, file), 0, file.bytes)
        except OSError as error:
            raise disk_error(error, self._directory, "the copy of it for the other member has ended") from error
        yield from _parts(layout.MANIFEST, 0, encode_manifest(self._manifest))

    def _segment(self, topic: TopicEntry, ledger: LedgerEntry) -> Iterator[CopyChunk]:
        path, at = layout.segment_path(self._directory, topic, ledger), 0
        name = name_of(self._directory, path)
        try:
            with readable(path), closing(open_segment(self._disk, path)) as file:
                for chunk in checked_chunks(file, path, 0, ledger.bytes, topic.place(ledger)):
                    yield from _parts(name, at, chunk)
                    at += len(chunk)
        except (Damaged, UnsupportedFormat) as error:
            self._damaged(error, path)
            yield from self._as_stored(path, at, ledger.bytes)

    def _as_stored(self, path: str, start: int, size: int) -> Iterator[CopyChunk]:
        """What a file has from an offset on, with zeros for what it lacks or what can't be read."""
        name = name_of(self._directory, path)
        with contextlib.ExitStack() as stack:
            file: File | None = None
            with contextlib.suppress(Damaged):
                file = stack.enter_context(closing(open_segment(self._disk, path)))
            for at in range(start, size, CHUNK_BYTES):
                data, wanted = b"", min(CHUNK_BYTES, size - at)
                with contextlib.suppress(Damaged), readable(path):
                    data = b"" if file is None else file.read(at, wanted)
                yield chunk_of(name, at, data.ljust(wanted, b"\0"))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._ended()


def _parts(name: str, offset: int, data: bytes) -> Iterator[CopyChunk]:
    for at in range(0, len(data), CHUNK_BYTES):
        yield chunk_of(name, offset + at, data[at : at + CHUNK_BYTES])


class CopyFiles(Resource):
    """Writes the parts of a copy into a directory that has none of its files.

    After an error it takes nothing more. Closed before everything was there, it removes what it has written, which may
    be what the disk has no space for.
    """

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk, self._directory = disk, directory
        self._file: File | None = None
        self._name = ""
        self._size = self._synced = 0
        self._received: dict[str, int] = {}
        self._begun: list[str] = []
        self._manifest = bytearray()

    def add(self, chunk: CopyChunk) -> None:
        """Write a part. Raises Damaged if its checksum or place is wrong, OSError."""
        name, offset, data, crc = chunk
        if google_crc32c.value(data) != crc:
            raise self._damaged(name, offset, "a part of a copy has another checksum")
        if name == layout.MANIFEST:
            if offset != len(self._manifest):
                raise self._damaged(name, offset, f"{len(self._manifest)} bytes of it came before")
            self._manifest += data
            return
        if name != self._name:
            self._begin(name)
        if offset != self._size or self._file is None:
            raise self._damaged(name, offset, f"{self._size} bytes of it came before")
        self._file.write(offset, [data])
        self._size += len(data)
        if self._size - self._synced >= SYNC_BYTES:
            self._file.sync()
            self._synced = self._size

    def _damaged(self, name: str, offset: int, reason: str) -> Damaged:
        return Damaged(layout.join(self._directory, name), offset, f"{reason}: the copy begins again")

    def _begin(self, name: str) -> None:
        self._end()
        if not is_segment_name(name) or name in self._received or self._manifest:
            raise self._damaged(name, 0, "no file of this name can follow")
        path = layout.join(self._directory, name)
        self._disk.make_directory(path.rpartition("/")[0])
        self._begun.append(path)
        self._file = self._disk.open(path, write=True, create=True)
        self._file.truncate(0)
        self._name, self._size, self._synced = name, 0, 0

    def _end(self) -> None:
        """The file is complete."""
        if self._file is not None:
            self._file.sync()
            self._received[self._name] = self._size
            self._close()

    def _close(self) -> None:
        file, self._file, self._name = self._file, None, ""
        if file is not None:
            file.close()

    def finish(self) -> Manifest:
        """Sync everything; the manifest of the copy, of which every file is there. Raises Damaged, OSError."""
        self._end()
        manifest = decode_manifest(bytes(self._manifest), layout.join(self._directory, layout.MANIFEST))
        for topic in manifest.topics:
            self._disk.make_directory(layout.topic_path(self._directory, topic.number))
            for ledger in topic.ledgers:
                self._finish_segment(topic, ledger)
        for file in manifest.pair.prepared:
            self._complete(layout.prepared_path(self._directory, file), file.bytes)
        if self._received:
            raise self._damaged(next(iter(self._received)), 0, "the manifest of the copy does not name it")
        for topic in manifest.topics:
            self._disk.sync_directory(layout.topic_path(self._directory, topic.number))
        self._disk.make_directory(layout.join(self._directory, layout.TOPICS))
        self._disk.sync_directory(layout.join(self._directory, layout.TOPICS))
        self._disk.sync_directory(self._directory)
        self._begun = []  # from now on a manifest may name them
        return manifest

    def _finish_segment(self, topic: TopicEntry, ledger: LedgerEntry) -> None:
        path = layout.segment_path(self._directory, topic, ledger)
        self._complete(path, ledger.bytes)
        index = SparseIndex()
        with (
            closing(self._disk.open(path)) as file,
            contextlib.suppress(Error),
        ):  # without an index readers make their own
            complete_index(index, file, path, ledger.bytes)
            if len(index):
                index.save(self._disk, layout.index_path(path))

    def _complete(self, path: str, size: int) -> None:
        """Check that a file was received as a whole; one without bytes has no parts."""
        name = name_of(self._directory, path)
        if (found := self._received.pop(name, 0)) != size:
            raise self._damaged(name, found, f"the copy has {found} of its {size} bytes")
        if not size:
            with closing(self._disk.open(path, write=True, create=True)) as file:
                file.truncate(0)
                file.sync()

    def close(self) -> None:
        self._close()
        begun, self._begun = self._begun, []
        with contextlib.suppress(OSError):  # the next copy, or opening, removes what is left
            for path in begun:
                self._disk.remove(path)
