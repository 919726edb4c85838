"""A transaction of the asyncio client"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from txnbuffer.checks import MAX_NUMBER, check_flag, check_txn
from txnbuffer.client import lifecycle
from txnbuffer.client.base import BaseClient
from txnbuffer.client.path.record_path import EndPlan, OpenTransaction, as_plan
from txnbuffer.client.path.send_columns import (
    PROPERTY_BYTES,
    Batching,
    EventTime,
    Key,
    Properties,
    SendColumns,
    deletion,
    many_rows,
    one_row,
    slices,
    take_rows,
)
from txnbuffer.client.serializers import Serializer
from txnbuffer.client.session.session import ClientSession
from txnbuffer.coordinator.messages import (
    Branch,
    ConsumerPosition,
    ProducerSequence,
)
from txnbuffer.errors import (
    Error,
    Fenced,
    InvalidRequest,
    NotVisible,
    OutcomeUnknown,
    TransactionAborted,
    TransactionCommitted,
)
from txnbuffer.model import Outcome, TxnId


def check_branches(branches: object) -> tuple[Branch, ...]:
    """Return the branches to commit with a transaction. Raises InvalidRequest."""
    found = tuple(branches) if isinstance(branches, Sequence) else (branches,)
    for branch in found:
        if not isinstance(branch, Branch) or not _is_counted(branch.topics, branch.records):
            raise InvalidRequest(f"winners must be a list of branches, got {branch!r}")
        check_txn(branch.txn)
    return found


def _is_counted(topics: object, records: object) -> bool:
    if not (isinstance(topics, tuple) and isinstance(records, tuple) and len(topics) == len(records)):
        return False
    counts = all(type(count) is int and 0 <= count <= MAX_NUMBER for count in records)
    return counts and all(isinstance(topic, str) for topic in topics)


async def _nothing() -> None:
    pass


PARTLY_SENT = "only some of the records of a send were sent"
CHUNK = 4096
"""Maximum number of records of a `send_many` that are passed to the session together."""


class Transaction:
    """Sends to one or more topics. All records become visible when the transaction commits; none if it aborts.

        async with client.transaction() as txn:
            await txn.send("orders", b"...", key="o-1")

    The end of the block commits and raises the errors of `commit`; an exception in the block aborts.
    """

    def __init__(
        self,
        client: BaseClient,
        sequence: tuple[str, int] | None = None,
        timeout: float | None = None,
        group: str | None = None,
    ) -> None:
        """`sequence`: the producer's name and the number. `group`: the consumer group whose position the commit
        moves.
        """
        self._client = client
        self._session: (
            ClientSession  # set by `begin`: sessions open on the loop, but a transaction may be created anywhere
        )
        self._home = sequence[0] if sequence is not None else group
        self._sequence = sequence
        self._timeout = timeout
        self._open: OpenTransaction | None = None
        self._positions: tuple[ConsumerPosition, ...] = ()
        self._lent = False
        self._committing = False
        self._answer: asyncio.Future[Any] | None = None  # to the commit that was requested, or withdrawn
        self._partial = 0
        """How many calls of `send_rows` have sent some of their records."""
        self._whole: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.describe()}>"

    def describe(self) -> str:
        """Its id or name, state, and the records that it has sent, for `repr`."""
        name = "" if self._sequence is None else "{}:{} ".format(*self._sequence)
        if self._open is None:
            return f"{name}not begun"
        if self._committed is True or isinstance(self._committed, NotVisible):
            state = "committed"
        elif self._committed:
            state = "outcome unknown"
        elif self._open.ending:
            state = "ended"
        else:
            state = "open" if self._open.failure is None else "failed"
        sent = ", ".join(f"{count} for {topic!r}" for topic, count in self._open.counts.items())
        return f"{name}{self._open.txn} {state}, {'records: ' + sent if sent else 'no records'}"

    @property
    def id(self) -> TxnId:
        """The id of the transaction, printed as `most:least`. Raises InvalidRequest before it has begun."""
        return self._begun().txn

    @property
    def begun(self) -> bool:
        """Whether the transaction has begun; stays true after it has ended."""
        return self._open is not None

    @property
    def over(self) -> bool:
        """Whether commit or abort was requested."""
        return self._open is not None and (self._open.ending or self._committing)

    @property
    def committed(self) -> bool:
        """Internal: whether it is known to have committed."""
        return self._committed is True

    @property
    def _committed(self) -> bool | Error:
        """Whether it has committed; or the error of a commit that has or may have taken effect."""
        answer = self._answer
        if answer is None or not answer.done() or answer.cancelled():
            return False
        if (error := answer.exception()) is None:
            return answer.result() is Outcome.COMMIT
        return error if isinstance(error, NotVisible | OutcomeUnknown) else False

    @property
    def commit_sent(self) -> bool:
        """Internal: whether a commit was sent and is not answered, so that it cannot be withdrawn."""
        return self._open is not None and self._session.core.transactions.commit_sent(self._open)

    @property
    def named(self) -> bool:
        """Internal: whether it is a numbered transaction of a named producer."""
        return self._sequence is not None

    @property
    def room(self) -> int:
        """Internal: how many bytes of records can be sent without waiting for acknowledgements."""
        session = self._client.session if self._open is None else self._session
        return session.core.room

    def check(self) -> None:
        """Internal: raise the error that prevents sending, if there is one."""
        self._usable()

    def fail(self, error: BaseException) -> None:
        """Internal: make the transaction unable to commit, because some of its records could not be sent."""
        opened = self._open
        if opened is not None and not opened.ending:
            reason = error if isinstance(error, Error) else TransactionAborted(opened.txn, PARTLY_SENT)
            self._session.core.transactions.fail(opened, reason)

    async def begin(self) -> Self:
        """Begin the transaction; `async with` calls this.

        Raises AlreadyCommitted if its number has committed, ProducerFenced if another client has opened the name of
        the producer and this one has not asked for its committed number since, InvalidRequest if it was begun before,
        and ServiceUnavailable.
        """
        client = self._client
        if client.closed:
            client.check_open()
        if self._open is not None:
            raise InvalidRequest(f"transaction {self._open.txn} has already begun: create another one")
        sequence: ProducerSequence | None = None
        if self._sequence is not None:
            sequence = await client.names.sequence(*self._sequence, client.committed_number)
        self._session, self._open = await client.sessions.begin(self._home, self._timeout, sequence)
        return self

    async def send(
        self,
        topic: str,
        value: Any,
        *,
        key: Key = None,
        ordering_key: str | None = None,
        event_time: EventTime = None,
        properties: Properties = None,
        serializer: Serializer | None = None,
        batching: Batching | None = None,
        partition: int | None = None,
    ) -> None:
        """Queue one record to be sent; waits only while too many bytes are unacknowledged. `commit` waits for all.

        - `value`: bytes, text, or a value for the serializer.
        - `key`: bytes or text. On a partitioned topic the key selects the partition, unless `partition` is given.
        - `ordering_key`: stored as the property `ordering_key`.
        - `event_time`: a datetime with a time zone, or milliseconds since 1970.
        - `properties`: a mapping of text to text.
        - `serializer`: converts this value to bytes, instead of the client's serializer or the topic's schema.
        - `batching`: "messages" or "records", as in `connect`.
        - `partition`: the number of the partition to send to: 0, 1, 2 …

        Raises InvalidMessage, MessageTooLarge, InvalidTopicName and InvalidRequest: this record is not sent, and the
        transaction can still commit. After any other error it can only abort; it may be the error of an earlier send.
        """
        if serializer is not None or self._client.serializers.has_any:
            serializer = await self._client.serializer_of(topic, serializer)
        rows = one_row(value, key, ordering_key, event_time, properties, serializer)
        await self.send_rows(topic, rows, batching, partition)

    async def send_many(
        self,
        topic: str,
        values: Sequence[Any],
        *,
        keys: Sequence[Key] | None = None,
        event_times: Sequence[EventTime] | None = None,
        properties: Sequence[Properties] | None = None,
        serializer: Serializer | None = None,
        batching: Batching | None = None,
        partition: int | None = None,
    ) -> None:
        """Queue records to be sent, given as columns with one item for each record.

        The other arguments and the errors are those of `send`. If only some of the records could be sent, the
        transaction can only abort. A commit of another task waits until all of the records are sent.
        """
        serializer = await self._client.serializer_of(topic, serializer)
        rows = many_rows(values, keys, event_times, properties, serializer)
        await self.send_rows(topic, rows, batching, partition)

    async def delete(
        self, topic: str, key: Key, *, properties: Properties = None, partition: int | None = None
    ) -> None:
        """Delete a key: send a record with this key and no value. Other arguments and errors as in `send`."""
        await self.send_rows(topic, deletion(key, properties), partition=partition)

    async def send_rows(
        self, topic: str, rows: SendColumns, batching: Batching | None = None, partition: int | None = None
    ) -> None:
        """Internal: send records whose columns have been checked."""
        opened = self._usable()
        session, client = self._session, self._client
        rows = client.checked(topic, rows, batching, PROPERTY_BYTES)
        left = count = len(rows.values)
        partly = False
        try:
            for chunk in slices(rows, CHUNK) if count > 1 else (rows,) * count:
                direct = client.routes is None and partition is None
                groups = ((topic, None),) if direct else await client.groups(topic, chunk.keys, partition)
                for name, which in groups:
                    some = chunk if which is None else take_rows(chunk, which.tolist())
                    if left < count or client.routes is not None:  # other tasks may have run
                        opened = self._usable(begun=left < count)
                    room = session.core.send(name, some, opened)
                    left -= len(some.values)
                    if left and not partly:
                        partly = True
                        self._partial += 1
                if not room:
                    await session.wait_for_room()
                    if left:
                        self._usable(begun=True)
        except BaseException as error:
            if 0 < left < count:
                self.fail(error)
            raise
        finally:
            if partly:
                self._sent()

    def _sent(self) -> None:
        """A call of `send_rows` that had sent only some of its records has ended; a commit may wait for that."""
        self._partial -= 1
        if self._whole is not None and not self._partial and not self._whole.done():
            self._whole.set_result(None)

    def consumed(self, position: ConsumerPosition) -> None:
        """Internal: move a consumer group with the commit, which fails if another member has moved it already."""
        self._positions += (position,)

    @contextmanager
    def handler_scope(self) -> Iterator[None]:
        """Internal: reject commit and abort while the handler of a consumer group runs, in the `with` block."""
        self._lent = True
        try:
            yield
        finally:
            self._lent = False

    def check_can_end(self) -> None:
        """Internal: raise InvalidRequest while a handler runs."""
        if self._lent:
            raise InvalidRequest(
                "a handler cannot end its transaction: return from the handler to commit it, raise an exception to "
                "abort it"
            )

    async def commit(self, *, wait_visible: bool = False, winners: Sequence[Branch] = ()) -> None:
        """Commit; return when all records and the commit are durable.

        - `wait_visible`: also wait, for up to two minutes, until readers get the records. They do not while an older
          transaction is open on one of the topics, also one of this client: end that one first.
        - `winners`: branches of other processes to commit with this transaction, see `txnbuffer.client.branches`. Then
          `wait_visible` does not wait for older transactions.

        If the call is cancelled after the commit was requested, the transaction may commit; the exception has a note
        that says so. After InvalidRequest for an argument the transaction is still open. Raises:

        - TransactionAborted: nothing became visible; run the transaction again.
        - LimitExceeded: a limit of the service refused it, and nothing became visible; run it again later.
        - OutcomeUnknown: it may or may not have committed; call `client.outcome`.
        - Fenced: another producer opened the name, or another member of the group got the partition.
        - AlreadyCommitted: the number was committed before.
        - NotVisible: it has committed, but readers do not get it on all topics yet; the error names the topic, and the
          transaction that is in the way.
        """
        if self._lent:
            self.check_can_end()
        branches = () if winners == () else check_branches(winners)
        if wait_visible is not False:
            check_flag(wait_visible, "wait_visible")
        opened = self._open or self._begun()
        waiter = self._session.waiter()
        if opened.ending or self._committing:
            raise self._over(opened)
        plan = as_plan((True, waiter, wait_visible, self._positions, branches, False))
        self._committing = True
        try:
            if opened.sequence is None:
                await self._request(opened, plan)
            else:  # after the commits of its name that this client has begun before
                async with self._client.names.committing(opened.txn, opened.sequence.name):
                    await self._request(opened, plan)
                    self._client.names.committed(opened.sequence)
        except BaseException as error:
            self._failed(opened, waiter, error)
            raise
        finally:
            self._committing = False

    def _request(self, opened: OpenTransaction, plan: EndPlan) -> Awaitable[Any]:
        """Request the commit; return its answer."""
        if self._partial:
            return self._request_whole(opened, plan)
        if opened.ending:  # since an earlier commit, or the sends of another task, were waited for
            self._session.check()
            raise self._over(opened)
        self._answer = plan.waiter
        self._session.end(opened, plan)
        return self._answer

    async def _request_whole(self, opened: OpenTransaction, plan: EndPlan) -> None:
        """Wait until no call has sent only some of its records; calls that have sent none yet are rejected."""
        self._whole = asyncio.get_running_loop().create_future()
        try:
            await self._whole
        finally:
            self._whole = None
        await self._request(opened, plan)

    def _failed(self, opened: OpenTransaction, waiter: asyncio.Future[Any], error: BaseException) -> None:
        """End a transaction whose commit has failed or was cancelled."""
        if self._answer is waiter and isinstance(error, asyncio.CancelledError):
            self._answer, withdrawn = self._session.withdraw_commit(opened, waiter)
            if not withdrawn:
                error.add_note(f"transaction {opened.txn} may have committed: query its outcome")
        elif isinstance(error, Fenced):
            self._lost_name(error)
        if not opened.ending:
            self._session.end(opened, EndPlan(False, None))

    async def abort(self) -> None:
        """Abort; return when the abort is durable. Does nothing after another abort, or after a commit that failed.

        Raises TransactionCommitted after a commit; waits for one that another task has requested, or whose call was
        cancelled. If that raised NotVisible or OutcomeUnknown, raises it again.
        """
        self.check_can_end()
        opened = self._begun()
        session = self._session
        session.check()
        while (answer := self._answer) is not None:
            await asyncio.wait([answer])
            if answer is self._answer:  # else the commit was cancelled meanwhile
                break
        if committed := self._committed:
            raise TransactionCommitted(opened.txn) if committed is True else committed
        if not opened.ending:
            await session.result(lambda future: session.end(opened, EndPlan(False, future)))

    __aenter__ = begin

    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Coroutine[Any, Any, None]:
        if self._lent:
            self.check_can_end()
        opened = self._open or self._begun()
        if opened.ending or (self._committing and error is None):
            return _nothing()  # commit or abort was called in the block
        if error is None:
            return self.commit()
        self._session.end(opened, EndPlan(False, None))
        return _nothing()

    def _begun(self) -> OpenTransaction:
        if self._open is None:
            raise InvalidRequest("the transaction has not begun: use it with `async with`, or await begin()")
        return self._open

    def _usable(self, *, begun: bool = False) -> OpenTransaction:
        """Return the open transaction. Raises the error that prevents sending.

        A commit that waits for calls that have `begun` to send prevents all others.
        """
        opened = self._open or self._begun()
        forked = self._session.forked_from != lifecycle.ForkGeneration.generation
        if opened.failure is None and not (opened.ending or self._committing or forked):
            return opened
        self._session.check()  # without a service, all transactions have failed
        if opened.failure is not None:
            if isinstance(opened.failure, Fenced):
                self._lost_name(opened.failure)
            raise opened.failure
        if opened.ending or (self._committing and not begun):
            raise self._over(opened)
        return opened

    def _lost_name(self, error: Fenced) -> None:
        """Forget the producer name, which another client has opened."""
        if self._open is not None and self._open.sequence is not None:
            self._client.names.lost(self._open.sequence, error)

    def _over(self, opened: OpenTransaction) -> InvalidRequest:
        return InvalidRequest(f"transaction {opened.txn} has ended: begin a new one")
