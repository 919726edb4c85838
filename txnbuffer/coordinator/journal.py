"""The owner's side of the decision log: what is to be appended, in order, and what waits for it."""

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
    """Entries land in the order in which they were put; what an entry says may rely on all before it.

    A group has at most `max_group` rows with all their topics, and `max_bytes`, what a message of the log may have.
    `group_durable` is told of each group of decisions once it is durable; `now` is the time in seconds since 1970.
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
        """Decisions that stand in one group, those of one transaction, and what it commits besides.

        Returns the number of the group. Raises TooLarge, and decides nothing, if they don't fit into one.
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
        """The same of ABORTs only, which always fit.

        What is too large stands in several groups, a row that is by itself without its topics: the buffers there ask.
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
        """Say ABORT of unused ids: of at most `retired_blocks` blocks."""
        added = RETIRED * len(blocks)
        if self._bytes + added > self.max_bytes:
            self._seal()
        self._bytes += added
        self._retired += blocks
        self._retirements.append(retirement)

    def put(self, entry: Entry, on_durable: OnDurable | None = None) -> None:
        """An entry of its own, behind all decisions so far; `then` is called once it is durable."""
        self._seal()
        if isinstance(entry, Name | Consumers):
            entry = entry._replace(since=self.next_group)
        self._messages.append(encode(entry))
        if on_durable is not None:
            self._callbacks.append(on_durable)

    def forget(self, keys: Sequence[str]) -> None:
        """Make the log forget keys; the reason why they may go must be durable."""
        self._seal()
        self._messages += map(tombstone, keys)

    def prove_ownership(self, on_durable: OnDurable) -> None:
        """Call `then` once something is durable behind all that was put: only the owner can write."""
        self.forget([PROOF_KEY])
        self._callbacks.append(on_durable)

    def take(self) -> AppendDecisions | None:
        """What is to be appended now."""
        self._seal()
        if not self._messages:
            return None
        self._token += 1
        append = AppendDecisions(self._token, tuple(self._messages))
        self._under_way.append((self._token, self._callbacks))
        self._messages, self._callbacks = [], []
        return append

    def durable(self, token: int) -> None:
        """All appends up to this one are durable: the log keeps their order."""
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
        """Close the group, so that what comes next stands behind it."""
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
        """Raises TooLarge for what has no place in a group of its own, whatever the bounds say."""
        size = size_of(encode(self._group(rows, (), names, positions)))
        if size > self.max_bytes:
            self._start_group()
            raise TooLarge(size)


class TooLarge(Exception):
    """Decisions that have to stand in one group, and are `size` bytes."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} bytes")
        self.size = size


def ids_of(group: Group) -> BitMap64:
    """All ids that a group decides."""
    ids = bitmap_of(DecisionRows.of(group.rows).least)
    for first, count in group.retired:
        ids.add_range(first, first + count)
    return ids
