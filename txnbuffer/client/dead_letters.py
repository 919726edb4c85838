"""What becomes of a record that a group's handler fails on, where such records are put aside: a dead letter.

It has the record's key, value, properties and event time, and says in properties of its own where the record stood and
why it is here. A transaction's record has at most 997 properties, and records of others may have any number: of one
that has too many, those which come last by name stand in one property, as a JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from txnbuffer.client.outbox import Rows
from txnbuffer.client.records import Record
from txnbuffer.client.rows import many_rows

PACKED = "dead_letter_properties"
MOST, KEPT = 950, 900
"""Properties of a record that stay as they are; where it has more fewer do, so that a letter of its letter has room."""
ERROR_LENGTH = 1000
"""Characters of an error that a dead letter tells."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Records that the handler fails on go to this topic."""

    topic: str


def dead_letter(topic: str) -> DeadLetter:
    """For `on_error`: put records that the handler fails on into a topic, and go on.

    Each keeps its key, value, properties and event time, and gets the properties `dead_letter_topic`,
    `dead_letter_position`, `dead_letter_group`, `dead_letter_attempts` and `dead_letter_error`. Of a record with more
    than 950 properties some stand in `dead_letter_properties`, as a JSON object.
    """
    return DeadLetter(topic)


def letter_of(record: Record, group: str, attempts: int, error: Exception) -> Rows:
    """The dead letter of a record, after so many calls of the handler, the last of which raised `error`."""
    row = {
        **_bounded(record.properties),
        "dead_letter_topic": record.topic,
        "dead_letter_position": str(record.position),
        "dead_letter_group": group,
        "dead_letter_attempts": str(attempts),
        "dead_letter_error": _told(error),
    }
    rows = many_rows([record.value or b""], [record.key], [record.event_time], [row], None)
    return rows._replace(values=(None,)) if record.value is None else rows


def _bounded(properties: Mapping[str, str]) -> Mapping[str, str]:
    if len(properties) <= MOST:
        return properties
    kept = {name: properties[name] for name in sorted(properties.keys() - {PACKED})[:KEPT]}
    packed = {name: properties[name] for name in sorted(properties.keys() - kept.keys())}
    return kept | {PACKED: json.dumps(packed, separators=(",", ":"), ensure_ascii=False)}


def _told(error: Exception) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = f"{type(error).__name__}, which can't be told as text"
    return text[:ERROR_LENGTH].encode(errors="replace").decode()
