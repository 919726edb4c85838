"""Messages between client and service of `txnbuffer.v1.Log`, and their bytes.

Control is Avro without a schema in front; messages of a log travel as blocks (`broker_io.block`, not compressed,
key hashes with seed 0, place 0). Anything else is rejected with MalformedMessage.

Methods with one request and one reply. A request has `topic` and `number`, a reply `texts` and `numbers`:

    Hello                        numbers: version of this protocol, largest message, largest append, in bytes
    Topics                       texts: the names
    CreateTopic, DeleteTopic
    Incarnation                  texts: the incarnation
    Ledgers                      numbers: ledger, entries, bytes, and 1 if closed plus 2 if not lasting of each
    FirstPosition, LastPosition  numbers: ledger, entry, batch; none for no position
    PositionAt                   number: time in milliseconds; numbers as before
    Roll, Compact
    Trim                         number: first ledger to be kept

`Append`, a stream each way; the writer lives as long as the stream. The client's first message opens it:
`topic`, `exclusive`. Each later one is consecutive blocks; a block is one append. The service answers in their order:
`counts`, of each append the number of its positions, or -1 if it failed; `ledgers`, `entries`, `indexes` and `lengths`
of the runs of these positions, a new run with each append; `errors` of those that failed. A run is messages of one
ledger whose entries are consecutive. The first answer is empty and says that the writer is open. The client ends its
side when it is done; the service ends its own once everything is answered.

`Read`, a stream each way. The client's first message opens the reader: `topic`, `incarnation` (the reader must be
of this one; empty: of any), `ledger`, `entry`, `batch`, `inclusive`, `compacted`. The service answers with
`incarnation` and with `ledger`, `entry`, `batch`, a position below all that this reader will give, so that a reader
opened at the end can be opened there again. Each later message of the client is one request: at most `limit` messages,
waiting `wait_ms` milliseconds for the first. The answer is

    offset  size
         0     4  length n of the control record, little-endian
         4     n  `count` of messages, `ledger`; `positions`: nothing, or where messages have batch indexes the int64
                  entries and then the int64 indexes of all; `more`: the service has more at hand; `error`, or null
     4 + n        one block, or nothing if `count` is 0

so the service holds no more for a client than the client requested.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from fastavro import parse_schema, schemaless_reader, schemaless_writer

from broker_io.batch import Batch, PlacedBatch
from broker_io.block import BadBlock, Decoded, decode_foreign_block, encode_block
from broker_io.errors import ERROR_SCHEMA, Error, MalformedMessage, error_from_fields, error_to_fields
from broker_io.position import NO_INDEX, Position, Positions


def encode_runs(positions: Positions) -> tuple[list[int], list[int], list[int], list[int]]:
    """Ledger, first entry, batch index and length of each run, in order."""
    count = len(positions)
    ledgers, entries, indexes = positions.ledgers, positions.entries, positions.indexes
    if count < 2:
        return ledgers.tolist(), entries.tolist(), indexes.tolist(), [1] * count
    breaks = (ledgers[1:] != ledgers[:-1]) | (entries[1:] != entries[:-1] + 1) | (indexes[1:] != indexes[:-1])
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    lengths = np.diff(np.append(starts, count))
    return ledgers[starts].tolist(), entries[starts].tolist(), indexes[starts].tolist(), lengths.tolist()


def decode_runs(ledgers: list[int], entries: list[int], indexes: list[int], lengths: list[int]) -> Positions:
    """The positions of runs. Raises ValueError if the columns are not valid runs."""
    if not len(ledgers) == len(entries) == len(indexes) == len(lengths):
        raise ValueError("columns of runs of positions have different lengths")
    if lengths and min(lengths) < 1:
        raise ValueError("a run of positions has no length")
    if len(lengths) == 1 and indexes[0] == NO_INDEX:
        return Positions.consecutive(ledgers[0], entries[0], lengths[0])
    sizes = np.array(lengths, np.int64)
    starts = np.cumsum(sizes) - sizes
    within = np.arange(int(sizes.sum()), dtype=np.int64) - np.repeat(starts, sizes)
    return Positions(
        np.repeat(np.array(ledgers, np.int64), sizes),
        np.repeat(np.array(entries, np.int64), sizes) + within,
        np.repeat(np.array(indexes, np.int64), sizes),
    )


SERVICE = "txnbuffer.v1.Log"
VERSION = 1
FAILED = -1

_LENGTH = struct.Struct("<I")
_LONGS = {"type": "array", "items": "long"}
_POSITION = [("ledger", "long"), ("entry", "long"), ("batch", "long")]

Outcome = Positions | Error
"""The outcome of an append."""


def _record(name: str, fields: Sequence[tuple[str, Any]]) -> Any:
    parts = [{"name": field, "type": kind} for field, kind in fields]
    return parse_schema({"type": "record", "name": name, "namespace": "txnbuffer.log", "fields": parts})


_ERROR = parse_schema(dict(ERROR_SCHEMA))
_REQUEST = _record("Request", [("topic", "string"), ("number", "long")])
_REPLY = _record("Reply", [("texts", {"type": "array", "items": "string"}), ("numbers", _LONGS)])
_OPEN_WRITER = _record("OpenWriter", [("topic", "string"), ("exclusive", "boolean")])
_APPENDED = _record(
    "Appended",
    [
        *((name, _LONGS) for name in ("counts", "ledgers", "entries", "indexes", "lengths")),
        ("errors", {"type": "array", "items": ERROR_SCHEMA}),
    ],
)
_OPEN_READER = _record(
    "OpenReader",
    [("topic", "string"), ("incarnation", "string"), *_POSITION, ("inclusive", "boolean"), ("compacted", "boolean")],
)
_OPENED = _record("Opened", [("incarnation", "string"), *_POSITION])
_ASK = _record("Ask", [("limit", "long"), ("wait_ms", "long")])
_ANSWER = _record(
    "Answer",
    [
        ("count", "long"),
        ("ledger", "long"),
        ("positions", "bytes"),
        ("more", "boolean"),
        ("error", ["null", ERROR_SCHEMA]),
    ],
)


class TopicRequest(NamedTuple):
    topic: str = ""
    number: int = 0


class Reply(NamedTuple):
    texts: Sequence[str] = ()
    numbers: Sequence[int] = ()


class OpenWriter(NamedTuple):
    topic: str
    exclusive: bool


class OpenReader(NamedTuple):
    topic: str
    incarnation: str
    start: Position
    inclusive: bool
    compacted: bool


class ReaderOpened(NamedTuple):
    incarnation: str
    behind: Position


class Ask(NamedTuple):
    limit: int
    wait_ms: int


class Answer(NamedTuple):
    """The answer to one request of a reader: messages, an error, or nothing."""

    batch: PlacedBatch | None = None
    error: Error | None = None
    more: bool = False


# --- control ---


def encode_request(request: TopicRequest) -> bytes:
    return _encode(_REQUEST, request._asdict())


def decode_request(data: bytes) -> TopicRequest:
    return TopicRequest(**_decode(_REQUEST, data))


def encode_reply(reply: Reply) -> bytes:
    return _encode(_REPLY, reply._asdict())


def decode_reply(data: bytes) -> Reply:
    return Reply(**_decode(_REPLY, data))


def encode_error(error: Error) -> bytes:
    return _encode(_ERROR, error_to_fields(error))


def decode_error(data: bytes) -> Error:
    return _error(_decode(_ERROR, data))


def encode_open_writer(opening: OpenWriter) -> bytes:
    return _encode(_OPEN_WRITER, opening._asdict())


def decode_open_writer(data: bytes) -> OpenWriter:
    return OpenWriter(**_decode(_OPEN_WRITER, data))


def encode_open_reader(opening: OpenReader) -> bytes:
    fields = opening._asdict()
    return _encode(_OPEN_READER, {**fields, **fields.pop("start")._asdict()})


def decode_open_reader(data: bytes) -> OpenReader:
    fields = _decode(_OPEN_READER, data)
    return OpenReader(start=_position(fields), **fields)


def encode_opened(opened: ReaderOpened) -> bytes:
    return _encode(_OPENED, {"incarnation": opened.incarnation, **opened.behind._asdict()})


def decode_opened(data: bytes) -> ReaderOpened:
    fields = _decode(_OPENED, data)
    return ReaderOpened(fields["incarnation"], _position(fields))


def encode_ask(ask: Ask) -> bytes:
    return _encode(_ASK, ask._asdict())


def decode_ask(data: bytes) -> Ask:
    return Ask(**_decode(_ASK, data))


def _position(fields: dict[str, Any]) -> Position:
    return Position(fields.pop("ledger"), fields.pop("entry"), fields.pop("batch"))


# --- appends ---


def encode_append(batch: Batch) -> bytes:
    """The block of one append of at least one message."""
    return b"".join(encode_block(batch, first_entry=0, publish_time=0).chunks)


def decode_appends(data: bytes) -> list[Batch]:
    """The batches of consecutive blocks, at least one."""
    batches: list[Batch] = []
    at = 0
    try:
        while not batches or at < len(data):
            decoded, at = decode_foreign_block(data, at)
            batches.append(decoded.messages)
    except BadBlock as error:
        raise MalformedMessage(f"append {len(batches)} of a message can't be read: {error}") from None
    return batches


def encode_appended(outcomes: Sequence[Outcome]) -> bytes:
    fields: dict[str, list[Any]] = {name: [] for name in ("counts", "ledgers", "entries", "indexes", "lengths")}
    fields["errors"] = [error_to_fields(outcome) for outcome in outcomes if isinstance(outcome, Error)]
    for outcome in outcomes:
        if isinstance(outcome, Error):
            fields["counts"].append(FAILED)
            continue
        fields["counts"].append(len(outcome))
        for name, column in zip(("ledgers", "entries", "indexes", "lengths"), encode_runs(outcome), strict=True):
            fields[name] += column
    return _encode(_APPENDED, fields)


def decode_appended(data: bytes) -> list[Outcome]:
    fields = _decode(_APPENDED, data)
    errors = iter(fields["errors"])
    columns = [fields[name] for name in ("ledgers", "entries", "indexes", "lengths")]
    outcomes: list[Outcome] = []
    at = 0
    for count in fields["counts"]:
        if count == FAILED:
            if (error := next(errors, None)) is None:
                raise MalformedMessage("an answer to appends lacks an error")
            outcomes.append(_error(error))
            continue
        end, found = at, 0
        while found < count and end < len(columns[3]):
            found += columns[3][end]
            end += 1
        try:
            if found != count:
                raise ValueError(f"an append of {count} messages has {found} positions")
            outcomes.append(decode_runs(*[column[at:end] for column in columns]))
        except ValueError as error:
            raise MalformedMessage(f"an answer to appends can't be read: {error}") from None
        at = end
    if at != len(columns[3]) or next(errors, None) is not None:
        raise MalformedMessage("an answer to appends has columns that belong to no append")
    return outcomes


# --- reads ---


def encode_answer(answer: Answer) -> bytes:
    batch = answer.batch
    control = {
        "count": 0,
        "ledger": 0,
        "positions": b"",
        "more": answer.more,
        "error": answer.error and error_to_fields(answer.error),
    }
    if batch is None:
        return _join(_encode(_ANSWER, control))
    control["count"] = len(batch)
    positions, times = batch.positions, batch.publish_times
    control["ledger"] = positions.first.ledger
    entries, indexed = positions.entries, bool((positions.indexes != NO_INDEX).any())
    if indexed:
        control["positions"] = entries.astype("<i8").tobytes() + positions.indexes.astype("<i8").tobytes()
    block = encode_block(
        batch.messages,
        first_entry=0 if indexed else int(entries[0]),
        publish_time=int(times[0]),
        entries=None if indexed else entries,
        publish_times=None if (times == times[0]).all() else times,
    )
    return _join(_encode(_ANSWER, control), *block.chunks)


def decode_answer(data: bytes) -> Answer:
    try:
        at = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        control = _decode(_ANSWER, data[_LENGTH.size : at])
        batch: PlacedBatch | None = None
        if control["count"]:
            decoded, at = decode_foreign_block(data, at)
            batch = PlacedBatch(_positions(control, decoded), decoded.publish_times, decoded.messages)
        if at != len(data):
            raise ValueError(f"it ends at byte {at} of {len(data)}")
    except (ValueError, struct.error, BadBlock) as problem:
        raise MalformedMessage(f"an answer to a reader can't be read: {problem}") from None
    error = control["error"]
    return Answer(batch, error and _error(error), control["more"])


def _positions(control: Mapping[str, Any], decoded: Decoded) -> Positions:
    count = len(decoded.messages)
    if count != control["count"]:
        raise ValueError(f"its block has {count} messages instead of {control['count']}")
    entries, indexes = decoded.entries, np.full(count, NO_INDEX, np.int64)
    if control["positions"]:
        columns = np.frombuffer(control["positions"], "<i8").reshape(2, count).astype(np.int64)
        entries, indexes = columns[0].copy(), columns[1].copy()
    return Positions(np.full(count, control["ledger"], np.int64), entries, indexes)


# --- parts ---


def _join(control: bytes, *chunks: bytes) -> bytes:
    return b"".join([_LENGTH.pack(len(control)), control, *chunks])


def _error(fields: dict[str, Any]) -> Error:
    try:
        return error_from_fields(fields)
    except ValueError as error:
        raise MalformedMessage(str(error)) from None


def _encode(schema: Any, fields: Mapping[str, Any]) -> bytes:
    out = BytesIO()
    schemaless_writer(out, schema, fields)
    return out.getvalue()


def _decode(schema: Any, data: bytes) -> dict[str, Any]:
    source = BytesIO(data)
    try:
        fields: Any = schemaless_reader(source, schema, None)
    except Exception as error:  # the decoder raises errors of many classes
        text = f"no {schema['name'].rpartition('.')[2]} of the log service: {type(error).__name__} {error}"
        raise MalformedMessage(text.strip()) from None
    if source.tell() != len(data):
        raise MalformedMessage(f"{len(data) - source.tell()} bytes too many after a {schema['name']}")
    return dict(fields)
