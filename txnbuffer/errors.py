"""Errors of the log protocol and the transaction buffer; the tree's root is `broker_io.errors`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from broker_io.errors import CallerError, EnvironmentFault, Error, Fault, PeerError, StorageError
from broker_io.position import Position

__all__ = [
    "CallerError",
    "EnvironmentFault",
    "Error",
    "Fault",
    "InvalidConfiguration",
    "InvalidRequest",
    "OutOfOrder",
    "PartMismatch",
    "PeerError",
    "ProtocolStopped",
    "StorageError",
    "UndecodableMarker",
    "UndecodableRecordSet",
    "UnsupportedProtocol",
]


class ProtocolStopped(StorageError):
    """A topic stopped at a message: whatever stands before `position` is applied, nothing from there on.

    `effects` is what the messages before it in the same batch had as effects, so that none is lost.
    `topic` is None until whoever knows it calls `of_topic`.
    """

    effects: Sequence[object] = ()

    def __init__(self, position: Position, what: str, topic: str | None = None) -> None:
        super().__init__(f"{'the topic' if topic is None else f'topic {topic}'} stopped at {position}: {what}")
        self.position = position
        self.what = what
        self.topic = topic

    def of_topic(self, topic: str) -> Self:
        """The same error with the topic's name in its message."""
        named = type(self).__new__(type(self))
        ProtocolStopped.__init__(named, self.position, self.what, topic)
        named.effects = self.effects
        return named


class UndecodableMarker(ProtocolStopped):
    """A marker that can't be read: which transactions ended here is unknown, so nothing after it can be shown."""

    def __init__(self, position: Position, reason: str, topic: str | None = None) -> None:
        super().__init__(position, f"its marker can't be decoded ({reason}); inspect the message there", topic)


class UnsupportedProtocol(ProtocolStopped):
    """A message of a protocol version that this release does not read."""

    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, position: Position, version: str, topic: str | None = None) -> None:
        super().__init__(
            position, f"the message is of protocol version {version}; read the topic with a newer release", topic
        )


class OutOfOrder(ProtocolStopped):
    """A message at or below the position up to which the log was applied already."""

    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, position: Position, applied: Position, topic: str | None = None) -> None:
        super().__init__(position, f"the log is applied up to {applied}; read on behind that position", topic)


class PartMismatch(StorageError):
    """Parts that are not the ones which the state of a buffer names."""


class UndecodableRecordSet(StorageError):
    """A record set whose payload is not the block of records that its properties announce."""


class InvalidRequest(CallerError):
    """An argument that can't be served."""


class InvalidConfiguration(CallerError):
    """A configuration that names an unknown key or gives an impossible value."""
