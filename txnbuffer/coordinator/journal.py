"""The owner's side of the decision log: what is to be appended, in order, and what waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from pyroaring import BitMap64

from broker_io.batch import Message
from txnbuffer.coordinator.entries import (
    PROOF_KEY,
    Consumers,
    Entry,
    Group,
    Name,
    NamedCommit,
    PositionCommit,
    Retired,
    encode,
    tombstone,
)
from txnbuffer.coordinator.ids import bitmap_of
from txnbuffer.coordinator.messages import AppendDecisions
from txnbuffer.coordinator.rows import Row, Rows
from txnbuffer.coordinator.transaction import GroupRecord, Retirement, Transaction

Then = Callable[[], None]
GroupDurable = Callable[[GroupRecord, list[Transaction], list[Retirement]], None]


class Journal:
    """Entries land in the order in which they were put; what an entry says may rely on all before it.

    `group_durable` is told of each group of decisions once it is durable; `now` is the time in seconds since 1970.
    """

    def __init__(self, epoch: int, next_group: int, max_group: int, group_durable: GroupDurable) -> None:
        self._epoch = epoch
        self.next_group = next_group
        self._max_group = max_group
        self._group_durable = group_durable
        self._messages: list[Message] = []
        self._thens: list[Then] = []
        self._under_way: deque[tuple[int, list[Then]]] = deque()
        self._token = 0
        self.now = 0.0
        self._start_group()

    def decide(self, rows: Sequence[tuple[Row, Transaction]]) -> None:
        """Decisions that stand in one group: those of one transaction."""
        size = sum(1 + len(row.topics) for row, _ in rows)
        if self._rows and self._size + size > self._max_group:
            self._seal()
        self._size += size
        for row, transaction in rows:
            self._rows.append(row)
            self._transactions.append(transaction)

    def commit_number(self, name: str, number: int) -> int:
        """The transaction just decided is this number of the name; returns the number of its group."""
        self._names.append(NamedCommit(name, number))
        return self.next_group

    def commit_positions(self, positions: Sequence[PositionCommit]) -> int:
        """The transaction just decided consumed up to these; returns the number of its group."""
        self._positions += positions
        return self.next_group

    def retire(self, retirement: Retirement, blocks: Sequence[Retired]) -> None:
        """Say ABORT of unused ids."""
        self._retired += blocks
        self._retirements.append(retirement)

    def put(self, entry: Entry, then: Then | None = None) -> None:
        """An entry of its own, behind all decisions so far; `then` is called once it is durable."""
        self._seal()
        if isinstance(entry, Name | Consumers):
            entry = entry._replace(since=self.next_group)
        self._messages.append(encode(entry))
        if then is not None:
            self._thens.append(then)

    def forget(self, keys: Sequence[str]) -> None:
        """Make the log forget keys; the reason why they may go must be durable."""
        self._seal()
        self._messages += map(tombstone, keys)

    def prove(self, then: Then) -> None:
        """Call `then` once something is durable behind all that was put: only the owner can write."""
        self.forget([PROOF_KEY])
        self._thens.append(then)

    def take(self) -> AppendDecisions | None:
        """What is to be appended now."""
        self._seal()
        if not self._messages:
            return None
        self._token += 1
        append = AppendDecisions(self._token, tuple(self._messages))
        self._under_way.append((self._token, self._thens))
        self._messages, self._thens = [], []
        return append

    def durable(self, token: int) -> None:
        """All appends up to this one are durable: the log keeps their order."""
        while self._under_way and self._under_way[0][0] <= token:
            _, thens = self._under_way.popleft()
            for then in thens:
                then()

    def _start_group(self) -> None:
        self._size = 0
        self._rows: list[Row] = []
        self._transactions: list[Transaction] = []
        self._names: list[NamedCommit] = []
        self._positions: list[PositionCommit] = []
        self._retired: list[Retired] = []
        self._retirements: list[Retirement] = []

    def _seal(self) -> None:
        """Close the group, so that what comes next stands behind it."""
        if not (self._rows or self._retired):
            return
        number = self.next_group
        self.next_group += 1
        group = Group(
            number,
            self._epoch,
            int(self.now * 1000),
            tuple(self._rows),
            tuple(self._retired),
            tuple(self._names),
            tuple(self._positions),
        )
        transactions, retirements = self._transactions, self._retirements
        record = GroupRecord(number, self.now, ids_of(group), len(transactions))
        record.names = tuple(name for name, _ in self._names)
        record.consumers = tuple({commit.group: None for commit in self._positions})
        self._start_group()
        self._messages.append(encode(group))
        self._thens.append(lambda: self._group_durable(record, transactions, retirements))


def ids_of(group: Group) -> BitMap64:
    """All ids that a group decides."""
    ids = bitmap_of(Rows.of(group.rows).least)
    for first, count in group.retired:
        ids.add_range(first, first + count)
    return ids
