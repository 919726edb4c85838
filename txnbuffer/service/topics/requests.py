"""The request handler: checks client frames and passes them to the coordinator and the append queues.

The transaction of each record that a client sends must be open and owned by the session, its sequence number must be
the next one, and its size must be allowed. A violation rejects the records of the transaction concerned; the rest of
the send is appended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import NamedTuple

import numpy as np

from broker_io.batch import Batch, Labels
from broker_io.environment import current
from broker_io.errors import (
    Error,
    InvalidMessage,
    InvalidTopicName,
    LimitExceeded,
    MessageTooLarge,
    TopicNotFound,
)
from broker_io.port import MAX_PROPERTIES
from txnbuffer.access.policy import Action, ResourceKind
from txnbuffer.checks import MAX_NAME
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.coordinator.decisions import OwnerEpoch
from txnbuffer.coordinator.messages import MOST_OPEN_SESSION, Commit
from txnbuffer.coordinator.takeover import first_epoch
from txnbuffer.coordinator.transaction import LOCAL_BEGIN, principal_tag
from txnbuffer.errors import (
    CoordinatorStopped,
    ForeignTopic,
    InvalidRequest,
    LogRestored,
    NotAuthorized,
    UnknownSession,
)
from txnbuffer.model import TxnId
from txnbuffer.protocol import RESERVED, SEQ, TXN, VERSION, SentSlice, sent_slices
from txnbuffer.rpc.frames import ClientFrame, Send, SessionHello
from txnbuffer.service.door.access import EVERYTHING_ALLOWED
from txnbuffer.service.door.connection import SessionConnection
from txnbuffer.service.door.needs import allowed
from txnbuffer.service.door.quotas import ClientQuota, Quotas
from txnbuffer.service.topics.appends import AppendPart, Appends, ServiceTopic, UnitAppends
from txnbuffer.service.topics.topics import Topics, check_owned

TRANSACTIONAL = {VERSION, TXN, SEQ}


class CheckedSend(NamedTuple):
    """`batch`: the records to append, None if there are none; `least`: the transactions in it.

    `begun`: how many requests begin with it: transactions, or the ordinary send.
    """

    batch: Batch | None
    least: list[int]
    failures: list[tuple[TxnId | None, Error]]
    begun: int = 0


NO_UNIT = 2**63
"""The unit of records that wait until their topic is open; it is after all others."""


class Written(dict[str, int]):
    """The last sequence number that a transaction has sent to each topic; its first and its last unit."""

    first = last = 0


@dataclass(eq=False)
class Sends:
    """Checks sends, and which commits have all their records.

    `written`: what each open transaction, by `least`, has sent, in this process or before; `failed`: the errors that
    force transactions to abort.
    """

    _coordinator: Coordinator
    _limit: int
    _units: UnitAppends | None
    """None on a cluster, where no sends come here."""
    written: dict[int, Written] = field(default_factory=dict)
    failed: dict[int, Error] = field(default_factory=dict)

    def check(self, session: str, topic: ServiceTopic, batch: Batch, quota: ClientQuota | None) -> CheckedSend:
        """Return which records of a send may be appended. `quota` is None if its client has no limits."""
        try:
            if len(batch.properties) > MAX_PROPERTIES:
                raise InvalidMessage(
                    f"a send has {len(batch.properties)} different properties: use at most {MAX_PROPERTIES}"
                )
            if _upper_bound(batch) > self._limit:
                self._check_sizes(batch)
            if reserved := {*filter(_is_reserved, batch.properties)}:
                return self._check_slices(session, topic, batch, _slices(batch, reserved), quota)
            if self._units is not None and (full := self._units.refusal) is not None:
                return CheckedSend(None, [], [(None, full)])
            if quota is not None and (refusal := self._ordinary_refusal(batch, quota)) is not None:
                return CheckedSend(None, [], [(None, refusal)])
            return CheckedSend(batch, [], [], 1)
        except Error as error:
            return CheckedSend(None, [], [(None, error)])

    def _ordinary_refusal(self, batch: Batch, quota: ClientQuota) -> LimitExceeded | None:
        """Why a limit refuses an ordinary send, which is counted."""
        if quota.limited:
            return quota.admit(quota.last_send(), batch.weight)
        quota.ask(1, batch.weight)
        return None

    def refusal(self, txn: TxnId) -> LimitExceeded | None:
        """Why the first record of a transaction was refused, if a limit has; then nothing of it was written."""
        error = self.failed.get(txn.least)
        return error if isinstance(error, LimitExceeded) and txn.least not in self.written else None

    def topics_of(self, txn: TxnId, named: tuple[str, ...]) -> tuple[str, ...]:
        """The topics to which a transaction may have written; `named` are those that its client names."""
        if self.refusal(txn) is not None:
            return ()
        written = self.written.get(txn.least)
        return named if written is None else (*named, *written)

    def open_on(self, topic: str) -> list[TxnId]:
        """The transactions that have sent records to a topic and have not ended."""
        wrote = [least for least, written in self.written.items() if topic in written]
        ended = set(self._coordinator.ended_among(wrote))
        return [TxnId(self._coordinator.shard, least) for least in wrote if least not in ended]

    def under_way(self, topic: ServiceTopic, least: int, highest: int) -> bool:
        """Whether a transaction has sent records after `highest`, the last one that the buffer has applied."""
        written = self.written.get(least)
        return written is not None and least not in self.failed and written.get(topic.name, 0) > highest

    def stored(self, commits: Sequence[Commit], topics: Topics) -> set[int]:
        """The commits whose records, all and no others, are in the logs, or in the unit that is being formed.

        The buffers count the records of the others, which come later, or never.
        """
        found: set[int] = set()
        units = self._units
        if units is None:
            return found
        named = {*chain.from_iterable(map(attrgetter("topics"), commits))}
        followed = set(filter(topics.is_followed, named))
        for commit in commits:
            least = commit.txn.least
            written = self.written.get(least)
            if written is None:
                if not commit.topics:
                    found.add(least)
            elif written.first == units.number or written.last <= units.durable:
                same = written == dict(zip(commit.topics, commit.records, strict=False))
                if same and least not in self.failed and followed.issuperset(written):
                    found.add(least)
        return found

    def sweep(self) -> None:
        """Forget transactions that have ended."""
        for known in (self.written, self.failed):
            for least in self._coordinator.ended_among(known):
                del known[least]

    def _check_sizes(self, batch: Batch) -> None:
        sizes = batch.sizes()
        largest = int(sizes.argmax())
        if sizes[largest] > self._limit:
            raise MessageTooLarge(
                f"message {largest} of the send has {sizes[largest]} bytes, the limit is {self._limit}: split it; "
                "nothing of the send was appended"
            )

    def _admission(self, least: int, quota: ClientQuota) -> Error | None:
        """Why a limit refuses a transaction, whose first record this is."""
        error = quota.admit(partial(self._coordinator.has_ended, least))
        if error is not None:
            self.failed[least] = error
        return error

    def _check_slices(
        self,
        session: str,
        topic: ServiceTopic,
        batch: Batch,
        slices: Sequence[SentSlice],
        quota: ClientQuota | None,
    ) -> CheckedSend:
        if topic.followed is None:
            raise topic.refusal()
        name, refusals = topic.name, self._coordinator.write_refusals(session, [*map(itemgetter(0), slices)])
        dropped: list[tuple[int, int]] = []
        failures: dict[TxnId, Error] = {}
        accepted: list[int] = []
        known_before = len(self.written)
        limited = quota if quota is not None and quota.limited else None
        unit = NO_UNIT if topic.held or topic.backlog or self._units is None else self._units.number
        full = None if self._units is None else self._units.refusal
        for sent in slices:
            txn, start, size, seq = sent
            least, known = txn.least, size
            error = refusals.get(txn) or self.failed.get(least)
            if limited and error is None and least not in self.written:
                error = self._admission(least, limited)
            if error is None:
                written = self.written.get(least)
                if written is None:
                    written = self.written[least] = Written()
                    written.first = written.last = unit
                known, error = _known(sent, name, written.get(name, 0), full)
                if error is not None:
                    self.failed[least] = error
                elif known < size:
                    written[name] = seq + size - 1
                    written.last = max(written.last, unit)
                    written.first = written.first if unit != NO_UNIT else NO_UNIT
                    accepted.append(least)
            if error is not None:
                failures[txn] = error
            if known:
                dropped.append((start, known))
        batch = _without(batch, dropped) if dropped else batch
        begun = len(self.written) - known_before
        if quota is not None:
            quota.ask(0 if limited else begun, batch.weight)  # `limited` has counted those that it has admitted
        return CheckedSend(batch if accepted else None, accepted, [*failures.items()], begun)


def _known(sent: SentSlice, topic: str, last: int, full: Error | None) -> tuple[int, Error | None]:
    """How many records of a slice are not appended: those up to record `last`, or, because of the error, all of them.

    `full`: why no new ones can be.
    """
    txn, _, size, seq = sent
    known = min(last - seq + 1, size)
    if known < 0:
        return size, InvalidRequest(
            f"transaction {txn} sent record {seq} to {topic!r}, expected record {last + 1}: abort it"
        )
    return (known, None) if known == size or full is None else (size, full)


_is_reserved = methodcaller("startswith", RESERVED)


def _slices(batch: Batch, reserved: set[str]) -> Sequence[SentSlice]:
    """The slices of a send with these reserved properties. Raises InvalidRequest."""
    if reserved != TRANSACTIONAL:
        strange = ", ".join(sorted(reserved ^ TRANSACTIONAL))
        raise InvalidRequest(f"properties that begin with {RESERVED} are reserved ({strange}): use other names")
    slices = sent_slices(batch.properties, len(batch.values.offsets) - 1)
    if slices is None:
        raise InvalidRequest(f"a send has an invalid {VERSION}, {TXN} or {SEQ}: give each record valid ones")
    return slices


def _without(batch: Batch, slices: list[tuple[int, int]]) -> Batch:
    """The messages that are not in these slices, given as first row and number of rows."""
    keep = np.ones(len(batch), np.bool_)
    for start, size in slices:
        keep[start : start + size] = False
    return batch.take(keep)


def _upper_bound(batch: Batch) -> int:
    """An upper bound on the size of each message; cheaper to compute than the sizes."""
    bound = len(batch.keys.data) + len(batch.values.data)
    for name, column in batch.properties.items():
        longest = max(map(len, column.values), default=0) if isinstance(column, Labels) else 20
        bound += 4 * (len(name) + longest)
    return bound


OPEN_REQUEST = 0
"""The request number that opens a session; clients' numbers begin with 1."""
NO_REQUEST = -1
"""The request number of requests that have no answer."""
MAX_SESSION_NAME = 100
_QUALIFIED_NAME = re.compile("([0-9a-flp][0-9a-f]{31})x([0-9]+)x([0-9a-f]{32})")
MAX_SHOWN = 100
"""Characters of an invalid name that its error quotes."""
WRITE_TO_CLUSTER = (
    "this service runs in cluster mode and takes no records: connect the client to the cluster's address, so that it "
    "writes them to the cluster"
)
MAX_LEASES = 16
"""Leases in one frame or part of it. A client asks for one at a time, and each is an entry of the decision log."""
MAX_BACKLOG = 64
"""Frames that a client may send before it is welcomed."""


@dataclass(eq=False)
class RequestHandler:
    """Handles the frames of all clients.

    `connections`: the open connections, by session. `owners`: the log's newest owners, by epoch. `unsettled_bytes`:
    clients' records that are not durable yet; `records`: those that were appended. `refusal`: why no session is served.
    """

    _coordinator: Coordinator
    _topics: Topics
    _appends: Appends
    _sends: Sends
    _quotas: Quotas
    owners: Mapping[int, OwnerEpoch]
    expect_visible: Callable[[str, Sequence[Commit]], None]
    connections: dict[str, SessionConnection] = field(default_factory=dict)
    unsettled_bytes: int = 0
    records: int = 0
    draining: bool = False
    refusal: Error | None = None
    _backlogs: dict[SessionConnection, list[ClientFrame]] = field(default_factory=dict)

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
        connection.quota.usage.sessions -= bool(connection.session)

    def _check_session(self, connection: SessionConnection, name: str) -> None:
        """Raises LimitExceeded if the client may not open a session, or connect the one with this name again."""
        quota = connection.quota
        if name in self.connections:  # this connection replaces another one
            return
        refusal = quota.check("sessions", quota.usage.sessions) or (None if name else quota.waits())
        if refusal is not None:
            raise refusal

    def _hello(self, connection: SessionConnection, hello: SessionHello, now: float) -> None:
        if self.draining:
            raise CoordinatorStopped("the service is stopping: connect again later")
        if self.refusal is not None:
            raise self.refusal
        if len(hello.session) > MAX_SESSION_NAME or not (hello.session == "" or hello.session.isalnum()):
            raise InvalidRequest(
                f"session id {hello.session[:MAX_SHOWN]!r} is invalid: use the id that the service assigned"
            )
        if len(hello.open) > (MOST_OPEN_SESSION if hello.session else 0):
            most = MOST_OPEN_SESSION if hello.session else 0
            raise InvalidRequest(f"a session names {len(hello.open)} open transactions, it can have at most {most}")
        name, tag = self._session_of(hello.session), connection.permissions.tag
        if name and principal_tag(name) != tag:
            raise connection.permissions.denied(
                NotAuthorized("the session belongs to another principal: open a session of your own")
            )
        self._check_session(connection, name)
        tag = LOCAL_BEGIN if connection.local else tag
        name = name or tag + current().randomness.token(16).hex()[len(tag) :]
        older = self.connections.pop(name, None)
        if older is not None:
            older.close(UnknownSession("another connection has resumed this session: this one is closed"))
        connection.session = name
        connection.quota.usage.sessions += 1
        self.connections[name] = connection
        self._adopt({*hello.open})
        self._coordinator.open_session(name, OPEN_REQUEST, hello.open, now)

    def qualified_name(self, session: str) -> str:
        """The session name for the client: with this owner's epoch and id, which the next owner looks up."""
        epoch = self._coordinator.epoch
        return f"{session}x{epoch}x{self.owners[epoch].id}" if epoch in self.owners else session

    def _session_of(self, qualified_name: str) -> str:
        """The session of a qualified name.

        Raises LogRestored if the log never had the owner that assigned it, or is another history since, after a restore
        or a forced promotion: then it has that owner, but not all that it wrote.
        """
        match = _QUALIFIED_NAME.fullmatch(qualified_name)
        if match is None:
            return qualified_name
        session, epoch, owner = match.groups()
        if (known := self.owners.get(int(epoch))) is None or known.id != owner:
            why = f"it never had epoch {epoch}, of"
        elif int(epoch) < first_epoch(self._coordinator.epoch):
            why = f"it lacks the end of epoch {epoch}, of"
        else:
            return session
        raise LogRestored(
            "this log was restored from an older copy, or a forced promotion of a pair has cut it: "
            f"{why} the owner that this client was last connected to. What was written later is lost: check what must "
            "be written again, and open a new client"
        )

    def _adopt(self, claims: set[TxnId]) -> None:
        """Find the records that transactions wrote before this process began."""
        for topic in self._topics.by_name.values() if claims else ():
            if topic.followed is not None:
                for entry in topic.followed.buffer.ongoing.among(claims):
                    written = self._sends.written.setdefault(entry.txn.least, Written())
                    written.setdefault(topic.name, entry.highest)

    def _handle(self, connection: SessionConnection, frame: ClientFrame, now: float) -> None:
        coordinator, name = self._coordinator, connection.session
        if connection.permissions is not EVERYTHING_ALLOWED:
            rows = frame.rows
            frame, refusals = allowed(connection.permissions, frame)
            if refusals:
                connection.answer(refusals)
            connection.mistaken(rows - frame.rows - len(refusals))
        for request, topic in frame.registers:
            self._register(connection, request, topic, now)
        if len(frame.leases) > MAX_LEASES:
            raise InvalidRequest(f"{len(frame.leases)} leases were asked for at once: ask for a larger one instead")
        for request, count in frame.leases:
            self._lease(connection, request, count, now)
        if frame.open_names or frame.delete_names or frame.joins or frame.members:
            self._handle_names(connection, frame, now)
        if frame.begins:
            coordinator.begin_many(name, frame.begins, now)
        for send in frame.sends:
            self._send(connection, send)
        self._handle_ends(connection, frame, now)
        if connection.filtered and (hold := connection.quota.take_hold()):
            connection.hold(hold)
        if frame.bye:
            coordinator.close_session(name, NO_REQUEST, now)
            connection.close()

    def _handle_ends(self, connection: SessionConnection, frame: ClientFrame, now: float) -> None:
        """Handle the requests that end transactions or ask how they ended."""
        coordinator, name = self._coordinator, connection.session
        commits = frame.commits
        if commits and (self._sends.failed or (not self._topics.takes_records and connection.quota.limited)):
            commits = self._admitted(connection, commits)
        elif commits and not self._topics.takes_records:
            connection.quota.ask(len(commits), 0)
        if commits:
            self.expect_visible(name, commits)
            coordinator.commit_many(name, commits, now, self._sends.stored(commits, self._topics))
        for request, txn, topics in frame.aborts:
            coordinator.abort(name, request, txn, self._sends.topics_of(txn, topics), now)
        for request, txn in frame.queries:
            coordinator.query(name, request, txn, now)
        if frame.returned:
            coordinator.return_ids(name, NO_REQUEST, frame.returned, now)

    def _admitted(self, connection: SessionConnection, commits: tuple[Commit, ...]) -> tuple[Commit, ...]:
        """Answer the commits that a limit refuses; return the others. Transactions that have sent records go on."""
        admitted = []
        for commit in commits:
            refusal = self._sends.refusal(commit.txn)
            if refusal is None and not self._topics.takes_records:
                refusal = connection.quota.admit(partial(self._coordinator.has_ended, commit.txn.least))
            if refusal is None:
                admitted.append(commit)
            else:
                connection.answer([(commit.request, refusal)])
        return tuple(admitted)

    def _lease(self, connection: SessionConnection, request: int, count: int, now: float) -> None:
        """Lease ids, fewer than asked for if the principal may not have more open."""
        quota = connection.quota
        refusal = None if quota.has_few() else quota.waits()
        if refusal is None and (most := quota.usage.limits.open_transactions):
            used = self._coordinator.outstanding_of[connection.permissions.tag]
            refusal = quota.check("open_transactions", used)
            count = min(count, most - used)
        if refusal is None:
            self._coordinator.lease(connection.session, request, count, now)
        else:
            connection.answer([(request, refusal)])

    def _handle_names(self, connection: SessionConnection, frame: ClientFrame, now: float) -> None:
        """Handle the requests of named producers and of consumer groups."""
        coordinator, name = self._coordinator, connection.session
        for request, producer in frame.open_names:
            if self._fits(connection, request, "producer", producer, producer=producer):
                coordinator.open_name(name, request, producer, now)
        for deletion in frame.delete_names:
            if self._fits(connection, deletion.request, "producer", deletion.name):
                coordinator.delete_name(name, deletion.request, deletion.name, now, over=deletion.over)
        for request, group in frame.joins:
            if self._fits(connection, request, "group", group, group=group):
                coordinator.join_group(name, request, group, now)
        for part in frame.members:
            if self._fits(connection, part.request, "group", part.group, group=part.group, member=part.member):
                coordinator.heartbeat(name, part, now)

    def _register(self, connection: SessionConnection, request: int, name: str, now: float) -> None:
        known = self._topics.get(name)
        try:
            if known is None:
                self._check_new(connection, name)
            elif known.problem is not None and not known.missing:  # a missing topic is registered again
                raise known.problem
        except Error as error:
            connection.answer([(request, error)])
        else:
            self._coordinator.register_topic(connection.session, request, name, now)

    def _check_new(self, connection: SessionConnection, name: str) -> None:
        """Raises an error for a topic that may not be opened, or not be created by the client."""
        self._topics.check_new(name)
        connection.quota.create_topic(lambda: self._topics.is_missing(name))

    def _send(self, connection: SessionConnection, send: Send) -> None:
        connection.sends += 1
        number = connection.sends
        quota = connection.quota if connection.filtered else None
        try:
            if not self._topics.takes_records:
                raise InvalidRequest(WRITE_TO_CLUSTER)
            if quota is not None:
                connection.permissions.check(Action.WRITE, ResourceKind.TOPIC, send.topic)
            topic = self._topics.get(send.topic)
            if topic is None:
                self._check_new(connection, send.topic)
                topic = self._topics.make(send.topic, connection.session)
        except (InvalidRequest, NotAuthorized, InvalidTopicName, TopicNotFound, LimitExceeded) as refusal:
            connection.fail(number, refusal)
            connection.settle(number, 0)
            return
        batch, least, failures, begun = self._sends.check(connection.session, topic, send.batch, quota)
        for txn, error in failures:
            connection.fail(number, error, txn)
        if batch is None:
            connection.settle(number, 0)
            return
        size, records = batch.weight, len(batch.values.offsets) - 1
        durable = partial(self._send_durable, connection, number, size, records, begun)
        failed = partial(self._send_failed, connection, number, size, least)
        self.unsettled_bytes += size
        connection.unsettled += size
        connection.quota.usage.bytes_in_flight += size
        self._appends.add(topic, AppendPart(batch, size, durable, failed))

    def _send_durable(self, connection: SessionConnection, number: int, size: int, records: int, begun: int) -> None:
        self.unsettled_bytes -= size
        connection.quota.usage.bytes_in_flight -= size
        if connection.filtered:
            self._quotas.served(begun, size)
        self.records += records
        connection.settle(number, size)

    def _send_failed(
        self, connection: SessionConnection, number: int, size: int, least: list[int], error: Error
    ) -> None:
        self.unsettled_bytes -= size
        connection.quota.usage.bytes_in_flight -= size
        self._sends.failed.update(dict.fromkeys(least, error))
        connection.fail(number, error)
        connection.settle(number, size)

    def _fits(self, connection: SessionConnection, request: int, kind: str, owned: str, **names: str) -> bool:
        """Whether a producer or group belongs to this shard, and names are valid; otherwise answer with an error."""
        try:
            for what, name in names.items():
                if not (name and name.isprintable() and len(name.encode()) <= MAX_NAME):
                    shown = name if len(name) <= MAX_SHOWN else name[:MAX_SHOWN] + "…"
                    raise InvalidRequest(f"{what} {shown!r}: a name must be 1 to {MAX_NAME} bytes of printable UTF-8")
            check_owned(self._topics.shard, kind, owned)
        except (InvalidRequest, ForeignTopic) as error:
            connection.answer([(request, error)])
            return False
        return True
