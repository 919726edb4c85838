"""Shard messages: requests and reports between the owners of a namespace's shards

A shard message is written to the receiver's partition of the topic `__txnbuffer_letters`; stored names call it a
letter. It has no key. Its properties are `tb.v` (the format's version, `1`), `tb.kind` (`letter`) and sometimes
`tb.final`. Its value is one Avro record without its schema, which is below. Ids are the `least` of transactions, each
as the difference from the one before, the first from 0. They belong to the receiver's coordinator (`asked`, `applied`)
or the sender's (`awaited`).

| field | meaning |
|---|---|
| `sender` | the sender's shard |
| `register` | topics of the receiver: register them, and report the result |
| `registered` | topics of the sender that are durably registered |
| `refused`, `reasons` | topics of the sender that can't be registered, and why, as text |
| `known` | topics of the receiver that the sender considers registered |
| `missing` | those of `known` that are not registered |
| `asked` | topic of the sender, ids of the receiver: they are ongoing there; write their markers if they have ended |
| `awaited` | topic of the receiver, ids of the sender: report when they have ended there |
| `applied` | topic of the sender, ids of the receiver: they have ended there |
| `floors_wanted` | topic, number: report the lowest ledger of the topic that a consumer group of the receiver needs |
| `floors` | topic, the number of the request, that ledger, or -1 if no group needs any |

The property `tb.final` has, a line each, the topics of `refused` that will always be refused.

A shard message may be lost, repeated or late. Its reports were true and durable when it was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from broker_io.batch import Message
from txnbuffer import avro
from txnbuffer.coordinator.decisions import FIXED, LONG, deltas, same_length, sums, text_bytes

TOPIC = "__txnbuffer_letters"
"""This topic exists only with several shards."""

KIND = "letter"
VERSION = "1"
FINAL = "tb.final"

MAX_REASON = 500
"""The most characters of a reason."""

TopicIds: TypeAlias = "tuple[str, tuple[int, ...]]"
"""A topic, and ids of transactions in it."""

_TEXTS = ("register", "registered", "refused", "reasons", "known", "missing")
_IDS = ("asked", "awaited", "applied")


class ShardMessage(NamedTuple):
    """The content of a shard message; the fields are those of the table above.

    `refused` has pairs of topic and reason, and `final` the topics that will always be refused.
    """

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
    """Pack rows by field into messages of at most `limit` bytes; without rows it is one empty message.

    Long reasons are cut, and many ids of one topic are split over several rows.
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
    """Each field and row, with an upper bound of its size in bytes."""
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
    """None if this version can't read the message: a sender that needs an answer repeats it."""
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
