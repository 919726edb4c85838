"""Limits on memory, on messages and on requests in flight, beyond which clients have to wait.

A client waits in `client.sending` while its credits are used up; the service stops reading from a client over its limit
in `service.connection`. On a cluster records do not pass through the service: `client.direct_link` has a constant.
"""

from __future__ import annotations

from dataclasses import dataclass

from broker_io.batch import Batch
from broker_io.port import MAX_MESSAGE_BYTES

MIB = 1024 * 1024
ROW_BYTES = 64
"""Approximate memory of a record in addition to its bytes."""
CELL_BYTES = 8
"""Maximum memory of a record in a property column, even if it lacks the property."""
SMALLEST_CREDIT = 64 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes: unacknowledged records of one client and of all clients, and one message.

    `answers`: answers that one client has not read; beyond it the service stops reading from that client.
    `create_topics`: create topics on first use.
    """

    client_bytes: int = 8 * MIB
    total_bytes: int = 256 * MIB
    max_message_bytes: int = MAX_MESSAGE_BYTES
    answers: int = 200_000
    create_topics: bool = True

    def credits(self, clients: int) -> int:
        """Bytes that each of `clients` clients may have unacknowledged."""
        return max(min(self.client_bytes, self.total_bytes // max(clients, 1)), SMALLEST_CREDIT)


def weight(batch: Batch) -> int:
    """Approximate memory of a batch in bytes."""
    return len(batch.keys.data) + len(batch.values.data) + ROW_BYTES * len(batch)
