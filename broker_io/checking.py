"""What every backend refuses before it does anything: batches that can't be stored, compaction of data."""

from __future__ import annotations

import numpy as np

from broker_io.batch import Batch, Blobs, Labels, PropertyColumn
from broker_io.errors import InvalidMessage, MessageTooLarge, NotOffered
from broker_io.port import MAX_PROPERTIES

NUMBER_DIGITS = 20
"""What a property that is a number takes at most."""


OWN_PREFIX = "__txnbuffer"
"""What the names of topics begin with that hold no transactions, and so may be compacted."""


def check_compaction(topic: str, prefix: str) -> None:
    """Raises NotOffered for a topic of records: the newest of a key may be one that was aborted."""
    if not topic.startswith(prefix):
        raise NotOffered(
            f"topic {topic!r} can't be compacted, for compaction knows no transactions and could drop committed "
            f"records: only topics that begin with {prefix!r} are; to free space, trim it"
        )


def check_batch(batch: Batch, limit: int) -> int:
    """About the bytes of a batch. Raises MessageTooLarge or InvalidMessage; nothing of it was appended then."""
    count = len(batch)
    lengths = {len(batch.keys), *(len(column) for column in batch.properties.values())}
    if batch.event_times is not None:
        lengths.add(len(batch.event_times))
    if lengths != {count}:
        raise InvalidMessage(
            f"a batch whose columns have different lengths ({sorted(lengths | {count})}): make them one"
        )
    if len(batch.properties) > MAX_PROPERTIES:
        raise InvalidMessage(f"a batch with {len(batch.properties)} different properties: use at most {MAX_PROPERTIES}")
    largest, total = 0, 0
    for name, column in batch.properties.items():
        longest, size = _measure_property(name, column, count)
        largest += longest
        total += size
    for blobs in (batch.keys, batch.values):
        longest, size = _measure(blobs)
        largest += longest
        total += size + 4 * count
    if largest > limit:
        _check_sizes(batch, limit)
    return total


def _measure(blobs: Blobs) -> tuple[int, int]:
    """Bytes of the longest string and of all. Raises InvalidMessage if the offsets lie."""
    offsets = blobs.offsets
    first, last = int(offsets[0]), int(offsets[-1])
    shortest = longest = last - first
    if len(offsets) > 2:
        lengths = offsets[1:] - offsets[:-1]
        shortest, longest = int(lengths.min()), int(lengths.max())
    if first < 0 or shortest < 0 or last > len(blobs.data):
        raise InvalidMessage("a batch whose offsets do not fit its bytes: make them ascend from 0 to the length")
    return longest, last - first


def _measure_property(name: str, column: PropertyColumn, count: int) -> tuple[int, int]:
    """At least the bytes of the longest name with text, about those of all. Raises InvalidMessage for no Unicode."""
    labels = column.values if isinstance(column, Labels) else ()
    try:
        sizes = [len(label.encode()) for label in labels]
        named = len(name.encode())
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"property {name!r} holds text that is no Unicode ({error.reason}): mend it") from None
    if isinstance(column, Labels):
        return named + max(sizes, default=0), named + sum(sizes) + 4 * count
    return named + NUMBER_DIGITS, named + 8 * count


def _check_sizes(batch: Batch, limit: int) -> None:
    sizes = batch.sizes()
    index = int(np.argmax(sizes > limit))
    if sizes[index] > limit:
        raise MessageTooLarge(
            f"message {index} of the batch has {sizes[index]} bytes, more than the limit of {limit}: "
            "split it, or raise the limit of message bytes; nothing of the batch was appended"
        )
