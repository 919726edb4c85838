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
from broker_io.filelog.log.records import Fork, Kind, LogRecord, Mark
from broker_io.filelog.pair.port import CopyChunk
from broker_io.filelog.replication.messages import (
    CatchUp,
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
from broker_io.rpc.encoding import LARGE_BYTES, BlockSlice, join_blocks, serialize, split_blocks
from broker_io.rpc.replication_pb2 import LinkFork, LinkFrame, LinkMark

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
            fields = {
                "epoch": frame.epoch,
                "store": frame.store,
                "commit": frame.commit,
                "epochs": [each.mark.epoch for each in records],
                "lsns": [each.mark.lsn for each in records],
                "chains": [each.mark.chain for each in records],
                "commits": [each.commit for each in records],
                "kinds": [each.kind for each in records],
            }
            yield join_blocks(LinkFrame(records=fields), [(each.content,) for each in records])
    elif isinstance(frame, CopyChunk):
        head = LinkFrame(copy_chunk={"name": frame.name, "offset": frame.offset, "crc": frame.crc})
        yield join_blocks(head, [(frame.data,)])
    else:
        yield serialize(_head(frame))


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


def _head(
    frame: Hello | Follow | Rejoin | CopyRequest | CopyBegin | Durable | RewriteDone | DamagedTopics | CopyEnd | None,
) -> Any:
    if frame is None:
        return LinkFrame()
    if isinstance(frame, CopyEnd):
        return LinkFrame(copy_end={})
    if isinstance(frame, DamagedTopics):
        return LinkFrame(damaged_topics={"epoch": frame.epoch, "store": frame.store, "topics": frame.topics})
    if isinstance(frame, RewriteDone):
        numbers, lengths, digests = zip(*frame.results, strict=True) if frame.results else ((), (), ())
        fields = {
            "epoch": frame.epoch, "store": frame.store, "numbers": numbers, "lengths": lengths, "digests": digests
        }  # fmt: skip
        return LinkFrame(rewrite_done=fields)
    head = LinkFrame()
    fields = {name: _ENCODE.get(type(value), _same)(value) for name, value in zip(frame._fields, frame, strict=True)}
    content = getattr(head, _NAMES[type(frame)])
    content.MergeFrom(type(content)(**fields))
    return head


def _same(value: object) -> object:
    return value


def _encode_mark(mark: Mark) -> Any:
    return LinkMark(epoch=mark.epoch, lsn=mark.lsn, chain=mark.chain)


def _encode_forks(forks: tuple[Fork, ...]) -> list[Any]:
    return [LinkFork(epoch=fork.epoch, before=_encode_mark(fork.before)) for fork in forks]


_ENCODE: dict[type, Callable[[Any], object]] = {
    Mark: _encode_mark,
    CatchUp: lambda plan: plan.value,
    tuple: _encode_forks,
}
_NAMES = {
    Hello: "hello",
    Follow: "follow",
    Rejoin: "rejoin",
    CopyRequest: "copy_request",
    CopyBegin: "copy_begin",
    Durable: "durable",
}
"""The fields of a frame for messages whose fields have the same names there."""


def decode_frame(data: bytes) -> Frame:
    """The message of a frame; None for a sign of life. Raises MalformedMessage."""
    try:
        frame, blocks = split_blocks(LinkFrame, _checked(data))
        content = frame.WhichOneof("content")
        if content is None:
            _expect(blocks, 0)
            return None
        return _DECODE[content](getattr(frame, content), blocks)
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


def _decode_mark(mark: Any) -> Mark:
    return Mark(mark.epoch, mark.lsn, mark.chain)


def _decode_hello(found: Any, blocks: list[BlockSlice]) -> Hello:
    _expect(blocks, 0)
    return Hello(found.epoch, found.store, _decode_mark(found.end), _decode_mark(found.commit), found.partial)


def _decode_follow(found: Any, blocks: list[BlockSlice]) -> Follow:
    _expect(blocks, 0)
    return Follow(found.epoch, found.store, _decode_mark(found.after), found.commit)


def _decode_rejoin(found: Any, blocks: list[BlockSlice]) -> Rejoin:
    _expect(blocks, 0)
    return Rejoin(found.epoch, found.store, CatchUp(found.plan), _decode_mark(found.after))


def _decode_copy_request(found: Any, blocks: list[BlockSlice]) -> CopyRequest:
    _expect(blocks, 0)
    return CopyRequest(found.epoch, found.store)


def _decode_copy_begin(found: Any, blocks: list[BlockSlice]) -> CopyBegin:
    _expect(blocks, 0)
    forks = tuple([Fork(each.epoch, _decode_mark(each.before)) for each in found.forks])
    return CopyBegin(found.epoch, found.store, _decode_mark(found.at), forks)


def _decode_records(found: Any, blocks: list[BlockSlice]) -> Records:
    marks = map(Mark, found.epochs, found.lsns, found.chains)
    columns = (found.epochs, found.lsns, found.chains, found.commits, found.kinds)
    for column in columns:
        _expect(blocks, len(column))
    contents = [_bytes_of(block) for block in blocks]
    records = tuple(map(LogRecord, marks, found.commits, map(Kind, found.kinds), contents))
    return Records(found.epoch, found.store, records, found.commit)


def _decode_durable(found: Any, blocks: list[BlockSlice]) -> Durable:
    _expect(blocks, 0)
    return Durable(found.epoch, found.store, _decode_mark(found.mark), found.applied, found.full)


def _decode_rewrite_done(found: Any, blocks: list[BlockSlice]) -> RewriteDone:
    _expect(blocks, 0)
    results = tuple(map(RewriteFinished, found.numbers, found.lengths, found.digests))
    if not len(results) == len(found.numbers) == len(found.lengths) == len(found.digests):
        raise ValueError("columns of different lengths")
    return RewriteDone(found.epoch, found.store, results)


def _decode_damaged_topics(found: Any, blocks: list[BlockSlice]) -> DamagedTopics:
    _expect(blocks, 0)
    return DamagedTopics(found.epoch, found.store, tuple(found.topics))


def _decode_copy_chunk(found: Any, blocks: list[BlockSlice]) -> CopyChunk:
    _expect(blocks, 1)
    return CopyChunk(found.name, found.offset, _bytes_of(blocks[0]), found.crc)


def _decode_copy_end(_: Any, blocks: list[BlockSlice]) -> CopyEnd:
    _expect(blocks, 0)
    return CopyEnd()


_DECODE: dict[str, Callable[[Any, list[BlockSlice]], Frame]] = {
    "hello": _decode_hello,
    "follow": _decode_follow,
    "rejoin": _decode_rejoin,
    "copy_request": _decode_copy_request,
    "copy_begin": _decode_copy_begin,
    "records": _decode_records,
    "durable": _decode_durable,
    "rewrite_done": _decode_rewrite_done,
    "damaged_topics": _decode_damaged_topics,
    "copy_chunk": _decode_copy_chunk,
    "copy_end": _decode_copy_end,
}
