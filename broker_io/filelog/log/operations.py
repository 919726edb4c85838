"""Operations: the content of a record of the log

All numbers are little-endian. A content starts with the number of operations (4 bytes) and 4 zero bytes. A table
follows, 64 bytes per operation, and then the bodies in the same order:

    offset  size
         0     4  what the operation does: a `Change`
         4     4  zero
         8     8  number of the topic; 0 if it changes none
        16     8  number of the operation among those of the topic; 0 if it changes none
        24     8  number of the operation among those of the manifest; 0 for an append
        32     8  ledger         |
        40     8  generation     | of an append, else 0
        48     8  offset         |
        56     8  length of the body

The body of an append are blocks (see broker_io/block.py) as they are in the segment, from that offset on. The body of a
structure operation is a JSON object in UTF-8. It has all that was drawn at random or by a clock, and the state
afterwards of what it changes, so that applying it decides nothing:

    MAKE     name, incarnation (32 hexadecimal digits) and ledger, the first one
    DELETE   next_ledger: the lowest ledger of later topics
    ROLL     ledger, and time: when the newest message before it was published, in milliseconds, 0 if there is none
    TRIM     ledger and entry: the floor of the topic, which is in the last of the dropped ledgers, after its messages
    POLICY   policy: the compaction policy as an object, or null
    PREPARE  files: of each file that a compaction has written a list of ledger, generation, bytes, and digest, the
             XXH3-128 of its bytes as 32 hexadecimal digits
    SWAP     prepared: the number in the manifest of its PREPARE; ledgers: those that change, as in the manifest;
             cleaned and purged: of the topic
    EPOCH    next_ledger; after a forced promotion a ROLL of each topic follows in the same record
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from broker_io.block import HEADER_BYTES, BadBlock, Header, parse_header
from broker_io.compaction import CompactionPolicy
from broker_io.environment import Randomness
from broker_io.filelog.log.layout import LedgerEntry, Manifest, ledger_document, read_ledger
from broker_io.filelog.log.numbers import Change, NumberedOperation, ObjectNumbers
from broker_io.position import LEDGERS_OF_A_HISTORY

HEAD_BYTES = 8
ROW_BYTES = 64

_HEAD = struct.Struct("<I4x")
_ROW = struct.Struct("<I4xQQQQQQQ")
_HEX = frozenset("0123456789abcdef")

Data: TypeAlias = bytes | memoryview


class AppendBlocks(NamedTuple):
    """Blocks at an offset of the open ledger of a topic, as chunks of `length` bytes in all."""

    ledger: int
    generation: int
    offset: int
    length: int
    chunks: Sequence[Data]


class MakeTopic(NamedTuple):
    name: str
    incarnation: str
    ledger: int


class DeleteTopic(NamedTuple):
    next_ledger: int


class RollTopic(NamedTuple):
    ledger: int
    time: int


class TrimTopic(NamedTuple):
    ledger: int
    entry: int


class SetPolicy(NamedTuple):
    policy: CompactionPolicy | None


class WrittenFile(NamedTuple):
    """The next generation of a closed ledger."""

    ledger: int
    generation: int
    bytes: int
    digest: str


class PrepareFiles(NamedTuple):
    files: tuple[WrittenFile, ...]


class SwapFiles(NamedTuple):
    prepared: int
    ledgers: tuple[LedgerEntry, ...]
    cleaned: int
    purged: int


class BeginEpoch(NamedTuple):
    next_ledger: int


# --- encoding ---


def encode_operations(operations: Sequence[NumberedOperation]) -> list[Data]:
    """The content of a record as chunks; the blocks of appends are not copied."""
    rows, bodies = [_HEAD.pack(len(operations))], list[Data]()
    for change, topic, number, manifest, body in operations:
        if isinstance(body, AppendBlocks):
            ledger, generation, offset, length, chunks = body
            bodies += chunks
        else:
            ledger = generation = offset = 0
            bodies.append(text := _encode_body(body))
            length = len(text)
        rows.append(_ROW.pack(change, topic, number, manifest, ledger, generation, offset, length))
    return [b"".join(rows), *bodies]


def _encode_body(body: Any) -> bytes:
    document = body._asdict()
    if isinstance(body, SetPolicy):
        document["policy"] = body.policy and body.policy._asdict()
    elif isinstance(body, SwapFiles):
        document["ledgers"] = [ledger_document(ledger) for ledger in body.ledgers]
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


# --- decoding ---


def decode_operations(content: Data) -> list[NumberedOperation]:
    """The operations of a content; blocks are parts of it, and not copied. Raises BadBlock if it has another form."""
    view = memoryview(content)
    if len(view) < HEAD_BYTES:
        raise BadBlock("a record without a table of operations")
    (count,) = _HEAD.unpack_from(view)
    start = HEAD_BYTES + count * ROW_BYTES
    if start > len(view):
        raise BadBlock(f"a record of {len(view)} bytes can't have {count} operations")
    operations: list[NumberedOperation] = []
    for row in _ROW.iter_unpack(view[HEAD_BYTES:start]):
        change, topic, number, manifest, ledger, generation, offset, length = row
        data = view[start : start + length]
        start += length
        if len(data) < length:
            raise BadBlock("a record that ends within an operation")
        body: Any
        if change == Change.APPEND:
            body = AppendBlocks(ledger, generation, offset, length, [data])
        else:
            body = _decode_body(change, data)
        operations.append(_checked(NumberedOperation(Change(change), topic, number, manifest, body)))
    if start != len(view):
        raise BadBlock(f"a record with {len(view) - start} bytes after its operations")
    return operations


def count_operations(content: Data) -> int:
    """How many operations a record has."""
    (count,) = _HEAD.unpack_from(content)
    return int(count)


def _checked(operation: NumberedOperation) -> NumberedOperation:
    change, topic, number, manifest, _ = operation
    if (topic > 0, number > 0) != (change is not Change.EPOCH,) * 2 or (manifest > 0) == (change is Change.APPEND):
        raise BadBlock(f"{change.name} of topic {topic} with the numbers {number} and {manifest}")
    return operation


def _decode_body(change: int, data: memoryview) -> Any:
    read = _READERS.get(change)
    if read is None:
        raise BadBlock(f"an operation of the unknown kind {change}: use the release that wrote it, or a newer one")
    try:
        return read(json.loads(bytes(data)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadBlock(f"the body of {Change(change).name} can't be parsed ({error!r})") from None


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a number from 0 to before 2^63")
    return value


def _digits(value: Any, count: int) -> str:
    if type(value) is not str or len(value) != count or not _HEX.issuperset(value):
        raise ValueError(f"{value!r} has not {count} hexadecimal digits")
    return value


def _read_make(body: dict[str, Any]) -> MakeTopic:
    if type(name := body["name"]) is not str:
        raise ValueError(f"{name!r} is not a name")
    return MakeTopic(name, _digits(body["incarnation"], 32), _number(body["ledger"]))


def _read_policy(body: dict[str, Any]) -> SetPolicy:
    return SetPolicy(None if body["policy"] is None else CompactionPolicy(**body["policy"]))


def _read_prepare(body: dict[str, Any]) -> PrepareFiles:
    return PrepareFiles(tuple([_read_file(*file) for file in body["files"]]))


def _read_file(ledger: Any, generation: Any, size: Any, digest: Any) -> WrittenFile:
    return WrittenFile(_number(ledger), _number(generation), _number(size), _digits(digest, 32))


def _read_swap(body: dict[str, Any]) -> SwapFiles:
    ledgers = tuple(map(read_ledger, body["ledgers"]))
    return SwapFiles(_number(body["prepared"]), ledgers, _number(body["cleaned"]), _number(body["purged"]))


_READERS: dict[int, Callable[[dict[str, Any]], Any]] = {
    Change.MAKE: _read_make,
    Change.DELETE: lambda body: DeleteTopic(_number(body["next_ledger"])),
    Change.ROLL: lambda body: RollTopic(_number(body["ledger"]), _number(body["time"])),
    Change.TRIM: lambda body: TrimTopic(_number(body["ledger"]), _number(body["entry"])),
    Change.POLICY: _read_policy,
    Change.PREPARE: _read_prepare,
    Change.SWAP: _read_swap,
    Change.EPOCH: lambda body: BeginEpoch(_number(body["next_ledger"])),
}


def blocks_of(append: AppendBlocks) -> Iterator[tuple[int, Header]]:
    """The header of each block of an append, with its offset in the segment. Raises BadBlock or UnsupportedFormat."""
    data = memoryview(append.chunks[0] if len(append.chunks) == 1 else b"".join(append.chunks))
    at = 0
    while at < append.length:
        header = parse_header(bytes(data[at : at + HEADER_BYTES]))
        if at + header.length > append.length:
            raise BadBlock(f"a block of {header.length} bytes in the last {append.length - at} of an append")
        yield append.offset + at, header
        at += header.length


# --- a new history ---


def continued(last: int, jump: int) -> int:
    """The ledger in which a topic whose last one is `last` continues in another history, after a jump >= 1."""
    return (last // LEDGERS_OF_A_HISTORY + jump) * LEDGERS_OF_A_HISTORY


def random_jump(randomness: Randomness) -> int:
    """How far another history continues from the one before it: at random, so that two of them hardly ever meet."""
    return 1 + int.from_bytes(randomness.token(4), "little") % LEDGERS_OF_A_HISTORY


def epoch_operations(manifest: Manifest, numbers: ObjectNumbers, jump: int) -> list[NumberedOperation]:
    """The operations that begin an epoch, after a forced promotion with a jump >= 1 into a history of its own.

    They draw their numbers.
    """
    if not jump:
        return [numbers.draw(Change.EPOCH, 0, BeginEpoch(manifest.next_ledger))]
    operations = [numbers.draw(Change.EPOCH, 0, BeginEpoch(continued(manifest.next_ledger, jump)))]
    for topic in manifest.topics:
        last = topic.ledgers[-1]
        operations.append(
            numbers.draw(Change.ROLL, topic.number, RollTopic(continued(last.ledger, jump), last.last_time))
        )
    return operations
