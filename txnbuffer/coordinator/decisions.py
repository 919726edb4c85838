"""The format of the decision log: its entries, and the owner's address as a property of the topic

Each coordinator has one compacted topic, `__txnbuffer_decisions`. Each message has a key, and the properties `tb.v`
(the format's version, `1`) and `tb.kind`. Its value is one Avro record without its schema, which is below; a message
without a value deletes its key. Readers apply the messages in order. Times are in milliseconds since 1970. A delta
column has each number as the difference from the one before, the first from 0. A bitmap is a 64-bit Roaring bitmap in
its portable form. Ids are the `least` of this coordinator's transactions.

| kind        | key                | content                                                                    |
|-------------|--------------------|----------------------------------------------------------------------------|
| `owner`     | `__owner`          | the owner of all later entries, and its epoch                              |
| `group`     | `group-<number>`   | decisions that were taken together; numbers grow by one                    |
| `mark`      | `mark-<number>`    | a low-water mark, and the outcomes of the one-phase transactions it passed |
| `ended`     | `ended`            | ids above the low-water mark that have ended with all markers durable      |
| `lease`     | `lease-<first>`    | a block of ids that a session may use                                      |
| `topic`     | `topic-<name>`     | a topic with transactions; whether it may have one-phase markers           |
| `name`      | `name-<name>`      | a named producer: its epoch (`opening`), and its last committed number     |
| `consumers` | `consumers-<name>` | a consumer group: its generation, and its position on each topic           |

The key `proof` never has a value. An owner deletes it to find out whether the log is still its own.

An `owner` may also have the property `tb.address`: HOST:PORT, at which clients connect to it; and `tb.owners`: a JSON
array of the newest owners up to itself, oldest first, 1,000 or as many as fit. Each one is `[epoch,id]`, with a random
id, so that a reader that has seen an owner knows whether this log had it. On an embedded log, of which a part may be
lost, it is `[epoch,id,skipped,first]`: no owner of this log leased the ids from `skipped` to before `first`, but owners
of the lost part may have.

A `group` has r rows: `least` (delta), and `outcomes` with one byte each, 0 ABORT and 1 COMMIT. Row i has
`topic_counts[i]` topics: the next ones of `topic_rows`, which are rows of the table `topics`, each with its number of
records in `records`. The group also aborts the blocks of ids `retired_first` (delta) and `retired_size`, which were
returned or never used. Then come the changes by its commits: `names` with the committed number, and `positions` of
consumer groups. A newer `name` or `consumers` entry repeats these, so that the group can be deleted.

`name` and `consumers` entries have the property `tb.group`: they contain what all groups of lower numbers say. After a
crash of the cluster such an entry may be in the log twice, the second time after newer groups, which take precedence;
without the property the later message does.

The session of a `lease` begins with `l` if its client is in the process of the owner, and so is gone when the next
owner begins. A service's clients have other names. `granted_at` is the last sign of life of the session at that time.

A group is deleted when all its transactions have ended with durable markers, `remember` has passed since `decided_at`,
and a durable `mark` or `ended` covers all its ids. A mark is deleted `remember` after `raised_at` if there is a newer
one; a lease when a durable mark has passed it, and `remember` later if its session belongs to a known principal, since
no other one may ask how those transactions ended; a deleted name when no group mentions it, and `remember` later if
some of its numbers are finished.

The owner's address is a property of the topic, one line of text:

    EPOCH ADDRESS [no-topics]

EPOCH is the epoch of its `owner` entry in decimal digits. ADDRESS is HOST:PORT, or empty if the owner has none. The
word `no-topics` follows if clients may not create missing topics. The owner writes the line once its entry is durable.
It may be missing or out of date, so a client that can't connect there reads the log.

The upper bounds of sizes at the end are computed without encoding: a sum of them is never below the size that a broker
counts for the message, and costs a few additions a row.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from pyroaring import BitMap64

from broker_io.batch import Batch, Message
from broker_io.position import Position, maker
from txnbuffer import avro
from txnbuffer.buffer.state import bitmap_of_bytes, bitmap_to_bytes
from txnbuffer.coordinator.transaction import SettledIds
from txnbuffer.errors import UnreadableDecision
from txnbuffer.model import Outcome


def position_columns(ends: Sequence[Position], prefix: str) -> dict[str, list[int]]:
    return {
        f"{prefix}ledgers": [position.ledger for position in ends],
        f"{prefix}entries": [position.entry for position in ends],
        f"{prefix}batches": [position.batch for position in ends],
    }


def positions(record: dict[str, Any], prefix: str) -> list[Position]:
    columns = [record[f"{prefix}{name}"] for name in ("ledgers", "entries", "batches")]
    same_length(*columns)
    return list(map(Position, *columns))


def deltas(numbers: list[int]) -> list[int]:
    """Each number as the difference from the one before, the first from 0."""
    return [after - before for before, after in itertools.pairwise([0, *numbers])]


def sums(differences: list[int]) -> list[int]:
    """The numbers of which `deltas` returned these differences."""
    return list(itertools.accumulate(differences))


def same_length(*columns: Sequence[Any]) -> None:
    """Raises ValueError for columns of different lengths."""
    lengths = [*map(len, columns)]
    if len(set(lengths)) != 1:
        raise ValueError(f"columns that belong together have {lengths} items")


_OUTCOMES = (Outcome.ABORT, Outcome.COMMIT)


class Row(NamedTuple):
    """The decision of one transaction id; `topics` and the `records` in each, as far as they are known."""

    least: int
    outcome: Outcome
    topics: tuple[str, ...]
    records: tuple[int, ...]


as_row = maker(Row)


@dataclass(slots=True)
class DecisionRows:
    """The decisions of a group as columns; a Row is created when it is needed.

    A new owner reads decisions by the hundred thousand, and most of them are settled. `outcomes` has a byte a row,
    `counts` the number of topics of each row. `named` has the topics of all rows in order, as indexes of `topics`, and
    `records` the number of records in each.
    """

    least: Sequence[int]
    outcomes: bytes
    counts: Sequence[int]
    topics: Sequence[str]
    named: Sequence[int]
    records: Sequence[int]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> DecisionRows:
        table: dict[str, int] = {}
        named = [table.setdefault(topic, len(table)) for row in rows for topic in row.topics]
        return cls(
            [row.least for row in rows],
            bytes([row.outcome for row in rows]),
            [len(row.topics) for row in rows],
            list(table),
            named,
            [count for row in rows for count in row.records],
        )

    def __len__(self) -> int:
        return len(self.least)

    def __iter__(self) -> Iterator[Row]:
        ends = itertools.accumulate(self.counts, initial=0)
        for least, outcome, (first, last) in zip(self.least, self.outcomes, itertools.pairwise(ends), strict=True):
            yield self._row(least, outcome, first, last)

    def split(self, progress: SettledIds) -> tuple[BitMap64, BitMap64, list[Row]]:
        """The settled ids that aborted, those that committed, and the rows that are not settled."""
        ids = np.array(self.least, np.uint64)
        counts = np.array(self.counts, np.int64)
        ends = np.cumsum(counts)
        unsettled = [
            index
            for index in np.flatnonzero((ids > progress.low_water_mark) & (counts > 0)).tolist()
            if not progress.has_ended(self.least[index])
        ]
        undone = [
            self._row(self.least[at], self.outcomes[at], int(ends[at] - counts[at]), int(ends[at])) for at in unsettled
        ]
        done = np.ones(len(ids), np.bool_)
        done[unsettled] = False
        committed = np.frombuffer(self.outcomes, np.uint8) == Outcome.COMMIT
        return BitMap64(ids[done & ~committed]), BitMap64(ids[done & committed]), undone

    def _row(self, least: int, outcome: int, first: int, last: int) -> Row:
        topics = tuple([self.topics[at] for at in self.named[first:last]])
        return Row(least, _OUTCOMES[outcome], topics, tuple(self.records[first:last]))


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


class OwnerEpoch(NamedTuple):
    """An owner's epoch and random id; no owner of the log leased the ids from `skipped` to before `first`."""

    epoch: int
    id: str
    skipped: int = 0
    first: int = 0


class Owner(NamedTuple):
    """An `owner` entry. `address`: HOST:PORT for clients, or empty. `owners`: the newest owners, itself the last."""

    epoch: int
    owner: str
    address: str = ""
    owners: tuple[OwnerEpoch, ...] = ()


class NamedCommit(NamedTuple):
    """A commit of a named producer's number."""

    name: str
    number: int


class PositionCommit(NamedTuple):
    """A commit that moves a consumer group on one topic to `end`."""

    group: str
    topic: str
    end: Position


class Retired(NamedTuple):
    """A block of ids that are never used; they count as aborted."""

    first: int
    size: int


class Group(NamedTuple):
    """A `group` entry: decisions, and what their commits change."""

    number: int
    epoch: int
    decided_at: int
    rows: DecisionRows
    retired: tuple[Retired, ...] = ()
    names: tuple[NamedCommit, ...] = ()
    positions: tuple[PositionCommit, ...] = ()


class LowWaterMark(NamedTuple):
    """A `mark` entry."""

    number: int
    low_water_mark: int
    raised_at: int
    committed: BitMap64
    aborted: BitMap64


class EndedIds(NamedTuple):
    """The `ended` entry."""

    ids: BitMap64


class Lease(NamedTuple):
    """A `lease` entry."""

    first: int
    size: int
    session: str
    granted_at: int


class RegisteredTopic(NamedTuple):
    """A `topic` entry."""

    topic: str
    one_phase: bool


class Name(NamedTuple):
    """A `name` entry. The producer `epoch`, stored as `opening`, grows by one each time a producer opens the name.

    `deleted`: the name is deleted, and its numbers up to `committed` count as finished. `since`: the entry contains
    what groups below this number say; 0: what all earlier messages say.
    """

    name: str
    epoch: int
    committed: int
    deleted: bool
    since: int = 0


class Consumers(NamedTuple):
    """A `consumers` entry. `since`: as in Name."""

    group: str
    generation: int
    positions: tuple[tuple[str, Position], ...]
    since: int = 0


Entry: TypeAlias = Owner | Group | LowWaterMark | EndedIds | Lease | RegisteredTopic | Name | Consumers

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
    kind: avro.stored_schema(
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


_FORMS: dict[type, tuple[str, str]] = {
    Owner: ("owner", OWNER_KEY),
    Group: ("group", "group-{0.number}"),
    LowWaterMark: ("mark", "mark-{0.number}"),
    EndedIds: ("ended", ENDED_KEY),
    Lease: ("lease", "lease-{0.first}"),
    RegisteredTopic: ("topic", "topic-{0.topic}"),
    Name: ("name", "name-{0.name}"),
    Consumers: ("consumers", "consumers-{0.group}"),
}
"""The kind of each entry, and the form of its key."""


def key_of(entry: Entry) -> str:
    """The key of an entry's message."""
    return _FORMS[type(entry)][1].format(entry)


def encode(entry: Entry) -> Message:
    """The message of an entry."""
    kind, _ = _FORMS[type(entry)]
    properties = _PROPERTIES[kind]
    if isinstance(entry, Owner):
        properties = properties | ({ADDRESS: entry.address} if entry.address else {})
        owners = [one if any(one[2:]) else one[:2] for one in entry.owners]
        properties = properties | ({OWNERS: json.dumps(owners, separators=(",", ":"))} if owners else {})
    elif isinstance(entry, Name | Consumers) and entry.since:
        properties = properties | {GROUP: str(entry.since)}
    return Message(key_of(entry).encode(), avro.encode(_PARSED[kind], _record(entry)), properties)


def tombstone(key: str) -> Message:
    """The message that deletes a key."""
    return Message(key.encode(), None, {VERSION: FORMAT_VERSION})


def decode(message: Message) -> Entry | None:
    """The entry of a message; None for one that deletes its key. Raises UnreadableDecision."""
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
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise UnreadableDecision(f"decision log, {key!r}: {error}; restore the log from a backup") from None
    return entry


def _of_bytes(data: bytes) -> BitMap64:
    bitmap = bitmap_of_bytes(data)
    if bitmap_to_bytes(bitmap) != data:
        raise ValueError("a bitmap can't be read: its bytes are not in the portable form")
    return bitmap


def _record(entry: Entry) -> dict[str, Any]:
    """The fields of an entry; the schema chooses the ones that are stored."""
    match entry:
        case Group():
            return _group_record(entry)
        case LowWaterMark() | EndedIds():
            fields = entry._asdict().items()
            return {name: bitmap_to_bytes(value) if isinstance(value, BitMap64) else value for name, value in fields}
        case Name():
            return entry._asdict() | {"opening": entry.epoch}
        case Consumers():
            columns = position_columns([end for _, end in entry.positions], "")
            return entry._asdict() | {"topics": [topic for topic, _ in entry.positions]} | columns
        case _:
            return entry._asdict()


def _of_record(kind: str, record: dict[str, Any], properties: Mapping[str, str]) -> Entry:
    since = int(properties.get(GROUP, "0"))
    match kind:
        case "owner":
            owners = tuple(
                OwnerEpoch(int(epoch), str(by), *map(int, skip))
                for epoch, by, *skip in json.loads(properties.get(OWNERS, "[]"))
            )
            return Owner(**record, address=properties.get(ADDRESS, ""), owners=owners)
        case "group":
            return _group(record)
        case "mark":
            bitmaps = {"committed": _of_bytes(record["committed"]), "aborted": _of_bytes(record["aborted"])}
            return LowWaterMark(**record | bitmaps)
        case "ended":
            return EndedIds(_of_bytes(record["ids"]))
        case "lease":
            return Lease(**record)
        case "topic":
            return RegisteredTopic(**record)
        case "name":
            return Name(record["name"], record["opening"], record["committed"], record["deleted"], since)
        case _:
            ends = positions(record, "")
            same_length(record["topics"], ends)
            pairs = tuple(zip(record["topics"], ends, strict=True))
            return Consumers(record["group"], record["generation"], pairs, since)


def _group_record(group: Group) -> dict[str, Any]:
    rows = group.rows
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
        raise ValueError(f"its rows have {sum(counts)} topics in topic_counts, but {len(topic_rows)} in topic_rows")
    same_length(topic_rows, records)
    if topic_rows and not 0 <= min(topic_rows) <= max(topic_rows) < len(topics):
        raise ValueError("a row names a topic that is not in the table")
    if max(outcomes, default=0) > 1:
        raise ValueError(f"{max(outcomes)} is not an outcome")
    rows = DecisionRows(least, outcomes, counts, topics, topic_rows, records)
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


_OWNER_ADDRESS = re.compile(r"([1-9][0-9]{0,18}) (\S+:[0-9]+|)( no-topics)?", re.ASCII)


class OwnerAddress(NamedTuple):
    """The owner's address in the topic's property. `creates_topics`: clients may create missing topics."""

    epoch: int
    address: str
    creates_topics: bool = True


def encode_owner_address(owner: OwnerAddress) -> str:
    return f"{owner.epoch} {owner.address}{'' if owner.creates_topics else ' no-topics'}"


def decode_owner_address(text: str) -> OwnerAddress | None:
    """None for any other text, for example that of a later version."""
    found = _OWNER_ADDRESS.fullmatch(text)
    return None if found is None else OwnerAddress(int(found[1]), found[2], found[3] is None)


LONG = 10
"""The most bytes of a number."""
_PLACE = 5
"""The most bytes of a count, or of an index in a table."""

FIXED = 512
"""Key, properties, plain fields, and the counts and ends of all columns of a message."""
POSITION = 3 * LONG
RETIRED = 2 * LONG
MARKER_ITEM = 2 * LONG + 1


def text_bytes(text: str) -> int:
    return _PLACE + (len(text) if text.isascii() else len(text.encode()))


def long_bytes(number: int) -> int:
    """The bytes of a number, or of its negative."""
    return (number.bit_length() + 7) // 7


def rows_bytes(rows: Iterable[Row], known: set[str], least: int) -> int:
    """The bytes that rows add to a group with the `known` topics, whose last id is `least`; adds theirs to `known`."""
    total = 0
    for row in rows:
        topics = row.topics
        for topic in topics:
            if topic not in known:
                known.add(topic)
                total += text_bytes(topic)
        each = long_bytes(len(known)) + long_bytes(max(row.records, default=0))
        total += 1 + long_bytes(row.least - least) + long_bytes(len(topics)) + each * len(topics)
        least = row.least
    return total


def names_bytes(commits: Iterable[tuple[str, int]]) -> int:
    return sum([text_bytes(name) + LONG for name, _ in commits])


def positions_bytes(commits: Sequence[tuple[str, str, object]]) -> int:
    return sum([text_bytes(group) + text_bytes(topic) + POSITION for group, topic, _ in commits])


def consumers_bytes(group: str, topics: Iterable[str]) -> int:
    """The size of a `consumers` entry with any positions on these topics."""
    return FIXED + 2 * text_bytes(group) + sum([text_bytes(topic) + POSITION for topic in topics])


def marker_items(limit: int) -> int:
    """The number of transactions that fit into a marker."""
    return (limit - FIXED) // MARKER_ITEM


def retired_blocks(limit: int) -> int:
    """The number of blocks of unused ids that fit into a group without decisions."""
    return (limit - FIXED) // RETIRED


def size_of(message: Message) -> int:
    """The size that a broker compares with its limit."""
    return int(Batch.of([message]).sizes()[0])
