"""How many messages of a writer go into one entry of the log.

The client library sends a batch when it is full, and by a timer. It looks at the configuration that a producer was
made with each time, so what is full can be set for each append: the last message of an append makes it so. It goes out
at once then, as one entry that holds all of it and nothing else; and only that last message is acknowledged, since its
place in the entry tells that all the others stand before it. An acknowledgement takes Python's lock several times over.

With many appends under way, or a large one, the library puts messages together as they come. It counts nothing but
payloads then, and fails with all of a batch that keys and properties make too large for an entry; so the more of them
messages have, the fewer may go into one.
"""

from __future__ import annotations

import _pulsar
import pulsar

from broker_io.batch import Batch
from broker_io.position import Position, Positions

PENDING_MESSAGES = 4000
BATCH_MESSAGES = 1000
BATCH_BYTES = 128 * 1024
BATCH_DELAY_MS = 1
ENTRIES = 4
"""Appends under way that are entries of their own; more of them go together."""

ALONE = (2, 0, BATCH_DELAY_MS)
"""Each message is full by itself. The library takes no number below 2."""
MESSAGE_ROOM, PROPERTY_ROOM = 64, 16
"""Bytes at most that an entry spends on a message, and on a property of it, besides their text."""
ENTRY_BYTES = 8 * 1024 * 1024
NEVER_MS = 60_000
"""An entry of its own is full long before; a process that is stopped in the middle of it for so long finds it split."""


class Batching:
    """`configuration` is what the producer has to be made with. Its writer's lock is held at each call.

    `limit`: bytes that a message may have at most; `entry_bytes`: those that messages may have that go together.
    `schema`: what the cluster is told that values are; None: bytes.
    """

    def __init__(
        self, mode: pulsar.ProducerAccessMode, limit: int, *, enabled: bool, schema: pulsar.schema.Schema | None = None
    ) -> None:
        self.enabled = enabled
        self._room = limit // 2  # payloads, and keys in base64, need some as well
        self.entry_bytes = min(BATCH_BYTES, self._room)
        self._unseen = Recent()
        self.configuration = made = _pulsar.ProducerConfiguration()
        made.schema((schema or pulsar.schema.BytesSchema()).schema_info())
        made.access_mode(mode)
        made.send_timeout_millis(0)
        made.block_if_queue_full(True)
        made.max_pending_messages(PENDING_MESSAGES)
        made.batching_enabled(enabled)
        # Compaction never drops deletes that are neither compressed nor batched.
        made.compression_type(pulsar.CompressionType.NONE if enabled else pulsar.CompressionType.LZ4)
        self._limits = (0, 0, 0)
        self._limit((BATCH_MESSAGES, self.entry_bytes, BATCH_DELAY_MS))

    def as_they_come(self, unseen: int, begun: int, done: int) -> None:
        """The next messages go with others, and each is acknowledged.

        `unseen`: what one of them has at most that the library doesn't count; `begun`, `done`: so many appends went
        this way before, and so many of those are acknowledged. What of the others waits in the library counts too.
        """
        fitting = min(BATCH_MESSAGES, self._room // max(self._unseen.peak(unseen, begun, done), 1))
        self._limit((fitting, self.entry_bytes, BATCH_DELAY_MS) if fitting > 1 else ALONE)

    def one_entry(self, messages: int) -> None:
        """The next so many messages are one entry; none may wait in the library for the timer."""
        # A batch of one can't be asked for by number, but one is full that may hold no bytes.
        self._limit((BATCH_MESSAGES, 0, NEVER_MS) if messages == 1 else (messages, ENTRY_BYTES, NEVER_MS))

    def _limit(self, limits: tuple[int, int, int]) -> None:
        if limits != self._limits:
            self._limits = limits
            messages, size, delay = limits
            self.configuration.batching_max_messages(messages)
            self.configuration.batching_max_allowed_size_in_bytes(size)
            self.configuration.batching_max_publish_delay_ms(delay)


class Recent:
    """The largest of some numbers that come in order, for those that are not done and some of those before."""

    def __init__(self) -> None:
        self._older = self._newer = self._split = 0

    def peak(self, number: int, begun: int, done: int) -> int:
        """With `number` as the next one; so many came before, and so many of them are done."""
        if done >= self._split:
            self._older, self._newer, self._split = self._newer, 0, begun
        self._newer = max(self._newer, number)
        return max(self._older, self._newer)


def measure(batch: Batch, about: int) -> tuple[int, int]:
    """Bytes of a batch, which is not empty, and the most that one message of it has and the library doesn't count.

    `about`: what `check_batch` says, which counts a text that many messages have once.
    """
    room = MESSAGE_ROOM + PROPERTY_ROOM * len(batch.properties)
    payloads = batch.values.lengths()
    if len(batch) == 1:
        return about, about - int(payloads[0]) + room
    sizes = batch.sizes()
    return int(sizes.sum()), int((sizes - payloads).max()) + room


def places_in_entry(last: Position, messages: int) -> Positions | None:
    """The places of all messages of an append that is an entry, by that of its last; None if it is not all of one."""
    if last.batch != messages - 1:
        return None
    return Positions.entry(last.ledger, last.entry, messages)
