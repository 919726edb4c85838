"""What transactions, readers and consumer groups use of the asyncio client"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from broker_io.batch import Blobs
from broker_io.port import Broker
from txnbuffer.checks import check_name, check_txn
from txnbuffer.client import lifecycle
from txnbuffer.client.path.routing import Groups, Routes
from txnbuffer.client.path.send_columns import (
    BATCHINGS,
    Batching,
    SendColumns,
    check_size,
)
from txnbuffer.client.path.writers import OrdinarySends
from txnbuffer.client.producer_names import ProducerNames
from txnbuffer.client.reading.async_reader import AsyncReader
from txnbuffer.client.reading.reader import EndsBy, read_table, unknown_end
from txnbuffer.client.reading.records import Decode
from txnbuffer.client.reading.starts import Isolation, Start, Until
from txnbuffer.client.serializers import Deserializers, Serializer, Serializers
from txnbuffer.client.session.session import CLOSED, ClientSession, ShardSessions
from txnbuffer.client.topic_names import check_target
from txnbuffer.coordinator.messages import (
    GroupHeartbeat,
    MemberAssignments,
    NameOpened,
)
from txnbuffer.errors import (
    Error,
    InvalidRequest,
)
from txnbuffer.model import Outcome, TxnId
from txnbuffer.recordset import SET_BYTES
from txnbuffer.rpc.frames import NamedRequest, Query

if TYPE_CHECKING:
    import pyarrow as pa


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
        self.deserializers = Deserializers()
        self.batching: Batching = "messages"
        self.routes: Routes | None = None  # set if topics may have partitions
        self.open_broker = broker
        self.names = ProducerNames()
        self._ordinary = ordinary
        self._topics: set[str] = set()
        self.closed = False
        self.ends_by: EndsBy = unknown_end
        self.address = ""
        self.refusal: Error | None = None  # why a read-only client makes no other requests

    def describe(self) -> str:
        """What the client is connected to, and its state, for `repr`."""
        if self.closed:
            state = "closed"
        elif self.refusal is not None:
            state = "read-only"
        else:
            count = self.sessions.open_transactions
            state = f"{count or 'no'} open transaction{'' if count == 1 else 's'}"
        return f"of {self.address or 'a log'}, {state}"

    async def outcome(self, txn: TxnId | str) -> Outcome | None:
        """Return whether a transaction committed or aborted; None while it is open.

        Raises OutcomeForgotten, UnknownTransaction.
        """
        wanted = check_txn(txn)
        result = await self.sessions.at(wanted.most).ask("queries", lambda number: Query(number, wanted))
        return result if isinstance(result, Outcome) else None

    async def committed_number(self, name: str) -> int:
        """Return the number of the last committed transaction of a named producer; 0 if there is none.

        This opens the name: open transactions under it, of this or any other client, can no longer commit.
        """
        session = self.sessions.of(check_name(name, "a producer"))
        opened: NameOpened = await session.ask("open_names", lambda number: NamedRequest(number, name))
        self.names.opened(name, opened)
        return opened.committed

    async def reader(
        self,
        topics: str | Sequence[str],
        *,
        start: Start | Mapping[str, Start] = "beginning",
        until: Until | Mapping[str, Until] | None = None,
        isolation: Isolation = "read_committed",
        wait: bool = False,
    ) -> AsyncReader:
        """Return an asyncio reader of committed records. The arguments and errors are those of CommittedReader."""
        self.check_readable()
        reader = await AsyncReader.open(
            self.open_broker, topics, start, until, isolation, self.deserializers, wait=wait
        )
        reader.use(self.ends_by)
        return reader

    async def read_table(
        self,
        topics: str | Sequence[str],
        *,
        columns: Sequence[str] | None = None,
        start: Start | Mapping[str, Start] = "beginning",
        until: Until | Mapping[str, Until] = "now",
        decode: Decode | None = None,
    ) -> pa.Table:
        """Return the committed records of topics as an Arrow table, as `SyncClient.read_table`, in another thread."""
        self.check_readable()
        return await asyncio.to_thread(
            read_table, self.open_broker, topics, columns, start, until, decode, self.deserializers
        )

    def check_open(self) -> None:
        """Raises InvalidRequest once the client is closed."""
        if self.closed:
            raise InvalidRequest(CLOSED)

    def check(self) -> None:
        """Raise the error that makes every request fail, if there is one."""
        self.check_open()
        if self._ordinary is None:
            self.session.check()
        else:
            lifecycle.check(self.session.forked_from)

    def check_readable(self) -> None:
        """Raise the error that prevents reading, if there is one. A read-only client can always read."""
        if self.refusal is None:
            self.check()
            return
        self.check_open()
        lifecycle.check(self.session.forked_from)

    def check_writable(self) -> None:
        """Raises ReadOnly if the client is read-only, and InvalidRequest once it is closed."""
        self.check_open()
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)

    def check_topic(self, topic: str) -> None:
        """Raises InvalidTopicName, also for an internal topic."""
        self._topics.add(check_target(topic))

    @property
    def max_message_bytes(self) -> int:
        """The size limit of a record in bytes; 0 while it is not known."""
        known = self.session.core.max_message_bytes
        if self._ordinary is None:
            return known
        own = self._ordinary.max_message_bytes
        return min(known, own) if known else own

    async def serializer_of(self, topic: str, given: Serializer | None) -> Serializer | None:
        """Return the serializer for a value of a topic, as `Serializers.of`, without blocking the event loop."""
        if given is None and not self.serializers.has_any:
            return None
        if self.serializers.must_load(topic, given):
            await asyncio.to_thread(self.serializers.of, topic, given)
        return self.serializers.of(topic, given)

    def checked(self, topic: str, rows: SendColumns, batching: Batching | None, extra: int = 0) -> SendColumns:
        """Return the rows with the size limit of their record sets set; each of them gets `extra` bytes more.

        Raises InvalidTopicName, InvalidRequest and MessageTooLarge.
        """
        if type(topic) is not str or topic not in self._topics:
            self.check_topic(topic)
        if (batching is not None or self._ordinary is not None) and (set_bytes := self.set_bytes(topic, batching)):
            rows = rows._replace(set_bytes=set_bytes)
        limit = self.session.core.max_message_bytes if self._ordinary is None else self.max_message_bytes
        if rows.size + extra > limit or rows.set_bytes:
            check_size(rows, limit, extra)
        return rows

    def set_bytes(self, topic: str, batching: Batching | None) -> int:
        """Return the size limit of record sets in bytes, 0 for none. Raises InvalidRequest."""
        wanted = batching or self.batching
        if wanted not in BATCHINGS:
            raise InvalidRequest(f"batching must be 'messages' or 'records', got {wanted!r}")
        if wanted == "messages" or self._ordinary is None:  # the service of an embedded log packs records itself
            return 0
        self.serializers.check_sets(topic)
        return min(SET_BYTES, self.max_message_bytes)

    def must_ask(self, topic: str, partition: int | None) -> bool:
        """Return whether `groups` waits for the cluster. Raises InvalidRequest."""
        if self.routes is not None:
            return not self.routes.known(topic, partition)
        if partition is not None:
            _check_unpartitioned(topic, partition)
        return False

    async def groups(self, topic: str, keys: Sequence[bytes | None] | Blobs, partition: int | None) -> Groups:
        """Return the topics or partitions to send records with these keys to. Raises InvalidRequest."""
        if self.routes is not None:
            return await self.routes.groups(topic, keys, partition)
        if partition is not None:
            _check_unpartitioned(topic, partition)
        return ((topic, None),)

    async def heartbeat(self, heartbeat: GroupHeartbeat) -> MemberAssignments:
        """Send the heartbeat of a group member; return its assignments."""
        session = self.sessions.of(heartbeat.group)
        answer: MemberAssignments = await session.ask("members", lambda number: heartbeat._replace(request=number))
        return answer


def _check_unpartitioned(topic: str, partition: int | None) -> None:
    if partition is not None:
        raise InvalidRequest(f"topic {topic!r} has no partitions: cannot send to partition {partition}")
