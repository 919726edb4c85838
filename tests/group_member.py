"""A group member as a process, to be killed: it copies the records that it gets, with their positions."""

from __future__ import annotations

import json
import signal
import sys
import time
from contextlib import closing

from txnbuffer import Record, ServiceUnavailable, SyncClient, SyncTransaction, connect

GROUP, DONE = "flights-done", "done"
MAX_WAIT = 60.0


def copy(txn: SyncTransaction, record: Record) -> None:
    if record.value is not None:
        place = {"from": record.topic, "at": str(record.position)}
        txn.send(DONE, record.value.swapcase(), key=record.key, properties=place)


def main(address: str, options: str, *topics: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with closing(connected(address, json.loads(options))) as client:
        client.process(topics, GROUP, copy, batch=25)


def connected(address: str, options: dict[str, str]) -> SyncClient:
    """Connect to the service, which may be restarting."""
    give_up = time.monotonic() + MAX_WAIT
    while True:
        try:
            return connect(address, broker_options=options or None).open_sync()
        except ServiceUnavailable:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    main(*sys.argv[1:])
