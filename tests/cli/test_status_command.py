"""`txnbuf status`: what is at an address, with an exit code for scripts."""

from __future__ import annotations

import json
from pathlib import Path

from commands import txnbuf
from service_process import ServiceProcess

from txnbuffer import connect


def fill(place: str) -> None:
    with connect(place) as client:
        client.send("orders", "one")
        client.process("orders", "g", lambda txn, record: None, idle_timeout=0.05)
        client.send("orders", "two")


def test_a_log_is_described_from_its_files(tmp_path: Path) -> None:
    log = f"file:{tmp_path / 'log'}"
    fill(log)
    done = txnbuf("status", log, "--output", "json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["kind"], found["topics"], found["lag"]) == (0, "embedded log", 1, {"g": 1})
    assert found["problems"] == []
    assert "nothing needs attention" in txnbuf("status", log).stdout


def test_a_full_disk_needs_attention(tmp_path: Path) -> None:
    log = f"file:{tmp_path / 'log'}"
    fill(log)
    done = txnbuf("status", log, "--set", f"log.watermark_bytes={2**60}")
    assert (done.returncode, "needs attention: the disk has" in done.stdout) == (1, True), done.stdout


def test_a_service_is_described(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "log") as service:
        address = f"txnbuf://127.0.0.1:{service.port}"
        fill(address)
        done = txnbuf("status", address, "--output", "json")
        found = json.loads(done.stdout)
        assert (done.returncode, found["kind"], found["shards"], found["lag"]) == (0, "service", 1, {"g": 1})


def test_exit_code_3_if_nothing_answers() -> None:
    assert txnbuf("status", "txnbuf://127.0.0.1:1").returncode == 3
