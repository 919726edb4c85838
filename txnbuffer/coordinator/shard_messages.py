"""Letters: what services of other shards of a namespace ask and tell one another.

Each stands on the partition of `__txnbuffer_letters` of the shard that it goes to. It has no key, the properties `tb.v`
(version of the format, `1`) and `tb.kind` (`letter`), and as its value one Avro record without a schema in front,
whose schema stands below. Ids are the `least` of transactions of the one coordinator that the letter goes to (`asked`,
`applied`) or comes from (`awaited`), each as the difference from the one before, the first from 0.

| field | says |
|---|---|
| `sender` | the shard that wrote it |
| `register` | topics of the receiver: make them ones with transactions, and tell what came of it |
| `registered` | topics of the sender that are; durably |
| `refused`, `reasons` | topics of the sender that can't be, and why, for people |
| `known` | topics of the receiver that the sender takes for registered |
| `missing` | those of them that are not |
| `asked` | topic of the sender, ids of the receiver: they are ongoing there; write their markers if they have ended |
| `awaited` | topic of the receiver, ids of the sender: tell when they have ended there |
| `applied` | topic of the sender, ids of the receiver: they have |
| `floors_wanted` | topic, number: tell the lowest ledger of it that a consumer group of the receiver needs |
| `floors` | topic, the number that was given, that ledger; -1 if none does |

Topics of `refused` that will be, however often they are asked for, stand in the property `tb.final`, a line each.

A letter may be lost, come twice or late. What it tells was true when it was written, and durable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from broker_io.batch import Message
from txnbuffer import avro
from txnbuffer.coordinator.decisions import deltas, same_length, sums
from txnbuffer.coordinator.sizes import FIXED, LONG, text_bytes

TOPIC = "__txnbuffer_letters"
"""It exists only where there are several shards."""

KIND = "letter"
VERSION = "1"
FINAL = "tb.final"

MAX_REASON = 500
"""Characters."""

TopicIds: TypeAlias = "tuple[str, tuple[int, ...]]"
"""A topic and transactions that it is about."""

_TEXTS = ("register", "registered", "refused", "reasons", "known", "missing")
_IDS = ("asked", "awaited", "applied")


class ShardMessage(NamedTuple):
    """As above; `refused` are pairs of topic and reason, `final` the topics of those that stay refused."""

    sender: int
    register: tuple[str, ...] = ()
    registered: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    known: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    asked: tuple[TopicIds, ...] = ()
    awaited: tuple[TopicIds, ...] = ()
    applied: tuple[TopicIds, ...] = ()
    floors_wanted: tuple[tuple[str, int], ...] = ()
    floors: tuple[tuple[str, int, int], ...] = ()
    final: tuple[str, ...] = ()


def _array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _record(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": name, "type": type_} for name, type_ in fields.items()]}


_SCHEMA = avro.schema(
    _record(
        "Letter",
        sender="int",
        **{name: _array("string") for name in _TEXTS},
        asked=_array(_record("Ids", topic="string", ids=_array("long"))),
        awaited=_array("Ids"),
        applied=_array("Ids"),
        floors_wanted=_array(_record("FloorWanted", topic="string", number="long")),
        floors=_array(_record("Floor", topic="string", number="long", ledger="long")),
    )
)


def encode_shard_message(message: ShardMessage) -> Message:
    record: dict[str, Any] = message._asdict()
    properties = {"tb.v": VERSION, "tb.kind": KIND}
    if final := record.pop("final"):
        properties[FINAL] = "\n".join(final)
    record["refused"] = [topic for topic, _ in message.refused]
    record["reasons"] = [reason for _, reason in message.refused]
    for name in _IDS:
        record[name] = [{"topic": topic, "ids": deltas([*ids])} for topic, ids in record[name]]
    record["floors_wanted"] = [{"topic": topic, "number": number} for topic, number in message.floors_wanted]
    record["floors"] = [{"topic": topic, "number": number, "ledger": at} for topic, number, at in message.floors]
    return Message(value=avro.encode(_SCHEMA, record), properties=properties)


def pack_shard_messages(sender: int, found: Mapping[str, Sequence[Any]], limit: int) -> Iterator[ShardMessage]:
    """What there is to say by field, in letters of at most `limit` bytes; a letter without a word if it is nothing.

    Long reasons are cut, and many ids of one topic are told in several pieces.
    """
    room = limit - FIXED
    final = {*found.get("final", ())}
    rows: dict[str, list[Any]] = {}
    size, sent = 0, False
    for field, row, bytes_ in _sized_rows(found, room // 2):
        if size + bytes_ > room:
            yield _shard_message(sender, rows, final)
            rows, size, sent = {}, 0, True
        rows.setdefault(field, []).append(row)
        size += bytes_
    if rows or not sent:
        yield _shard_message(sender, rows, final)


def _shard_message(sender: int, rows: Mapping[str, Sequence[Any]], final: set[str]) -> ShardMessage:
    stays = tuple(topic for topic, _ in rows.get("refused", ()) if topic in final)
    return ShardMessage(sender, **{field: tuple(row) for field, row in rows.items()}, final=stays)


def _sized_rows(found: Mapping[str, Sequence[Any]], most: int) -> Iterator[tuple[str, Any, int]]:
    """Field, row, and the bytes that it takes at most."""
    for field, rows in found.items():
        for row in rows:
            if field in _IDS:
                topic, ids = row
                name = text_bytes(topic) + LONG
                count = (most - name) // LONG
                for start in range(0, len(ids), count):
                    some = ids[start : start + count]
                    yield field, (topic, some), name + LONG * len(some)
            elif field == "refused":
                topic, why = row
                why = why[:MAX_REASON]
                yield field, (topic, why), 2 * text_bytes(topic) + text_bytes(why)
            elif field in _TEXTS:
                yield field, row, text_bytes(row)
            elif field != "final":
                yield field, row, text_bytes(row[0]) + 2 * LONG


def decode_shard_message(message: Message) -> ShardMessage | None:
    """None for what is no letter that this version reads: whoever needs an answer to it asks again."""
    properties = message.properties or {}
    if message.value is None or (properties.get("tb.v"), properties.get("tb.kind")) != (VERSION, KIND):
        return None
    try:
        record = avro.decode(_SCHEMA, message.value)
        reasons = record.pop("reasons")
        same_length(record["refused"], reasons)
    except ValueError:
        return None
    columns = {name: tuple(record[name]) for name in ("register", "registered", "known", "missing")}
    columns |= {name: _ids(record[name]) for name in _IDS}
    return ShardMessage(
        record["sender"],
        refused=tuple(zip(record["refused"], reasons, strict=True)),
        floors_wanted=tuple((one["topic"], one["number"]) for one in record["floors_wanted"]),
        floors=tuple((one["topic"], one["number"], one["ledger"]) for one in record["floors"]),
        final=tuple(filter(None, properties.get(FINAL, "").split("\n"))),
        **columns,
    )


def _ids(rows: Sequence[dict[str, Any]]) -> tuple[TopicIds, ...]:
    return tuple((row["topic"], tuple(sums(row["ids"]))) for row in rows)
