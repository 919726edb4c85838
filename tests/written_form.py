"""A buffer's state through its written form, as a recovery gets it: never a copied object."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import numpy as np

from broker_io.position import Position
from txnbuffer.buffer import BufferState, Counters, Damage, Part
from txnbuffer.model import TxnId


def through_written_form(state: BufferState, parts: list[Part]) -> tuple[BufferState, list[Part]]:
    """What a recovery reads after an owner has written this state and these parts."""
    written = json.dumps([_plain(state), [_plain(part) for part in parts]]).encode()
    read_state, read_parts = json.loads(written)
    return _made(BufferState, read_state), [_made(Part, part) for part in read_parts]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _made(kind: Any, plain: Any) -> Any:
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: _made(hints[name], value) for name, value in plain.items()})  # type: ignore[operator]
    if plain is None or kind is int:
        return plain
    if kind is Counters:
        return Counters(*plain)
    if "Position" in str(kind):
        return Position(*plain)
    if "bytes" in str(kind):
        return tuple(map(bytes.fromhex, plain))
    if "Damage" in str(kind):
        return tuple(Damage(TxnId(*txn), Position(*place), *rest) for txn, place, *rest in plain)
    return np.array(plain, np.int64)
