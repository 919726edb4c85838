"""`txnbuf compact` on a service in another process, and on a log that no service has open."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from commands import BAR_AT_ONCE, txnbuf
from service_process import ServiceProcess

from txnbuffer import connect

pytestmark = pytest.mark.usefixtures("early_sends")
"""So that the records of aborted transactions are in the log."""


def result(*arguments: str) -> Any:
    done = txnbuf("compact", *arguments, "--output", "json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no progress bar without a terminal"
    return json.loads(done.stdout)


def write(address: str) -> None:
    """20 values of each of two keys, and an aborted record."""
    with connect(address) as client:
        for value in range(20):
            with client.transaction() as txn:
                txn.send("orders", f"a{value}", key="a")
                txn.send("orders", f"b{value}", key="b")
        with pytest.raises(ZeroDivisionError), client.transaction() as txn:
            txn.send("orders", "never", key="a")
            raise ZeroDivisionError


def removed(statistics: dict[str, Any]) -> int:
    """The records that a compaction has emptied; markers stay."""
    count: int = statistics["records_in"] - statistics["records_out"]
    return count


def values(address: str) -> list[str]:
    return [line.split("\t")[-1] for line in txnbuf("tail", address, "orders").stdout.splitlines()]


def test_a_service_compacts_a_topic_on_request(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "log") as service:
        address = f"txnbuf://127.0.0.1:{service.port}"
        write(address)
        done = result(address, "orders")
        assert (removed(done), done["purged"]) == (39, 0)
        assert (done["dirty_ratio_before"], done["dirty_ratio_after"], done["rewritten"]) == (1.0, 0.0, 1)
        assert done["bytes_in"] > done["bytes_out"] > 0
        assert done["passes"] >= 1
        assert done["read_amplification"] >= 1.0
        assert values(address) == ["a19", "b19"]
        shown = txnbuf("compact", address, "orders")
        assert "records_out" in shown.stdout
        (row,) = result(address)
        assert (row["topic"], row["state"], row["policy"]) == ("orders", "done", None)


def test_the_policy_is_stored_with_the_topic(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with ServiceProcess(log) as service:
        address = f"txnbuf://127.0.0.1:{service.port}"
        write(address)
        policy = {"dirty_ratio": 0.25, "least_lag": 0.0, "most_lag": 60.0, "grace": 3600.0}
        given = "dirty_ratio=0.25, most_lag = 60,grace=3600"
        assert result(address, "orders", "--policy", given) == {"topic": "orders", "policy": policy}
        service.kill()
    frequent = ("--set", "compaction.check_seconds=0.05")
    with ServiceProcess(log, *frequent) as service:
        address = f"txnbuf://127.0.0.1:{service.port}"
        (row,) = result(address)
        assert row["policy"] == policy
        assert len(values(address)) == 40, "its only ledger is open"
        short = result(address, "orders", "--policy", "dirty_ratio=0.1,most_lag=0.01")
        assert short["policy"]["most_lag"] == 0.01
        while result(address)[0]["state"] != "done":
            pass
        assert values(address) == ["a19", "b19"]
        assert result(address, "orders", "--no-policy") == {"topic": "orders", "policy": None}


def test_a_log_that_nobody_has_open_is_compacted(tmp_path: Path) -> None:
    log = f"file:{tmp_path / 'log'}"
    with ServiceProcess(tmp_path / "log") as service:
        write(f"txnbuf://127.0.0.1:{service.port}")
        refused = txnbuf("compact", log, "orders")
        assert refused.returncode == 5
        assert "another process" in refused.stderr
        service.terminate()
        assert service.finish() == 0
    assert removed(result(log, "orders")) == 39
    assert values(log) == ["a19", "b19"]
    assert result(log, "orders", "--policy", "dirty_ratio=0.5")["policy"]["dirty_ratio"] == 0.5
    assert txnbuf("verify", log).returncode == 0


def test_a_damaged_segment_is_reported_until_it_is_restored(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "log") as service:
        address = f"txnbuf://127.0.0.1:{service.port}"
        write(address)
        with connect(address) as client, client.transaction() as txn:
            txn.send("other", "1", key="k")
        (path,) = [path for path in (tmp_path / "log").rglob("*.log") if b"never" in path.read_bytes()]
        offset = path.read_bytes().index(b"never")
        change(path, offset)
        refused = txnbuf("compact", address, "orders")
        assert refused.returncode == 4
        assert "'orders' was not compacted" in refused.stderr
        assert str(path) in refused.stderr
        assert {row["topic"]: row["state"] for row in result(address)} == {"orders": "quarantined"}
        assert result(address, "other")["rewritten"] == 0
        problem = service.wait_event("problem")
        assert problem["what"] in ("topic orders", "compaction of orders")
        assert str(path) in problem["error"]
        with urllib.request.urlopen(f"http://127.0.0.1:{service.http}/metrics", timeout=60) as answer:
            assert "txnbuffer_compaction_quarantined 1.0" in answer.read().decode()
        refused = txnbuf("compact", address, "orders")
        assert refused.returncode == 4
        assert "stop the service, restore the whole directory" in refused.stderr
        service.terminate()
        assert service.finish() == 0
    change(path, offset)
    with ServiceProcess(tmp_path / "log") as service:
        assert removed(result(f"txnbuf://127.0.0.1:{service.port}", "orders")) == 39


def change(path: Path, offset: int) -> None:
    """Flip a bit of a file; again: flip it back."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_terminal_gets_a_progress_bar(tmp_path: Path) -> None:
    log = f"file:{tmp_path / 'log'}"
    write(log)
    ours, terminal = pty.openpty()
    command = [sys.executable, "-c", BAR_AT_ONCE, "compact", log, "orders", "--output", "json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, timeout=120, check=True)
    os.close(terminal)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "compaction of orders" in shown
    assert removed(json.loads(done.stdout)) == 39


@pytest.mark.parametrize("online", [True, False])
def test_an_interrupted_command_says_what_becomes_of_the_compaction(tmp_path: Path, online: bool) -> None:
    """It is interrupted once it waits for a compaction that takes a minute at its I/O limit."""
    slow = ("--set", "compaction.bytes_per_second=4096")
    with connect(f"file:{tmp_path / 'log'}") as client, client.transaction() as txn:
        for _ in range(3):
            txn.send("orders", bytes(100_000), key="k")
    with contextlib.ExitStack() as stack:
        place: tuple[str, ...] = (f"file:{tmp_path / 'log'}", "orders", *slow)
        if online:
            service = stack.enter_context(ServiceProcess(tmp_path / "log", *slow))
            place = (f"txnbuf://127.0.0.1:{service.port}", "orders")
        ours, terminal = pty.openpty()
        command = [sys.executable, "-m", "txnbuffer", "compact", *place]
        waiting = stack.enter_context(subprocess.Popen(command, stderr=terminal, stdout=subprocess.DEVNULL))
        os.close(terminal)
        shown = b""
        while b"compaction of orders" not in shown:
            shown += os.read(ours, 1 << 16)
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(60) == 130
        with contextlib.suppress(OSError):  # the end
            while more := os.read(ours, 1 << 16):
                shown += more
        os.close(ours)
        wanted = b"the compaction continues in the service" if online else b"has left the topic as it was"
        assert b"interrupted: " in shown
        assert wanted in shown
        assert b"Traceback" not in shown
        if online:
            assert result(f"txnbuf://127.0.0.1:{service.port}")[0]["state"] == "running"


NOBODY = "txnbuf://127.0.0.1:1"
UNKNOWN = "unknown policy value '{}': give dirty_ratio, least_lag, most_lag or grace"


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (("--policy", "dirty_ratio=0.5"), 2, "give the TOPIC"),
        (("orders", "--policy", "dirty_ratio=1", "--no-policy"), 2, "exclude each other"),
        (("orders", "--policy", "dirty_ratio"), 2, "NAME=NUMBER"),
        ((NOBODY, "orders", "--policy", "foo=1"), 2, UNKNOWN.format("foo")),
        ((NOBODY, "orders", "--policy", "topic=5"), 2, UNKNOWN.format("topic")),
        (("file:LOG", "orders", "--policy", "method=3"), 2, UNKNOWN.format("method")),
        ((NOBODY, "orders", "--policy", "grace=1,grace = 2"), 2, "--policy has grace twice"),
        ((NOBODY, "orders", "--policy", "dirty_ratio=2"), 2, "dirty_ratio must be a number above 0"),
        (("file:LOG", "missing"), 2, "no topic 'missing'"),
        (("pulsar://127.0.0.1:1", "orders"), 2, "txnbuf relay"),
        (("memory:", "orders"), 2, "'memory:' is an empty log in the memory of this command"),
        (("LOG", "orders"), 2, "is not an address: write file:DIR"),
        ((NOBODY, "orders", "--set", "compaction.least_dead=0"), 2, "--set can be used with file:DIR only"),
        ((NOBODY, "--config", "FILE", "--set", "log.compaction_bytes=1"), 2, "--config and --set can be used with"),
        (("file:LOG", "orders", "--tls-ca", "FILE"), 2, "--tls-ca can't be used with file:DIR"),
        (("file:LOG-mistyped", "orders"), 4, "LOG-mistyped contains no log"),
        ((NOBODY, "orders"), 3, "127.0.0.1:1"),
    ],
)
def test_a_wrong_request_gets_one_clear_error(tmp_path: Path, arguments: tuple[str, ...], code: int, why: str) -> None:
    log = str(tmp_path / "log")
    with connect(f"file:{log}"):
        pass
    settings = Path(log, "settings.toml")
    settings.write_text("[compaction]\nleast_dead = 0\n")
    refused = txnbuf("compact", *(one.replace("LOG", log).replace("FILE", str(settings)) for one in arguments))
    assert (refused.returncode, why.replace("LOG", log) in refused.stderr) == (code, True), refused.stderr
    assert "Traceback" not in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["log"], "the command creates no log"
