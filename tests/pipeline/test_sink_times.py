"""Shares of a batch whose driver commits long after their tasks are done: none is lost, none comes twice."""

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
from txnbuffer.pipeline.spark.sink import TaskResult, commit_messages, write_share

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
    """What a task leaves behind that is done: nobody is connected for its share any more."""
    rows: Iterator[pa.RecordBatch] = iter([pa.RecordBatch.from_pydict({"value": [text.encode() for text in texts]})])
    return write_share(options(service), "query", 1, rows)


def wait_for_abort(service: ServiceProcess, txn: str) -> None:
    """Returns when a transaction that nobody has claimed is aborted: `session_timeout` has gone by."""
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
    """All that readers see, up to a record that is written now."""
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


def test_shares_outlive_the_sessions_of_their_tasks(tmp_path: Path) -> None:
    with serve(tmp_path) as service:
        done = [written(service, "a"), written(service, "b", "c")]
        wait_for_abort(service, session_goes(service))
        commit_messages(options(service), done)
        assert read(service) == [b"a", b"b", b"c"]


def test_a_batch_that_outlived_a_restart_for_too_long_is_aborted_whole_and_can_be_written_again(tmp_path: Path) -> None:
    service = serve(tmp_path, kept_port())
    try:
        before = written(service, "a")
        service.kill()
        service = serve(tmp_path, service.port)
        after = written(service, "b")
        assert before.share is not None
        wait_for_abort(service, str(before.share.txn))
        with pytest.raises(TransactionAborted, match="had ended"):
            commit_messages(options(service), [before, after])
        commit_messages(options(service), [written(service, "a"), written(service, "b")])
        commit_messages(options(service), [before, after])  # a driver that comes late
        assert read(service) == [b"a", b"b"]
    finally:
        service.kill()
