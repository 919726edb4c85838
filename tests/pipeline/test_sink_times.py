"""Branches of a batch that the driver commits long after its tasks: none is lost or doubled."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pyarrow as pa
import pytest
from service_process import ServiceProcess, kept_port

from txnbuffer import Outcome, connect
from txnbuffer.errors import TransactionAborted
from txnbuffer.pipeline.options import WriteOptions
from txnbuffer.pipeline.spark.sink import TaskResult, commit_messages, write_branch

QUICK = ("--set", "transactions.session_timeout=0.2")
SECONDS = 120.0
GONE = """
import os, signal, sys
from txnbuffer import connect

with connect(sys.argv[1]) as client, client.transaction() as txn:
    print(txn.id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def serve(directory: Path, port: int = 0) -> ServiceProcess:
    return ServiceProcess(directory, *QUICK, port=port).wait_serving()


def options(service: ServiceProcess) -> WriteOptions:
    address = f"txnbuf://127.0.0.1:{service.port}"
    return WriteOptions.of({"broker": address, "topic": "t"}, streaming=False)


def written(service: ServiceProcess, *texts: str) -> TaskResult:
    """The result of a finished task, whose session has ended."""
    rows: Iterator[pa.RecordBatch] = iter([pa.RecordBatch.from_pydict({"value": [text.encode() for text in texts]})])
    return write_branch(options(service), "query", 1, rows)


def wait_for_abort(service: ServiceProcess, txn: str) -> None:
    """Wait until an unclaimed transaction is aborted, after `session_timeout`."""
    deadline = time.monotonic() + SECONDS
    with connect(options(service).broker) as client:
        while (outcome := client.outcome(txn)) is None:
            assert time.monotonic() < deadline
            Event().wait(0.05)
    assert outcome is Outcome.ABORT


def session_goes(service: ServiceProcess) -> str:
    """The open transaction of a process that is killed."""
    done = subprocess.run(
        [sys.executable, "-c", GONE, options(service).broker], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout, done.stderr
    return done.stdout.strip()


def read(service: ServiceProcess) -> list[bytes | None]:
    """All visible values, up to a record written now."""
    found: list[bytes | None] = []
    with connect(options(service).broker) as client:
        with client.transaction() as txn:
            txn.send("t", b"end")
        with client.reader("t") as reader:
            while b"end" not in found:
                batch = reader.read(timeout=SECONDS)
                assert batch is not None
                found += [record.value for record in batch]
    return [value for value in found if value != b"end"]


def test_branches_outlive_the_sessions_of_their_tasks(tmp_path: Path) -> None:
    with serve(tmp_path) as service:
        done = [written(service, "a"), written(service, "b", "c")]
        wait_for_abort(service, session_goes(service))
        commit_messages(options(service), done)
        assert read(service) == [b"a", b"b", b"c"]


def test_a_batch_not_committed_in_time_after_a_restart_is_aborted_and_can_be_written_again(tmp_path: Path) -> None:
    service = serve(tmp_path, kept_port())
    try:
        before = written(service, "a")
        service.kill()
        service = serve(tmp_path, service.port)
        after = written(service, "b")
        assert before.branch is not None
        wait_for_abort(service, str(before.branch.txn))
        with pytest.raises(TransactionAborted, match="had ended"):
            commit_messages(options(service), [before, after])
        commit_messages(options(service), [written(service, "a"), written(service, "b")])
        commit_messages(options(service), [before, after])  # a late driver
        assert read(service) == [b"a", b"b"]
    finally:
        service.kill()
