"""The cluster of the tests is available and shared, and a program ends although its broker hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import pulsar
from pulsar_cluster import WAYS, Cluster

from broker_io.standalone import Standalone, ask

SECONDS = 120.0


def write_and_read(url: str, topic: str) -> bytes:
    """Write a message, and read the topic's first one."""
    client = pulsar.Client(url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull))
    try:
        client.create_producer(topic).send(uuid.uuid4().bytes)
        return client.create_reader(topic, pulsar.MessageId.earliest).read_next(30_000).data()
    finally:
        client.close()


def test_message_round_trip(cluster: Cluster, namespace: str) -> None:
    assert len(write_and_read(cluster.url, f"persistent://{namespace}/orders")) == 16
    assert ask(cluster.admin, f"persistent/{namespace}") == [f"persistent://{namespace}/orders"]


def test_required_way_is_used(cluster: Cluster) -> None:
    assert cluster.way in WAYS
    assert os.environ.get("TXNBUFFER_PULSAR_REQUIRE", cluster.way) == cluster.way


def test_each_namespace_is_fresh(cluster: Cluster) -> None:
    one, other = cluster.namespace(), cluster.namespace()
    assert one != other
    cluster.drop(one)
    cluster.drop(other)


SENDING = """
import sys
from broker_io import open_broker
from broker_io.batch import Batch, Message
broker = open_broker(sys.argv[1], admin_url=sys.argv[2])
broker.create_topic("unanswered")
writer = broker.writer("unanswered")
writer.append(Batch.of([Message(None, b"stands")])).result(300)
print("ready", flush=True)
sys.stdin.readline()
under_way = [writer.append(Batch.of([Message(None, b"%d" % number)])) for number in range(100)]
sys.exit(7)
"""


def test_a_program_ends_while_its_broker_hangs(mortal: Standalone) -> None:
    """A program with pending sends that closes nothing exits with its own code; the library would abort it."""
    command = [sys.executable, "-c", SENDING, f"{mortal.url}/{mortal.namespace()}", mortal.admin]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdin is not None
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            mortal.pause()
            try:
                program.stdin.write("on\n")
                program.stdin.flush()
                assert program.wait(SECONDS) == 7
            finally:
                mortal.resume()
        finally:
            program.kill()
