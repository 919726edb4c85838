"""Build 6: every operation that may take more than two seconds reports its progress."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from commands import txnbuf
from source_tree import ROOT

from broker_io import check_backup, open_broker, restore_backup
from broker_io.environment import Environment, use
from broker_io.port import BackupBroker
from broker_io.testing.contract.base import eventually
from txnbuffer import Progress, connect, progress_bar, reporting
from txnbuffer.errors import InvalidRequest
from txnbuffer.pipeline.jobs import running
from txnbuffer.progress import BYTES, INTERVAL, ProgressReporter, report
from txnbuffer.recovery.audit import CommittedLog, audit, digest_of
from txnbuffer.recovery.rebuild import compare
from txnbuffer.recovery.verify import verify
from txnbuffer.service.offline import compacted, owning
from txnbuffer.sinks.relay import Relay
from txnbuffer.sinks.relay_targets import OwnedTarget
from txnbuffer.sinks.runner import materialize

RECORDS = 50


@pytest.fixture
def log(tmp_path: Path) -> str:
    """A log with the topics `orders` and `stock`."""
    address = f"file:{tmp_path / 'log'}"
    with connect(address) as client:
        for number in range(RECORDS):
            with client.transaction() as txn:
                txn.send("orders", f"order {number}", key=f"k{number % 10}")
                txn.send("stock", "-1", key="k")
    return address


class Heard:
    """What a callback has heard: `ends` has each operation that has ended, with its total and unit."""

    def __init__(self) -> None:
        self.each: list[Progress] = []

    def __call__(self, progress: Progress) -> None:
        self.each.append(progress)

    @property
    def ends(self) -> dict[str, tuple[int, str]]:
        return {one.operation: (one.done, one.unit) for one in self.each if one.done == one.total}

    def __enter__(self) -> Heard:
        self._block = reporting(self)
        self._block.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)


# The callback


class SetClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def test_a_callback_hears_the_start_then_at_intervals_and_the_end() -> None:
    clock, heard = SetClock(), Heard()
    with use(Environment(clock=clock)), ProgressReporter(heard, "copy", "records", 1000) as reporter:
        for _ in range(1000):
            clock.now += INTERVAL / 10
            reporter.advance()
    assert heard.each[0] == Progress("copy", 0, 1000, "records", 0.0)
    assert 80 <= len(heard.each) <= 102
    assert heard.each[-1] == Progress("copy", 1000, 1000, "records", pytest.approx(100 * INTERVAL))
    assert [one.done for one in heard.each] == sorted(one.done for one in heard.each)


def test_an_operation_that_fails_has_no_end() -> None:
    heard = Heard()
    with pytest.raises(ValueError, match="broken"), ProgressReporter(heard, "copy", "records", 10):
        raise ValueError("broken")
    assert heard.ends == {}


def test_the_end_of_an_unknown_total_is_what_is_done() -> None:
    with Heard() as heard:
        with report("copy", "records") as reporter:
            reporter.advance(7)
        with report("empty", "records", 0):
            pass
    assert heard.each[0].total is None
    assert heard.ends == {"copy": (7, "records"), "empty": (0, "records")}


def test_a_callback_can_stop_an_operation(log: str) -> None:
    def stop(_: Progress) -> None:
        raise KeyboardInterrupt

    with open_broker(log, read_only=True) as broker, reporting(stop), pytest.raises(KeyboardInterrupt):
        verify(broker)


def test_threads_and_tasks_report_to_the_callback_of_the_block() -> None:
    async def in_thread() -> None:
        await asyncio.to_thread(lambda: report("thread", "records", 0).__exit__(None, None, None))

    with Heard() as heard:
        asyncio.run(in_thread())
    assert heard.ends == {"thread": (0, "records")}
    with report("after", "records", 0):
        pass
    assert "after" not in heard.ends


def test_progress_as_text() -> None:
    assert str(Progress("backup of file:data", 1_500_000, 3_000_000_000, BYTES, 2.4)) == (
        "backup of file:data: 1.5 MB of 3.0 GB, 2 s"
    )
    assert str(Progress("reading orders", 1200, 5000, "messages", 3.0)) == (
        "reading orders: 1,200 of 5,000 messages, 3 s"
    )
    assert str(Progress("relay of orders", 7, None, "records", 0.0)) == "relay of orders: 7 records, 0 s"
    assert Progress("", 999, None, BYTES, 0.0).amount == "999 B"


# The operations


def test_loading_and_recovery(log: str) -> None:
    heard = Heard()
    with connect(log, progress=heard) as client:
        client.send("orders", "1")
    assert heard.ends["recovery"] == (2, "topics")
    with open_broker(log) as broker:
        broker.delete_topic("__txnbuffer_snapshots")
    with Heard() as read, open_broker(log, read_only=True) as broker:
        compare(broker, "orders")
    assert read.ends["reading orders"][1] == "messages"
    assert read.ends["reading orders"][0] > RECORDS


def test_progress_must_be_a_function() -> None:
    wrong: Any = 5
    with pytest.raises(InvalidRequest, match="progress must be"), connect("memory:", progress=wrong):
        pass


def test_verify(log: str) -> None:
    with Heard() as heard, open_broker(log, read_only=True) as broker:
        verify(broker)
    assert heard.ends["verification"] == (2, "topics")
    assert heard.ends["reading orders"][0] >= 2 * RECORDS


def test_audit(log: str, tmp_path: Path) -> None:
    with (
        Heard() as heard,
        open_broker(log, read_only=True) as broker,
        open_broker(log, read_only=True) as other,
    ):
        audit(CommittedLog(broker, "orders"), CommittedLog(other, "orders"), str(tmp_path))
        digest_of(CommittedLog(broker, "orders"), str(tmp_path))
    for operation in ("audit of the copy", "audit of the log", "digest of the log"):
        assert heard.ends[operation] == (RECORDS, "records")


def test_backup_and_restore(log: str, tmp_path: Path) -> None:
    heard, path = Heard(), str(tmp_path / "log.backup")
    with open_broker(log) as broker, ProgressReporter(heard, "backup", BYTES) as reporter:
        assert isinstance(broker, BackupBroker)
        broker.back_up(path, reporter.update)
    with ProgressReporter(heard, "check", BYTES) as reporter:
        check_backup(path, reporter.update)
    with ProgressReporter(heard, "restore", BYTES) as reporter:
        restore_backup(path, f"file:{tmp_path / 'restored'}", reporter.update)
    for operation in ("backup", "check", "restore"):
        assert heard.ends[operation][0] > 1000


async def test_compaction(log: str) -> None:
    shown: list[tuple[str, int, int]] = []

    with open_broker(log) as broker:
        async with owning(broker, "test", None) as ask:
            number = (await ask("Compact", topic="orders"))["run"]
            await compacted(ask, "orders", number, lambda *call: shown.append(call))
    assert shown[-1][1] == shown[-1][2] > 0


def test_materialize_and_backfill(log: str, tmp_path: Path) -> None:
    async def work() -> None:
        async with connect(log) as client:
            await materialize(client, "orders", tmp_path / "orders.db", to="now")

    with Heard() as heard:
        asyncio.run(work())
    (name,) = [one for one in heard.ends if one.startswith("orders to ")]
    assert heard.ends[name] == (RECORDS, "mutations")


def test_relay(log: str, tmp_path: Path) -> None:
    target = OwnedTarget(lambda: open_broker(f"file:{tmp_path / 'copy'}"), "copy", release=False, compacts=False)
    with Heard() as heard:
        Relay(lambda: open_broker(log, read_only=True), "orders", target).run(follow=False)
    told = [one for one in heard.each if one.operation == "relay of orders"]
    assert told
    assert told[-1].unit == "records"


def test_pipeline_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "UPDATE_INTERVAL", 0.01)
    stage = SimpleNamespace(numCompletedTasks=3, numTasks=8)
    tracker = SimpleNamespace(getActiveStageIds=lambda: [1, 2], getStageInfo=lambda _: stage)
    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(statusTracker=lambda: tracker))
    lines: list[str] = []
    with Heard() as heard, running.report_progress(spark, "exporting", lines.append):
        eventually(lambda: len(heard.each) > 1)
    assert (heard.each[-2].done, heard.each[-2].total, heard.each[-2].unit) == (6, 16, "tasks")
    assert heard.ends["exporting"] == (16, "tasks")
    assert lines == []
    monkeypatch.setattr(running, "PROGRESS_INTERVAL", 0.01)
    with running.report_progress(spark, "exporting", lines.append):
        eventually(lambda: bool(lines))
    assert lines[0].startswith("exporting: 3 of 8 tasks done, 3 of 8 tasks done")


# The bar


def test_there_is_no_bar_without_a_terminal(log: str, tmp_path: Path) -> None:
    assert not progress_bar().shows
    for words in (("verify", log), ("backup", log, str(tmp_path / "b")), ("recover", log, "orders")):
        done = txnbuf(*words, "--output", "json")
        assert done.returncode == 0
        json.loads(done.stdout)
        assert "\x1b" not in done.stderr
        assert "reading" not in done.stderr


def on_terminal(code: str) -> tuple[str, str]:
    """Run Python with a terminal as stderr; what it wrote to stdout and to the terminal."""
    primary, secondary = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=secondary, env={**os.environ, "TERM": "xterm"}
    ) as process:
        os.close(secondary)
        out: list[bytes] = []
        reader = threading.Thread(target=lambda: out.append(process.stdout.read()) if process.stdout else None)
        reader.start()
        seen = b""
        while True:
            try:
                if not (data := os.read(primary, 65536)):
                    break
            except OSError:  # the other end is closed
                break
            seen += data
        reader.join()
    os.close(primary)
    return b"".join(out).decode(), seen.decode()


SLOW = """
import sys, time
from txnbuffer import progress_bar, reporting
from txnbuffer.progress import report
with progress_bar() as bar, reporting(bar):
    with report("verification", "topics", 20) as one:
        for _ in range(20):
            time.sleep(0.06)
            one.advance()
            if one.done == 15:
                print("a result")
                print("a message", file=sys.stderr)
    with report("short", "topics", 1) as one:
        one.advance()
"""


def test_a_terminal_shows_a_bar_on_stderr() -> None:
    out, seen = on_terminal(SLOW)
    assert out == "a result\n"
    assert "verification" in seen
    assert "of 20 topics" in seen
    assert "a message" in seen
    assert "short" not in seen


def test_commands_show_a_bar_on_a_terminal(log: str) -> None:
    code = f"""
import sys
from txnbuffer import progress
progress.SHOWN_AFTER = progress.INTERVAL = 0.0
sys.argv = ["txnbuf", "verify", {log!r}, "--output", "json"]
from txnbuffer.cli import main
main()
"""
    out, seen = on_terminal(code)
    assert [row["level"] for row in json.loads(out)] == ["ok", "ok"]
    assert "verification" in seen
    assert "0 errors in 2 topics" in seen


def in_notebook(code: str, directory: Path) -> list[Any]:
    """The displayed outputs of a cell."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    source, result = directory / "source.ipynb", directory / "result.ipynb"
    nbformat.write(notebook, source)
    subprocess.run([sys.executable, ROOT / "tests" / "notebook_run.py", source, result], check=True, timeout=600)
    outputs = nbformat.read(result, as_version=4).cells[0].outputs
    return [output.data for output in outputs if output.output_type == "display_data"]


def test_a_notebook_shows_a_bar(tmp_path: Path) -> None:
    (shown,) = in_notebook(SLOW, tmp_path)
    assert shown["text/plain"].startswith("verification: 20 of 20 topics, ")
    assert "<progress" in shown["text/html"]


def test_a_notebook_shows_the_recovery_of_a_client(log: str, tmp_path: Path) -> None:
    code = f"""
from txnbuffer import connect, progress, progress_bar
progress.SHOWN_AFTER = progress.INTERVAL = 0.0
with connect({log!r}, progress=progress_bar()):
    pass
"""
    assert "recovery: 2 of 2 topics, 0 s" in [shown["text/plain"] for shown in in_notebook(code, tmp_path)]


def test_a_service_logs_the_progress_of_a_long_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    from txnbuffer.cli import serve

    events: list[tuple[str, dict[str, Any]]] = []
    show = serve._progress_log(lambda event, **facts: events.append((event, facts)))
    for seconds in (0.0, 1.0, 2.5, 3.0, 4.6):
        show(Progress("recovery", int(seconds), 10, "topics", seconds))
    show(Progress("recovery", 10, 10, "topics", 5.0))
    assert [(event, facts["seconds"]) for event, facts in events] == [("progress", 2.5), ("progress", 4.6)]
    assert events[0][1] == {"operation": "recovery", "done": 2, "total": 10, "unit": "topics", "seconds": 2.5}
