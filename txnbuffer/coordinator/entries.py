"""The entries of the decision log: one compacted topic a coordinator, `__txnbuffer_decisions`.

Every message has a key, and the properties `tb.v` (version of the format, `1`) and `tb.kind`; its value
is one Avro record without a schema in front, whose schema stands below. No value: the key is forgotten.
Times are in milliseconds since 1970. A column called a delta column holds each number as the difference
from the one before, the first from 0. A bitmap is a 64-bit Roaring bitmap in its portable form. Ids are
the `least` of transactions of this coordinator. Whoever reads applies the messages in order. An `owner` may have
the property `tb.address` too: HOST:PORT at which its clients find it; and `tb.owners`, a JSON array of
the newest owners up to itself, oldest first, 1,000 or as many as fit. Each is `[epoch,id]`, with an id that it draws
at random, so that who has seen an owner can tell whether the log is one that had it; or `[epoch,id,skipped,first]` on
an embedded log, where an older copy may have been put back: the ids of transactions from `skipped` up to before
`first` are leased by no owner of this log, but perhaps by ones that are gone. A `name` and a `consumers` entry have
`tb.group`: what groups of lower numbers say is in them. A cluster that crashed may have such an entry a second
time behind groups that came after it, and those hold; without the property the later message does.

| kind        | key                | says                                                                       |
|-------------|--------------------|----------------------------------------------------------------------------|
| `owner`     | `__owner`          | who writes from here on, and its epoch                                     |
| `group`     | `group-<number>`   | decisions, taken together; numbers grow by one                              |
| `mark`      | `mark-<number>`    | a low-water mark, and outcomes of the one-phase transactions that it passed |
| `ended`     | `ended`            | ids above the low-water mark that have ended with all their markers durable |
| `lease`     | `lease-<first>`    | a block of ids that a session may use                                      |
| `topic`     | `topic-<name>`     | a topic with transactions; whether it may have one-phase markers           |
| `name`      | `name-<name>`      | a named producer: its holder, its last number that is committed or over     |
| `consumers` | `consumers-<name>` | a consumer group: its generation, how far it has come on each topic        |

Nothing stands under the key `proof`. Who forgets it sees by that whether the log is still its own.

A `group` has r rows (`least` delta, `outcomes` one byte each: 0 ABORT, 1 COMMIT). Row i names `topic_counts[i]`
topics: the next ones of `topic_rows`, which are rows of the table `topics`, each with the number of
records in `records`. Besides, it says ABORT of the blocks of ids `retired_first` (delta), `retired_size`:
given back, or left unused. What its commits changed follows: `names` with the number that was
committed, and `positions` of consumer groups. A newer `name` or `consumers` entry repeats that, so that
the group can be forgotten.

A group is forgotten when all its transactions have ended with their markers durable, `remember` has
passed since `decided_at`, and a durable `mark` or `ended` covers all its ids. A mark is forgotten
`remember` after `raised_at` when there is a newer one; a lease when a durable mark has passed it; a name that was
deleted when no group speaks of it, and `remember` after that if numbers of it are over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from pyroaring import BitMap64

from broker_io.batch import Message
from broker_io.position import Position
from txnbuffer import avro
from txnbuffer.coordinator.entry_columns import deltas, position_columns, positions, same_length, sums
from txnbuffer.coordinator.rows import Row, Rows
from txnbuffer.errors import UnreadableDecision

TOPIC = "__txnbuffer_decisions"
VERSION = "tb.v"
KIND = "tb.kind"
ADDRESS = "tb.address"
OWNERS = "tb.owners"
GROUP = "tb.group"
FORMAT_VERSION = "1"

OWNER_KEY = "__owner"
ENDED_KEY = "ended"
PROOF_KEY = "proof"


class Ownership(NamedTuple):
    """An owner's epoch and random id; from `skipped` on, up to before `first`, nobody leased anything."""

    epoch: int
    id: str
    skipped: int = 0
    first: int = 0


class Owner(NamedTuple):
    """`address`: HOST:PORT for clients; nothing where they know it. `owners`: those up to itself, which is the last."""

    epoch: int
    owner: str
    address: str = ""
    owners: tuple[Ownership, ...] = ()


class NamedCommit(NamedTuple):
    name: str
    number: int


class PositionCommit(NamedTuple):
    group: str
    topic: str
    end: Position


class Retired(NamedTuple):
    first: int
    size: int


class Group(NamedTuple):
    number: int
    epoch: int
    decided_at: int
    rows: Sequence[Row]
    retired: tuple[Retired, ...] = ()
    names: tuple[NamedCommit, ...] = ()
    positions: tuple[PositionCommit, ...] = ()


class Mark(NamedTuple):
    number: int
    low_water_mark: int
    raised_at: int
    committed: BitMap64
    aborted: BitMap64


class EndedIds(NamedTuple):
    ids: BitMap64


class Lease(NamedTuple):
    first: int
    size: int
    session: str
    granted_at: int


class Topic(NamedTuple):
    topic: str
    one_phase: bool


class Name(NamedTuple):
    """`opening` grows by one with each opening; `deleted`: forgotten, but that numbers up to `committed` are over.

    `since`: it says what groups below this number said; 0: whatever stands before it.
    """

    name: str
    opening: int
    committed: int
    deleted: bool
    since: int = 0


class Consumers(NamedTuple):
    """`since`: as of a name."""

    group: str
    generation: int
    positions: tuple[tuple[str, Position], ...]
    since: int = 0


Entry: TypeAlias = Owner | Group | Mark | EndedIds | Lease | Topic | Name | Consumers

_LONGS = {"type": "array", "items": "long"}
_STRINGS = {"type": "array", "items": "string"}

SCHEMAS: dict[str, list[tuple[str, Any]]] = {
    "owner": [("epoch", "long"), ("owner", "string")],
    "group": [
        ("number", "long"),
        ("epoch", "long"),
        ("decided_at", "long"),
        ("least", _LONGS),
        ("outcomes", "bytes"),
        ("topics", _STRINGS),
        ("topic_counts", _LONGS),
        ("topic_rows", _LONGS),
        ("records", _LONGS),
        ("retired_first", _LONGS),
        ("retired_size", _LONGS),
        ("names", _STRINGS),
        ("name_numbers", _LONGS),
        ("position_groups", _STRINGS),
        ("position_topics", _STRINGS),
        ("position_ledgers", _LONGS),
        ("position_entries", _LONGS),
        ("position_batches", _LONGS),
    ],
    "mark": [
        ("number", "long"),
        ("low_water_mark", "long"),
        ("raised_at", "long"),
        ("committed", "bytes"),
        ("aborted", "bytes"),
    ],
    "ended": [("ids", "bytes")],
    "lease": [("first", "long"), ("size", "long"), ("session", "string"), ("granted_at", "long")],
    "topic": [("topic", "string"), ("one_phase", "boolean")],
    "name": [("name", "string"), ("opening", "long"), ("committed", "long"), ("deleted", "boolean")],
    "consumers": [
        ("group", "string"),
        ("generation", "long"),
        ("topics", _STRINGS),
        ("ledgers", _LONGS),
        ("entries", _LONGS),
        ("batches", _LONGS),
    ],
}

_PARSED = {
    kind: avro.schema(
        {
            "type": "record",
            "name": kind.capitalize(),
            "namespace": "txnbuffer.decisions",
            "fields": [{"name": name, "type": of} for name, of in fields],
        }
    )
    for kind, fields in SCHEMAS.items()
}
_PROPERTIES = {kind: {VERSION: FORMAT_VERSION, KIND: kind} for kind in SCHEMAS}


def key_of(entry: Entry) -> str:
    """The key under which an entry stands."""
    match entry:
        case Owner():
            return OWNER_KEY
        case Group(number=number):
            return f"group-{number}"
        case Mark(number=number):
            return f"mark-{number}"
        case EndedIds():
            return ENDED_KEY
        case Lease(first=first):
            return f"lease-{first}"
        case Topic(topic=name):
            return f"topic-{name}"
        case Name(name=name):
            return f"name-{name}"
        case Consumers(group=name):
            return f"consumers-{name}"


def encode(entry: Entry) -> Message:
    """The message that carries an entry."""
    kind, record = _to_record(entry)
    properties = _PROPERTIES[kind]
    if isinstance(entry, Owner):
        properties = properties | ({ADDRESS: entry.address} if entry.address else {})
        owners = [one if any(one[2:]) else one[:2] for one in entry.owners]
        properties = properties | ({OWNERS: json.dumps(owners, separators=(",", ":"))} if owners else {})
    elif isinstance(entry, Name | Consumers) and entry.since:
        properties = properties | {GROUP: str(entry.since)}
    return Message(key_of(entry).encode(), avro.encode(_PARSED[kind], record), properties)


def tombstone(key: str) -> Message:
    """The message that makes the log forget a key."""
    return Message(key.encode(), None, {VERSION: FORMAT_VERSION})


def decode(message: Message) -> Entry | None:
    """The entry of a message; None for one that makes its key forgotten. Raises UnreadableDecision."""
    key = (message.key or b"").decode(errors="replace")
    version = message.properties.get(VERSION)
    if version != FORMAT_VERSION:
        raise UnreadableDecision(f"decision log, {key!r}: format version {version}; use the release that wrote it")
    if message.value is None:
        return None
    kind = message.properties.get(KIND, "")
    try:
        if kind not in _PARSED:
            raise ValueError(f"kind {kind!r} is unknown")
        entry = _of_record(kind, avro.decode(_PARSED[kind], message.value), message.properties)
        if key_of(entry) != key:
            raise ValueError(f"its content belongs under {key_of(entry)!r}")
    except (ValueError, TypeError) as error:
        raise UnreadableDecision(f"decision log, {key!r}: {error}; restore the log before going on") from None
    return entry


def to_bytes(bitmap: BitMap64) -> bytes:
    """A bitmap in its written form."""
    copy = bitmap.copy()
    copy.run_optimize()
    data: bytes = copy.serialize()
    return data


def _of_bytes(data: bytes) -> BitMap64:
    try:
        bitmap = BitMap64.deserialize(data)
    except Exception as error:  # the library raises whatever it stumbles over
        raise ValueError(f"a bitmap can't be read: {error}") from None
    if to_bytes(bitmap) != data:
        raise ValueError("a bitmap can't be read: its bytes are not those of any")
    return bitmap


def _to_record(entry: Entry) -> tuple[str, dict[str, Any]]:
    match entry:
        case Owner():
            return "owner", {"epoch": entry.epoch, "owner": entry.owner}
        case Group():
            return "group", _group_record(entry)
        case Mark():
            bitmaps = {"committed": to_bytes(entry.committed), "aborted": to_bytes(entry.aborted)}
            return "mark", entry._asdict() | bitmaps
        case EndedIds():
            return "ended", {"ids": to_bytes(entry.ids)}
        case Lease():
            return "lease", entry._asdict()
        case Topic():
            return "topic", entry._asdict()
        case Name():
            return "name", {name: value for name, value in entry._asdict().items() if name != "since"}
        case Consumers(group=group, generation=generation, positions=places):
            columns = position_columns([end for _, end in places], "")
            topics = [topic for topic, _ in places]
            return "consumers", {"group": group, "generation": generation, "topics": topics} | columns


def _of_record(kind: str, record: dict[str, Any], properties: Mapping[str, str]) -> Entry:
    since = int(properties.get(GROUP, "0"))
    match kind:
        case "owner":
            owners = tuple(
                Ownership(int(epoch), str(by), *map(int, skip))
                for epoch, by, *skip in json.loads(properties.get(OWNERS, "[]"))
            )
            return Owner(**record, address=properties.get(ADDRESS, ""), owners=owners)
        case "group":
            return _group(record)
        case "mark":
            bitmaps = {"committed": _of_bytes(record["committed"]), "aborted": _of_bytes(record["aborted"])}
            return Mark(**record | bitmaps)
        case "ended":
            return EndedIds(_of_bytes(record["ids"]))
        case "lease":
            return Lease(**record)
        case "topic":
            return Topic(**record)
        case "name":
            return Name(**record, since=since)
        case _:
            ends = positions(record, "")
            same_length(record["topics"], ends)
            pairs = tuple(zip(record["topics"], ends, strict=True))
            return Consumers(record["group"], record["generation"], pairs, since)


def _group_record(group: Group) -> dict[str, Any]:
    rows = Rows.of(group.rows)
    return {
        "number": group.number,
        "epoch": group.epoch,
        "decided_at": group.decided_at,
        "least": deltas(list(rows.least)),
        "outcomes": rows.outcomes,
        "topics": rows.topics,
        "topic_counts": rows.counts,
        "topic_rows": rows.named,
        "records": rows.records,
        "retired_first": deltas([block.first for block in group.retired]),
        "retired_size": [block.size for block in group.retired],
        "names": [commit.name for commit in group.names],
        "name_numbers": [commit.number for commit in group.names],
        "position_groups": [commit.group for commit in group.positions],
        "position_topics": [commit.topic for commit in group.positions],
    } | position_columns([commit.end for commit in group.positions], "position_")


def _group(record: dict[str, Any]) -> Group:
    least, outcomes, counts = sums(record["least"]), record["outcomes"], record["topic_counts"]
    same_length(least, outcomes, counts)
    topics, topic_rows, records = record["topics"], record["topic_rows"], record["records"]
    if sum(counts) != len(topic_rows) or min(counts, default=0) < 0:
        raise ValueError(f"its rows name {sum(counts)} topics and there are {len(topic_rows)}")
    same_length(topic_rows, records)
    if topic_rows and not 0 <= min(topic_rows) <= max(topic_rows) < len(topics):
        raise ValueError("a row names a topic that is not in the table")
    if max(outcomes, default=0) > 1:
        raise ValueError(f"{max(outcomes)} is no outcome")
    rows = Rows(least, outcomes, counts, topics, topic_rows, records)
    blocks, sizes = sums(record["retired_first"]), record["retired_size"]
    same_length(blocks, sizes)
    same_length(record["names"], record["name_numbers"])
    places = positions(record, "position_")
    same_length(record["position_groups"], record["position_topics"], places)
    return Group(
        record["number"],
        record["epoch"],
        record["decided_at"],
        rows,
        tuple(map(Retired, blocks, sizes)),
        tuple(map(NamedCommit, record["names"], record["name_numbers"])),
        tuple(map(PositionCommit, record["position_groups"], record["position_topics"], places)),
    )
