"""The version of the session protocol that a client speaks.

A client's frames begin in all versions with `hello`, null or a record, and that with the version, whatever stands
behind it. A service of another version reads no more, and ends the call with the status FAILED_PRECONDITION, whose
details say who is to be upgraded: so neither has to read a frame of the other.
"""

from __future__ import annotations

from txnbuffer import avro
from txnbuffer.frames import check_version
from txnbuffer.wire.parts import control_of, optional, record

BEGINNING = record("Beginning", [("hello", optional(record("Versioned", [("version", "long")])))])

_BEGINNING = avro.schema(BEGINNING)


def check_hello(frame: bytes) -> None:
    """Raises OtherVersion if a frame says hello in another version than ours, ValueError if it is no frame."""
    hello = avro.decode_first(_BEGINNING, control_of(frame))["hello"]
    if hello is not None:
        check_version(hello["version"])
