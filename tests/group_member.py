"""A member of a group in a process of its own: copies what it is given, and says where it stood. To be killed."""

from __future__ import annotations

import json
import signal
import sys

from txnbuffer import PlainTransaction, Record, connect

GROUP, DONE = "flights-done", "done"


def copy(txn: PlainTransaction, record: Record) -> None:
    if record.value is not None:
        place = {"from": record.topic, "at": str(record.position)}
        txn.send(DONE, record.value.swapcase(), key=record.key, properties=place)


def main(address: str, options: str, *topics: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with connect(address, broker_options=json.loads(options) or None) as client:
        client.process(topics, GROUP, copy, batch=25)


if __name__ == "__main__":
    main(*sys.argv[1:])
