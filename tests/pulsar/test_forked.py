"""Forked children of a process with an open cluster do not use it, and exit normally."""

from __future__ import annotations

import subprocess
import sys

from pulsar_cluster import Cluster

FORKING = """
import os, sys
from broker_io import open_broker
from broker_io.batch import Batch, Message
from broker_io.errors import Closed

def put(writer, value):
    writer.append(Batch.of([Message(None, value)])).result(300)

def child(how):
    if how == "uses":
        assert "before this process was forked" in str(writer.append(Batch.of([Message(None, b"")])).exception(0))
        try:
            reader.read()
            sys.exit(1)
        except Closed:
            pass
    elif how == "closes":
        with broker, writer, reader:
            pass

broker = open_broker(sys.argv[1], admin_url=sys.argv[2])
broker.create_topic("log")
writer, reader = broker.writer("log"), broker.reader("log")
put(writer, b"one")
codes = []
for how in sys.argv[3:]:
    if not (pid := os.fork()):
        child(how)
        sys.exit(7)  # with Python's normal exit
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
put(writer, b"two")
found = []
while len(found) < 2:
    found += reader.read(timeout=300).messages.values.to_list()
broker.close()
print(codes, found)
"""


def test_forked_children_exit_and_do_not_use_the_cluster(cluster: Cluster, namespace: str) -> None:
    command = [sys.executable, "-c", FORKING, f"{cluster.url}/{namespace}", cluster.admin]
    command += ["ends", "uses", "closes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout == "[7, 7, 7] [b'one', b'two']\n", done
