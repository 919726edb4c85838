"""Errors over a wire: told on one side, raised on the other as the same class of the one tree.

An error is an Avro record: `name` of its class, `fault` (caller, peer, storage, environment), `message`, and
`details`, its attributes that are texts or whole numbers. A class that the receiver does not know becomes the
one of its fault. A gRPC call that fails ends with the gRPC status of the class, and has the record as trailing
metadata under `txnbuffer-error-bin`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from broker_io.errors import CallerError, EnvironmentFault, Error, Fault, PeerError, StorageError

ERROR_TRAILER = "txnbuffer-error-bin"
LONGEST_MESSAGE = 2000
"""Characters of a message that travel: metadata has a limit of some kilobytes."""

ERROR_SCHEMA = {
    "type": "record",
    "name": "Error",
    "fields": [
        {"name": "name", "type": "string"},
        {"name": "fault", "type": "string"},
        {"name": "message", "type": "string"},
        {"name": "details", "type": {"type": "map", "values": ["long", "string"]}},
    ],
}

_OF_FAULT: dict[str, type[Error]] = {
    Fault.CALLER.value: CallerError,
    Fault.PEER.value: PeerError,
    Fault.STORAGE.value: StorageError,
    Fault.ENVIRONMENT.value: EnvironmentFault,
}


def detail(value: object) -> int | str | None:
    """An attribute of an error as it travels; None if it doesn't."""
    if isinstance(value, str):
        return _short(value)
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


def tell(error: Error, as_detail: Callable[[object], int | str | None] = detail) -> dict[str, Any]:
    """The record of an error; `as_detail` makes of each attribute what travels."""
    details = {name: as_detail(value) for name, value in vars(error).items()}
    return {
        "name": type(error).__name__,
        "fault": error.fault.value,
        "message": _short(str(error)),
        "details": {name: value for name, value in details.items() if value is not None},
    }


def told(fields: dict[str, Any]) -> Error:
    """The error of a record. Raises ValueError if it is none."""
    kind = _classes().get(fields["name"]) or _OF_FAULT.get(fields["fault"])
    if kind is None:
        raise ValueError(f"an error has the fault {fields['fault']!r}")
    error = kind.__new__(kind)
    Exception.__init__(error, fields["message"])
    for name, value in fields["details"].items():
        if not hasattr(kind, name):  # what a class has of its own is not the peer's to say
            setattr(error, name, value)
    return error


def _short(text: str) -> str:
    clean = text.encode(errors="replace").decode()
    return clean if len(clean) <= LONGEST_MESSAGE else clean[: LONGEST_MESSAGE - 1] + "…"


def _classes() -> dict[str, type[Error]]:
    found: dict[str, type[Error]] = {}
    waiting: list[type[Error]] = [Error]
    while waiting:
        kind = waiting.pop()
        found.setdefault(kind.__name__, kind)
        waiting += kind.__subclasses__()
    return found
