"""Format of the messages of the snapshot topic, and of the end entry that commits a snapshot.

A message has the key of its entry (`snapshots.keys`) and three properties: `tb.v`, the format version
(1); `tb.kind`, one of `owner`, `part`, `spill`, `end`, `gone`; and `tb.epoch`, the epoch of the owner
that wrote it. Its value is one Avro record of the schema `<kind>-<version>` (a spill: plain bytes).
`gone` has no value: it deletes its key. A sealed segment is stored as a part, overflow of the state as spills.

A message whose epoch is lower than that of an `owner` entry before it in the log was written by an owner that had
already lost the topic; readers ignore it.

`T-end` (schema `end-1`) is the commit record: a snapshot exists once its end entry is durable, and consists of what
that entry names. It names the parts `T-first_part` to `T-(next_part - 1)` by their numbers and by the chain digest
before the first and after the last of them. It holds the state as bytes, inline or, if that is too long for one entry,
cut into the spills `T-s(next_spill - n)` to `T-s(next_spill - 1)`, each named by its digest.

A digest is BLAKE2b of 16 bytes. An entry ends with the digest of all its bytes before. For a part (see
`snapshots.segments`) that digest is the chain digest after it, for the entry also holds the one before it; the chain
starts with the digest of topic and incarnation. A spill is plain bytes without any frame.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

from broker_io.batch import Message
from broker_io.position import Position
from snapshots.errors import SnapshotDamaged, UnsupportedSnapshot
from snapshots.keys import OWNER_KEY, EntryKey, KeyKind
from snapshots.records import BadRecord, RecordCodec, record

FORMAT_VERSION = "1"

VERSION_PROPERTY = "tb.v"
KIND_PROPERTY = "tb.kind"
EPOCH_PROPERTY = "tb.epoch"

OWNER = "owner"
PART = "part"
SPILL = "spill"
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
    """The chain digest before part 1."""
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


@dataclass(frozen=True, slots=True)
class EndEntry:
    """The content of `T-end`; the schema `end-1` describes each field."""

    topic: str
    incarnation: str
    epoch: int
    snapshot_id: int
    first_part: int
    next_part: int
    chain_first: bytes
    chain_next: bytes
    next_spill: int = 1
    spills: tuple[bytes, ...] = ()
    state: bytes = b""
    deleted: bool = False

    @property
    def parts(self) -> range:
        return range(self.first_part, self.next_part)

    @property
    def spill_numbers(self) -> range:
        return range(self.next_spill - len(self.spills), self.next_spill)

    def encode(self) -> bytes:
        values = {name: getattr(self, name) for name in self.__slots__}
        return sealed(record("end-1", __package__), {**values, "spills": list(self.spills)}, "digest")

    @classmethod
    def decode(cls, data: bytes) -> EndEntry:
        """Raises BadRecord."""
        values = unsealed(record("end-1", __package__), data)
        del values["digest"]
        end = cls(**{**values, "spills": tuple(values["spills"])})
        if not 1 <= end.first_part <= end.next_part or end.next_spill <= len(end.spills) or end.snapshot_id < 1:
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
