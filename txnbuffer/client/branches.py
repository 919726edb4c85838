"""Parts of one number of a named producer that many processes write: each begins a share, one of them commits all.

A share that is finished outlives the process that wrote it, until its time is up; before that it ends with its session.
Whoever commits the number names the shares that count; every other one of that number, however late it is, stays
invisible for ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

from broker_io.batch import Batch
from broker_io.errors import Error
from txnbuffer.checks import check_name, check_number, check_timeout
from txnbuffer.client.client import Client
from txnbuffer.client.open_transactions import EndPlan
from txnbuffer.client.outbox import Batching, OpenTransaction, check_batch, split
from txnbuffer.client.session import ClientSession
from txnbuffer.coordinator.messages import PARTICIPANT, Branch, ProducerSequence, State
from txnbuffer.errors import AlreadyCommitted, InvalidRequest, NotVisible, TransactionAborted
from txnbuffer.model import TxnId


class Participant:
    """What this process writes for number `number` of producer `name`; at most `timeout` seconds before the commit."""

    def __init__(self, client: Client, name: str, number: int, timeout: float | None = None) -> None:
        self._client = client
        self._session: ClientSession  # from `begin` on, which opens it if need be
        self._naming = ProducerSequence(check_name(name, "a producer"), check_number(number), PARTICIPANT)
        self._timeout = check_timeout(timeout)
        self._open: OpenTransaction | None = None

    @property
    def id(self) -> TxnId:
        """Its own transaction id."""
        return self._begun().txn

    async def begin(self) -> None:
        """Begin; returns when the service knows it. Raises AlreadyCommitted if the number is, TransactionAborted."""
        session = self._session = await self._client.sessions.ready(self._naming.name)
        opened = self._open = session.core.begin(self._timeout, self._naming)
        await self._check(await session.result(lambda future: session.core.query(opened.txn, future)))

    async def send_batch(
        self, topic: str, records: Batch, batching: Batching | None = None, partition: int | None = None
    ) -> None:
        """Send records given as columns; waits only while the service takes no more.

        Raises MessageTooLarge, or why the share can only abort.
        """
        self._begun()
        client, session = self._client, self._session
        client.check_topic(topic)
        set_bytes = client.set_bytes(topic, batching)
        check_batch(records, client.max_message_bytes, in_sets=set_bytes > 0)
        for piece in split(records):
            for name, some in await client.split(topic, piece, partition):
                session.core.send_batch(name, some, self._usable(), set_bytes)
                session.poke()
            await client.room(session)

    async def finish(self) -> Branch:
        """Wait until all that was sent is durable, and kept for whoever commits; what the commit is to name.

        Nothing can be sent after that.
        """
        opened = self._usable()
        await self._check(
            await self._session.result(lambda future: self._end(opened, EndPlan(False, future, ready=True)))
        )
        return Branch(opened.txn, tuple(opened.counts), tuple(opened.counts.values()))

    async def abort(self) -> None:
        """Abort; returns when that is durable."""
        opened = self._begun()
        if not opened.ending:
            await self._session.result(lambda future: self._end(opened, EndPlan(False, future)))

    def _end(self, opened: OpenTransaction, plan: EndPlan) -> None:
        self._session.core.end(opened, plan)

    async def _check(self, state: object) -> None:
        """Raises why the share is not open any more."""
        opened = self._begun()
        if state is not State.OPEN and opened.failure is None:
            # By the time the service answers this it has told why it refused the share, if it did.
            await self._session.result(lambda future: self._end(opened, EndPlan(False, future)))
        if opened.failure is not None:
            raise opened.failure
        if state is not State.OPEN:
            raise TransactionAborted(opened.txn, "its time was up, or its number was committed without it")

    def _usable(self) -> OpenTransaction:
        opened = self._begun()
        self._session.check()
        if opened.failure is not None:
            raise opened.failure
        if opened.ending:
            raise InvalidRequest(f"share {opened.txn} has ended: begin another one")
        return opened

    def _begun(self) -> OpenTransaction:
        if self._open is None:
            raise InvalidRequest("the share was not begun: await begin()")
        return self._open


async def abort_shares(client: Client, shares: Sequence[Branch]) -> None:
    """Abort shares that others wrote; of those that have ended nothing changes."""
    for txn, topics, _ in shares:
        session = client.sessions.at(txn.most)
        await session.result(partial(session.core.abort_foreign, txn, topics))


async def commit_shares(client: Client, name: str, number: int, shares: Sequence[Branch]) -> bool:
    """Commit a number of a producer with these shares; False: it was committed before, by whatever shares.

    Waits until it is visible on all topics, two minutes at most. Raises TransactionAborted, after which nothing of
    it is visible, ProducerFenced, OutcomeUnknown, AlreadyCommitted if the last number is a higher one.
    """
    txn = client.transaction(name=name, number=number)
    try:
        await txn.begin()
        with contextlib.suppress(NotVisible):  # of a commit that stands
            await txn.commit(wait_visible=True, winners=shares)
    except AlreadyCommitted as done:
        if done.last > number:
            raise
        return False
    except Error:
        if txn.begun and not txn.over:
            await txn.abort()
        raise
    return True
