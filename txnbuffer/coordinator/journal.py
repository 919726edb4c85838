"""The owner's appends to the decision log, in order, and what to call when they are durable"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from pyroaring import BitMap64

from broker_io.batch import Message
from txnbuffer.coordinator.decisions import (
    PROOF_KEY,
    Consumers,
    DecisionRows,
    Entry,
    Group,
    Name,
    NamedCommit,
    PositionCommit,
    Retired,
    Row,
    encode,
    tombstone,
)
from txnbuffer.coordinator.messages import AppendDecisions
from txnbuffer.coordinator.progress import bitmap_of
from txnbuffer.coordinator.sizes import FIXED, RETIRED, names_bytes, positions_bytes, rows_bytes, size_of
from txnbuffer.coordinator.transaction import GroupRecord, Retirement, TransactionState

OnDurable = Callable[[], None]
Decisions = Sequence[tuple[Row, TransactionState]]
GroupDurable = Callable[[GroupRecord, list[TransactionState], list[Retirement]], None]


class DecisionJournal:
    """Collects entries and decisions until `take` returns them as messages.

    Entries become durable in the order of the calls, so each may rely on all before it. Decisions are collected in
    groups. A group has at most `max_group` rows and topics, and its message at most `max_bytes`. `group_durable` is
    called for each group once it is durable; `now` is the time in seconds since 1970.
    """

    def __init__(
        self, epoch: int, next_group: int, max_group: int, max_bytes: int, group_durable: GroupDurable
    ) -> None:
        self._epoch = epoch
        self.next_group = next_group
        self._max_group = max_group
        self.max_bytes = max_bytes
        self._group_durable = group_durable
        self._messages: list[Message] = []
        self._callbacks: list[OnDurable] = []
        self._under_way: deque[tuple[int, list[OnDurable]]] = deque()
        self._token = 0
        self.now = 0.0
        self._start_group()

    def decide(
        self, decisions: Decisions, names: Sequence[NamedCommit] = (), positions: Sequence[PositionCommit] = ()
    ) -> int:
        """Write the decisions of one transaction into one group, together with the other changes by its commit.

        Returns the number of the group. Raises TooLarge, and decides nothing, if they don't fit into one group.
        """
        rows = [row for row, _ in decisions]
        size = sum([1 + len(row.topics) for row in rows])
        extra = names_bytes(names) + positions_bytes(positions)
        added = rows_bytes(rows, self._topics, self._rows[-1].least if self._rows else 0) + extra
        if self._bytes + added > self.max_bytes or self._size + size > self._max_group:
            self._seal()
            self._topics.clear()
            added = rows_bytes(rows, self._topics, 0) + extra
            if FIXED + added > self.max_bytes:
                self._check_fits(rows, names, positions)
        self._size += size
        self._bytes += added
        self._rows += rows
        self._transactions += [transaction for _, transaction in decisions]
        self._names += names
        self._positions += positions
        return self.next_group

    def abort(self, decisions: Decisions) -> None:
        """Write ABORT decisions, which always fit.

        Decisions that are too large for one group are written into several, a row that is too large without its
        topics: the buffers there query the outcome.
        """
        try:
            self.decide(decisions)
        except TooLarge:
            for row, transaction in decisions:
                try:
                    self.decide([(row, transaction)])
                except TooLarge:
                    self.decide([(row._replace(topics=(), records=()), transaction)])

    def retire(self, retirement: Retirement, blocks: Sequence[Retired]) -> None:
        """Abort unused ids, in at most `retired_blocks` blocks."""
        added = RETIRED * len(blocks)
        if self._bytes + added > self.max_bytes:
            self._seal()
        self._bytes += added
        self._retired += blocks
        self._retirements.append(retirement)

    def put(self, entry: Entry, on_durable: OnDurable | None = None) -> None:
        """Append an entry after all decisions so far; `on_durable` is called once it is durable."""
        self._seal()
        if isinstance(entry, Name | Consumers):
            entry = entry._replace(since=self.next_group)
        self._messages.append(encode(entry))
        if on_durable is not None:
            self._callbacks.append(on_durable)

    def forget(self, keys: Sequence[str]) -> None:
        """Delete keys from the log. What makes them obsolete must be durable."""
        self._seal()
        self._messages += map(tombstone, keys)

    def prove_ownership(self, on_durable: OnDurable) -> None:
        """Call `on_durable` once a new message is durable, which proves that the log had no newer owner."""
        self.forget([PROOF_KEY])
        self._callbacks.append(on_durable)

    def take(self) -> AppendDecisions | None:
        """The messages to append now."""
        self._seal()
        if not self._messages:
            return None
        self._token += 1
        append = AppendDecisions(self._token, tuple(self._messages))
        self._under_way.append((self._token, self._callbacks))
        self._messages, self._callbacks = [], []
        return append

    def durable(self, token: int) -> None:
        """All appends up to this one are durable, since the log keeps their order."""
        while self._under_way and self._under_way[0][0] <= token:
            _, callbacks = self._under_way.popleft()
            for callback in callbacks:
                callback()

    def _start_group(self) -> None:
        self._size, self._bytes = 0, FIXED
        self._topics: set[str] = set()
        self._rows: list[Row] = []
        self._transactions: list[TransactionState] = []
        self._names: list[NamedCommit] = []
        self._positions: list[PositionCommit] = []
        self._retired: list[Retired] = []
        self._retirements: list[Retirement] = []

    def _seal(self) -> None:
        """Close the group, so that later entries come after it."""
        if not (self._rows or self._retired):
            return
        group = self._group(self._rows, self._retired, self._names, self._positions)
        number = self.next_group
        self.next_group += 1
        transactions, retirements = self._transactions, self._retirements
        record = GroupRecord(number, self.now, ids_of(group), len(transactions))
        record.names = tuple(name for name, _ in self._names)
        record.consumers = tuple({commit.group: None for commit in self._positions})
        self._start_group()
        self._messages.append(encode(group))
        self._callbacks.append(lambda: self._group_durable(record, transactions, retirements))

    def _group(
        self,
        rows: Sequence[Row],
        retired: Sequence[Retired],
        names: Sequence[NamedCommit],
        positions: Sequence[PositionCommit],
    ) -> Group:
        now = int(self.now * 1000)
        return Group(self.next_group, self._epoch, now, tuple(rows), tuple(retired), tuple(names), tuple(positions))

    def _check_fits(
        self, rows: Sequence[Row], names: Sequence[NamedCommit], positions: Sequence[PositionCommit]
    ) -> None:
        """Raises TooLarge if a group of its own can't hold them; the sizes added up before are upper bounds."""
        size = size_of(encode(self._group(rows, (), names, positions)))
        if size > self.max_bytes:
            self._start_group()
            raise TooLarge(size)


class TooLarge(Exception):
    """The decisions of one transaction need a group of `size` bytes, which is above the limit."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} bytes")
        self.size = size


def ids_of(group: Group) -> BitMap64:
    """All ids that a group decides."""
    ids = bitmap_of(DecisionRows.of(group.rows).least)
    for first, count in group.retired:
        ids.add_range(first, first + count)
    return ids
