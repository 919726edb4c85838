"""Errors over the wire: told on one side, raised on the other as the same class of the one tree.

An error is a record: `name` of its class, `fault` (caller, peer, storage, environment), `message`, and
`details`, its attributes that are whole numbers or texts; a transaction id goes as the text `most:least`
under the name `txn`. A class that the receiver does not know becomes the one of its fault.
"""

from __future__ import annotations

from typing import Any

from broker_io.errors import CallerError, EnvironmentFault, Error, Fault, PeerError, StorageError
from txnbuffer.model import TxnId
from txnbuffer.wire.parts import Fields, record

ERROR_SCHEMA = record(
    "Error",
    [
        ("name", "string"),
        ("fault", "string"),
        ("message", "string"),
        ("details", {"type": "map", "values": ["long", "string"]}),
    ],
)

_OF_FAULT: dict[str, type[Error]] = {
    Fault.CALLER.value: CallerError,
    Fault.PEER.value: PeerError,
    Fault.STORAGE.value: StorageError,
    Fault.ENVIRONMENT.value: EnvironmentFault,
}


def tell(error: Error) -> Fields:
    """The record of an error."""
    details = {name: _detail(value) for name, value in vars(error).items()}
    return {
        "name": type(error).__name__,
        "fault": error.fault.value,
        "message": str(error),
        "details": {name: value for name, value in details.items() if value is not None},
    }


def told(fields: Fields) -> Error:
    """The error of a record. Raises ValueError if it is none."""
    kind = _classes().get(fields["name"]) or _OF_FAULT.get(fields["fault"])
    if kind is None:
        raise ValueError(f"an error has the fault {fields['fault']!r}")
    error = kind.__new__(kind)
    Exception.__init__(error, fields["message"])
    for name, value in fields["details"].items():
        if not hasattr(kind, name):  # what a class has of its own is not the peer's to say
            setattr(error, name, TxnId.parse(str(value)) if name == "txn" else value)
    return error


def _detail(value: Any) -> int | str | None:
    if isinstance(value, TxnId):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
        return int(value)
    return value if isinstance(value, str) else None


def _classes() -> dict[str, type[Error]]:
    found: dict[str, type[Error]] = {}
    waiting: list[type[Error]] = [Error]
    while waiting:
        kind = waiting.pop()
        found.setdefault(kind.__name__, kind)
        waiting += kind.__subclasses__()
    return found
