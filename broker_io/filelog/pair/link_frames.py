"""Frames of the link of a pair: messages and copies as bytes, by `replication.proto`

A frame is a `LinkFrame` that begins with its field `checksum`: nine bytes, the last eight of which are the xxh3_64 of
all bytes after them, little-endian. So what changes on the way is noticed, also on a connection without TLS. Records
that are sent together become frames of about `FRAME_BYTES` each; a receiver holds no more than that, or one large
record.

A field that this release does not know is an error, so a new field needs another version of the protocol. A new kind
of message does not: `LATER` has those that 0.2.0 does not know, and the transport sends them only to a member that says
it takes them. `damaged_topics` names the topics with a damaged file at its sender, which has none unless it says so.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import xxhash

from broker_io.errors import MalformedMessage
from broker_io.filelog.log.records import Kind, LogRecord, Mark
from broker_io.filelog.pair.port import CopyChunk
from broker_io.filelog.replication.messages import (
    CopyBegin,
    CopyRequest,
    DamagedTopics,
    Durable,
    Follow,
    Hello,
    Message,
    Records,
    Rejoin,
    RewriteDone,
    RewriteFinished,
)
from broker_io.rpc.encoding import LARGE_BYTES, BlockSlice, fields, join_blocks, reader, serialize, split_blocks
from broker_io.rpc.replication_pb2 import LinkFrame

FRAME_BYTES = 4 * 1024 * 1024
FRAME_RECORDS = 10_000


class CopyEnd(NamedTuple):
    """All parts of a copy were sent."""


Frame: TypeAlias = Message | CopyChunk | CopyEnd | None

LATER: dict[type, str] = {DamagedTopics: "damaged-topics"}
"""The messages that are not in each release of this version, and what a member that takes them says."""

CHECKSUM_TAG = 14 << 3 | 1
_CHECKSUM = struct.Struct("<BQ")


def size_of(message: Message) -> int:
    """About how many bytes a message has."""
    return 100 + (sum([100 + len(each.content) for each in message.records]) if isinstance(message, Records) else 0)


def encode_frames(frame: Frame) -> Iterator[bytes]:
    """A message as one or more frames; None is a sign of life."""
    for content in _contents(frame):
        yield _CHECKSUM.pack(CHECKSUM_TAG, xxhash.xxh3_64_intdigest(content)) + content


def _contents(frame: Frame) -> Iterator[bytes]:
    """The bytes of frames without their checksums."""
    if isinstance(frame, Records):
        for records in _batches(frame.records):
            columns = {
                "epoch": frame.epoch,
                "store": frame.store,
                "commit": frame.commit,
                "epochs": [each.mark.epoch for each in records],
                "lsns": [each.mark.lsn for each in records],
                "chains": [each.mark.chain for each in records],
                "commits": [each.commit for each in records],
                "kinds": [each.kind for each in records],
            }
            yield join_blocks(LinkFrame(records=columns), [(each.content,) for each in records])
    elif isinstance(frame, CopyChunk):
        head = LinkFrame(copy_chunk={"name": frame.name, "offset": frame.offset, "crc": frame.crc})
        yield join_blocks(head, [(frame.data,)])
    elif isinstance(frame, RewriteDone):
        numbers, lengths, digests = zip(*frame.results, strict=True) if frame.results else ((), (), ())
        results = {"numbers": numbers, "lengths": lengths, "digests": digests}
        yield serialize(LinkFrame(rewrite_done={"epoch": frame.epoch, "store": frame.store, **results}))
    else:
        yield serialize(LinkFrame() if frame is None else LinkFrame(**{_NAMES[type(frame)]: fields(frame)}))


def _batches(records: Sequence[LogRecord]) -> Iterator[Sequence[LogRecord]]:
    """Ranges of records with up to FRAME_BYTES or one record each; one range without records if there are none."""
    first = size = 0
    for at, record in enumerate(records):
        full = size + len(record.content) > FRAME_BYTES or at - first == FRAME_RECORDS
        if full and at > first:
            yield records[first:at]
            first, size = at, 0
        size += len(record.content)
    yield records[first:]


_NAMES = {
    Hello: "hello",
    Follow: "follow",
    Rejoin: "rejoin",
    CopyRequest: "copy_request",
    CopyBegin: "copy_begin",
    Durable: "durable",
    DamagedTopics: "damaged_topics",
    CopyEnd: "copy_end",
}
"""The fields of a frame for messages whose fields have the same names there."""


def decode_frame(data: bytes) -> Frame:
    """The message of a frame; None for a sign of life. Raises MalformedMessage."""
    try:
        frame, blocks = split_blocks(LinkFrame, _checked(data))
        content = frame.WhichOneof("content")
        if content in _WITH_BLOCKS:
            return _WITH_BLOCKS[content](getattr(frame, content), blocks)
        _expect(blocks, 0)
        return None if content is None else _DECODE[content](getattr(frame, content))
    except ValueError as error:
        raise MalformedMessage(f"a frame of the other member of the pair can't be read: {error}") from None


def _checked(data: bytes) -> bytes:
    """The bytes after the checksum of a frame; of a large frame they are not copied. Raises ValueError."""
    if len(data) < _CHECKSUM.size:
        raise ValueError(f"it has {len(data)} bytes")
    tag, checksum = _CHECKSUM.unpack_from(data)
    rest = data[_CHECKSUM.size :] if len(data) < LARGE_BYTES else cast(bytes, memoryview(data)[_CHECKSUM.size :])
    if tag != CHECKSUM_TAG or xxhash.xxh3_64_intdigest(rest) != checksum:
        raise ValueError("its checksum is wrong")
    return rest


def _expect(blocks: list[BlockSlice], count: int) -> None:
    if len(blocks) != count:
        raise ValueError(f"{len(blocks)} blocks instead of {count}")


def _bytes_of(block: BlockSlice) -> bytes:
    data, start, end = block
    return bytes(data[start:end])  # a view into a large frame would keep all of it


def _decode_records(found: Any, blocks: list[BlockSlice]) -> Records:
    marks = map(Mark, found.epochs, found.lsns, found.chains)
    columns = (found.epochs, found.lsns, found.chains, found.commits, found.kinds)
    for column in columns:
        _expect(blocks, len(column))
    contents = [_bytes_of(block) for block in blocks]
    records = tuple(map(LogRecord, marks, found.commits, map(Kind, found.kinds), contents))
    return Records(found.epoch, found.store, records, found.commit)


def _decode_rewrite_done(found: Any) -> RewriteDone:
    results = tuple(map(RewriteFinished, found.numbers, found.lengths, found.digests))
    if not len(results) == len(found.numbers) == len(found.lengths) == len(found.digests):
        raise ValueError("columns of different lengths")
    return RewriteDone(found.epoch, found.store, results)


def _decode_copy_chunk(found: Any, blocks: list[BlockSlice]) -> CopyChunk:
    _expect(blocks, 1)
    return CopyChunk(found.name, found.offset, _bytes_of(blocks[0]), found.crc)


_DECODE: dict[str, Callable[[Any], Frame]] = {
    "rewrite_done": _decode_rewrite_done,
    **{name: reader(kind) for kind, name in _NAMES.items()},
}
_WITH_BLOCKS: dict[str | None, Callable[[Any, list[BlockSlice]], Frame]] = {
    "records": _decode_records,
    "copy_chunk": _decode_copy_chunk,
}
