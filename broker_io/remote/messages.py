"""The streams of the log service as messages of `log.proto`.

Blocks are those of `broker_io.block`, not compressed, with key hashes of seed 0 and place 0. Anything else is rejected
with MalformedMessage, and with UnsupportedFormat if the blocks are of a newer release.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np

from broker_io.batch import Batch, PlacedBatch
from broker_io.block import Decoded, encode_block
from broker_io.errors import Error, MalformedMessage
from broker_io.position import NO_INDEX, Position, Positions
from broker_io.rpc import encoding, log_pb2
from broker_io.rpc.encoding import (
    encode_error,
    fields,
    join_blocks,
    reader,
    serialize,
)

P = ParamSpec("P")
M = TypeVar("M")


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
FAILED = -1

Outcome = Positions | Error
"""The outcome of an append."""


class OpenReader(NamedTuple):
    topic: str
    incarnation: str
    start: Position
    inclusive: bool
    compacted: bool


class ReaderOpened(NamedTuple):
    incarnation: str
    after: Position


class Ask(NamedTuple):
    limit: int
    wait_ms: int


class Answer(NamedTuple):
    """The answer to one request of a reader: messages, an error, or nothing."""

    batch: PlacedBatch | None = None
    error: Error | None = None
    more: bool = False


def _malformed(decode: Callable[P, M]) -> Callable[P, M]:
    """The function, with MalformedMessage instead of its ValueError."""

    def decoded(*arguments: P.args, **named: P.kwargs) -> M:
        try:
            return decode(*arguments, **named)
        except ValueError as error:
            raise MalformedMessage(str(error)) from None

    return decoded


parse, _split = _malformed(encoding.parse), _malformed(encoding.split_blocks)
decode_error, _block = _malformed(encoding.decode_error), _malformed(encoding.decode_block)
decode_position = reader(Position)
_read_open, _read_opened = reader(OpenReader), reader(ReaderOpened)


# --- appends ---


def encode_open_writer(topic: str, exclusive: bool) -> bytes:
    return serialize(log_pb2.AppendRequest(open={"topic": topic, "exclusive": exclusive}))


def decode_open_writer(data: bytes) -> log_pb2.OpenLogWriter:
    message = parse(log_pb2.AppendRequest, data)
    if not message.HasField("open") or message.blocks:
        raise MalformedMessage("the first request of a writer must only open it")
    return message.open


def encode_append(batch: Batch) -> bytes:
    """The block of one append of at least one message."""
    return b"".join(encode_block(batch, first_entry=0, publish_time=0).chunks)


def encode_appends(blocks: Sequence[bytes]) -> bytes:
    return join_blocks(log_pb2.AppendRequest(), [(block,) for block in blocks])


def decode_appends(data: bytes) -> list[Batch]:
    """The batches of the blocks of a request, at least one."""
    message, blocks = _split(log_pb2.AppendRequest, data)
    if message.HasField("open") or not blocks:
        raise MalformedMessage("a request of an open writer must have blocks, and nothing else")
    return [
        _block(block, f"append {number} of a message can't be read").messages for number, block in enumerate(blocks)
    ]


def encode_appended(outcomes: Sequence[Outcome]) -> bytes:
    message = log_pb2.AppendReply()
    for outcome in outcomes:
        if isinstance(outcome, Error):
            message.counts.append(FAILED)
            message.errors.append(encode_error(outcome))
            continue
        message.counts.append(len(outcome))
        columns = message.ledgers, message.entries, message.indexes, message.lengths
        for column, values in zip(columns, encode_runs(outcome), strict=True):
            column.extend(values)
    return serialize(message)


def decode_appended(data: bytes, pending: int) -> list[Outcome]:
    """The outcomes of appends that have at most `pending` messages together. Raises MalformedMessage."""
    message = parse(log_pb2.AppendReply, data)
    if sum(max(count, 0) for count in message.counts) > pending:
        raise MalformedMessage(f"an answer has positions of more than the {pending} messages that are pending")
    errors = iter(message.errors)
    columns = [[*message.ledgers], [*message.entries], [*message.indexes], [*message.lengths]]
    outcomes: list[Outcome] = []
    at = 0
    for count in message.counts:
        if count == FAILED:
            if (error := next(errors, None)) is None:
                raise MalformedMessage("an answer to appends lacks an error")
            outcomes.append(decode_error(error))
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
    if any(len(column) != at for column in columns) or next(errors, None) is not None:
        raise MalformedMessage("an answer to appends has columns that belong to no append")
    return outcomes


# --- reads ---


def encode_open_reader(opening: OpenReader) -> bytes:
    return serialize(log_pb2.ReadRequest(open=fields(opening)))


def decode_open_reader(data: bytes) -> OpenReader:
    message = parse(log_pb2.ReadRequest, data)
    if not message.HasField("open"):
        raise MalformedMessage("the first request of a reader must open it")
    return _read_open(message.open)


def encode_opened(opened: ReaderOpened) -> bytes:
    return serialize(log_pb2.ReadReply(opened=fields(opened)))


def decode_opened(data: bytes) -> ReaderOpened:
    message = parse(log_pb2.ReadReply, data)
    if not message.HasField("opened"):
        raise MalformedMessage("the first reply to a reader does not say where it was opened")
    return _read_opened(message.opened)


def encode_ask(ask: Ask) -> bytes:
    return serialize(log_pb2.ReadRequest(**ask._asdict()))


def decode_ask(data: bytes) -> Ask:
    message = parse(log_pb2.ReadRequest, data)
    if message.HasField("open"):
        raise MalformedMessage("a reader was opened twice")
    return Ask(message.limit, message.wait_ms)


def encode_answer(answer: Answer) -> bytes:
    batch = answer.batch
    message = log_pb2.ReadReply(more=answer.more, error=None if answer.error is None else encode_error(answer.error))
    if batch is None:
        return serialize(message)
    positions, times = batch.positions, batch.publish_times
    message.ledger = positions.first.ledger
    entries, indexed = positions.entries, bool((positions.indexes != NO_INDEX).any())
    if indexed:
        message.entries, message.indexes = entries.astype("<i8").tobytes(), positions.indexes.astype("<i8").tobytes()
    block = encode_block(
        batch.messages,
        first_entry=0 if indexed else int(entries[0]),
        publish_time=int(times[0]),
        entries=None if indexed else entries,
        publish_times=None if (times == times[0]).all() else times,
    )
    return join_blocks(message, [block.chunks])


def decode_answer(data: bytes) -> Answer:
    message, blocks = _split(log_pb2.ReadReply, data)
    if message.HasField("opened") or len(blocks) > 1:
        raise MalformedMessage(f"a reply to an open reader has {len(blocks)} blocks, or opens it again")
    batch: PlacedBatch | None = None
    if blocks:
        decoded = _block(blocks[0], "an answer to a reader can't be read")
        batch = PlacedBatch(_positions(message, decoded), decoded.publish_times, decoded.messages)
    return Answer(batch, decode_error(message.error) if message.HasField("error") else None, message.more)


def _positions(message: log_pb2.ReadReply, decoded: Decoded) -> Positions:
    count = len(decoded.messages)
    entries, indexes = decoded.entries, np.full(count, NO_INDEX, np.int64)
    if message.entries or message.indexes:
        if not len(message.entries) == len(message.indexes) == 8 * count:
            raise MalformedMessage(f"an answer to a reader has {count} messages with other numbers of positions")
        entries = np.frombuffer(message.entries, "<i8").astype(np.int64)
        indexes = np.frombuffer(message.indexes, "<i8").astype(np.int64)
    return Positions(np.full(count, message.ledger, np.int64), entries, indexes)
