"""`txnbuf find-hanging` and `txnbuf abort` on a log that no service has open."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from commands import txnbuf
from service_process import ServiceProcess

from txnbuffer import connect

pytestmark = pytest.mark.usefixtures("early_sends")
"""So that the records of the open transaction are in the log."""


def values(log: str, isolation: str) -> list[str]:
    lines = txnbuf("tail", log, "orders", "--isolation", isolation).stdout.splitlines()
    return [line.split("\t")[-1] for line in lines]


def test_a_transaction_of_a_directory_is_shown_and_aborted_without_a_service(tmp_path: Path) -> None:
    log = f"file:{tmp_path / 'log'}"
    service = ServiceProcess(tmp_path / "log").wait_serving()
    with connect(f"txnbuf://127.0.0.1:{service.port}", max_unavailable=1.0) as client:
        with client.transaction() as txn:
            txn.send("orders", "committed")
        hanging = client.transaction().begin()
        txn_id = str(hanging.id)
        hanging.send("orders", "open")
        client.send("orders", "after")
        deadline = time.monotonic() + 60.0
        while values(log, "read_uncommitted") != ["committed", "open", "after"]:
            assert time.monotonic() < deadline
        refused = txnbuf("abort", log, txn_id)
        assert (refused.returncode, refused.stdout) == (5, ""), refused.stderr
        service.kill()
    shown = txnbuf("find-hanging", log, "--older-than", "0", "--output", "json")
    assert shown.returncode == 0, shown.stderr
    (row,) = json.loads(shown.stdout)
    assert (row["txn"], row["topics"], row["state"]) == (txn_id, ["orders"], "open")
    assert row["open_seconds"] > 0.0
    done = txnbuf("abort", log, txn_id, "--output", "json")
    assert (done.returncode, json.loads(done.stdout)["outcome"]) == (0, "ABORT"), done.stderr
    assert values(log, "read_committed") == ["committed", "after"]
    assert json.loads(txnbuf("find-hanging", log, "--older-than", "0", "--output", "json").stdout) == []


@pytest.mark.parametrize("words", [("find-hanging",), ("abort", "0:1")])
def test_a_directory_without_a_log_stays_as_it_is(tmp_path: Path, words: tuple[str, ...]) -> None:
    command, *rest = words
    done = txnbuf(command, f"file:{tmp_path}/none", *rest)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "none").exists()
