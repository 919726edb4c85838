"""Upper bounds of the sizes of decision log entries and markers, computed without encoding them

A sum of these bounds is never below the size that a broker counts for the message, and costs a few additions a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from broker_io.batch import Batch, Message
from txnbuffer.coordinator.decisions import Row

LARGEST_LIMIT = 5 * 1024 * 1024
SMALLEST_LIMIT = 4096
"""Any entry of a fixed number of fields fits into this many bytes, since names and keys are short."""

LONG = 10
"""The most bytes of a number."""
_PLACE = 5
"""The most bytes of a count, or of an index in a table."""

FIXED = 512
"""Key, properties, plain fields, and the counts and ends of all columns of a message."""
POSITION = 3 * LONG
RETIRED = 2 * LONG
MARKER_ITEM = 2 * LONG + 1


def text_bytes(text: str) -> int:
    return _PLACE + (len(text) if text.isascii() else len(text.encode()))


def long_bytes(number: int) -> int:
    """The bytes of a number, or of its negative."""
    return (number.bit_length() + 7) // 7


def rows_bytes(rows: Iterable[Row], known: set[str], least: int) -> int:
    """The bytes that rows add to a group with the `known` topics, whose last id is `least`; adds theirs to `known`."""
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
    """The size of a `consumers` entry with any positions on these topics."""
    return FIXED + 2 * text_bytes(group) + sum([text_bytes(topic) + POSITION for topic in topics])


def marker_items(limit: int) -> int:
    """The number of transactions that fit into a marker."""
    return (limit - FIXED) // MARKER_ITEM


def retired_blocks(limit: int) -> int:
    """The number of blocks of unused ids that fit into a group without decisions."""
    return (limit - FIXED) // RETIRED


def size_of(message: Message) -> int:
    """The size that a broker compares with its limit."""
    return int(Batch.of([message]).sizes()[0])
