"""Positions of messages in the log of a topic."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Int64s: TypeAlias = NDArray[np.int64]
T = TypeVar("T", bound=tuple[Any, ...])


def maker(kind: type[T]) -> Callable[[tuple[Any, ...]], T]:
    """Make a NamedTuple of the tuple of all its fields: in C, while its own constructors are Python functions."""
    return cast(Callable[[tuple[Any, ...]], T], partial(tuple.__new__, kind))


NO_INDEX = -1
"""The batch index of a message that is not part of a record set."""
LEDGERS_OF_A_HISTORY = 2**20
"""A log that was restored from an older copy continues each topic in a ledger whose number is a multiple of this, so
that no position of the lost history comes back."""


class Position(NamedTuple):
    """`(ledger, entry, batch)`, ordered; printed and parsed as `ledger:entry` or `ledger:entry:batch`.

    In the embedded log a ledger is a segment and an entry is a message of it. `batch` is the index of a record in its
    message, and -1 if the message is one record.
    """

    ledger: int
    entry: int
    batch: int = NO_INDEX

    def __str__(self) -> str:
        text = f"{self.ledger}:{self.entry}"
        return text if self.batch == NO_INDEX else f"{text}:{self.batch}"

    @classmethod
    def parse(cls, text: str) -> Position:
        """Parse the output of `str`. Raises ValueError that quotes the text."""
        parts = text.split(":") if isinstance(text, str) else []
        try:
            if len(parts) not in (2, 3):
                raise ValueError
            return cls(*map(int, parts))
        except ValueError:
            raise ValueError(f"{text!r} is not a position: write ledger:entry or ledger:entry:batch") from None


as_position = maker(Position)

EARLIEST = Position(-1, -1, -1)
"""Below every message; a reader that starts here reads the whole log."""

LATEST = Position(2**63 - 1, 2**63 - 1, -1)
"""Above every message."""


def before_ledger(ledger: int) -> Position:
    """The position after which the messages of a ledger begin."""
    return Position(ledger, -1)


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """Ascending positions as three columns of one length.

    `published` is the publish time of all of them, in milliseconds since 1970; 0 if it is unknown or differs.
    """

    ledgers: Int64s
    entries: Int64s
    indexes: Int64s
    published: int = 0

    @classmethod
    def consecutive(cls, ledger: int, first_entry: int, count: int, published: int = 0) -> Positions:
        """`count` consecutive single messages of one ledger."""
        ledgers, indexes = np.empty((2, count), np.int64)
        ledgers.fill(ledger)
        indexes.fill(NO_INDEX)
        return cls(ledgers, np.arange(first_entry, first_entry + count, dtype=np.int64), indexes, published)

    @classmethod
    def entry(cls, ledger: int, entry: int, count: int) -> Positions:
        """The `count` records of one record set."""
        return cls(np.full(count, ledger, np.int64), np.full(count, entry, np.int64), np.arange(count, dtype=np.int64))

    @classmethod
    def of(cls, positions: list[Position]) -> Positions:
        flat = itertools.chain.from_iterable(positions)
        columns = np.fromiter(flat, np.int64, 3 * len(positions)).reshape(-1, 3).T
        return cls(columns[0].copy(), columns[1].copy(), columns[2].copy())

    @classmethod
    def concat(cls, parts: Sequence[Positions]) -> Positions:
        """The positions of all parts; `published` is known if it is the same for all."""
        if len(parts) == 1:
            return parts[0]
        published = {part.published for part in parts}
        return cls(
            np.concatenate([part.ledgers for part in parts]),
            np.concatenate([part.entries for part in parts]),
            np.concatenate([part.indexes for part in parts]),
            published.pop() if len(published) == 1 else 0,
        )

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Position:
        return as_position((self.ledgers.item(index), self.entries.item(index), self.indexes.item(index)))

    def __iter__(self) -> Iterator[Position]:
        return map(as_position, zip(self.ledgers.tolist(), self.entries.tolist(), self.indexes.tolist(), strict=True))

    def take(self, which: NDArray[np.bool_] | NDArray[np.intp] | slice) -> Positions:
        """The positions that a mask, an index column or a slice selects."""
        return Positions(self.ledgers[which], self.entries[which], self.indexes[which], self.published)

    def search(self, position: Position, *, right: bool = False) -> int:
        """The number of positions before `position` (`right`: before or at it)."""
        return (bisect.bisect_right if right else bisect.bisect_left)(self, position)

    @property
    def first(self) -> Position:
        return as_position((self.ledgers.item(0), self.entries.item(0), self.indexes.item(0)))

    @property
    def last(self) -> Position:
        return as_position((self.ledgers.item(-1), self.entries.item(-1), self.indexes.item(-1)))
