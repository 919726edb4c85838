"""What clients send is checked before it is appended: whose transaction, open, in order, of a size that can be.

What doesn't hold is refused for the transaction that it concerns, and nothing of that one is appended; the
rest of the send goes on.

What is appended: records that clients send, markers, borders, decisions; each knows whom to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from broker_io.batch import Batch, Labels, Message
from broker_io.errors import Error, InvalidMessage, MessageTooLarge
from txnbuffer.columns import numbers, texts_equal, transaction_codes
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import MAX_LEAST, PROTOCOL_VERSION, TxnId
from txnbuffer.protocol import SEQ, TXN, VERSION
from txnbuffer.service.connection import SessionConnection
from txnbuffer.service.limits import MAX_PROPERTIES, weight
from txnbuffer.service.topic import ServiceTopic

RESERVED = "tb."
TRANSACTIONAL = {VERSION, TXN, SEQ}


class WrittenTopics:
    """What a transaction has written: the last seq on its way to each topic. `failed`: why it can only abort."""

    __slots__ = ("failed", "seqs")

    def __init__(self) -> None:
        self.seqs: dict[str, int] = {}
        self.failed: Error | None = None


class CheckedSend(NamedTuple):
    """`batch` is what may be appended, None if that is nothing; `least` the transactions in it."""

    batch: Batch | None
    least: list[int]
    failures: list[tuple[TxnId | None, Error]]


class Sends:
    """`written`: by `least`, everything open that has written since this process began."""

    def __init__(self, coordinator: Coordinator, max_message_bytes: int) -> None:
        self.written: dict[int, WrittenTopics] = {}
        self._coordinator = coordinator
        self._limit = max_message_bytes

    def check(self, session: str, topic: ServiceTopic, batch: Batch) -> CheckedSend:
        """What of a send may be appended now."""
        try:
            self._check_messages(batch)
            reserved = {name for name in batch.properties if name.startswith(RESERVED)}
            if not reserved:
                return CheckedSend(batch, [], [])
            return self._check_transactions(session, topic, batch, reserved)
        except Error as error:
            return CheckedSend(None, [], [(None, error)])

    def adopt(self, txn: TxnId, topics: list[tuple[str, int]]) -> None:
        """An open transaction that wrote before this process began: the last seq in each topic."""
        written = self.written.setdefault(txn.least, WrittenTopics())
        for topic, seq in topics:
            written.seqs.setdefault(topic, seq)

    def topics_of(self, txn: TxnId) -> tuple[str, ...]:
        written = self.written.get(txn.least)
        return () if written is None else tuple(written.seqs)

    def under_way(self, topic: ServiceTopic, least: int, highest: int) -> bool:
        """Whether records of a transaction are on their way of which the buffer has the seqs up to `highest`."""
        written = self.written.get(least)
        return written is not None and written.failed is None and written.seqs.get(topic.name, 0) > highest

    def fail(self, least: list[int], error: Error) -> None:
        """Records of these were not appended."""
        for one in least:
            self.written.setdefault(one, WrittenTopics()).failed = error

    def sweep(self) -> None:
        """Forget what has ended."""
        has_ended = self._coordinator.has_ended
        for least in [least for least in self.written if has_ended(least)]:
            del self.written[least]

    def _check_messages(self, batch: Batch) -> None:
        if len(batch.properties) > MAX_PROPERTIES:
            raise InvalidMessage(
                f"a send with {len(batch.properties)} different properties: use at most {MAX_PROPERTIES}"
            )
        if _upper_bound(batch) <= self._limit:
            return
        sizes = batch.sizes()
        largest = int(sizes.argmax())
        if sizes[largest] > self._limit:
            raise MessageTooLarge(
                f"message {largest} of the send has {sizes[largest]} bytes, the limit is {self._limit}: split it; "
                "nothing of the send was appended"
            )

    def _check_transactions(self, session: str, topic: ServiceTopic, batch: Batch, reserved: set[str]) -> CheckedSend:
        count = len(batch)
        if reserved != TRANSACTIONAL:
            strange = ", ".join(sorted(reserved ^ TRANSACTIONAL))
            raise InvalidRequest(f"properties under {RESERVED} are the service's ({strange}): use other names")
        codes, table = transaction_codes(batch.properties[TXN], count)
        seqs = numbers(batch.properties[SEQ], count, MAX_LEAST)
        current = texts_equal(batch.properties[VERSION], count, str(PROTOCOL_VERSION))
        if not current.all() or int(seqs.min()) < 1 or int(codes.min()) < 0 or int(table.least[codes].min()) < 1:
            raise InvalidRequest(f"a send whose {VERSION}, {TXN} or {SEQ} can't be: all records of it need all three")
        if topic.followed is None:
            raise topic.refusal()
        begins = np.ones(count, np.bool_)
        begins[1:] = (codes[1:] != codes[:-1]) | (seqs[1:] != seqs[:-1] + 1)
        starts = np.flatnonzero(begins)
        sizes = np.diff(starts, append=count).tolist()
        rows = codes[starts]
        ids = map(TxnId, table.most[rows].tolist(), table.least[rows].tolist())
        runs = zip(ids, starts.tolist(), sizes, seqs[starts].tolist(), strict=True)
        return self._check_runs(session, topic, batch, [*runs])

    def _check_runs(
        self, session: str, topic: ServiceTopic, batch: Batch, runs: list[tuple[TxnId, int, int, int]]
    ) -> CheckedSend:
        """`runs`: transaction, first row, number of rows, first seq."""
        refusal, all_written, name = self._coordinator.refusal, self.written, topic.name
        dropped: list[tuple[int, int]] = []
        failures: dict[TxnId, Error] = {}
        accepted: list[int] = []
        for txn, start, size, seq in runs:
            least = txn.least
            error = refusal(session, txn)
            if error is None:
                written = all_written.get(least)
                if written is None:
                    written = all_written[least] = WrittenTopics()
                last = written.seqs.get(name, 0)
                known = last - seq + 1
                if written.failed is not None:
                    error = written.failed
                elif known < 0:
                    text = f"transaction {txn} sends record {seq} to {name!r} where {last + 1} is due: abort it"
                    error = written.failed = InvalidRequest(text)
                else:
                    if known > 0:
                        dropped.append((start, min(known, size)))
                    if known < size:
                        written.seqs[name] = seq + size - 1
                        accepted.append(least)
            if error is not None:
                failures[txn] = error
                dropped.append((start, size))
        if dropped:
            keep = np.ones(len(batch), np.bool_)
            for start, size in dropped:
                keep[start : start + size] = False
            batch = batch.take(keep)
        return CheckedSend(batch if len(batch) else None, accepted, [*failures.items()])


def _upper_bound(batch: Batch) -> int:
    """No message of the batch is larger than this; cheaper to tell than the sizes themselves."""
    bound = len(batch.keys.data) + len(batch.values.data)
    for name, column in batch.properties.items():
        longest = max(map(len, column.values), default=0) if isinstance(column, Labels) else 20
        bound += 4 * (len(name) + longest)
    return bound


class SendPart:
    """Records of a client. `least`: the transactions in them."""

    __slots__ = ("_account", "_connection", "_least", "_number", "_sends", "batch", "size")

    reserved = False

    def __init__(
        self,
        batch: Batch,
        connection: SessionConnection,
        number: int,
        least: list[int],
        sends: Sends,
        account: UnsettledSends,
    ) -> None:
        self.batch = batch
        self.size = weight(batch)
        self._connection = connection
        self._number = number
        self._least = least
        self._sends = sends
        self._account = account
        account.bytes += self.size
        connection.unsettled += self.size

    def acknowledged(self) -> None:
        self._account.bytes -= self.size
        self._account.records += len(self.batch)
        self._connection.settle(self._number, self.size)

    def failed(self, error: Error) -> None:
        self._account.bytes -= self.size
        self._sends.fail(self._least, error)
        self._connection.fail(self._number, error)
        self._connection.settle(self._number, self.size)


class UnsettledSends:
    """`bytes` of clients that are not settled; `records` of clients that were appended."""

    __slots__ = ("bytes", "records")

    def __init__(self) -> None:
        self.bytes = 0
        self.records = 0


class MessagesPart:
    """Messages of the service itself."""

    __slots__ = ("_acknowledged", "_failed", "batch", "size")

    reserved = True

    def __init__(
        self, messages: Sequence[Message], acknowledged: Callable[[], None], failed: Callable[[Error], None]
    ) -> None:
        self.batch = Batch.of(messages)
        self.size = weight(self.batch)
        self._acknowledged = acknowledged
        self._failed = failed

    def acknowledged(self) -> None:
        self._acknowledged()

    def failed(self, error: Error) -> None:
        self._failed(error)
