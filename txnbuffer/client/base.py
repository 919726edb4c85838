"""What transactions and consumer groups use of a client: sessions, producer names, and checks of sends"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from broker_io.batch import Batch
from broker_io.port import Broker, check_topic_name
from txnbuffer.checks import check_name, check_txn
from txnbuffer.client import lifecycle
from txnbuffer.client.open_transactions import Field
from txnbuffer.client.outbox import BATCHINGS, Batching, SendColumns
from txnbuffer.client.reader import AsyncReader
from txnbuffer.client.routing import Routes, Start
from txnbuffer.client.serializers import Serializers
from txnbuffer.client.session import ClientSession, ShardSessions
from txnbuffer.client.writers import OrdinarySends
from txnbuffer.coordinator.messages import GroupHeartbeat, MemberAssignments, NameOpened, ProducerSequence
from txnbuffer.errors import AlreadyCommitted, InvalidRequest
from txnbuffer.model import Outcome, TxnId
from txnbuffer.recordset import SET_BYTES


class ProducerNames:
    """The producer names that a client has opened, with their epochs and last committed numbers.

    Opening a name fences its previous holder, which may be this client; so each name is opened once.
    """

    def __init__(self) -> None:
        self._opened: dict[str, NameOpened] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def sequence(self, name: str, number: int, open_name: Callable[[str], Awaitable[object]]) -> ProducerSequence:
        """Return the sequence of a transaction; open the name with `open_name` first if necessary.

        Raises AlreadyCommitted.
        """
        held = self._opened.get(name)
        if held is None:
            async with self._turns.setdefault(name, asyncio.Lock()):
                if name not in self._opened:
                    await open_name(name)
                held = self._opened[name]
        if number <= held.committed:
            raise AlreadyCommitted(name, number, held.committed)
        return ProducerSequence(name, number, held.epoch)

    def opened(self, name: str, opened: NameOpened) -> None:
        """A name was opened."""
        self._opened[name] = opened

    def committed(self, sequence: ProducerSequence) -> None:
        """A transaction of the name has committed."""
        held = self._opened.get(sequence.name)
        if held is not None and held.epoch == sequence.epoch:
            self._opened[sequence.name] = held._replace(committed=sequence.number)

    def lost(self, sequence: ProducerSequence) -> None:
        """Another producer has opened the name; the next use opens it again."""
        held = self._opened.get(sequence.name)
        if held is not None and held.epoch == sequence.epoch:
            del self._opened[sequence.name]

    def forget(self, name: str) -> None:
        """Release a name; the next use opens it again."""
        self._opened.pop(name, None)


class BaseClient:
    """The methods of `Client` that transactions, readers and consumer groups use. Most of them are internal."""

    def __init__(
        self,
        session: ClientSession,
        broker: Callable[[], Broker],
        serializers: Serializers | None,
        ordinary: OrdinarySends | None = None,
    ) -> None:
        """`ordinary` sends the non-transactional records of a client that writes to a cluster itself."""
        self.session = session
        self.sessions = ShardSessions(session)
        self.serializers = serializers or Serializers()
        self.batching: Batching = "messages"
        self.routes: Routes | None = None  # set if topics may have partitions
        self.open_broker = broker
        self.names = ProducerNames()
        self._ordinary = ordinary
        self._topics: set[str] = set()

    async def outcome(self, txn: TxnId | str) -> Outcome | None:
        """Return whether a transaction committed or aborted; None while it is open.

        Raises OutcomeForgotten, UnknownTransaction.
        """
        wanted = check_txn(txn)
        session = self.sessions.at(wanted.most)
        result = await session.result(lambda future: session.core.query(wanted, future))
        return result if isinstance(result, Outcome) else None

    async def committed_number(self, name: str) -> int:
        """Return the number of the last committed transaction of a named producer; 0 if there is none.

        This opens the name: open transactions under it, of this or any other client, can no longer commit.
        """
        opened: NameOpened = await self.ask("open_names", check_name(name, "a producer"))
        self.names.opened(name, opened)
        return opened.committed

    async def reader(
        self,
        topics: str | Sequence[str],
        *,
        start: Start | Mapping[str, Start] = "beginning",
        isolation: str = "read_committed",
    ) -> AsyncReader:
        """Return an asyncio reader of committed records. The arguments and errors are those of CommittedReader."""
        self.check()
        return await AsyncReader.open(self.open_broker, topics, start, isolation)

    async def sequence(self, name: str, number: int) -> ProducerSequence:
        """Return the sequence of a named transaction; its first use opens the name. Raises AlreadyCommitted."""
        return await self.names.sequence(name, number, self.committed_number)

    def check(self) -> None:
        """Raise the error that makes every request fail, if there is one."""
        if self._ordinary is None:
            self.session.check()
        else:
            lifecycle.check(self.session.forked_from)

    def check_topic(self, topic: str) -> None:
        """Raises InvalidTopicName."""
        if topic not in self._topics:
            self._topics.add(check_topic_name(topic))

    @property
    def max_message_bytes(self) -> int:
        """The size limit of a record in bytes; 0 while it is not known."""
        known = self.session.core.max_message_bytes
        if self._ordinary is None:
            return known
        own = self._ordinary.max_message_bytes
        return min(known, own) if known else own

    def batched(self, topic: str, rows: SendColumns, batching: Batching | None) -> SendColumns:
        """Return the rows with the size limit of their record sets set. Raises InvalidRequest."""
        set_bytes = self.set_bytes(topic, batching)
        return rows._replace(set_bytes=set_bytes) if set_bytes else rows

    def set_bytes(self, topic: str, batching: Batching | None) -> int:
        """Return the size limit of record sets in bytes, 0 for none. Raises InvalidRequest."""
        wanted = batching or self.batching
        if wanted not in BATCHINGS:
            raise InvalidRequest(f"batching must be 'messages' or 'records', got {wanted!r}")
        if wanted == "messages" or self._ordinary is None:  # the service of an embedded log packs records itself
            return 0
        self.serializers.check_sets(topic)
        return min(SET_BYTES, self.max_message_bytes)

    async def room(self, session: ClientSession) -> None:
        """Wait until the service of a session accepts more records."""
        while not session.core.has_room:
            await session.result(session.core.wait_for_room)

    def must_ask(self, topic: str, partition: int | None) -> bool:
        """Return whether `parts` waits for the cluster. Raises InvalidRequest."""
        if self.routes is not None:
            return not self.routes.known(topic, partition)
        if partition is not None:
            _check_unpartitioned(topic, partition)
        return False

    async def parts(self, topic: str, rows: SendColumns, partition: int | None) -> Sequence[tuple[str, SendColumns]]:
        """Return the rows grouped by the topic or partition to send them to. Raises InvalidRequest."""
        if self.routes is not None:
            return await self.routes.parts(topic, rows, partition)
        _check_unpartitioned(topic, partition)
        return ((topic, rows),)

    async def split(self, topic: str, records: Batch, partition: int | None) -> Sequence[tuple[str, Batch]]:
        """Return the records grouped by the topic or partition to send them to. Raises InvalidRequest."""
        if self.routes is not None:
            return await self.routes.split(topic, records, partition)
        _check_unpartitioned(topic, partition)
        return ((topic, records),)

    async def heartbeat(self, heartbeat: GroupHeartbeat) -> MemberAssignments:
        """Send the heartbeat of a group member; return its assignments."""
        assignments: MemberAssignments = await self.sessions.ask(
            heartbeat.group, lambda core, future: core.heartbeat(heartbeat, future)
        )
        return assignments

    async def ask(self, field: Field, name: str) -> Any:
        """Send a request about a producer or a group to its service. Raises the error in the answer."""
        return await self.sessions.ask(name, lambda core, future: core.ask(field, name, future))


def _check_unpartitioned(topic: str, partition: int | None) -> None:
    if partition is not None:
        raise InvalidRequest(f"topic {topic!r} has no partitions: cannot send to partition {partition}")
