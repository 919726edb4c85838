"""The outer form of every message of the snapshot topic.

A message has the key of its entry (`snapshots.keys`) and three properties: `tb.v`, the format version
(1); `tb.kind`, one of `owner`, `part`, `spill`, `end`, `gone`; and `tb.epoch`, the epoch of the owner
that wrote it. Its value is one Avro record of the schema `<kind>-<version>` (a spill: plain bytes).
`gone` has no value: it deletes its key.

A message whose epoch is lower than that of an `owner` entry before it in the log was written by an
owner that had already lost the topic; it counts for nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from broker_io.batch import Message
from broker_io.position import Position
from snapshots.keys import OWNER_KEY
from snapshots.records import record

FORMAT_VERSION = "1"

VERSION_PROPERTY = "tb.v"
KIND_PROPERTY = "tb.kind"
EPOCH_PROPERTY = "tb.epoch"

OWNER = "owner"
PART = "part"
SPILL = "spill"
END = "end"
GONE = "gone"


class Stored(NamedTuple):
    """One entry as it stands in the topic; `value` is None once it is deleted.

    `version` and `kind` are the properties as found, `epoch` -1 where there was none to be read.
    """

    position: Position
    version: str
    kind: str
    epoch: int
    value: bytes | None


def message(key: bytes, kind: str, epoch: int, value: bytes | None) -> Message:
    properties = {VERSION_PROPERTY: FORMAT_VERSION, KIND_PROPERTY: kind, EPOCH_PROPERTY: str(epoch)}
    return Message(key, value, properties)


def gone(key: bytes, epoch: int) -> Message:
    return message(key, GONE, epoch, None)


def owner_message(epoch: int) -> Message:
    return message(OWNER_KEY, OWNER, epoch, record("owner-1", __package__).encode({"epoch": epoch}))
