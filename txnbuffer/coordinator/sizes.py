"""How many bytes entries of the decision log and markers take at most, told without making them.

These are bounds, not sizes: whoever adds up what a message will hold must never be below its size as brokers count it,
and must not pay for more than a few additions a row. `LONG` is what any whole number takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from broker_io.batch import Batch, Message
from txnbuffer.coordinator.decisions import Row

LARGEST_LIMIT = 5 * 1024 * 1024
SMALLEST_LIMIT = 4096
"""Names and keys are short enough that every entry which doesn't grow fits into so many bytes."""

LONG = 10
_PLACE = 5
"""A count, or a place in a table."""

FIXED = 512
"""Key, properties, plain fields, and the counts and ends of all columns of a message."""
POSITION = 3 * LONG
RETIRED = 2 * LONG
MARKER_ITEM = 2 * LONG + 1


def text_bytes(text: str) -> int:
    return _PLACE + (len(text) if text.isascii() else len(text.encode()))


def long_bytes(number: int) -> int:
    """What a number takes, and its negative."""
    return (number.bit_length() + 7) // 7


def rows_bytes(rows: Iterable[Row], known: set[str], least: int) -> int:
    """What rows add to a group that has the `known` topics, and ends with the id `least`; theirs are known then."""
    total = 0
    for row in rows:
        topics = row.topics
        for topic in topics:
            if topic not in known:
                known.add(topic)
                total += text_bytes(topic)
        each = long_bytes(len(known)) + long_bytes(max(row.records, default=0))
        total += 1 + long_bytes(row.least - least) + long_bytes(len(topics)) + each * len(topics)
        least = row.least
    return total


def names_bytes(commits: Iterable[tuple[str, int]]) -> int:
    return sum([text_bytes(name) + LONG for name, _ in commits])


def positions_bytes(commits: Sequence[tuple[str, str, object]]) -> int:
    return sum([text_bytes(group) + text_bytes(topic) + POSITION for group, topic, _ in commits])


def consumers_bytes(group: str, topics: Iterable[str]) -> int:
    """A `consumers` entry with positions on these topics, wherever they are."""
    return FIXED + 2 * text_bytes(group) + sum([text_bytes(topic) + POSITION for topic in topics])


def marker_items(limit: int) -> int:
    """So many transactions fit into a marker."""
    return (limit - FIXED) // MARKER_ITEM


def retired_blocks(limit: int) -> int:
    """So many blocks of unused ids fit into a group that has nothing else."""
    return (limit - FIXED) // RETIRED


def size_of(message: Message) -> int:
    """What a broker holds against its limit."""
    return int(Batch.of([message]).sizes()[0])
