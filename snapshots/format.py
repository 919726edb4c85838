"""Format of the snapshot topic: keys, messages, sealed segments, and the end entry that commits a snapshot.

Stored names call a sealed segment a `part`, and an entry with overflow of the state a `spill`.

A data topic T has the keys `T-1`, `T-2`, … for its sealed segments, `T-s1`, `T-s2`, … for the overflow of its end
entry, and `T-end`; `__owner` is the owner's. The text after the last `-` distinguishes them, so the topics `a`, `a-1`,
`a-s1` and `a-end` do not conflict: `a-1-1` is segment 1 of `a-1`.

A message has the key of its entry and three properties: `tb.v`, the format version (1); `tb.kind`, one of `owner`,
`part`, `spill`, `end`, `gone`; and `tb.epoch`, the epoch of the owner that wrote it. Its value is one Avro record of
the schema `<kind>-<version>` (overflow: plain bytes). `gone` has no value: it deletes its key.

A message whose epoch is lower than that of an `owner` entry before it in the log was written by an owner that had
already lost the topic; readers ignore it.

`T-end` (schema `end-1`) is the commit record: a snapshot exists once its end entry is durable, and consists of what
that entry names. It names the segments `T-first_part` to `T-(next_part - 1)` by their numbers and by the chain digest
before the first and after the last of them. It holds the state as bytes, inline or, if that is too long for one entry,
split into the n overflow entries `T-s(next_spill - n)` to `T-s(next_spill - 1)`, each named by its digest.

A sealed segment never changes and is written once under its number. Its content and that of the state are opaque here;
`txnbuffer/recovery/codec.py` describes them.

A digest is BLAKE2b of 16 bytes. An entry ends with the digest of all its bytes before. For a segment that digest is the
chain digest after it, since the entry also holds the one before it: at restore the chain proves that no segment is
missing, torn or of another topic. It starts with the digest of topic and incarnation. Overflow entries have no digest
of their own.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, TypeVar

from broker_io.batch import Message
from broker_io.errors import InvalidTopicName
from broker_io.position import Position
from snapshots.errors import SnapshotDamaged, UnsupportedSnapshot
from snapshots.records import BadRecord, RecordCodec, record

INTERNAL_PREFIX = "__txnbuffer_"
"""Name prefix of internal topics."""

SNAPSHOT_TOPIC = "__txnbuffer_snapshots"

OWNER_KEY = b"__owner"
END_SUFFIX = "end"

_NUMBERED = re.compile(r"(s?)([1-9][0-9]{0,17})")


class KeyKind(enum.Enum):
    SEGMENT = "part"
    OVERFLOW = "spill"
    END = "end"


class EntryKey(NamedTuple):
    """A key of the snapshot topic other than `__owner`. `number` is 0 for the end entry, else 1, 2, …"""

    topic: str
    kind: KeyKind
    number: int = 0

    def __str__(self) -> str:
        if self.kind is KeyKind.END:
            return f"{self.topic}-{END_SUFFIX}"
        prefix = "s" if self.kind is KeyKind.OVERFLOW else ""
        return f"{self.topic}-{prefix}{self.number}"

    def to_bytes(self) -> bytes:
        return str(self).encode()

    @classmethod
    def parse(cls, key: bytes) -> EntryKey | None:
        """Parse the output of `to_bytes`; None for anything else."""
        try:
            topic, dash, suffix = key.decode().rpartition("-")
        except UnicodeDecodeError:
            return None
        if not (topic and dash):
            return None
        if suffix == END_SUFFIX:
            return cls(topic, KeyKind.END)
        match = _NUMBERED.fullmatch(suffix)
        if match is None:
            return None
        return cls(topic, KeyKind.OVERFLOW if match[1] else KeyKind.SEGMENT, int(match[2]))


def segment_key(topic: str, number: int) -> bytes:
    return EntryKey(topic, KeyKind.SEGMENT, number).to_bytes()


def overflow_key(topic: str, number: int) -> bytes:
    return EntryKey(topic, KeyKind.OVERFLOW, number).to_bytes()


def end_key(topic: str) -> bytes:
    return EntryKey(topic, KeyKind.END).to_bytes()


def is_internal(topic: str) -> bool:
    return topic.startswith(INTERNAL_PREFIX)


def check_data_topic(topic: str) -> None:
    """Raises InvalidTopicName for an internal topic."""
    if is_internal(topic):
        raise InvalidTopicName(f"topic {topic!r} is internal and has no buffer: name a data topic")


FORMAT_VERSION = "1"

VERSION_PROPERTY = "tb.v"
KIND_PROPERTY = "tb.kind"
EPOCH_PROPERTY = "tb.epoch"

OWNER = "owner"
SEGMENT = "part"
OVERFLOW = "spill"
END = "end"
GONE = "gone"


class Stored(NamedTuple):
    """One stored entry; `value` is None once it is deleted.

    `version` and `kind` are the properties as stored; `epoch` is -1 if it is missing or unreadable.
    """

    position: Position
    version: str
    kind: str
    epoch: int
    value: bytes | None


def message(key: bytes, kind: str, epoch: int, value: bytes | None) -> Message:
    properties = {VERSION_PROPERTY: FORMAT_VERSION, KIND_PROPERTY: kind, EPOCH_PROPERTY: str(epoch)}
    return Message(key, value, properties)


def gone(key: bytes, epoch: int) -> Message:
    return message(key, GONE, epoch, None)


def owner_message(epoch: int) -> Message:
    return message(OWNER_KEY, OWNER, epoch, record("owner-1", __package__).encode({"epoch": epoch}))


DIGEST_BYTES = 16

T = TypeVar("T")


def digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def chain_start(topic: str, incarnation: str) -> bytes:
    """The chain digest before segment 1."""
    return digest(f"{topic}\0{incarnation}".encode())


def sealed(codec: RecordCodec, values: Mapping[str, Any], last: str) -> bytes:
    """A record whose last field is the digest of the bytes before it."""
    body = codec.encode({**values, last: bytes(DIGEST_BYTES)})[:-DIGEST_BYTES]
    return body + digest(body)


def unsealed(codec: RecordCodec, data: bytes) -> dict[str, Any]:
    """The fields of a record that `sealed` encoded. Raises BadRecord."""
    if digest(data[:-DIGEST_BYTES]) != data[-DIGEST_BYTES:]:
        raise BadRecord("its digest is wrong")
    return codec.decode(data)


def checked(key: EntryKey, kind: str, stored: Stored, decode: Callable[[bytes], T]) -> T:
    """Decode an entry. Raises SnapshotDamaged or UnsupportedSnapshot that names it."""
    if stored.version.isascii() and stored.version.isdigit() and stored.version != FORMAT_VERSION:
        raise UnsupportedSnapshot(key.topic, str(key), stored.version)
    if stored.version != FORMAT_VERSION or stored.kind != kind or stored.value is None:
        raise SnapshotDamaged(key.topic, str(key), f"its properties are not those of a {kind} entry")
    try:
        return decode(stored.value)
    except BadRecord as error:
        raise SnapshotDamaged(key.topic, str(key), str(error)) from error


_STORED_NAMES = {
    "first_segment": "first_part", "next_segment": "next_part", "next_overflow": "next_spill", "overflow": "spills"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EndEntry:
    """The content of `T-end`; the schema `end-1` describes each field. `overflow`: digests of the overflow entries."""

    topic: str
    incarnation: str
    epoch: int
    snapshot_id: int
    first_segment: int
    next_segment: int
    chain_first: bytes
    chain_next: bytes
    next_overflow: int = 1
    overflow: tuple[bytes, ...] = ()
    state: bytes = b""
    deleted: bool = False

    @property
    def segments(self) -> range:
        return range(self.first_segment, self.next_segment)

    @property
    def overflow_numbers(self) -> range:
        return range(self.next_overflow - len(self.overflow), self.next_overflow)

    def encode(self) -> bytes:
        values = {_STORED_NAMES.get(name, name): getattr(self, name) for name in self.__slots__}
        return sealed(record("end-1", __package__), {**values, "spills": list(self.overflow)}, "digest")

    @classmethod
    def decode(cls, data: bytes) -> EndEntry:
        """Raises BadRecord."""
        values = unsealed(record("end-1", __package__), data)
        fields = {name: values[_STORED_NAMES.get(name, name)] for name in cls.__slots__}
        end = cls(**{**fields, "overflow": tuple(fields["overflow"])})
        if (
            end.next_overflow <= len(end.overflow)
            or not 1 <= end.first_segment <= end.next_segment
            or end.snapshot_id < 1
        ):
            raise BadRecord("its numbers contradict each other")
        return end


def decode_end(topic: str, stored: Stored) -> EndEntry:
    """The end entry of a topic. Raises SnapshotDamaged and UnsupportedSnapshot."""
    key = EntryKey(topic, KeyKind.END)
    end = checked(key, "end", stored, EndEntry.decode)
    if end.topic != topic:
        raise SnapshotDamaged(topic, str(key), f"it is of topic {end.topic}")
    if end.epoch != stored.epoch:
        raise SnapshotDamaged(topic, str(key), f"its epoch is {end.epoch}, but {stored.epoch} in its properties")
    return end


class SegmentPayload(Protocol):
    """A segment to be written."""

    @property
    def number(self) -> int:
        """1, 2, 3 …"""

    def encode(self, topic: str, epoch: int, chain_before: bytes) -> bytes:
        """Return the value of its entry, which ends with the chain digest after it."""


class SegmentEntry(Protocol):
    """A decoded entry of a segment."""

    @property
    def epoch(self) -> int: ...

    @property
    def chain_before(self) -> bytes: ...

    @property
    def chain_after(self) -> bytes: ...


E = TypeVar("E", bound=SegmentEntry)


def chained(
    topic: str, end: EndEntry, found: Mapping[int, Stored], decode: Callable[[str, int, Stored], E]
) -> Iterator[E]:
    """All segments that an end entry names, each checked against the one before it. Raises SnapshotDamaged."""
    if end.first_segment == 1 and end.chain_first != chain_start(topic, end.incarnation):
        raise SnapshotDamaged(
            topic, str(EntryKey(topic, KeyKind.END)), "its chain does not start with the digest of this topic"
        )
    before, epoch = end.chain_first, 0
    for number in end.segments:
        key = str(EntryKey(topic, KeyKind.SEGMENT, number))
        stored = found.get(number)
        if stored is None:
            raise SnapshotDamaged(topic, key, f"it is missing, but the end entry names {_range(end)}")
        entry = decode(topic, number, stored)
        if entry.chain_before != before:
            raise SnapshotDamaged(topic, key, "it does not follow the segment before it")
        if not epoch <= entry.epoch <= end.epoch:
            raise SnapshotDamaged(topic, key, f"its epoch {entry.epoch} is out of order")
        before, epoch = entry.chain_after, entry.epoch
        yield entry
    if before != end.chain_next:
        raise SnapshotDamaged(topic, str(EntryKey(topic, KeyKind.END)), "its chain does not end with the last segment")


def _range(end: EndEntry) -> str:
    return f"{end.first_segment} to {end.next_segment - 1}"


def state_bytes(topic: str, end: EndEntry, found: Mapping[int, Stored]) -> bytes:
    """The state of an end entry, inline or from its overflow entries. Raises SnapshotDamaged."""
    if not end.overflow:
        return end.state
    pieces: list[bytes] = []
    for number, expected in zip(end.overflow_numbers, end.overflow, strict=True):
        stored = found.get(number)
        key = str(EntryKey(topic, KeyKind.OVERFLOW, number))
        if stored is None or stored.value is None:
            raise SnapshotDamaged(topic, key, "it is missing, but the end entry names it")
        if stored.kind != OVERFLOW or digest(stored.value) != expected:
            raise SnapshotDamaged(topic, key, "its digest is not the one in the end entry")
        pieces.append(stored.value)
    return b"".join(pieces)
