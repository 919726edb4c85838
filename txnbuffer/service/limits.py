"""How much the service takes in before it makes its clients wait, and what it asks of messages."""

from __future__ import annotations

from dataclasses import dataclass

from broker_io.batch import Batch
from broker_io.port import MAX_MESSAGE_BYTES

MIB = 1024 * 1024
ROW_BYTES = 64
"""What a record costs in memory besides its bytes, about."""
CELL_BYTES = 8
"""What a record takes in a column of properties, at most, even where it lacks the property."""
MAX_PROPERTIES = 1000
"""Different property names in one append, as every broker takes them."""
SMALLEST_CREDIT = 64 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes: unacknowledged records of one client and of all, one message.

    `answers`: requests of one client whose answers it has not taken; beyond it nothing more is read from it.
    `create_topics`: topics are made on first use.
    """

    client_bytes: int = 8 * MIB
    total_bytes: int = 256 * MIB
    max_message_bytes: int = MAX_MESSAGE_BYTES
    answers: int = 200_000
    create_topics: bool = True

    def credits(self, clients: int) -> int:
        """What each of so many clients may have unacknowledged."""
        return max(min(self.client_bytes, self.total_bytes // max(clients, 1)), SMALLEST_CREDIT)


def weight(batch: Batch) -> int:
    """About the bytes that a batch holds in memory."""
    return len(batch.keys.data) + len(batch.values.data) + ROW_BYTES * len(batch)
