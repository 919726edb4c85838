"""The broker of a running service."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

from broker_io.compaction import CompactionState
from broker_io.environment import current
from broker_io.errors import NotSupported, ServiceUnavailable, UntrustedService
from broker_io.port import Ledger, Resource, check_topic_name
from broker_io.position import EARLIEST, Position
from broker_io.remote.connection import RemoteConnection
from broker_io.remote.messages import decode_position
from broker_io.remote.reader import RemoteReader
from broker_io.remote.writer import RemoteWriter
from broker_io.rpc import log_pb2
from broker_io.rpc.channel import Endpoint, LogIdentity
from broker_io.rpc.credentials import ClientCredentials

T = TypeVar("T")

MAX_WAIT = 30.0
"""Default seconds for which calls wait for an unavailable service."""


class RemoteBroker(Resource):
    """Topics of the service at `target`, HOST:PORT; all calls are safe from any thread.

    For a pair `target` is HOST:PORT,HOST:PORT, and calls go to the one that serves.

    With `root_certificates` (PEM) the connection uses TLS; `certificate` and `key` (PEM) or `token`, its text or a
    function that returns it, say who the client is. All calls are for the log in `log_identity`, by default the
    log of the service that answers first: at the service of another log they raise ServiceUnavailable. While the
    service is unavailable, each call waits up to `max_unavailable` seconds for it, and so does opening the broker.
    Raises ServiceUnavailable if the service does not answer in that time, PeerError if what answers is no log service.
    """

    def __init__(
        self,
        target: str,
        *,
        root_certificates: bytes | None = None,
        certificate: bytes | None = None,
        key: bytes | None = None,
        token: str | Callable[[], str] | None = None,
        max_unavailable: float = MAX_WAIT,
        log_identity: LogIdentity | None = None,
    ) -> None:
        credentials = ClientCredentials(root_certificates, certificate, key, token)
        addresses = Endpoint.each(target.split(","), credentials)
        self._connection = RemoteConnection(addresses, log_identity or LogIdentity(), max_unavailable)
        self._open: weakref.WeakKeyDictionary[RemoteReader | RemoteWriter, None] = weakref.WeakKeyDictionary()
        self._lock = current().threads.lock()
        try:
            limits = self._hello()
        except BaseException:
            self._connection.close()
            raise
        self.max_message_bytes, self._max_append_bytes = limits.max_message_bytes, limits.max_append_bytes

    def _hello(self) -> log_pb2.LogLimits:
        """The limits of the service. A certificate that does not verify is an error at once."""
        try:
            return self._connection.ask("Hello", log_pb2.LogLimits)
        except UntrustedService:
            raise
        except ServiceUnavailable:
            return self._ask("Hello", log_pb2.LogLimits)

    def topics(self) -> list[str]:
        return [*self._ask("Topics", log_pb2.TopicNames).names]

    def create_topic(self, topic: str) -> None:
        self._ask("CreateTopic", log_pb2.Empty, topic)

    def delete_topic(self, topic: str) -> None:
        self._connection.check()
        self._connection.ask(
            "DeleteTopic", log_pb2.Empty, check_topic_name(topic), slow=True
        )  # not retried: it may be re-created meanwhile

    def incarnation(self, topic: str) -> str:
        return self._ask("Incarnation", log_pb2.TopicIncarnation, topic).incarnation

    def writer(
        self, topic: str, *, exclusive: bool = False, wait: float | None = None, unbatched: bool = False
    ) -> RemoteWriter:
        self._connection.check()
        if wait is not None:
            raise NotSupported(
                f"{self._connection.target} is the log of a service, which has no standby: open it without wait"
            )
        name, limits = check_topic_name(topic), (self.max_message_bytes, self._max_append_bytes)
        writer = self._connection.retry(
            lambda: RemoteWriter(self._connection, name, exclusive=exclusive, limits=limits)
        )
        with self._lock:
            self._open[writer] = None
        return writer

    def reader(
        self, topic: str, start: Position = EARLIEST, *, inclusive: bool = True, compacted: bool = False
    ) -> RemoteReader:
        self._connection.check()
        name = check_topic_name(topic)
        reader = RemoteReader(self._connection, name, start, inclusive=inclusive, compacted=compacted)
        with self._lock:
            self._open[reader] = None
        return reader

    def ledgers(self, topic: str) -> list[Ledger]:
        rows = self._ask("Ledgers", log_pb2.LedgerList, topic).ledgers
        return [Ledger(row.ledger, row.entries, row.bytes, row.closed, row.lasting, row.original) for row in rows]

    def first_position(self, topic: str) -> Position | None:
        return self._position("FirstPosition", topic)

    def last_position(self, topic: str) -> Position | None:
        return self._position("LastPosition", topic)

    def position_at(self, topic: str, time_ms: int) -> Position | None:
        return self._position("PositionAt", topic, time_ms)

    def compaction(self, topic: str) -> CompactionState:
        """How far the service has compacted a topic, without its policy."""
        found = self._ask("Compaction", log_pb2.TopicCompaction, topic)
        return CompactionState(found.cleaned, found.purged)

    def roll(self, topic: str) -> None:
        self._ask("Roll", log_pb2.Empty, topic, slow=True)

    def trim(self, topic: str, first_ledger: int) -> None:
        self._ask("Trim", log_pb2.Empty, topic, first_ledger, slow=True)

    def compact(self, topic: str) -> None:
        self._ask("Compact", log_pb2.Empty, topic, slow=True)

    def close(self) -> None:
        if self._connection.closed:
            return
        with self._lock:
            opened = [*self._open]
        for each in opened:
            each.close()
        self._connection.close()

    def _position(self, method: str, topic: str, number: int = 0) -> Position | None:
        found = self._ask(method, log_pb2.FoundPosition, topic, number)
        return decode_position(found.position) if found.HasField("position") else None

    def _ask(self, method: str, kind: type[T], topic: str | None = None, number: int = 0, *, slow: bool = False) -> T:
        """Send an idempotent request, with retries."""
        self._connection.check()
        name = "" if topic is None else check_topic_name(topic)
        return self._connection.retry(lambda: self._connection.ask(method, kind, name, number, slow=slow))
