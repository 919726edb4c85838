"""A program that ends with an open sync client prints nothing, and its log can be opened again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from txnbuffer import connect
from txnbuffer.testing import ServiceProcess

PROGRAM = """
import contextlib, sys, threading
from txnbuffer import connect
from txnbuffer.errors import Error

client = connect(f"file:{sys.argv[1]}").__enter__()
client.send("orders", b"1", key="k")
reader, stream = client.reader("orders"), client.stream("orders", cursor="c")
assert reader.read(timeout=60.0) is not None
assert stream.next(timeout=60.0) is not None
stream.done()
began = threading.Event()

def follow():
    began.set()
    with contextlib.suppress(Error):  # the thread may live long enough to see that the client is closed
        for _ in stream:
            pass

if sys.argv[2] == "stream":
    threading.Thread(target=follow, daemon=True).start()
    began.wait()
if sys.argv[2] == "transaction":
    txn = client.transaction()
    txn.__enter__()
    txn.send("orders", b"2", key="k")
"""


@pytest.mark.parametrize("what", ["client", "stream", "transaction"])
def test_a_program_that_ends_with_an_open_client_only_warns_of_dropped_records(tmp_path: Path, what: str) -> None:
    log = tmp_path / "log"
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(log), what], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "")
    warning = ended.stderr.splitlines()
    assert len(warning) == (what == "transaction")
    assert all(
        "closed before these transactions were committed" in line and "1 for 'orders'" in line for line in warning
    )
    with connect(f"file:{log}") as client:
        client.send("orders", b"3", key="k")


AT_EXIT = """
import atexit, sys
from txnbuffer import connect

client = connect(sys.argv[1]).__enter__()
client.send("orders", b"1")

def flush():
    with client.transaction() as txn:
        txn.send("orders", b"2")
    client.close()
    print("flushed")

atexit.register(flush)
"""


def test_functions_of_atexit_can_use_a_client_of_a_service(txnbuf_service: ServiceProcess) -> None:
    command = [sys.executable, "-c", AT_EXIT, txnbuf_service.address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert (ended.stdout, ended.stderr) == ("flushed\n", "")
