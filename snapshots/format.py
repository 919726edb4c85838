"""Format of the snapshot topic: keys, messages, sealed segments, and the end entry that commits a snapshot.

Stored names call a sealed segment a `part`, and an entry with overflow of the state a `spill`.

A data topic T has the keys `T-1`, `T-2`, … and `T-m1`, `T-m2`, … for its two chains of sealed segments, those of the
buffer and those of mutation snapshots; `T-s1`, `T-s2`, … for the overflow of its end entry; and `T-end`. `__owner` is
the owner's. The text after the last `-` distinguishes them, so the topics `a`, `a-1`, `a-s1` and `a-end` do not
conflict: `a-1-1` is segment 1 of `a-1`.

A message has the key of its entry and three properties: `tb.v`, the version of the format of its kind (2 or 3 for
`end`, 1 for all others); `tb.kind`, one of `owner`, `part`, `mutations`, `spill`, `end`, `gone`; and `tb.epoch`, the
epoch of the owner that wrote it. Its value is one Avro record of the schema `<kind>-<version>` (overflow: plain bytes).
`gone` has no value: it deletes its key.

A message whose epoch is lower than that of an `owner` entry before it in the log was written by an owner that had
already lost the topic; readers ignore it.

`T-end` (schema `end-2`) is the commit record: a snapshot exists once its end entry is durable, and consists of what
that entry names. It names the segments `T-first_part` to `T-(next_part - 1)` by their numbers and by the chain digest
before the first and after the last of them, and those of mutation snapshots, `T-m(first_mutations)` to
`T-m(next_mutations - 1)`, in the same way. Version 1 (`end-1`) is read too; it has no segments of mutation snapshots.
Version 3 has the schema of version 2, and is written while brokers have the plug-in that shows plain consumers only
what committed: readers of 0.2.0 and before do not ask such a broker for the log as it is, so they would wait for
markers that never come, and must refuse the topic instead.
It holds the state as bytes, inline or, if that is too long for one entry, split into the n overflow entries
`T-s(next_spill - n)` to `T-s(next_spill - 1)`, each named by its digest.

A sealed segment never changes and is written once under its number. Its content and that of the state are opaque here;
`txnbuffer/recovery/codec.py` describes them.

A digest is BLAKE2b of 16 bytes. End entries and segments end with the digest of all their bytes before. For a segment
that digest is the chain digest after it, since the entry also holds the one before it: at restore the chain proves that
no segment is missing, torn or of another topic. It starts with the digest of topic and incarnation; that of mutation
snapshots also hashes the word `mutations`. Owner and overflow entries have no digest of their own.

The records are Avro whose arrays are columns. The schemas are plain Avro in the directory `schemas` of the package that
writes the records, one file per kind and version. They use `long`, `boolean`, `string`, `bytes`, `fixed`, `array<long>`
(a column) and `array<bytes>`, in one flat record. Any Avro library reads what is written here, and what an Avro
library writes is read here.

A column of n numbers is an Avro `array<long>` of n longs: the first number, then the difference of each to the one
before it, modulo 2**64. Avro's array is one block (its count, then the items) and a closing 0; a long is the zigzag of
the number in groups of seven bits, lowest first, the high bit set on all but the last. An empty column is the closing 0
alone. Columns are coded with numpy, because one number at a time is slower by a factor of ten.

A column whose n > 1 numbers are all equal may be written as one element, where another field has the number of rows
(`constant_shortened`, `expanded`). So each group of columns has its number of rows in a field of its own.

A column of positions `x` becomes the three columns `x_ledger`, `x_entry`, `x_batch`, a single position three longs of
these names; no position is -1, -1, -1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from hashlib import blake2b
from importlib import resources
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from broker_io.batch import Message
from broker_io.errors import InvalidTopicName
from broker_io.position import EARLIEST, NO_INDEX, Int64s, Position, Positions
from snapshots.errors import SnapshotDamaged, UnsupportedSnapshot

MAX_LONG_BYTES = 10
"""Maximum size of an encoded 64-bit long."""

_CONTINUED = 0x80
_THRESHOLDS = np.array([1 << shift for shift in range(7, 64, 7)], np.uint64)
_EMPTY = np.empty(0, np.int64)


class BadRecord(ValueError):
    """Bytes that are not a record of the schema; the caller names the entry."""


def encode_long(value: int) -> bytes:
    """One Avro long."""
    rest = ((value << 1) ^ (value >> 63)) & 0xFFFF_FFFF_FFFF_FFFF
    out = bytearray()
    while rest >= _CONTINUED:
        out.append(rest & 0x7F | _CONTINUED)
        rest >>= 7
    out.append(rest)
    return bytes(out)


def decode_long(data: bytes, offset: int) -> tuple[int, int]:
    """One Avro long at `offset`, and the offset after it. Raises BadRecord."""
    rest = shift = 0
    for at in range(offset, min(offset + MAX_LONG_BYTES, len(data))):
        byte = data[at]
        rest |= (byte & 0x7F) << shift
        if byte < _CONTINUED:
            if rest >> 64:
                break
            return (rest >> 1) ^ -(rest & 1), at + 1
        shift += 7
    raise BadRecord(f"the number at offset {offset} is incomplete or too large")


def encode_longs(values: Int64s) -> bytes:
    """Consecutive longs, without count or end."""
    zigzag = ((values << np.int64(1)) ^ (values >> np.int64(63))).view(np.uint64)
    if not len(zigzag):
        return b""
    if int(zigzag.max()) < _CONTINUED:
        return zigzag.astype(np.uint8).tobytes()
    lengths = np.searchsorted(_THRESHOLDS, zigzag, side="right") + 1
    ends = np.cumsum(lengths)
    starts = ends - lengths
    out = np.empty(int(ends[-1]), np.uint8)
    for group in range(int(lengths.max())):
        rows = lengths > group if group else slice(None)
        more = np.where(lengths[rows] > group + 1, _CONTINUED, 0)
        low = (zigzag[rows] >> np.uint64(7 * group)) & np.uint64(0x7F)
        out[starts[rows] + group] = low.astype(np.uint8) | more.astype(np.uint8)
    return out.tobytes()


def decode_longs(data: bytes, offset: int, count: int) -> tuple[Int64s, int]:
    """`count` longs from `offset`, and the offset after them. Raises BadRecord."""
    if count == 0:
        return _EMPTY, offset
    if not 0 < count <= len(data) - offset:
        raise BadRecord(f"{count} numbers do not fit into the {len(data) - offset} bytes from offset {offset}")
    window = np.frombuffer(data, np.uint8, count, offset)
    if int(window.max()) < _CONTINUED:
        return _unzigzag(window.astype(np.uint64)), offset + count
    window = np.frombuffer(data, np.uint8, min(len(data) - offset, count * MAX_LONG_BYTES), offset)
    ends = np.flatnonzero(window < _CONTINUED)[:count]
    if len(ends) < count:
        raise BadRecord(f"fewer than {count} numbers from offset {offset}")
    starts = np.empty(count, np.int64)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    return _unzigzag(_gather(window, starts, ends - starts + 1)), offset + int(ends[-1]) + 1


def _gather(window: NDArray[np.uint8], starts: Int64s, lengths: Int64s) -> NDArray[np.uint64]:
    longest = int(lengths.max())
    if longest > MAX_LONG_BYTES:
        raise BadRecord("a number of more than 64 bits")
    zigzag = (window[starts] & 0x7F).astype(np.uint64)
    for group in range(1, longest):
        rows = np.flatnonzero(lengths > group)
        bits = (window[starts[rows] + group] & 0x7F).astype(np.uint64)
        if group == MAX_LONG_BYTES - 1 and int(bits.max()) > 1:
            raise BadRecord("a number of more than 64 bits")
        zigzag[rows] |= bits << np.uint64(7 * group)
    return zigzag


def _unzigzag(zigzag: NDArray[np.uint64]) -> Int64s:
    halves = (zigzag >> np.uint64(1)).view(np.int64)
    return halves ^ -(zigzag & np.uint64(1)).view(np.int64)


def encode_column(values: Int64s) -> bytes:
    """int64[n] as an Avro array of differences."""
    if not len(values):
        return b"\0"
    differences = np.empty(len(values), np.int64)
    differences[0] = values[0]
    np.subtract(values[1:], values[:-1], out=differences[1:])
    return encode_long(len(values)) + encode_longs(differences) + b"\0"


def decode_column(data: bytes, offset: int) -> tuple[Int64s, int]:
    """int64[n] from the Avro array at `offset`, and the offset after it. Raises BadRecord."""
    blocks: list[Int64s] = []
    count, offset = _decode_count(data, offset)
    while count:
        values, offset = decode_longs(data, offset, count)
        blocks.append(values)
        count, offset = _decode_count(data, offset)
    differences = blocks[0] if len(blocks) == 1 else np.concatenate([_EMPTY, *blocks])
    return np.cumsum(differences), offset


def _decode_count(data: bytes, offset: int) -> tuple[int, int]:
    """The number of items in the next block of an array, 0 at its end, and the offset of the items.

    Accepts every form that Avro allows: a negative number is followed by the size of the block in bytes.
    """
    count, offset = decode_long(data, offset)
    if count < 0:
        _, offset = decode_long(data, offset)
    return abs(count), offset


def constant_shortened(values: Int64s) -> Int64s:
    """The column, or one element of it if all are equal."""
    return values[:1] if len(values) > 1 and bool((values == values[0]).all()) else values


def expanded(values: Int64s, count: int) -> Int64s:
    """The column at its full length `count`. Raises BadRecord if it has another length."""
    if len(values) == count:
        return values
    if len(values) == 1 and count > 1:
        return np.full(count, values[0], np.int64)
    raise BadRecord(f"a column has {len(values)} numbers for {count} rows")


Kind: TypeAlias = "str | int"
"""The type of a field: its Avro name, that of the items with `[]` after it for an array, or the size of a fixed."""


def _kind(declared: Any, sizes: dict[str, int]) -> Kind:
    """The type of a field as the schema declares it; `sizes`: of the named fixed types until then."""
    if isinstance(declared, str):
        return sizes.get(declared, declared)
    if declared["type"] == "array":
        return f"{declared['items']}[]"
    return sizes.setdefault(declared["name"], declared["size"])


def _encode_field(kind: Kind, value: Any) -> bytes:
    match kind:
        case "long":
            return encode_long(value)
        case "long[]":
            return encode_column(value)
        case "boolean":
            return b"\1" if value else b"\0"
        case "string" | "bytes":
            data: bytes = value.encode() if kind == "string" else value
            return encode_long(len(data)) + data
        case "bytes[]":
            items = b"".join([encode_long(len(item)) + item for item in value])
            return encode_long(len(value)) + items + b"\0" if value else b"\0"
    if len(value) != kind:
        raise ValueError(f"a fixed field must have {kind} bytes, got {len(value)}")
    return bytes(value)


def _decode_field(kind: Kind, data: bytes, offset: int) -> tuple[Any, int]:
    """The value at `offset`, and the offset after it. Raises BadRecord and UnicodeDecodeError."""
    match kind:
        case "long":
            return decode_long(data, offset)
        case "long[]":
            return decode_column(data, offset)
        case "boolean":
            if (byte := data[offset : offset + 1]) not in (b"\0", b"\1"):
                raise BadRecord(f"the byte at offset {offset} is not a boolean")
            return byte == b"\1", offset + 1
        case "bytes[]":
            values: list[bytes] = []
            count, offset = _decode_count(data, offset)
            while count:
                for _ in range(count):
                    value, offset = _decode_field("bytes", data, offset)
                    values.append(value)
                count, offset = _decode_count(data, offset)
            return values, offset
    size, offset = (kind, offset) if isinstance(kind, int) else decode_long(data, offset)
    if not 0 <= size <= len(data) - offset:
        raise BadRecord(f"{size} bytes do not fit into the {len(data) - offset} from offset {offset}")
    content = data[offset : offset + size]
    return content.decode() if kind == "string" else content, offset + size


class RecordCodec:
    """The codec of one schema: mappings of its field names to values, and back."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        sizes: dict[str, int] = {}
        self.name: str = schema["name"]
        self.fields = [(field["name"], _kind(field["type"], sizes)) for field in schema["fields"]]

    def encode(self, values: Mapping[str, Any]) -> bytes:
        return b"".join([_encode_field(kind, values[name]) for name, kind in self.fields])

    def decode(self, data: bytes) -> dict[str, Any]:
        """All fields. Raises BadRecord, also for bytes after the last field."""
        values: dict[str, Any] = {}
        offset = 0
        for name, kind in self.fields:
            try:
                values[name], offset = _decode_field(kind, data, offset)
            except (BadRecord, UnicodeDecodeError) as error:
                raise BadRecord(f"field {name} of {self.name}: {error}") from error
        if offset != len(data):
            raise BadRecord(f"{self.name} is followed by {len(data) - offset} more bytes")
        return values


def schema(name: str, package: str) -> Mapping[str, Any]:
    """The Avro schema of one kind and version, such as `end-1`, in a package."""
    text = resources.files(package).joinpath("schemas", f"{name}.avsc").read_text()
    parsed: Mapping[str, Any] = json.loads(text)
    return parsed


@cache
def record(name: str, package: str) -> RecordCodec:
    return RecordCodec(schema(name, package))


def axes_of(name: str) -> tuple[str, str, str]:
    """The fields of a position, or of a column of positions."""
    return f"{name}_ledger", f"{name}_entry", f"{name}_batch"


def put_position(name: str, position: Position | None) -> dict[str, int]:
    return dict(zip(axes_of(name), position or EARLIEST, strict=True))


def get_position(values: Mapping[str, Any], name: str) -> Position | None:
    position = Position(*map(values.__getitem__, axes_of(name)))
    return None if position == EARLIEST else position


def reaches(at: Position | None, position: Position | None) -> bool:
    """Whether a reader that has read the message `at` has passed the record at `position`."""
    if position is None:
        return True
    if at is None:
        return False
    return at >= position or (at.batch == NO_INDEX and at[:2] == position[:2])


def put_columns(columns: Mapping[str, Int64s | Positions]) -> dict[str, Int64s]:
    """The columns as they are stored: one of positions becomes three, and constant ones are shortened."""
    stored: dict[str, Int64s] = {}
    for name, column in columns.items():
        if isinstance(column, Positions):
            for axis, numbers in zip(axes_of(name), (column.ledgers, column.entries, column.indexes), strict=True):
                stored[axis] = constant_shortened(numbers)
        else:
            stored[name] = constant_shortened(column)
    return stored


def get_columns(values: Mapping[str, Any], count: int, prefix: str, *names: str) -> list[Any]:
    """Columns of numbers or positions, by the rest of their names. Raises BadRecord for another number of rows."""
    found: list[Any] = []
    for name in (f"{prefix}{name}" for name in names):
        if name in values:
            found.append(expanded(values[name], count))
        else:
            ledgers, entries, indexes = (expanded(values[axis], count) for axis in axes_of(name))
            found.append(Positions(ledgers, entries, indexes))
    return found


INTERNAL_PREFIX = "__txnbuffer"
"""Name prefix of internal topics, which brokers may compact (`broker_io.port.OWN_PREFIX`)."""

SNAPSHOT_TOPIC = "__txnbuffer_snapshots"

OWNER_KEY = b"__owner"

OWNER = "owner"
SEGMENT = "part"
MUTATIONS = "mutations"
OVERFLOW = "spill"
END = "end"
GONE = "gone"

CHAINS = (SEGMENT, MUTATIONS)
"""The kinds of sealed segments."""

_PREFIXES = {SEGMENT: "", MUTATIONS: "m", OVERFLOW: "s"}
_KINDS = {prefix: kind for kind, prefix in _PREFIXES.items()}
_NUMBERED = re.compile(r"([ms]?)([1-9][0-9]{0,17})")


class EntryKey(NamedTuple):
    """A key of the snapshot topic other than `__owner`; `number` is 0 for END, else 1, 2, …"""

    topic: str
    kind: str
    number: int = 0

    def __str__(self) -> str:
        if self.kind == END:
            return f"{self.topic}-end"
        return f"{self.topic}-{_PREFIXES[self.kind]}{self.number}"

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
        if suffix == "end":
            return cls(topic, END)
        match = _NUMBERED.fullmatch(suffix)
        if match is None:
            return None
        return cls(topic, _KINDS[match[1]], int(match[2]))


def is_internal(topic: str) -> bool:
    return topic.startswith(INTERNAL_PREFIX)


def check_data_topic(topic: str) -> None:
    """Raises InvalidTopicName for an internal topic."""
    if is_internal(topic):
        raise InvalidTopicName(f"topic {topic!r} is internal and has no buffer: name a data topic")


END_VERSION, RAW_END_VERSION = "2", "3"
"""The versions of an end entry that are written: for all readers, and for those that ask for the log as it is."""
_VERSIONS = {END: ("1", END_VERSION, RAW_END_VERSION)}
"""The versions of a kind that are read. Of all other kinds there is version 1."""

VERSION_PROPERTY = "tb.v"
KIND_PROPERTY = "tb.kind"
EPOCH_PROPERTY = "tb.epoch"


class Stored(NamedTuple):
    """One stored entry; `value` is None once it is deleted.

    `version` and `kind` are the properties as stored; `epoch` is -1 if it is missing or unreadable.
    """

    position: Position
    version: str
    kind: str
    epoch: int
    value: bytes | None


def versions_of(kind: str) -> tuple[str, ...]:
    """The versions of a kind of entry that can be read."""
    return _VERSIONS.get(kind, ("1",))


def _message(key: bytes, kind: str, epoch: int, value: bytes | None, version: str = "1") -> Message:
    return Message(key, value, {VERSION_PROPERTY: version, KIND_PROPERTY: kind, EPOCH_PROPERTY: str(epoch)})


def message(key: EntryKey, epoch: int, value: bytes, *, raw: bool = False) -> Message:
    """An entry; `raw`: an end entry for readers that ask for the log as it is."""
    version = "1" if key.kind != END else RAW_END_VERSION if raw else END_VERSION
    return _message(key.to_bytes(), key.kind, epoch, value, version)


def gone(key: EntryKey, epoch: int) -> Message:
    return _message(key.to_bytes(), GONE, epoch, None)


def owner_message(epoch: int) -> Message:
    return _message(OWNER_KEY, OWNER, epoch, record("owner-1", __package__).encode({"epoch": epoch}))


DIGEST_BYTES = 16

T = TypeVar("T")


def digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def chain_start(topic: str, incarnation: str, kind: str = SEGMENT) -> bytes:
    """The chain digest before the first segment of a chain."""
    names = (topic, incarnation) if kind == SEGMENT else (topic, incarnation, kind)
    return digest("\0".join(names).encode())


def sealed(codec: RecordCodec, values: Mapping[str, Any], last: str) -> bytes:
    """A record whose last field is the digest of the bytes before it."""
    body = codec.encode({**values, last: bytes(DIGEST_BYTES)})[:-DIGEST_BYTES]
    return body + digest(body)


def unsealed(codec: RecordCodec, data: bytes) -> dict[str, Any]:
    """The fields of a record that `sealed` encoded. Raises BadRecord."""
    if digest(data[:-DIGEST_BYTES]) != data[-DIGEST_BYTES:]:
        raise BadRecord("its digest is wrong")
    return codec.decode(data)


def checked(key: EntryKey, stored: Stored, decode: Callable[[bytes], T]) -> T:
    """Decode an entry. Raises SnapshotDamaged or UnsupportedSnapshot that names it."""
    known = stored.version in versions_of(key.kind)
    if stored.version.isascii() and stored.version.isdigit() and not known:
        raise UnsupportedSnapshot(key.topic, str(key), stored.version)
    if not known or stored.kind != key.kind or stored.value is None:
        raise SnapshotDamaged(key.topic, str(key), f"its properties are not those of a {key.kind} entry")
    try:
        return decode(stored.value)
    except BadRecord as error:
        raise SnapshotDamaged(key.topic, str(key), str(error)) from error


class ChainRange(NamedTuple):
    """The segments `first` to before `next` of a chain, and the chain digests before and after them."""

    first: int
    next: int
    before: bytes
    after: bytes

    @property
    def numbers(self) -> range:
        return range(self.first, self.next)


_STORED_CHAINS = {
    SEGMENT: ("first_part", "next_part", "chain_first", "chain_next"),
    MUTATIONS: ("first_mutations", "next_mutations", "mutations_chain_first", "mutations_chain_next"),
}
"""The fields of each chain in an end entry."""


@dataclass(frozen=True, slots=True)
class EndEntry:
    """The content of `T-end`; the schema `end-2` describes each field.

    `chains`: by kind. `overflow`: digests of the overflow entries.
    """

    topic: str
    incarnation: str
    epoch: int
    snapshot_id: int
    chains: Mapping[str, ChainRange]
    next_overflow: int = 1
    overflow: tuple[bytes, ...] = ()
    state: bytes = b""
    deleted: bool = False

    @property
    def overflow_numbers(self) -> range:
        return range(self.next_overflow - len(self.overflow), self.next_overflow)

    def numbers(self, kind: str) -> range:
        """The numbers of the entries of a kind that it names."""
        return self.overflow_numbers if kind == OVERFLOW else self.chains[kind].numbers

    def encode(self) -> bytes:
        values = {
            "topic": self.topic,
            "incarnation": self.incarnation,
            "epoch": self.epoch,
            "snapshot_id": self.snapshot_id,
            "deleted": self.deleted,
            "next_spill": self.next_overflow,
            "spills": list(self.overflow),
            "state": self.state,
        }
        for kind, fields in _STORED_CHAINS.items():
            values |= zip(fields, self.chains[kind], strict=True)
        return sealed(record("end-2", __package__), values, "digest")

    @classmethod
    def decode(cls, data: bytes, version: str = "2") -> EndEntry:
        """Raises BadRecord."""
        values = unsealed(record(f"end-{min(version, END_VERSION)}", __package__), data)
        topic, incarnation = values["topic"], values["incarnation"]
        chains = {kind: no_segments(topic, incarnation, kind) for kind in CHAINS}
        for kind, fields in _STORED_CHAINS.items():
            if fields[0] in values:
                chains[kind] = ChainRange(*map(values.__getitem__, fields))
        end = cls(
            *(topic, incarnation, values["epoch"], values["snapshot_id"], chains),
            *(values["next_spill"], tuple(values["spills"]), values["state"], values["deleted"]),
        )
        in_order = all(1 <= chain.first <= chain.next for chain in chains.values())
        if end.next_overflow <= len(end.overflow) or not in_order or end.snapshot_id < 1:
            raise BadRecord("its numbers contradict each other")
        return end


def no_segments(topic: str, incarnation: str, kind: str) -> ChainRange:
    """A chain before its first segment."""
    start = chain_start(topic, incarnation, kind)
    return ChainRange(1, 1, start, start)


def decode_end(topic: str, stored: Stored) -> EndEntry:
    """The end entry of a topic. Raises SnapshotDamaged and UnsupportedSnapshot."""
    key = EntryKey(topic, END)
    end = checked(key, stored, partial(EndEntry.decode, version=stored.version))
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
    topic: str, end: EndEntry, kind: str, found: Mapping[int, Stored], decode: Callable[[str, int, Stored], E]
) -> Iterator[E]:
    """All segments of a chain that an end entry names, each checked against the one before. Raises SnapshotDamaged."""
    chain, of_end = end.chains[kind], str(EntryKey(topic, END))
    if chain.first == 1 and chain.before != chain_start(topic, end.incarnation, kind):
        raise SnapshotDamaged(topic, of_end, "its chain does not start with the digest of this topic")
    before, epoch = chain.before, 0
    for number in chain.numbers:
        key = str(EntryKey(topic, kind, number))
        stored = found.get(number)
        if stored is None:
            named = f"{chain.first} to {chain.next - 1}"
            raise SnapshotDamaged(topic, key, f"it is missing, but the end entry names {named}")
        entry = decode(topic, number, stored)
        if entry.chain_before != before:
            raise SnapshotDamaged(topic, key, "it does not follow the segment before it")
        if not epoch <= entry.epoch <= end.epoch:
            raise SnapshotDamaged(topic, key, f"its epoch {entry.epoch} is out of order")
        before, epoch = entry.chain_after, entry.epoch
        yield entry
    if before != chain.after:
        raise SnapshotDamaged(topic, of_end, "its chain does not end with the last segment")


def state_bytes(topic: str, end: EndEntry, found: Mapping[int, Stored]) -> bytes:
    """The state of an end entry, inline or from its overflow entries. Raises SnapshotDamaged."""
    if not end.overflow:
        return end.state
    pieces: list[bytes] = []
    for number, expected in zip(end.overflow_numbers, end.overflow, strict=True):
        stored = found.get(number)
        key = str(EntryKey(topic, OVERFLOW, number))
        if stored is None or stored.value is None:
            raise SnapshotDamaged(topic, key, "it is missing, but the end entry names it")
        if stored.kind != OVERFLOW or digest(stored.value) != expected:
            raise SnapshotDamaged(topic, key, "its digest is not the one in the end entry")
        pieces.append(stored.value)
    return b"".join(pieces)
