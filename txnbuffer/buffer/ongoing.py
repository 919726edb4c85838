"""Transactions with a record in this log and no marker yet, and the oldest of them at once."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

import numpy as np

from broker_io.position import Position, Positions
from txnbuffer.buffer.state import NOWHERE, OngoingColumns
from txnbuffer.model import TxnId


class OpenTxn:
    """One ongoing transaction: where it began here, the real position before that, what was accepted of it."""

    __slots__ = ("accepted", "before", "ended", "first", "highest", "txn")

    def __init__(self, txn: TxnId, first: Position, before: Position | None, highest: int, accepted: int) -> None:
        self.txn = txn
        self.first = first
        self.before = before
        self.highest = highest
        self.accepted = accepted
        self.ended = False


class Ongoing:
    """The ongoing transactions of a topic.

    They open in log order and an ended one never opens again, so the oldest is the head of a queue from
    which ended ones are taken lazily.
    """

    __slots__ = ("_by_id", "_queue")

    def __init__(self) -> None:
        self._by_id: dict[TxnId, OpenTxn] = {}
        self._queue: deque[OpenTxn] = deque()

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, txn: TxnId) -> bool:
        return txn in self._by_id

    def __iter__(self) -> Iterator[OpenTxn]:
        """Oldest first."""
        return (entry for entry in self._queue if not entry.ended)

    def began_by(self, position: Position) -> Iterator[OpenTxn]:
        """Those whose first record stands at or below a position, oldest first."""
        return itertools.takewhile(lambda entry: entry.first <= position, self)

    def get(self, txn: TxnId) -> OpenTxn | None:
        return self._by_id.get(txn)

    def open(self, entry: OpenTxn) -> None:
        self._by_id[entry.txn] = entry
        self._queue.append(entry)

    def end(self, txn: TxnId) -> OpenTxn | None:
        """Take a transaction out; None if it was not in."""
        entry = self._by_id.pop(txn, None)
        if entry is not None:
            entry.ended = True
        return entry

    def tidy(self) -> None:
        """Give back the room of ended transactions behind one that stays open; to be called now and then."""
        if len(self._queue) > 2 * len(self._by_id) + 64:
            self._queue = deque(self)

    def oldest(self) -> OpenTxn | None:
        queue = self._queue
        while queue and queue[0].ended:
            queue.popleft()
        return queue[0] if queue else None

    def columns(self) -> OngoingColumns:
        entries = list(self)
        numbers = [(*entry.txn, entry.highest, entry.accepted) for entry in entries]
        most, least, highest, accepted = np.array(numbers, np.int64).reshape(-1, 4).T
        befores = [NOWHERE if entry.before is None else entry.before for entry in entries]
        firsts = Positions.of([entry.first for entry in entries])
        return OngoingColumns(most, least, firsts, Positions.of(befores), highest, accepted)

    @classmethod
    def of(cls, columns: OngoingColumns) -> Ongoing:
        ongoing = cls()
        ids = map(TxnId, columns.most.tolist(), columns.least.tolist())
        rest = (columns.firsts, columns.befores, columns.highest.tolist(), columns.accepted.tolist())
        for txn, first, before, highest, accepted in zip(ids, *rest, strict=True):
            ongoing.open(OpenTxn(txn, first, None if before == NOWHERE else before, highest, accepted))
        return ongoing
