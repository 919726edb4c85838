"""`txnbuf materialize`: output, end, and rejected arguments."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from commands import txnbuf
from service_process import ServiceProcess

from txnbuffer import connect
from txnbuffer.cli.admin_client import ServiceAddress, call

MAX_WAIT = 90.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "txnbuffer", "materialize", *arguments]


def materialize(*arguments: str, code: int = 0) -> Any:
    done = txnbuf("materialize", *arguments)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if done.stdout.startswith("[") else done.stderr + done.stdout


def query(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(sql).fetchall()


def write(address: str, **rows: str | None) -> None:
    with connect(address) as client, client.transaction() as txn:
        for key, value in rows.items():
            if value is None:
                txn.delete("orders", key)
            else:
                txn.send("orders", value, key=key, properties={"by": "me"}, event_time=5)
        txn.commit(wait_visible=True)


def test_table_follows_a_service_until_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    with ServiceProcess(tmp_path / "log") as service:
        address = f"txnbuf://127.0.0.1:{service.port}"
        write(address, a="1", b="2")
        options = ("--to", "now", "--cursor", "table", "--output", "json")
        rows = materialize(address, "orders", f"sqlite:{path}", *options)
        (cursor,) = call(ServiceAddress(address), "Cursors")
        assert (cursor["topic"], cursor["cursor"], cursor["seqno"]) == ("orders", "table", 2)
        assert rows == [
            {"topic": "orders", "seqno": 2, "complete": True, "caught_up": True, "mutations": 2, "rollbacks": 0}
        ]
        columns = "key, value, properties, event_time, seqno"
        assert query(path, f"SELECT {columns} FROM orders ORDER BY key") == [
            ("a", "1", '{"by": "me"}', 5, 1), ("b", "2", '{"by": "me"}', 5, 2),
        ]  # fmt: skip
        following = subprocess.Popen(
            command(address, "orders", f"sqlite:{path}", "--output", "json"),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            write(address, a=None, c="3")
            deadline = time.monotonic() + MAX_WAIT
            while query(path, "SELECT key FROM orders ORDER BY key") != [("b",), ("c",)]:
                assert time.monotonic() < deadline
                assert following.poll() is None
                time.sleep(0.02)
            assert "another process writes to" in materialize(address, "orders", f"sqlite:{path}", code=5)
            following.send_signal(signal.SIGTERM)
            out, told = following.communicate(timeout=MAX_WAIT)
        finally:
            following.kill()
            following.wait()
        assert following.returncode == 0, told
        (row,) = json.loads(out)
        assert (row["seqno"], row["mutations"], row["complete"]) == (4, 2, True)
        assert "orders: caught up at seqno" in told


def test_table_rolls_back_with_a_restored_log(tmp_path: Path) -> None:
    log, path = f"file:{tmp_path / 'log'}", tmp_path / "orders.db"
    target = f"sqlite:{path}"
    write(log, a="1", b="2")
    materialize(log, "orders", target, "--table", "Kept orders", "--binary", "--to", "2")
    assert query(path, 'SELECT key, value FROM "Kept orders" ORDER BY key') == [(b"a", b"1"), (b"b", b"2")]
    shutil.copytree(tmp_path / "log", tmp_path / "copy")
    write(log, a=None)
    materialize(log, "orders", target, "--binary", "--to", "now")
    shutil.rmtree(tmp_path / "log")
    (tmp_path / "copy").rename(tmp_path / "log")
    assert txnbuf("recover", log, "orders", "--write").returncode == 0
    told = materialize(log, "orders", target, "--binary", "--to", "now")
    assert "orders: history branched, rolled back to seqno 2" in told
    assert query(path, 'SELECT key, value FROM "Kept orders" ORDER BY key') == [(b"a", b"1"), (b"b", b"2")]
    assert "use the same options" in materialize(log, "orders", target, "--to", "now", code=2)
    materialize(log, "orders", target, "--rebuild", "--to", "now")
    assert query(path, "SELECT key, value FROM orders ORDER BY key") == [("a", "1"), ("b", "2")]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("memory:", "t", "other:f"), 2, "'other:f' is not a sink: give sqlite:FILE"),
        (("memory:", "t", "sqlite:"), 2, "give sqlite:FILE"),
        (("memory:", "sqlite:f"), 2, "Missing argument"),
        (("memory:", "t", "sqlite:f", "--to", "never"), 2, "--to never is invalid: give a seqno or now"),
        (("memory:", "t", "u", "sqlite:f", "--table", "x"), 2, "a table only for a single topic"),
        (("memory:", "t", "sqlite:f"), 2, "no topic 't'"),
        (
            ("txnbuf://127.0.0.1:1", "t", "sqlite:f", "--max-unavailable", "1"),
            3,
            "no service for 1 s: no service answers",
        ),
        (("memory:", "t", "sqlite:no/where"), 4, "cannot write to no/where: No such file or directory"),
    ],
)
def test_invalid_arguments_give_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    told = materialize(*arguments, code=code)
    assert message in told
    assert "Traceback" not in told


def test_signal_ends_it_while_it_waits_for_a_service(tmp_path: Path) -> None:
    waiting = subprocess.Popen(
        command("txnbuf://127.0.0.1:1", "t", f"sqlite:{tmp_path / 'f.db'}", "--output", "json"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + MAX_WAIT
        while not catches(waiting.pid, signal.SIGTERM):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        waiting.send_signal(signal.SIGTERM)
        out, told = waiting.communicate(timeout=MAX_WAIT)
    finally:
        waiting.kill()
        waiting.wait()
    assert (waiting.returncode, json.loads(out)) == (0, []), told


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (number - 1) & 1)
