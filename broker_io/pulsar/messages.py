"""Messages of the port as messages of Pulsar, and back.

key         `partition_key`, as in `broker_io.partitions`. No key: no partition key.
value       the payload; no value: the null value, which is Pulsar's delete
properties  the properties
event time  the event time, two's complement below 1970; none: none
replication to no other cluster: what is written here is about this log and no other

So messages of other programs are read as they are; a partition key that Java wrote as bytes is text in base64 here.
Ordering keys and names of producers are ignored. A message that was written with a schema has the version of that in
the property SCHEMA_VERSION.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import _pulsar
import numpy as np

from broker_io.batch import Batch, Blobs, Numbers, property_column
from broker_io.errors import Damaged, MessageTooLarge
from broker_io.partitions import PREFIX, key_of_text, key_to_text
from broker_io.port import SCHEMA_VERSION

_MASK = 2**64 - 1
_SIGN = 2**63
KEY_ROOM = 32 * 1024
"""Bytes above the limit that the second copy of a key may take: half of the room that is left for metadata."""


def encode_messages(batch: Batch, limit: int, *, batching: bool = False) -> list[Any]:
    """A checked batch as messages of Pulsar. Raises MessageTooLarge if the encoded key exceeds the limit."""
    keys = [None if key is None else key_to_text(key) for key in batch.keys.to_list()]
    _check_keys(batch, keys, limit)
    if batching:
        _check_twice(batch, keys, limit + KEY_ROOM)
    names = [*batch.properties]
    texts = [column.to_list() for column in batch.properties.values()]
    times = [0] * len(batch) if batch.event_times is None else batch.event_times.tolist()
    rows = zip(*texts, strict=True) if texts else [()] * len(batch)
    builder_of = _pulsar.MessageBuilder
    messages = []
    for key, value, time, row in zip(keys, batch.values.to_list(), times, rows, strict=True):
        builder = builder_of()
        builder.disable_replication(True)
        if value is None:
            builder.set_null_value()
        else:
            builder.content(value)
        if key is not None:
            builder.partition_key(key)
        if time:
            builder.event_timestamp(time & _MASK)
        for name, text in zip(names, row, strict=True):
            if text is not None:
                builder.property(name, text)
        messages.append(builder.build())
    return messages


def _check_keys(batch: Batch, keys: list[str | None], limit: int) -> None:
    for index, text in enumerate(keys):
        if text is not None and text.startswith(PREFIX):
            size = int(batch.take(slice(index, index + 1)).sizes()[0]) + len(text) - len(batch.keys[index] or b"")
            if size > limit:
                raise MessageTooLarge(
                    f"message {index} of the batch has {size} bytes with its key in base64, more than the limit of "
                    f"{limit}: split it; nothing of the batch was appended"
                )


def _check_twice(batch: Batch, keys: list[str | None], limit: int) -> None:
    """Check sizes with two keys: the library repeats the key of the first message, and resends rejected batches."""
    if max((len(text) for text in keys if text is not None), default=0) * 4 <= KEY_ROOM:
        return
    for index, (text, size) in enumerate(zip(keys, batch.sizes().tolist(), strict=True)):
        if text is not None:
            size += 2 * len(text.encode()) - len(batch.keys[index] or b"")
            if size > limit:
                raise MessageTooLarge(
                    f"message {index} of the batch has {size} bytes with its key, which is sent twice, more than the "
                    f"limit of {limit}: use a shorter key, or split it; nothing of the batch was appended"
                )


def properties_of(message: Any) -> Mapping[str, str] | None:
    """The properties of a message; None if one of them is not text."""
    try:
        found: Mapping[str, str] = message.properties()
    except UnicodeDecodeError:
        return None
    return found


def decode_messages(messages: Sequence[Any], properties: Sequence[Mapping[str, str] | None]) -> Batch:
    """Messages as columns, with the given properties. Raises Damaged for a key or property that is not text."""
    rows = [row for row in properties if row is not None]
    try:
        keys = [key_of_text(message.partition_key()) for message in messages]
    except UnicodeDecodeError:
        rows = []
    if len(rows) < len(messages):
        raise Damaged(_topic_of(messages), 0, "a key or property among these messages is not UTF-8")
    values = [None if message.has_null_value() else message.data() for message in messages]
    names = dict.fromkeys(name for row in rows if row for name in row)
    columns = {name: property_column([row.get(name) for row in rows]) for name in names}
    versions = np.array([message.int_schema_version() for message in messages], np.int64)
    if (versions >= 0).any():
        columns[SCHEMA_VERSION] = Numbers(versions, None if (versions >= 0).all() else versions >= 0)
    times = [message.event_timestamp() for message in messages]
    return Batch(
        Blobs.of(keys),
        Blobs.of(values),
        columns,
        np.array([time - 2 * _SIGN if time >= _SIGN else time for time in times], np.int64) if any(times) else None,
    )


def _topic_of(messages: Sequence[Any]) -> str:
    first = messages[0].message_id()
    return f"{messages[0].topic_name()} from {first.ledger_id()}:{first.entry_id()}"


def is_hole(message: Any) -> bool:
    """Whether this is only the placeholder of a message of a batch that compaction dropped."""
    return not (message.partition_key() or message.length() or message.has_null_value() or message.properties())
