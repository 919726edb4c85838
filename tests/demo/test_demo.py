"""The demo: it succeeds, and its comparison detects every kind of fault."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from broker_io.batch import Batch, Labels, Message
from broker_io.position import Positions
from txnbuffer.client.reading.records import RecordBatch
from txnbuffer.demo.flights import ARRIVALS, DEPARTURES, Hour
from txnbuffer.demo.lanes import Seen, compare


def flight(number: int, key: bytes | None = b"plane") -> Message:
    return Message(key, json.dumps({"id": number}).encode())


RECORDS = [flight(n) for n in range(4)]


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "txnbuffer", "demo", "--seed", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_short_demo_with_kills_finds_no_difference(tmp_path: Path) -> None:
    done = run_demo("--transactions", "800", "--kills", "4", "--output", "json", "--dir", str(tmp_path / "log"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["records_read"] == report["records_expected"] > 40_000
    assert (report["lost"], report["duplicated"], report["uncommitted_seen"]) == (0, 0, 0)
    assert report["kills"] >= 4
    assert report["kills_in_recovery"] == report["producer_kills"] == 1
    assert report["recovery_seconds_max"] > 0
    assert report["transactions_per_second"] > 0


def test_directory_in_use_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    done = run_demo("--transactions", "500", "--dir", str(tmp_path))
    assert done.returncode != 0
    assert "is not empty" in done.stderr
    assert (tmp_path / "letter.txt").read_text() == "mine"


def seen(messages: list[Message], txn: str = "0:1", first_seqno: int = 1) -> Seen:
    count = len(messages)
    batch = RecordBatch(
        DEPARTURES,
        Positions.consecutive(1, 0, count),
        np.arange(first_seqno, first_seqno + count, dtype=np.int64),
        np.zeros(count, np.int64),
        Batch.of(messages),
        Labels.constant(txn, count),
    )
    return {DEPARTURES: [batch], ARRIVALS: []}


HOURS = [Hour(0, {DEPARTURES: RECORDS, ARRIVALS: []}), Hour(7, {DEPARTURES: [flight(9)], ARRIVALS: []})]
ENDED = {0: "0:1", 7: "0:2"}


@pytest.mark.parametrize(
    ("found", "lost", "duplicated", "uncommitted"),
    [
        (seen(RECORDS), 0, 0, 0),
        (seen(RECORDS[:3]), 1, 0, 0),
        (seen([*RECORDS, RECORDS[0]]), 0, 1, 0),
        (seen([*RECORDS[:3], Message(b"plane", b'{"id":3,"torn":1}')]), 1, 1, 0),
        (seen([*RECORDS[:3], Message(b"plane", b"torn")]), 1, 1, 1),
        (seen([*RECORDS[:3], flight(3, b"other")]), 1, 1, 0),
        (seen([*RECORDS, flight(9)]), 0, 1, 1),
        (seen(RECORDS, txn="0:3"), 0, 0, 4),
        (seen(RECORDS, first_seqno=2), 0, 4, 0),
    ],
)
def test_comparison_counts_every_kind_of_fault(found: Seen, lost: int, duplicated: int, uncommitted: int) -> None:
    good = seen(RECORDS)
    for live, again in ((found, good), (good, found)):
        result = compare(HOURS, ENDED, live, again)
        assert result["records_expected"] == 4
        assert (result["lost"], result["duplicated"], result["uncommitted_seen"]) == (lost, duplicated, uncommitted)


def test_comparison_accepts_any_one_transaction_of_an_unreported_hour() -> None:
    result = compare(HOURS, {0: None}, seen(RECORDS, txn="0:5"), seen(RECORDS, txn="0:5"))
    assert result["uncommitted_seen"] == 0
