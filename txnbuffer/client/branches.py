"""Branches: one transaction of a named producer, written by many processes

Each process writes a branch of the transaction as a `Participant`, and one process commits all of them. A branch that
is not finished aborts when its session ends; a finished one remains until its timeout. The commit names the branches to
commit; all other branches of the same sequence number stay invisible, also those that are written later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

from broker_io.batch import Batch
from broker_io.errors import Error
from txnbuffer.checks import check_name, check_number, check_timeout
from txnbuffer.client.client import Client
from txnbuffer.client.path.record_path import EndPlan, OpenTransaction
from txnbuffer.client.path.send_columns import Batching, check_batch, split
from txnbuffer.client.session.session import ClientSession
from txnbuffer.coordinator.messages import PARTICIPANT, Branch, ProducerSequence, State
from txnbuffer.errors import AlreadyCommitted, InvalidRequest, NotVisible, TransactionAborted
from txnbuffer.model import TxnId
from txnbuffer.rpc.frames import Abort, Query


class Participant:
    """Writes one branch of transaction `number` of producer `name`.

    The service aborts the branch if it has not committed after `timeout` seconds; None: after `transactions.timeout`.
    """

    def __init__(self, client: Client, name: str, number: int, timeout: float | None = None) -> None:
        self._client = client
        self._session: ClientSession  # set by `begin`, which opens it if necessary
        self._sequence = ProducerSequence(check_name(name, "a producer"), check_number(number), PARTICIPANT)
        self._timeout = check_timeout(timeout)
        self._open: OpenTransaction | None = None

    @property
    def id(self) -> TxnId:
        """The transaction id of the branch."""
        return self._begun().txn

    async def begin(self) -> None:
        """Begin; return when the service has accepted the branch.

        Raises AlreadyCommitted if the number has committed, and TransactionAborted.
        """
        begun = await self._client.sessions.begin(self._sequence.name, self._timeout, self._sequence)
        session, opened = self._session, self._open = begun
        await self._check(await session.ask("queries", lambda number: Query(number, opened.txn)))

    async def send_batch(
        self, topic: str, records: Batch, batching: Batching | None = None, partition: int | None = None
    ) -> None:
        """Send records given as columns; waits only while too many bytes are unacknowledged.

        Raises MessageTooLarge. After any other error the branch can only abort.
        """
        self._begun()
        client, session = self._client, self._session
        client.check_topic(topic)
        set_bytes = client.set_bytes(topic, batching)
        check_batch(records, client.max_message_bytes, in_sets=set_bytes > 0)
        for piece in split(records):
            for name, which in await client.groups(topic, piece.keys, partition):
                some = piece if which is None else piece.take(which)
                session.core.send_batch(name, some, self._usable(), set_bytes)
            await session.wait_for_room()

    async def finish(self) -> Branch:
        """Wait until all records are durable; return the branch for `commit_branches`. Later sends are rejected."""
        opened = self._usable()
        session = self._session
        await self._check(await session.result(lambda future: session.end(opened, EndPlan(False, future, ready=True))))
        return Branch(opened.txn, tuple(opened.counts), tuple(opened.counts.values()))

    async def abort(self) -> None:
        """Abort; return when the abort is durable."""
        opened = self._begun()
        if not opened.ending:
            await self._session.result(lambda future: self._session.end(opened, EndPlan(False, future)))

    async def _check(self, state: object) -> None:
        """Raise the reason if the branch is not open any more."""
        opened = self._begun()
        if state is not State.OPEN and opened.failure is None:
            # If the service rejected the branch, its error arrives before this answer.
            await self._session.result(lambda future: self._session.end(opened, EndPlan(False, future)))
        if opened.failure is not None:
            raise opened.failure
        if state is not State.OPEN:
            raise TransactionAborted(opened.txn, "it timed out, or its number committed without it")

    def _usable(self) -> OpenTransaction:
        opened = self._begun()
        self._session.check()
        if opened.failure is not None:
            raise opened.failure
        if opened.ending:
            raise InvalidRequest(f"branch {opened.txn} has ended: begin a new one")
        return opened

    def _begun(self) -> OpenTransaction:
        if self._open is None:
            raise InvalidRequest("the branch has not begun: await begin()")
        return self._open


async def abort_branches(client: Client, branches: Sequence[Branch]) -> None:
    """Abort branches of other processes. Branches that have ended do not change."""
    for branch in branches:
        session = client.sessions.at(branch.txn.most)
        await session.ask("aborts", partial(Abort, txn=branch.txn, topics=branch.topics))


async def commit_branches(client: Client, name: str, number: int, branches: Sequence[Branch]) -> bool:
    """Commit transaction `number` of producer `name` with these branches; False if the number had already committed.

    Waits up to two minutes until its end is in all topics; readers may still wait for an older transaction. Raises
    TransactionAborted if nothing became visible, ProducerFenced, OutcomeUnknown, and AlreadyCommitted if a higher
    number has committed.
    """
    txn = client.transaction(name=name, number=number)
    try:
        await txn.begin()
        with contextlib.suppress(NotVisible):  # it has committed
            await txn.commit(wait_visible=True, winners=branches)
    except AlreadyCommitted as done:
        if done.last > number:
            raise
        return False
    except Error:
        if txn.begun and not txn.over:
            await txn.abort()
        raise
    return True
