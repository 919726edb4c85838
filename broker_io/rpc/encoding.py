"""Messages of the protocol files, and errors, as bytes.

An error is sent as `Error` of `log.proto`: the name of its class, its fault, its message, and those of its attributes
that are texts or integers. The receiver raises the same class, or, if it does not know the class, the base class of the
fault.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import MappingProxyType, UnionType
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import DecodeError

from broker_io.block import BadBlock, Decoded, decode_foreign_block
from broker_io.errors import CallerError, EnvironmentFault, Error, Fault, PeerError, StorageError
from broker_io.rpc import log_pb2
from broker_io.varint import decode_varint, encode_varint

M = TypeVar("M")
Out = TypeVar("Out")
In = TypeVar("In")
Detail = int | str | None

LONGEST_TEXT = 2000
"""Characters of a message that are sent: gRPC metadata is limited to some kilobytes."""

_OF_FAULT: dict[str, type[Error]] = {
    Fault.CALLER.value: CallerError,
    Fault.PEER.value: PeerError,
    Fault.STORAGE.value: StorageError,
    Fault.ENVIRONMENT.value: EnvironmentFault,
}


class StreamMethod(NamedTuple, Generic[Out, In]):
    """A method with a stream of messages each way, which `encode` and `decode` convert."""

    path: str
    encode: Callable[[Out], bytes]
    decode: Callable[[bytes], In]


def parse(kind: type[M], data: bytes) -> M:
    """Return the message of these bytes. Raises ValueError, also for fields at any depth that are not known here.

    The message may have at most MAX_ROWS rows, at any depth.
    """
    message: Any = kind()
    if len(data) > 2 * MAX_ROWS:
        _check_rows(message.DESCRIPTOR, data)
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise ValueError(f"these {len(data)} bytes are not a {message.DESCRIPTOR.name}") from None
    message.DiscardUnknownFields()
    # Most peers encode as this library does, so that equal bytes show quickly that nothing was discarded.
    if message.SerializeToString() != data and _has_unknown_fields(kind, data):
        raise ValueError(f"a {message.DESCRIPTOR.name} has a field that this release does not know")
    found: M = message
    return found


def _has_unknown_fields(kind: type[Any], data: bytes) -> bool:
    message = kind.FromString(data)
    size: int = message.ByteSize()
    message.DiscardUnknownFields()
    return bool(message.ByteSize() < size)


BLOCKS_TAG = 15 << 3 | 2
"""The encoded number and type of the field `blocks`, which all messages with blocks have."""
BLOCKS_PREFIX = bytes([BLOCKS_TAG])
LARGE_BYTES = 16 * 1024
"""From this size on, the blocks of a message are read where they are."""
MAX_ROWS = 210_000
"""Rows and blocks of a message: each costs far more memory than its two or more bytes."""
MAX_SINGLES = 64
"""Fields of a row that are single numbers. More of them would be read without an end before the rows are counted."""

BlockSlice = tuple[bytes, int, int]
"""Bytes, and where in them a block begins and ends."""


def join_blocks(message: Any, blocks: Iterable[Sequence[bytes]]) -> bytes:
    """Return the bytes of a message and its blocks, each given as chunks, which are copied only once."""
    parts = [serialize(message)]
    for chunks in blocks:
        parts += (BLOCKS_PREFIX, encode_varint(sum(map(len, chunks))), *chunks)
    return b"".join(parts)


def split_blocks(kind: type[M], data: bytes) -> tuple[M, list[BlockSlice]]:
    """Return the message and its blocks, which in a large message are not copied. Raises ValueError.

    The message may have at most MAX_ROWS blocks, and as many rows.
    """
    if len(data) < LARGE_BYTES:
        message: Any = parse(kind, data)
        return message, [(block, 0, len(block)) for block in message.blocks]
    blocks: list[BlockSlice] = []
    rest, kept, others, singles = [], 0, 0, 0
    for start, at, end, tag in _fields(data, 0, len(data)):
        if tag & 7 != 2:
            singles += 1
            _check_singles(data, singles, 0)
        elif tag != BLOCKS_TAG:
            others += 1
            if others > MAX_ROWS:
                raise _too_many_rows(data)
        else:
            if len(blocks) == MAX_ROWS:
                raise _too_many_rows(data)
            blocks.append((data, at, end))
            rest.append(data[kept:start])
            kept = end
    rest.append(data[kept:])
    return parse(kind, b"".join(rest)), blocks


def _check_rows(descriptor: Any, data: bytes) -> None:
    """Raises ValueError for a message with too many rows, before they are parsed."""
    rows = singles = 0
    waiting = [(descriptor, 0, len(data))]
    while waiting:
        outer, begin, stop = waiting.pop()
        for _, at, end, tag in _fields(data, begin, stop):
            field = outer.fields_by_number.get(tag >> 3)
            if field is None or not (tag & 7 == 2 or field.is_repeated):
                singles += 1  # their memory is part of the row that has them
                _check_singles(data, singles, rows)
                continue
            rows += 1
            if field.message_type is not None:
                if _may_have_rows(field.message_type):
                    waiting.append((field.message_type, at, end))
            elif field.type not in (field.TYPE_STRING, field.TYPE_BYTES):
                rows += end - at  # a column of numbers
            if rows > MAX_ROWS:
                raise _too_many_rows(data)


@functools.cache
def _may_have_rows(descriptor: Any) -> bool:
    """Whether a message can have rows besides itself: not if all its fields are single numbers."""
    return any(
        field.is_repeated or field.message_type is not None or field.type in (field.TYPE_STRING, field.TYPE_BYTES)
        for field in descriptor.fields
    )


def _check_singles(data: bytes, singles: int, rows: int) -> None:
    """Raises ValueError for more single numbers, or unknown fields, than so many rows can have."""
    if singles > MAX_SINGLES * (rows + 1):
        raise ValueError(f"these {len(data)} bytes repeat fields that a message has once")


def _too_many_rows(data: bytes) -> ValueError:
    return ValueError(f"these {len(data)} bytes have more than {MAX_ROWS} rows: send several messages")


def _fields(data: bytes, at: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Where each field of a message begins, where its content begins and ends, and its tag. Raises ValueError."""
    while at < stop:
        start = at
        tag, at = decode_varint(data, at)
        if tag & 7 == 2:
            length, at = decode_varint(data, at)
            end = at + length
        else:
            end = decode_varint(data, at)[1] if tag & 7 == 0 else at + {1: 8, 5: 4}.get(tag & 7, stop)
        if end > stop:
            raise ValueError(f"these {len(data)} bytes are not a message")
        yield start, at, end, tag
        at = end


def decode_block(block: BlockSlice, what: str) -> Decoded:
    """Return the messages of a block of a peer. Raises ValueError that names `what`; UnsupportedFormat."""
    data, start, end = block
    try:
        decoded, found = decode_foreign_block(data, start)
        if found != end:
            raise BadBlock(f"it has {found - start} bytes, and its field {end - start}")
    except BadBlock as error:
        raise ValueError(f"{what}: {error}") from None
    return decoded


def serialize(message: Any) -> bytes:
    """Return the bytes of a message."""
    data: bytes = message.SerializeToString()
    return data


def fields(value: Any) -> Any:
    """Return a NamedTuple, or what a field of one has, as a field of a message with the same names takes it."""
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        values = [*map(fields, value)]
        return values if names is None else dict(zip(names, values, strict=True))
    return value.value if isinstance(value, Enum) else value


Readers = Mapping[Any, Callable[[Any], Any]]
_NO_READERS: Readers = MappingProxyType({})


def reader(kind: type[M], special: Readers = _NO_READERS) -> Callable[[Any], M]:
    """Return the function that makes this NamedTuple of a message with the same names, the inverse of `fields`.

    `special`: how to read fields of these types. The function raises ValueError for an unknown value of an enum.
    """
    columns = [(name, *_column(hint, special)) for name, hint in get_type_hints(kind).items()]

    def read(message: Any) -> M:
        return kind(*[
            None if optional and not message.HasField(name) else convert(getattr(message, name))
            for name, convert, optional in columns
        ])  # fmt: skip

    return read


def _column(hint: Any, special: Readers) -> tuple[Callable[[Any], Any], bool]:
    """Return how to read a field of this type, and whether it may be absent."""
    if get_origin(hint) is UnionType:
        return _column(get_args(hint)[0], special)[0], True
    if get_origin(hint) is tuple:
        one, _ = _column(get_args(hint)[0], special)
        return lambda rows: tuple(map(one, rows)), False
    if hint in special:
        return special[hint], False
    return reader(hint, special) if issubclass(hint, tuple) else hint, False


def detail(value: object) -> Detail:
    """An attribute of an error as it is sent; None if it is not sent."""
    if isinstance(value, str):
        return _short(value)
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


def encode_error(error: Error, as_detail: Callable[[object], Detail] = detail) -> log_pb2.Error:
    """Return the message of an error; `as_detail` converts each attribute to the form that is sent."""
    message = log_pb2.Error(name=type(error).__name__, fault=error.fault.value, message=_short(str(error)))
    for name, attribute in vars(error).items():
        value = as_detail(attribute)
        if isinstance(value, int):
            message.details.add(name=name, number=value)
        elif value is not None:
            message.details.add(name=name, text=value)
    return message


def decode_error(message: log_pb2.Error) -> Error:
    """Return the error of a message. Raises ValueError for an unknown fault."""
    kind = _classes().get(message.name) or _OF_FAULT.get(message.fault)
    if kind is None:
        raise ValueError(f"an error has the unknown fault {message.fault!r}")
    error = kind.__new__(kind)
    Exception.__init__(error, message.message)
    for one in message.details:
        if not hasattr(kind, one.name):  # a peer must not override attributes of the class
            setattr(error, one.name, one.number if one.HasField("number") else one.text)
    return error


def _short(text: str) -> str:
    clean = text.encode(errors="replace").decode()
    return clean if len(clean) <= LONGEST_TEXT else clean[: LONGEST_TEXT - 1] + "…"


def _classes() -> dict[str, type[Error]]:
    found: dict[str, type[Error]] = {}
    waiting: list[type[Error]] = [Error]
    while waiting:
        kind = waiting.pop()
        found.setdefault(kind.__name__, kind)
        waiting += kind.__subclasses__()
    return found
