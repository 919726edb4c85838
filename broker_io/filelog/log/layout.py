"""Files of an embedded log, its manifest, its options and its lock.

    DIR/lock                                      locked by the owner; holds its pid as text
    DIR/manifest                                  the valid files and their lengths (see below)
    DIR/manifest.new                              a manifest that is being written
    DIR/journal-<n>                               what was appended since the last checkpoint (journal.py)
    DIR/topics/<topic>/<ledger>-<generation>.log    one ledger of a topic: blocks, nothing else (segment.py)
    DIR/topics/<topic>/<ledger>-<generation>.index  sparse index of it, may be missing (segment.py)
    DIR/topics/<topic>/keys                         scratch of a compaction that runs (key_columns.py)
    DIR/topics/<topic>/<ledger>-<generation>-<attempt>.log, .index
                                                  written by another process for the owner (compaction_tasks.py)

Topic directories are named by number; topic names are in the manifest only, so any name suits any file system. Files
that the manifest does not name are leftovers of an unfinished change; the next owner removes them.

One process at a time owns a directory: it holds the lock and writes its pid there.

The manifest is the one file that lists the valid files of a log, and how many bytes of each are valid. Replacing it
commits everything but appends: topics created and deleted, segments rolled, trimmed, compacted, journals started. It is
text in UTF-8. The first line is

    txnbuffer-log <version> <CRC32C of all that follows that line, 8 hexadecimal digits>

and the rest is one JSON document:

    log         16 bytes in hexadecimal, the identity of the log
    secret      8 bytes in hexadecimal, the seed of its key hashes
    journal     number of the journal that holds what was appended since
    next_topic  number of the next topic; numbers are never reused
    next_ledger number of the first ledger of the next topic: above those of all deleted topics, so that a position in
                a deleted topic exists in no later topic of its name; missing in older manifests: 1
    pair        an object, if the directory is the store of a member of a pair (see below)
    topics      one object per topic: number, name, incarnation (16 bytes in hexadecimal), floor, ledgers, and
                operations, the number of the last operation that is in its ledgers (operations.py)

The incarnations of topics are random, but the first topic has the identity of the log: a service takes that of its
decision log for the identity of the whole, and a forced promotion may lose even the creation of that topic.

`floor` is `[ledger, entry]`: nothing below it exists any more. A data topic that was compacted has `cleaned` and
`purged`, one with a policy has `policy`, an object; `broker_io.compaction` describes them. Each of `ledgers`, in order,
is an object with ledger, generation (how often compaction rewrote it), entries (next entry number), bytes (all
durable), first_time and last_time (no message of it was published before the former, none of the topic so far after the
latter; milliseconds, 0 for an empty topic). Up to `cleaned` it may have `digest`, 32 hexadecimal digits: the sum that
`broker_io.key_digest` describes, with `secret` as its seed, of those of its messages that have a value and are the
newest with their key in all ledgers up to `cleaned`. Visible record sets are not part of it. All but the last ledger
are closed. Appends in the journal extend the last one.

`pair` has store (hexadecimal), partial (a store that lacks a part of its own log), committed (an lsn up to which
records were known to be committed), structures (the number of the last structure operation that the manifest has),
forks (for each forced promotion its epoch and the mark to which it cut the log), and prepared (for each file that a
compaction has written and not yet put in its place: number of the operation, topic, ledger, generation, bytes, and
digest in hexadecimal). It has id (hexadecimal), the random id that the founder of the pair drew and all copies have,
unless the store has no copy yet.

Version 1, of the release 0.1.0, is refused: the release 0.2.0 converts it.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import json
import re
from collections.abc import Container, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import google_crc32c

from broker_io.block import BadBlock
from broker_io.compaction import CompactionPolicy, CompactionState
from broker_io.environment import Disk, Environment, File, read_file
from broker_io.errors import (
    CallerError,
    Damaged,
    ForeignDirectory,
    Locked,
    UnsupportedFormat,
)
from broker_io.filelog.log.keymap import SMALLEST_BYTES
from broker_io.filelog.log.records import MAX_NUMBER, START, Fork, Mark, Store
from broker_io.port import MAX_MESSAGE_BYTES, OWN_PREFIX
from broker_io.position import LEDGERS_OF_A_HISTORY

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a log; sizes in bytes. Topics whose names begin with `compacted_prefix` may be compacted.

    A compaction remembers keys in `compaction_bytes` at most.
    """

    segment_bytes: int = 64 * MIB
    journal_bytes: int = 64 * MIB
    compress: bool = False
    watermark_bytes: int = 256 * MIB
    max_message_bytes: int = MAX_MESSAGE_BYTES
    compacted_prefix: str = OWN_PREFIX
    compaction_bytes: int = 128 * MIB

    @classmethod
    def checked(
        cls,
        segment_bytes: int,
        journal_bytes: int,
        compression: str | None,
        watermark_bytes: int,
        max_message_bytes: int,
        compacted_prefix: str,
        compaction_bytes: int,
    ) -> Options:
        """These options; `compression` is "zstd" or None. Raises CallerError that names the invalid one."""
        if compression not in (None, "zstd"):
            raise CallerError(f"compression {compression!r} is unknown: use 'zstd' or None")
        options = cls(
            segment_bytes,
            journal_bytes,
            compression == "zstd",
            watermark_bytes,
            max_message_bytes,
            compacted_prefix,
            compaction_bytes,
        )
        options.check()
        return options

    def check(self) -> None:
        """Raises CallerError that names the invalid option."""
        for name, least, most in _BOUNDS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise CallerError(f"{name} {value!r} is invalid: give a number of bytes from {least} to {most}")


_BOUNDS = (
    ("segment_bytes", 1, 2**40),
    ("journal_bytes", 1, 2**32),
    ("watermark_bytes", 0, 2**60),
    ("max_message_bytes", 1, 2**30),
    ("compaction_bytes", SMALLEST_BYTES, 2**40),
)
"""A journal is read into memory as a whole; the offsets in a block have 31 bits."""


def with_crc(head: bytes) -> bytes:
    """A head of a file or record with its CRC32C, 4 bytes."""
    return head + int(google_crc32c.value(head)).to_bytes(4, "little")


@contextlib.contextmanager
def damage_at(path: str, offset: int) -> Iterator[None]:
    """Convert BadBlock to Damaged with this location."""
    try:
        yield
    except BadBlock as error:
        raise Damaged(path, offset, str(error)) from None


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Convert the error of a disk that can't read a part of a file to Damaged."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise Damaged(path, 0, f"the disk can't read it ({error.strerror or error})") from error


LOCK = "lock"
MANIFEST = "manifest"
NEW_MANIFEST = "manifest.new"
TOPICS = "topics"
KEY_COLUMNS = "keys"

_JOURNAL = re.compile(r"journal-(0|[1-9]\d*)")
_DIGEST = re.compile("[0-9a-f]{32}")
_CHAIN = re.compile("[0-9a-f]{16}")


def join(directory: str, *names: str) -> str:
    return "/".join((directory.rstrip("/") or "", *names))


def journal_path(directory: str, number: int) -> str:
    return join(directory, f"journal-{number}")


def topic_path(directory: str, topic: int) -> str:
    return join(directory, TOPICS, str(topic))


def segment_path(directory: str, topic: TopicEntry, ledger: LedgerEntry, attempt: str = "") -> str:
    """The path of a segment, or of what an attempt to rewrite it has written."""
    name = f"{ledger.ledger}-{ledger.generation}{attempt and '-'}{attempt}.log"
    return join(directory, TOPICS, str(topic.number), name)


def prepared_path(directory: str, file: PreparedFile) -> str:
    """The path of a file that a compaction has prepared, which is that of the segment that it will be."""
    return join(directory, TOPICS, str(file.topic), f"{file.ledger}-{file.generation}.log")


def index_path(segment: str) -> str:
    """The path of the index of a segment."""
    return segment.removesuffix(".log") + ".index"


def remove_leftovers(disk: Disk, directory: str, manifest: Manifest, journals: Container[int]) -> None:
    """Remove files that the manifest does not name, and journals that are not in use."""
    for name in disk.list(directory):
        journal = _JOURNAL.fullmatch(name)
        if name == NEW_MANIFEST or (journal and int(journal[1]) not in journals):
            disk.remove(join(directory, name))
    if not disk.exists(join(directory, TOPICS)):
        return
    kept = {segment_path(directory, topic, ledger) for topic in manifest.topics for ledger in topic.ledgers}
    kept |= {prepared_path(directory, file) for file in manifest.pair.prepared}
    for topic in disk.list(join(directory, TOPICS)):
        for name in disk.list(join(directory, TOPICS, topic)):
            path = join(directory, TOPICS, topic, name)
            if path not in kept and path.removesuffix(".index") + ".log" not in kept:
                disk.remove(path)


def remove_attempts(disk: Disk, topic: str) -> None:
    """Remove what attempts to rewrite ledgers have left in the directory of a topic. May raise OSError."""
    for name in disk.list(topic):
        if name.count("-") > 1:
            disk.remove(join(topic, name))


LOCK_ATTEMPTS, LOCK_PAUSE = 20, 0.005
"""Attempts to lock: readers that check whether a log has an owner hold its lock for a moment."""

HOLDER_BYTES = 32
"""A lock file is overwritten, never truncated; its text is padded to this size, so it is always complete."""


class Lock:
    """A lock that this process holds."""

    def __init__(self, disk: Disk, path: str, file: File) -> None:
        self._disk = disk
        self._path = path
        self._file = file
        self._identity = disk.identity(path)[:2]

    def is_in_place(self) -> bool:
        """Whether the lock file is still this one; if not, another process may own the log too. May raise OSError."""
        try:
            return self._disk.identity(self._path)[:2] == self._identity
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Release the directory."""
        self._file.close()


def take_lock(environment: Environment, directory: str) -> Lock:
    """Raises Locked, or OSError."""
    disk, path = environment.disk, join(directory, LOCK)
    file = disk.lock(path)
    for _ in range(LOCK_ATTEMPTS):
        if file is not None:
            break
        environment.clock.sleep(LOCK_PAUSE)
        file = disk.lock(path)
    if file is None:
        with closing(disk.open(path)) as lock:
            holder = read_file(lock).decode(errors="replace").strip()
        if holder == environment.process:
            what = f"process {holder}, which is also the id of this one: close it there"
        else:
            what = f"another process{f' ({holder})' if holder else ''}: stop that process"
        raise Locked(f"{directory} is owned by {what}, or open the log with read_only=True")
    try:
        file.write(0, [f"{environment.process:<{HOLDER_BYTES}}".encode()])
        return Lock(disk, path, file)
    except BaseException:
        file.close()
        raise


VERSION = 2
"""The version of the manifest."""
_ADVICE = {
    "1": "open the log for writing with the release 0.2.0, which converts this format of 0.1.0, or restore the backup "
    "with that release"
}
"""What to do about a version that is not read."""
_MAGIC = "txnbuffer-log"


class LedgerEntry(NamedTuple):
    """One ledger, as far as the manifest covers it."""

    ledger: int
    generation: int = 0
    entries: int = 0
    bytes: int = 0
    first_time: int = 0
    last_time: int = 0
    digest: str = ""

    def grown(self, entries: int, size: int, first_time: int, last_time: int) -> LedgerEntry:
        """This ledger with `entries` messages in `size` bytes more, published between two times."""
        first = self.first_time if self.entries else first_time
        number, generation, before, stored, *_, digest = self
        return LedgerEntry(number, generation, before + entries, stored + size, first, last_time, digest)


class TopicEntry(NamedTuple):
    """One topic; `floor` is the first (ledger, entry) that was not trimmed, and only `ledgers[-1]` is open.

    `operations`: the number of the last operation that it has, if the log belongs to a pair.
    """

    number: int
    name: str
    incarnation: str
    floor: tuple[int, int]
    ledgers: tuple[LedgerEntry, ...]
    compaction: CompactionState = CompactionState()
    operations: int = 0

    @property
    def original(self) -> int | None:
        """The first ledger that the topic ever had, if nothing was trimmed: a trimmed topic has a floor below it."""
        first = self.ledgers[0].ledger
        return first if self.floor in ((0, 0), (first, 0)) else None

    def find(self, ledger: int) -> LedgerEntry | None:
        """The first ledger at or above a number."""
        at = bisect.bisect_left(self.ledgers, (ledger,))
        return self.ledgers[at] if at < len(self.ledgers) else None

    def has_had(self, ledger: int, entries: int) -> bool:
        """Whether the first messages of a ledger are in this history, or may have been before they were trimmed.

        They are not if they came after the point at which the log was restored from an older copy, or cut by a forced
        promotion: the ledgers of the topic then continue in another history (see `continued`) before they have those.
        """
        if (ledger, entries) <= self.floor:
            return True
        at = bisect.bisect_right(self.ledgers, ledger, key=lambda one: one.ledger)
        number, known = (self.ledgers[at - 1].ledger, self.ledgers[at - 1].entries) if at else self.floor
        if at == len(self.ledgers):
            return number // LEDGERS_OF_A_HISTORY == ledger // LEDGERS_OF_A_HISTORY
        if self.ledgers[at].ledger // LEDGERS_OF_A_HISTORY == ledger // LEDGERS_OF_A_HISTORY:
            return True
        return (ledger, entries) <= (number, known) or (ledger, entries) == (number + 1, 0)

    def place(self, entry: LedgerEntry) -> int:
        """The number in every block of a ledger that identifies its file, so that a renamed file is noticed."""
        return int(google_crc32c.value(f"{self.incarnation}/{entry.ledger}/{entry.generation}".encode()))

    def with_open(self, entry: LedgerEntry) -> TopicEntry:
        """The topic with its open ledger replaced."""
        return self._replace(ledgers=(*self.ledgers[:-1], entry))

    def appended(self, entry: LedgerEntry) -> TopicEntry:
        """The topic after an append, with its open ledger."""
        number, name, incarnation, floor, ledgers, compaction, operations = self
        ledgers = (*ledgers[:-1], entry)
        return TopicEntry(number, name, incarnation, floor, ledgers, compaction, operations + 1)


class TopicFiles(NamedTuple):
    """The files of a topic, and how their blocks are written: the seed of the key hashes, and whether to compress."""

    directory: str
    topic: TopicEntry
    seed: int
    compress: bool

    @property
    def path(self) -> str:
        """The directory of the topic."""
        return topic_path(self.directory, self.topic.number)


def empty_topic(number: int, name: str, incarnation: bytes, first: int) -> TopicEntry:
    """A new topic with one empty ledger, of number `first`."""
    return TopicEntry(number, name, incarnation.hex(), (first, 0) if first > 1 else (0, 0), (LedgerEntry(first),))


class PreparedFile(NamedTuple):
    """The next generation of a closed ledger, which compaction `number` has written and not yet put in its place.

    `digest` is that of the file, in hexadecimal.
    """

    number: int
    topic: int
    ledger: int
    generation: int
    bytes: int
    digest: str


class PairEntry(NamedTuple):
    """The membership of a directory in a pair: its store, and what the pair needs to know of its log.

    `committed`: the lsn up to which records were known to be committed; `structures`: the number of the last structure
    operation that the manifest has; `id`: that of the pair, empty for a log that was not copied yet.
    """

    store: Store
    partial: bool = False
    committed: int = 0
    structures: int = 0
    forks: tuple[Fork, ...] = ()
    prepared: tuple[PreparedFile, ...] = ()
    id: bytes = b""


ALONE = PairEntry(b"")
"""That of a log without a pair."""


class Manifest(NamedTuple):
    """The content of a manifest; topics in the order of their numbers.

    Everything up to the record `mark` is in the ledgers. Recovery reads the journals from `journal` on;
    `last_journal` and all between must exist.
    """

    log: str
    secret: str
    journal: int
    next_topic: int
    topics: tuple[TopicEntry, ...]
    next_ledger: int = 1
    last_journal: int = 0
    mark: Mark = START
    pair: PairEntry = ALONE

    @property
    def is_member(self) -> bool:
        """Whether the directory is the store of a member of a pair."""
        return bool(self.pair.store)


TopicTexts: TypeAlias = dict[int, tuple[TopicEntry, bytes]]
"""The encoded topics of the last manifest by number, so that a change of one topic encodes only that one."""


def encode_manifest(manifest: Manifest, texts: TopicTexts | None = None) -> bytes:
    known, encoded = texts or {}, TopicTexts()
    for topic in manifest.topics:
        same, text = known.get(topic.number, (None, b""))
        encoded[topic.number] = (topic, text if same is topic else _json(_topic_document(topic)))
    if texts is not None:
        texts.clear()
        texts.update(encoded)
    document: dict[str, Any] = {"log": manifest.log, "secret": manifest.secret, "journal": manifest.journal}
    if manifest.last_journal > manifest.journal:
        document["last"] = manifest.last_journal
    document |= {
        "mark": _mark_document(manifest.mark),
        "next_topic": manifest.next_topic,
        "next_ledger": manifest.next_ledger,
    }
    if manifest.is_member:
        document["pair"] = _pair_document(manifest.pair)
    topics = b",".join([text for _, text in encoded.values()])
    rest = b"".join((_json(document)[:-1], b',"topics":[', topics, b"]}\n"))
    return f"{_MAGIC} {VERSION} {google_crc32c.value(rest):08x}\n".encode() + rest


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _mark_document(mark: Mark) -> list[Any]:
    return [mark.epoch, mark.lsn, f"{mark.chain:016x}"]


def _pair_document(pair: PairEntry) -> dict[str, Any]:
    document = pair._asdict() | {
        "store": pair.store.hex(),
        "forks": [[fork.epoch, _mark_document(fork.before)] for fork in pair.forks],
        "prepared": [list(file) for file in pair.prepared],
        "id": pair.id.hex(),
    }
    if not pair.id:
        del document["id"]
    return document


def _topic_document(topic: TopicEntry) -> dict[str, Any]:
    document = {
        "number": topic.number,
        "name": topic.name,
        "incarnation": topic.incarnation,
        "floor": list(topic.floor),
        "ledgers": [ledger_document(ledger) for ledger in topic.ledgers],
    }
    cleaned, purged, policy = topic.compaction
    if cleaned:
        document |= {"cleaned": cleaned, "purged": purged}
    if policy is not None:
        document["policy"] = policy._asdict()
    if topic.operations:
        document["operations"] = topic.operations
    return document


def ledger_document(ledger: LedgerEntry) -> dict[str, Any]:
    """A ledger as the manifest has it."""
    document = ledger._asdict()
    if not ledger.digest:
        del document["digest"]
    return document


def decode_manifest(data: bytes, path: str) -> Manifest:
    """Raises Damaged or UnsupportedFormat that names the file."""
    line, _, rest = data.partition(b"\n")
    words = line.split(b" ")
    if len(words) != 3 or words[0] != _MAGIC.encode():
        raise Damaged(path, 0, "the first line is not that of a log's manifest")
    version = words[1].decode(errors="replace")
    if version != str(VERSION):
        advice = _ADVICE.get(version, "use the release that wrote it, or a newer one")
        raise UnsupportedFormat(
            f"{path}: a log of format version {version}; this release reads version {VERSION}: {advice}"
        )
    if words[2] != f"{google_crc32c.value(rest):08x}".encode():
        raise Damaged(path, len(line) + 1, "the checksum of the manifest is wrong: restore it from a copy")
    try:
        document = json.loads(rest)
        topics = tuple(map(_read_topic, document["topics"]))
        numbers = document["journal"], document["next_topic"]
        manifest = Manifest(document["log"], document["secret"], *numbers, topics, document.get("next_ledger", 1))
        return manifest._replace(**_read_place(document))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(path, len(line) + 1, f"the manifest can't be parsed ({error!r})") from None


def read_ledger(document: dict[str, Any]) -> LedgerEntry:
    """Raises ValueError or TypeError."""
    ledger = LedgerEntry(**document)
    if ledger.digest and not _DIGEST.fullmatch(ledger.digest):
        raise ValueError(f"{ledger.digest!r} is not a digest: it has 32 hexadecimal digits")
    return ledger


def _read_place(document: dict[str, Any]) -> dict[str, Any]:
    """What a manifest says of its place in the log, and of a pair."""
    pair = _read_pair(document["pair"]) if "pair" in document else ALONE
    return {"last_journal": document.get("last", 0), "mark": _read_mark(document["mark"]), "pair": pair}


def _read_mark(document: list[Any]) -> Mark:
    epoch, lsn, chain = document
    numbers = type(epoch) is int and type(lsn) is int and 0 <= min(epoch, lsn) <= max(epoch, lsn) <= MAX_NUMBER
    if not numbers or not _CHAIN.fullmatch(chain):
        raise ValueError(f"{document!r} is not a mark: an epoch, an lsn and 16 hexadecimal digits")
    return Mark(epoch, lsn, int(chain, 16))


def _read_pair(document: dict[str, Any]) -> PairEntry:
    forks = tuple([Fork(epoch, _read_mark(before)) for epoch, before in document["forks"]])
    prepared = tuple([PreparedFile(*file) for file in document["prepared"]])
    store, pair = bytes.fromhex(document["store"]), bytes.fromhex(document.get("id", ""))
    if not store:
        raise ValueError("the store of a pair has no id")
    return PairEntry(**document)._replace(store=store, forks=forks, prepared=prepared, id=pair)


def _read_topic(document: dict[str, Any]) -> TopicEntry:
    ledgers = tuple(map(read_ledger, document["ledgers"]))
    if not ledgers:
        raise ValueError(f"topic {document['number']} has no ledger")
    number, entry = document["floor"]
    policy = CompactionPolicy(**document["policy"]) if "policy" in document else None
    state = CompactionState(document.get("cleaned", 0), document.get("purged", 0), policy)
    name, incarnation, operations = document["name"], document["incarnation"], document.get("operations", 0)
    return TopicEntry(document["number"], name, incarnation, (number, entry), ledgers, state, operations)


def load_manifest(disk: Disk, directory: str) -> Manifest | None:
    """The manifest of a directory; None if there is none and a log may be created there.

    Raises ForeignDirectory if the directory contains other files, Damaged if a manifest is missing or broken.
    """
    path = join(directory, MANIFEST)
    if not disk.exists(path):
        names = disk.list(directory) if disk.exists(directory) else []
        for name in names:
            if name not in (LOCK, MANIFEST, NEW_MANIFEST, TOPICS) and not _JOURNAL.fullmatch(name):
                raise ForeignDirectory(f"{directory} contains {name!r} and no log: name an empty or missing directory")
        if not {LOCK, NEW_MANIFEST, "journal-1"}.issuperset(names):  # more than a log that was being created
            raise Damaged(path, 0, "the manifest is missing, though files of a log are there: restore it from a copy")
        return None
    with closing(disk.open(path)) as file:
        return decode_manifest(read_file(file), path)


def replace_manifest(disk: Disk, directory: str, manifest: Manifest, texts: TopicTexts | None = None) -> None:
    """Replace the manifest of a directory, atomically and durably."""
    new = join(directory, NEW_MANIFEST)
    with closing(disk.open(new, write=True, create=True)) as file:
        file.truncate(0)
        file.write(0, [encode_manifest(manifest, texts)])
        file.sync()
    disk.rename(new, join(directory, MANIFEST))
    disk.sync_directory(directory)
