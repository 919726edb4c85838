"""The request handler: checks client frames and passes them to the coordinator and the append queues."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from broker_io.environment import current
from broker_io.errors import Error, InvalidTopicName, TopicNotFound
from snapshots.shards import Shard
from txnbuffer.checks import MAX_NAME
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.coordinator.decisions import OwnerEpoch
from txnbuffer.errors import (
    CoordinatorStopped,
    ForeignTopic,
    InvalidRequest,
    LogRestored,
    UnknownSession,
)
from txnbuffer.model import TxnId
from txnbuffer.rpc.frames import ClientFrame, Deletion, NamedRequest, Send, SessionHello
from txnbuffer.service.appends import Appends, SendPart, Sends, UnsettledSends
from txnbuffer.service.connection import Limits, SessionConnection
from txnbuffer.service.registration import TopicRegistrar
from txnbuffer.service.topic import Topics, check_owned

Named = TypeVar("Named", NamedRequest, Deletion)

OPEN_REQUEST = 0
"""The request number that opens a session; clients' numbers begin with 1."""
NO_REQUEST = -1
"""The request number of requests that have no answer."""
MAX_SESSION_NAME = 100
_QUALIFIED_NAME = re.compile("([0-9a-f]{32})x([0-9]+)x([0-9a-f]{32})")
MAX_SHOWN = 100
"""Characters of an invalid name that its error quotes."""
WRITE_TO_CLUSTER = (
    "this service runs in cluster mode and takes no records: connect the client to the cluster's address, so that it "
    "writes them to the cluster"
)
MAX_BACKLOG = 64
"""Frames that a client may send before it is welcomed."""


class RequestHandler:
    """Handles the frames of all clients.

    `connections`: the open connections, by session. `owners`: the log's newest owners, by epoch. Without
    `takes_records` clients write to the cluster themselves.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        topics: Topics,
        appends: Appends,
        sends: Sends,
        registrar: TopicRegistrar,
        limits: Limits,
        owners: Mapping[int, OwnerEpoch],
        *,
        takes_records: bool,
    ) -> None:
        self.connections: dict[str, SessionConnection] = {}
        self.account = UnsettledSends()
        self.draining = False
        self._randomness = current().randomness
        self.owners = owners
        self._coordinator = coordinator
        self._topics = topics
        self._appends = appends
        self._sends = sends
        self._limits = limits
        self._open_topic = registrar.open
        self._takes_records = takes_records
        self._backlogs: dict[SessionConnection, list[ClientFrame]] = {}

    def handle(self, connection: SessionConnection, frame: ClientFrame, now: float) -> None:
        """Handle one frame. Raises an error that ends the connection."""
        if connection.closed:
            return
        if not connection.session:
            if frame.hello is None:
                raise UnknownSession("the first frame of a connection must contain hello: open the session first")
            self._hello(connection, frame.hello, now)
        elif frame.hello is not None:
            raise InvalidRequest("hello was sent twice: open another connection for another session")
        if connection.welcomed:
            self._handle(connection, frame, now)
            return
        backlog = self._backlogs.setdefault(connection, [])
        backlog.append(frame)
        if len(backlog) > MAX_BACKLOG:
            raise InvalidRequest(
                f"{len(backlog)} frames were sent before the welcome, at most {MAX_BACKLOG} may be: wait for it"
            )

    def welcomed(self, connection: SessionConnection, now: float) -> None:
        """Handle the frames that a client sent before it was welcomed."""
        for frame in self._backlogs.pop(connection, ()):
            self._handle(connection, frame, now)

    def disconnected(self, connection: SessionConnection, now: float) -> None:
        """Disconnect the session of a connection that has ended."""
        self._backlogs.pop(connection, None)
        if self.connections.get(connection.session) is connection:
            del self.connections[connection.session]
            self._coordinator.session_disconnected(connection.session, now)

    def _hello(self, connection: SessionConnection, hello: SessionHello, now: float) -> None:
        if self.draining:
            raise CoordinatorStopped("the service is stopping: connect again later")
        if len(hello.session) > MAX_SESSION_NAME or not (hello.session == "" or hello.session.isalnum()):
            raise InvalidRequest(
                f"session id {hello.session[:MAX_SHOWN]!r} is invalid: use the id that the service assigned"
            )
        name = self._session_of(hello.session) or self._randomness.token(16).hex()
        older = self.connections.pop(name, None)
        if older is not None:
            older.close(UnknownSession("another connection has resumed this session: this one is closed"))
        connection.session = name
        self.connections[name] = connection
        for txn in hello.open:
            self._adopt(txn)
        self._coordinator.open_session(name, OPEN_REQUEST, hello.open, now)

    def qualified_name(self, session: str) -> str:
        """The session name for the client: with this owner's epoch and id, which the next owner looks up."""
        epoch = self._coordinator.epoch
        return f"{session}x{epoch}x{self.owners[epoch].id}" if epoch in self.owners else session

    def _session_of(self, qualified_name: str) -> str:
        """The session of a qualified name. Raises LogRestored if the log never had the owner that assigned it."""
        match = _QUALIFIED_NAME.fullmatch(qualified_name)
        if match is None:
            return qualified_name
        session, epoch, owner = match.groups()
        if (known := self.owners.get(int(epoch))) is None or known.id != owner:
            raise LogRestored(
                f"this log was restored from an older copy: it never had epoch {epoch}, of the owner that this client "
                "was last connected to. Everything written after the copy is lost: check what must be written again, "
                "and connect again"
            )
        return session

    def _adopt(self, txn: TxnId) -> None:
        """Find the records that a transaction wrote before this process began."""
        found = [
            (topic.name, entry.highest)
            for topic in self._topics.by_name.values()
            if topic.followed is not None and (entry := topic.followed.buffer.ongoing.get(txn)) is not None
        ]
        if found:
            self._sends.adopt(txn, found)

    def _handle(self, connection: SessionConnection, frame: ClientFrame, now: float) -> None:
        coordinator, name = self._coordinator, connection.session
        for request, topic in frame.registers:
            self._register(connection, request, topic, now)
        for request, count in frame.leases:
            coordinator.lease(name, request, count, now)
        self._handle_names(connection, frame, now)
        if frame.begins:
            coordinator.begin_many(name, frame.begins, now)
        for send in frame.sends:
            self._send(connection, send)
        coordinator.commit_many(name, frame.commits, now)
        for request, txn, topics in frame.aborts:
            coordinator.abort(name, request, txn, (*topics, *self._sends.topics_of(txn)), now)
        for request, txn in frame.queries:
            coordinator.query(name, request, txn, now)
        for first, size in frame.returned:
            coordinator.return_ids(name, NO_REQUEST, first, size, now)
        if frame.bye:
            coordinator.close_session(name, NO_REQUEST, now)
            connection.close()

    def _handle_names(self, connection: SessionConnection, frame: ClientFrame, now: float) -> None:
        """Handle the requests of named producers and of consumer groups."""
        coordinator, name, shard = self._coordinator, connection.session, self._topics.shard
        for request, producer in _valid(connection, shard, "producer", frame.open_names):
            coordinator.open_name(name, request, producer, now)
        for request, producer, over in _owned(connection, shard, "producer", frame.delete_names):
            coordinator.delete_name(name, request, producer, now, over=over)
        for request, group in _valid(connection, shard, "group", frame.joins):
            coordinator.join_group(name, request, group, now)
        for part in frame.members:
            called = ("group", part.group), ("member", part.member)
            fits = all(_is_valid(connection, kind, part.request, text) for kind, text in called)
            if fits and _is_owned(connection, shard, "group", part.request, part.group):
                coordinator.heartbeat(name, part, now)

    def _register(self, connection: SessionConnection, request: int, name: str, now: float) -> None:
        known = self._topics.get(name)
        try:
            if known is None:
                self._topics.check_new(name)
            elif known.problem is not None and not known.missing:  # a missing topic is registered again
                raise known.problem
        except Error as error:
            connection.answer([(request, error)])
        else:
            self._coordinator.register_topic(connection.session, request, name, now)

    def _send(self, connection: SessionConnection, send: Send) -> None:
        connection.sends += 1
        number = connection.sends
        if not self._takes_records:
            connection.fail(number, InvalidRequest(WRITE_TO_CLUSTER))
            connection.settle(number, 0)
            return
        topic = self._topics.get(send.topic)
        if topic is None:
            try:
                self._topics.check_new(send.topic)
                topic = self._topics.make(send.topic)
            except (InvalidTopicName, TopicNotFound) as refusal:
                connection.fail(number, refusal)
                connection.settle(number, 0)
                return
            self._open_topic(topic)
        batch, least, failures = self._sends.check(connection.session, topic, send.batch)
        for txn, error in failures:
            connection.fail(number, error, txn)
        if batch is None:
            connection.settle(number, 0)
        else:
            part = SendPart(batch, connection, number, least, self._sends, self.account)
            self._appends.add(topic, part)

    def over_limit(self) -> bool:
        """Whether all clients together have more unacknowledged bytes than allowed."""
        return self.account.bytes > self._limits.total_bytes


def _owned(connection: SessionConnection, shard: Shard, kind: str, asked: Iterable[Named]) -> Iterator[Named]:
    """Yield requests for producers or groups of this shard; answer the others with an error."""
    return (one for one in asked if _is_owned(connection, shard, kind, one.request, one.name))


def _is_owned(connection: SessionConnection, shard: Shard, kind: str, request: int, name: str) -> bool:
    try:
        check_owned(shard, kind, name)
    except ForeignTopic as error:
        connection.answer([(request, error)])
        return False
    return True


def _valid(
    connection: SessionConnection, shard: Shard, kind: str, asked: Iterable[NamedRequest]
) -> Iterator[NamedRequest]:
    """Yield requests with a valid name of this shard; answer the others with an error."""
    owned = _owned(connection, shard, kind, asked)
    return (one for one in owned if _is_valid(connection, kind, one.request, one.name))


def _is_valid(connection: SessionConnection, kind: str, request: int, name: str) -> bool:
    """Whether a name is valid; otherwise answer with an error."""
    if name and name.isprintable() and len(name.encode()) <= MAX_NAME:
        return True
    shown = name if len(name) <= MAX_SHOWN else name[:MAX_SHOWN] + "…"
    text = f"{kind} {shown!r}: a name must be 1 to {MAX_NAME} bytes of printable UTF-8"
    connection.answer([(request, InvalidRequest(text))])
    return False
