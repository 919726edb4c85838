"""Writes a small embedded log with transactions and snapshots: `python tests/recovery/make_directory.py DIRECTORY`.

The directory in tests/golden/directory-v2 must stay readable. When a format changes on purpose, another directory is
added.
"""

from __future__ import annotations

import sys

from snapshot_driver import manager_on
from writing import TopicWriter

from broker_io.filelog.log import FileBroker
from snapshots.format import SNAPSHOT_TOPIC

TOPICS = ("orders", "orders-1")


def make(directory: str) -> None:
    with FileBroker.open(directory) as broker:
        owner = manager_on(broker, max_entry_bytes=1200)
        for topic in TOPICS:
            owner.register(topic)
            writer = TopicWriter(broker, topic)
            writer.plain("first", key="k")
            writer.records(100, "open", "still open")
            for txn in range(1, 21):
                writer.records(txn, f"value {txn}", key=f"key {txn}")
                (writer.abort if txn % 3 else writer.commit)(txn)
            writer.records(18, "late", first_seq=1)
            owner.pump()
            owner.snapshot(topic)
            broker.roll(topic)
            writer.commit(100)
            writer.records(30, None, key="k")
            writer.commit(30)
        broker.compact(SNAPSHOT_TOPIC)


if __name__ == "__main__":
    make(sys.argv[1])
