"""Plain consumers of a topic with Pulsar's Python client, with the arguments and the output of PlainConsumer.java.

Calls have a timeout: without one, the client library returned messages of one batch in another order at times.
"""

from __future__ import annotations

import base64
import contextlib
import os
import sys
import threading
from typing import Any

import pulsar

WAIT = 10_000
"""Milliseconds."""
printing = threading.Lock()


def show(kind: str, message: Any) -> None:
    place = message.message_id()
    words = [kind, f"{place.ledger_id()}:{place.entry_id()}:{place.batch_index()}"]
    words += [base64.b64encode(part).decode() for part in ((message.partition_key() or "").encode(), message.data())]
    with printing:
        print(*words, sep="\t", flush=True)


def read(client: pulsar.Client, topic: str) -> None:
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    while True:
        with contextlib.suppress(pulsar.Timeout):
            show("reader", reader.read_next(WAIT))


def consume(client: pulsar.Client, topic: str, kind: str) -> None:
    consumer = client.subscribe(
        topic, f"python-{kind}", consumer_type=getattr(pulsar.ConsumerType, kind.replace("_", "")),
        initial_position=pulsar.InitialPosition.Earliest,
    )  # fmt: skip
    while True:
        with contextlib.suppress(pulsar.Timeout):
            message = consumer.receive(WAIT)
            show(kind, message)
            consumer.acknowledge(message)


if __name__ == "__main__":
    _, url, topic, *kinds = sys.argv
    client = pulsar.Client(url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull))
    for kind in kinds:
        work = (read, (client, topic)) if kind == "reader" else (consume, (client, topic, kind))
        threading.Thread(target=work[0], args=work[1], daemon=True).start()
    sys.stdin.read()
    os._exit(0)
