"""`txnbuf relay` as a process, through kills of both sides, from a service to an embedded log."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

from commands import txnbuf
from relay_kills import CLEAN, RelayProcess, T, committed, through_kills, write
from service_process import ServiceProcess

from broker_io import open_broker
from txnbuffer import connect
from txnbuffer.cli.admin_client import ServiceAddress, call


def test_the_target_equals_the_source_after_kills_of_both_sides(tmp_path: Path) -> None:
    source, target = through_kills(tmp_path, kills=3, seed=20261121, same_service=False)
    assert target == source
    assert len(source) > 100


def test_a_relay_reports_its_result_and_exits_with_0_at_sigterm(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "log") as service:
        address, clean = f"txnbuf://127.0.0.1:{service.port}", f"file:{tmp_path / 'clean'}"
        with connect(address) as client:
            write(client, 0, 10)
        options = ("--cursor", "relay", "--no-follow", "--output", "json")
        first = RelayProcess(tmp_path / "log.txt", address, T, CLEAN, "--to", clean, *options)
        code, printed = first.finish()
        assert code == 0, first.log.read_text()
        report = json.loads(printed)
        with open_broker(address) as broker:
            rows = committed(broker, T)
        assert (report["records"], report["seqno"], report["resumed_behind"]) == (len(rows), len(rows), None)
        (cursor,) = call(ServiceAddress(address), "Cursors")
        assert (cursor["topic"], cursor["cursor"], cursor["seqno"]) == (T, "relay", len(rows))
        going = RelayProcess(tmp_path / "going.txt", address, T, CLEAN, "--to", clean, "--output", "json")
        deadline = time.monotonic() + 60.0
        while "relaying" not in going.log.read_text():
            assert going.process.poll() is None, going.log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        going.process.send_signal(signal.SIGTERM)
        code, printed = going.finish()
        assert code == 0, going.log.read_text()
        assert json.loads(printed)["records"] == 0


def test_invalid_relays_are_rejected(tmp_path: Path) -> None:
    def refused(*arguments: str, code: int = 2) -> str:
        done = txnbuf("relay", *arguments)
        assert done.returncode == code, done.stderr
        return done.stderr

    with ServiceProcess(tmp_path / "log") as service:
        address = f"txnbuf://127.0.0.1:{service.port}"
        with connect(address) as client:
            client.send(CLEAN, b"taken")
            write(client, 0, 1)
        assert "no topic 'missing'" in refused(address, "missing", "new")
        assert "not written by a relay" in refused(address, T, CLEAN)
    refused("nowhere", T, CLEAN)
    assert "in the memory of this process only" in refused("memory:", T, CLEAN)
    latest = refused("memory:", T, CLEAN, "--to", f"file:{tmp_path / 'to'}", "--latest")
    assert "--latest needs a target on a cluster" in latest
    nobody = refused("memory:", T, CLEAN, "--to", "txnbuf://127.0.0.1:1", "--max-unavailable", "1", code=3)
    assert "no service for 1 s: no service answers at 127.0.0.1:1" in nobody
