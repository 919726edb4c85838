"""Inputs in which one number of a protobuf message is at an edge of its range."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_SIGNED_32, _SIGNED_64 = (-(2**31), -1, 0, 2**31 - 1), (-(2**63), -1, 0, 2**63 - 1)


def _edges(field: Any) -> tuple[int, ...]:
    """The edges of a field; none if it is not a number."""
    match field.type:
        case field.TYPE_INT64 | field.TYPE_SINT64 | field.TYPE_SFIXED64:
            return _SIGNED_64
        case field.TYPE_INT32 | field.TYPE_SINT32 | field.TYPE_SFIXED32:
            return _SIGNED_32
        case field.TYPE_UINT64 | field.TYPE_FIXED64:
            return (0, 2**64 - 1)
        case field.TYPE_UINT32 | field.TYPE_FIXED32:
            return (0, 2**32 - 1)
        case field.TYPE_DOUBLE:
            return (-1, 0, 2**63)
        case field.TYPE_ENUM:
            return tuple(value.number for value in field.enum_type.values)
    return ()


def at_edges(message: Any) -> Iterator[tuple[str, bytes]]:
    """The bytes of a message for each number in it and each edge, with the place and the value."""
    for place, holder, field in [*_numbers(message, "")]:
        name = field.name
        before = [*getattr(holder, name)] if field.is_repeated else getattr(holder, name)
        for edge in _edges(field):
            if field.is_repeated:
                getattr(holder, name)[0] = edge
            else:
                setattr(holder, name, edge)
            yield f"{place} = {edge}", message.SerializeToString()
        if field.is_repeated:
            getattr(holder, name)[:] = before
        else:
            setattr(holder, name, before)


def _numbers(message: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None:
            rows = value if field.is_repeated else [value] * message.HasField(field.name)
            for row in rows:
                yield from _numbers(row, f"{place}.{field.name}")
        elif _edges(field) and (not field.is_repeated or len(value)):
            yield f"{place}.{field.name}", message, field
