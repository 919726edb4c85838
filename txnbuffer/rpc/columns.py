"""What all frames have in common: the control record, columns, transaction ids and errors

A frame has the length of its control record (4 bytes, little-endian), the control record, and blocks of messages.
Errors are encoded as in `broker_io.errors`; their attribute `txn` is encoded as the text `most:least`.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from broker_io import errors
from broker_io.errors import ERROR_SCHEMA, Error
from txnbuffer import avro
from txnbuffer.model import MAX_LEAST, TxnId
from txnbuffer.rpc.frames import MAX_FRAME_BYTES

__all__ = ["ERROR_SCHEMA", "decode_error", "encode_error"]


Fields = dict[str, Any]

LONGS = {"type": "array", "items": "long"}
STRINGS = {"type": "array", "items": "string"}

_LENGTH = struct.Struct("<I")


def record(name: str, fields: Iterable[tuple[str, Any]], namespace: str = "txnbuffer.session") -> Fields:
    """Return the Avro schema of a record."""
    parts = [{"name": field, "type": kind} for field, kind in fields]
    return {"type": "record", "name": name, "namespace": namespace, "fields": parts}


def optional(kind: Any) -> list[Any]:
    return ["null", kind]


def rows(kind: Any) -> Fields:
    return {"type": "array", "items": kind}


def join(schema: avro.Schema, control: Fields, blocks: Sequence[bytes]) -> bytes:
    """Return the frame with this control record and the chunks of these blocks."""
    head = avro.encode(schema, control)
    return b"".join([_LENGTH.pack(len(head)), head, *blocks])


def control_of(frame: bytes) -> bytes:
    """Return the encoded control record of a frame. Raises ValueError."""
    if not _LENGTH.size <= len(frame) <= MAX_FRAME_BYTES:
        raise ValueError(f"it has {len(frame)} bytes")
    (size,) = _LENGTH.unpack_from(frame)
    end = _LENGTH.size + size
    if end > len(frame):
        raise ValueError(f"its control record of {size} bytes is cut off")
    return frame[_LENGTH.size : end]


def split(schema: avro.Schema, frame: bytes) -> tuple[Fields, int]:
    """Return the decoded control record of a frame, and the offset of its first block. Raises ValueError."""
    control = control_of(frame)
    return avro.decode(schema, control), _LENGTH.size + len(control)


def txn_columns(txns: Sequence[TxnId]) -> tuple[Sequence[int], Sequence[int]]:
    """Return the columns `most` and `least`; `most` has a single number if it is the same for all."""
    if not txns:
        return (), ()
    most, least = zip(*txns, strict=True)
    return most if len(set(most)) > 1 else most[:1], least


def txns_of(most: list[int], least: list[int], what: str) -> list[TxnId]:
    """Return the ids from the columns of `txn_columns`. Raises ValueError; `what` names them in the message."""
    if len(most) == 1:
        most *= len(least)
    if len(most) != len(least):
        raise ValueError(f"{what} have {len(most)} and {len(least)} halves of transaction ids")
    if least and not (min(most) >= 0 and max(most) <= MAX_LEAST and min(least) >= 1 and max(least) <= MAX_LEAST):
        raise ValueError(f"{what} have a transaction id out of range")
    return list(map(TxnId, most, least))


def same_length(what: str, *columns: Sequence[Any]) -> None:
    """Raises ValueError if the columns differ in length."""
    if len(set(map(len, columns))) > 1:
        raise ValueError(f"{what} have columns of {', '.join(str(len(column)) for column in columns)} rows")


def not_negative(what: str, *columns: Sequence[int]) -> None:
    """Raises ValueError if a number is below 0."""
    if any(column and min(column) < 0 for column in columns):
        raise ValueError(f"{what} have a number below 0")


def slices(counts: list[int], items: Sequence[Any], what: str) -> list[tuple[Any, ...]]:
    """Cut items into tuples of these lengths. Raises ValueError if the sum is not the number of items."""
    not_negative(what, counts)
    ends = list(itertools.accumulate(counts, initial=0))
    if ends[-1] != len(items):
        raise ValueError(f"{what} have {len(items)} parts instead of {ends[-1]}")
    return [tuple(items[a:b]) for a, b in itertools.pairwise(ends)]


def names_at(table: Sequence[str], codes: list[int], what: str) -> list[str]:
    """Return the names in a table at these indexes. Raises ValueError."""
    if codes and not 0 <= min(codes) <= max(codes) < len(table):
        raise ValueError(f"{what} name a topic that the frame does not have")
    return [table[code] for code in codes]


def encode_error(error: Error) -> Fields:
    """Return the record of an error."""
    return errors.error_to_fields(error, lambda value: str(value) if isinstance(value, TxnId) else errors.detail(value))


def decode_error(fields: Fields) -> Error:
    """Return the error of a record. Raises ValueError if it is not the record of an error."""
    error = errors.error_from_fields(fields)
    txn = vars(error).get("txn")
    if txn is not None:
        error.txn = TxnId.parse(str(txn))  # type: ignore[attr-defined]  # some classes have it
    return error
