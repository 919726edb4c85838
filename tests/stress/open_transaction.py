"""A client that begins a transaction, prints its id, and waits to be killed.

python tests/stress/open_transaction.py ADDRESS TOPIC
"""

from __future__ import annotations

import sys
import time

from txnbuffer import connect

if __name__ == "__main__":
    _, address, topic = sys.argv
    with connect(address) as client:
        txn = client.transaction(timeout=600.0).begin()
        txn.send(topic, b"of a client that is killed")
        time.sleep(3.0)  # until the client has announced the transaction to the service
        print(txn.id, flush=True)
        time.sleep(600.0)
