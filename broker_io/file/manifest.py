"""The manifest: the one file that says which other files of a log count, and how far.

Replacing it commits everything but appends: topics created and deleted, segments rolled, trimmed, compacted, journals
begun. It is text in UTF-8. The first line is

    txnbuffer-log <version> <CRC32C of all that follows that line, 8 hexadecimal digits>

and the rest is one JSON document:

    log         16 bytes in hexadecimal, the identity of the log
    secret      8 bytes in hexadecimal, the seed of its key hashes
    journal     number of the journal that holds what was appended since
    next_topic  number of the next topic; numbers are never reused
    next_ledger number of the first ledger of the next topic: above those of all deleted topics, so that a position in
                a deleted topic exists in no later topic of its name; missing in older manifests: 1
    topics      one object per topic: number, name, incarnation (16 bytes in hexadecimal), floor and ledgers

`floor` is `[ledger, entry]`: nothing below it exists any more. Each of `ledgers`, ascending, is an object with ledger,
generation (how often compaction rewrote it), entries (next entry number), bytes (all durable), first_time and
last_time (no message of it was published before the former, none of the topic so far after the latter; milliseconds, 0
for an empty topic). All but the last ledger are closed. Appends in the journal extend the last one.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import google_crc32c

from broker_io.environment import Disk, read_file
from broker_io.errors import Damaged, ForeignDirectory, UnsupportedFormat
from broker_io.file import layout

VERSION = 1
_MAGIC = "txnbuffer-log"


class LedgerEntry(NamedTuple):
    """One ledger, as far as the manifest covers it."""

    ledger: int
    generation: int = 0
    entries: int = 0
    bytes: int = 0
    first_time: int = 0
    last_time: int = 0

    def grown(self, entries: int, size: int, first_time: int, last_time: int) -> LedgerEntry:
        """This ledger with `entries` messages in `size` bytes more, published between two times."""
        first = self.first_time if self.entries else first_time
        return self._replace(
            entries=self.entries + entries, bytes=self.bytes + size, first_time=first, last_time=last_time
        )


class TopicEntry(NamedTuple):
    """One topic; `floor` is the first (ledger, entry) that was not trimmed, and only `ledgers[-1]` is open."""

    number: int
    name: str
    incarnation: str
    floor: tuple[int, int]
    ledgers: tuple[LedgerEntry, ...]

    def find(self, ledger: int) -> LedgerEntry | None:
        """The first ledger at or above a number."""
        return next((entry for entry in self.ledgers if entry.ledger >= ledger), None)

    def place(self, entry: LedgerEntry) -> int:
        """The number in every block of a ledger that identifies its file, so that a renamed file is noticed."""
        return int(google_crc32c.value(f"{self.incarnation}/{entry.ledger}/{entry.generation}".encode()))

    def with_open(self, entry: LedgerEntry) -> TopicEntry:
        """The topic with its open ledger replaced."""
        return self._replace(ledgers=(*self.ledgers[:-1], entry))


def empty_topic(number: int, name: str, incarnation: bytes, first: int) -> TopicEntry:
    """A new topic with one empty ledger, of number `first`."""
    return TopicEntry(number, name, incarnation.hex(), (first, 0) if first > 1 else (0, 0), (LedgerEntry(first),))


class Manifest(NamedTuple):
    """The content of a manifest; topics in the order of their numbers."""

    log: str
    secret: str
    journal: int
    next_topic: int
    topics: tuple[TopicEntry, ...]
    next_ledger: int = 1


class TopicTexts:
    """Cache of the encoded topics of a manifest, so that a change of one topic encodes only that one."""

    def __init__(self) -> None:
        self._texts: dict[int, tuple[TopicEntry, bytes]] = {}

    def of(self, topics: tuple[TopicEntry, ...]) -> list[bytes]:
        """The encoded topics in order; the texts of all other topics are dropped."""
        known = self._texts
        self._texts = {topic.number: self._of_one(topic, known.get(topic.number)) for topic in topics}
        return [text for _, text in self._texts.values()]

    def _of_one(self, topic: TopicEntry, known: tuple[TopicEntry, bytes] | None) -> tuple[TopicEntry, bytes]:
        return known if known is not None and known[0] is topic else (topic, _json(_topic_document(topic)))


def encode_manifest(manifest: Manifest, texts: TopicTexts | None = None) -> bytes:
    document = {
        "log": manifest.log,
        "secret": manifest.secret,
        "journal": manifest.journal,
        "next_topic": manifest.next_topic,
        "next_ledger": manifest.next_ledger,
    }
    topics = b",".join((texts or TopicTexts()).of(manifest.topics))
    rest = b"".join((_json(document)[:-1], b',"topics":[', topics, b"]}\n"))
    return f"{_MAGIC} {VERSION} {google_crc32c.value(rest):08x}\n".encode() + rest


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _topic_document(topic: TopicEntry) -> dict[str, Any]:
    return {
        "number": topic.number,
        "name": topic.name,
        "incarnation": topic.incarnation,
        "floor": list(topic.floor),
        "ledgers": [ledger._asdict() for ledger in topic.ledgers],
    }


def decode_manifest(data: bytes, path: str) -> Manifest:
    """Raises Damaged or UnsupportedFormat that names the file."""
    line, _, rest = data.partition(b"\n")
    words = line.split(b" ")
    if len(words) != 3 or words[0] != _MAGIC.encode():
        raise Damaged(path, 0, "the first line is not that of a log's manifest")
    if words[1] != str(VERSION).encode():
        raise UnsupportedFormat(
            f"{path}: a log of format version {words[1].decode(errors='replace')}; this release reads version "
            f"{VERSION}: use the release that wrote it, or a newer one"
        )
    if words[2] != f"{google_crc32c.value(rest):08x}".encode():
        raise Damaged(path, len(line) + 1, "the checksum of the manifest is wrong: restore it from a copy")
    try:
        document = json.loads(rest)
        topics = tuple(map(_read_topic, document["topics"]))
        numbers = document["journal"], document["next_topic"]
        return Manifest(document["log"], document["secret"], *numbers, topics, document.get("next_ledger", 1))
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(path, len(line) + 1, f"the manifest can't be parsed ({error!r})") from None


def _read_topic(document: dict[str, Any]) -> TopicEntry:
    ledgers = tuple(LedgerEntry(**ledger) for ledger in document["ledgers"])
    if not ledgers:
        raise ValueError(f"topic {document['number']} has no ledger")
    ledger, entry = document["floor"]
    return TopicEntry(document["number"], document["name"], document["incarnation"], (ledger, entry), ledgers)


def load_manifest(disk: Disk, directory: str) -> Manifest | None:
    """The manifest of a directory; None if there is none and a log may be created there.

    Raises ForeignDirectory if the directory contains other files, Damaged if a manifest is missing or broken.
    """
    path = layout.join(directory, layout.MANIFEST)
    if not disk.exists(path):
        _check_no_log(disk, directory, path)
        return None
    file = disk.open(path)
    try:
        return decode_manifest(read_file(file), path)
    finally:
        file.close()


def _check_no_log(disk: Disk, directory: str, path: str) -> None:
    names = disk.list(directory) if disk.exists(directory) else []
    for name in names:
        if not layout.is_log_file(name):
            raise ForeignDirectory(f"{directory} contains {name!r} and no log: name an empty or missing directory")
    if not layout.may_be_unfinished(names):
        raise Damaged(path, 0, "the manifest is missing, though files of a log are there: restore it from a copy")


def replace_manifest(disk: Disk, directory: str, manifest: Manifest, texts: TopicTexts | None = None) -> None:
    """Replace the manifest of a directory, atomically and durably."""
    new = layout.join(directory, layout.NEW_MANIFEST)
    file = disk.open(new, write=True, create=True)
    try:
        file.truncate(0)
        file.write(0, [encode_manifest(manifest, texts)])
        file.sync()
    finally:
        file.close()
    disk.rename(new, layout.join(directory, layout.MANIFEST))
    disk.sync_directory(directory)
