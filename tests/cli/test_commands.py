"""The commands as people and programs run them: output, exit codes, one clear error for bad input."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import txnbuf
from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io import open_broker
from broker_io.batch import Batch, Message


def result(*arguments: str, code: int = 0) -> Any:
    done = txnbuf(*arguments, "--output", "json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with a committed, an aborted and an open transaction, a late record, and a snapshot."""
    place = tmp_path_factory.mktemp("logs") / "log"
    with open_broker(f"file:{place}") as broker, LogOwner(broker) as manager:
        manager.recover()
        manager.register("orders")
        log = TopicWriter(broker, "orders")
        log.plain("plain", key="k0")
        log.records(1, "one", "two", key="k1")
        log.records(2, "never")
        log.commit(1)
        log.abort(2)
        log.records(1, "late")
        log.records(3, "open")
        manager.pump()
        manager.snapshot("orders")
    return place


@pytest.fixture
def own_copy(directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(directory, tmp_path / "copy"))


def test_help_lists_every_command() -> None:
    listing = txnbuf("--help").stdout
    for name in ("inspect", "verify", "recover", "tail", "bench", "demo"):
        assert f"  {name}" in listing
        usage = txnbuf(name, "--help")
        assert usage.returncode == 0
        assert usage.stdout.startswith(f"Usage: txnbuf {name}")


def test_inspect_log_lists_topics(directory: Path) -> None:
    rows = {row["topic"]: row for row in result("inspect", "log", f"file:{directory}")}
    assert rows["orders"]["messages"] == 8
    assert rows["orders"]["first"] == "1:0"
    assert rows["orders"]["last"] == "1:7"
    assert "__txnbuffer_snapshots" in rows


def test_inspect_log_shows_stored_messages(directory: Path) -> None:
    rows = result("inspect", "log", f"file:{directory}", "orders")
    assert [row["kind"] for row in rows] == ["record"] * 4 + ["marker"] * 2 + ["record"] * 2
    assert rows[1] | {"published": ""} == {
        "position": "1:1", "published": "", "kind": "record", "txn": "0:1", "seq": "1", "key": "k1", "content": "one",
    }  # fmt: skip
    assert "COMMIT 0:1 (2)" in rows[4]["content"]
    assert len(result("inspect", "log", f"file:{directory}", "orders", "--from", "1:6")) == 2
    assert len(result("inspect", "log", f"file:{directory}", "orders", "--limit", "3")) == 3


def test_inspect_log_shows_undecodable_messages(own_copy: Path) -> None:
    with open_broker(f"file:{own_copy}") as broker, broker.writer("orders") as writer:
        writer.append(Batch.of([Message(None, b"\xff", {"tb.v": "1", "tb.marker": "1"})])).result(120)
    rows = result("inspect", "log", f"file:{own_copy}", "orders", "--from", "1:8")
    assert rows[0]["kind"] == "marker"
    assert rows[0]["content"].startswith("undecodable: ")
    assert "Traceback" not in txnbuf("tail", f"file:{own_copy}", "orders").stderr


def test_inspect_buffer_shows_the_state(directory: Path) -> None:
    state = result("inspect", "buffer", f"file:{directory}", "orders")
    assert state["registered"] is True
    assert state["max_read_position"] == "1:6"
    assert state["oldest_open"] == ["0:3 since 1:7, 1 record"]
    assert (state["aborts"], state["late"], state["suppressed_ranges"]) == (1, 1, 1)


@pytest.mark.parametrize(
    ("txn", "state"), [("0:1", "COMMITTED"), ("0:2", "ABORTED"), ("0:3", "OPEN"), ("0:4", "never seen here")]
)
def test_inspect_buffer_shows_the_state_of_a_transaction(directory: Path, txn: str, state: str) -> None:
    assert result("inspect", "buffer", f"file:{directory}", "orders", "--txn", txn)["state"] == state


def test_inspect_snapshot_shows_entries(directory: Path) -> None:
    (row,) = result("inspect", "snapshot", f"file:{directory}")
    assert row["entry"] == "orders-end"
    assert row["bytes"] > 0
    assert row["content"].startswith("format 2, snapshot ")


def test_verify_accepts_a_healthy_log(directory: Path) -> None:
    findings = result("verify", f"file:{directory}")
    assert {finding["level"] for finding in findings} == {"ok"}


def test_recover_finds_no_difference_in_a_healthy_log(directory: Path) -> None:
    found = result("recover", f"file:{directory}", "orders")
    assert found["differences"] == []
    assert (found["aborts"], found["open_transactions"], found["late"]) == (1, 1, 1)


def forge_snapshot(place: Path) -> None:
    """Append an invalid end entry."""
    with open_broker(f"file:{place}") as broker, broker.writer("__txnbuffer_snapshots") as writer:
        properties = {"tb.v": "1", "tb.kind": "end", "tb.epoch": "1000"}
        writer.append(Batch.of([Message(b"orders-end", b"torn", properties)])).result(120)


def test_a_damaged_snapshot_is_found_and_can_be_replaced(own_copy: Path) -> None:
    forge_snapshot(own_copy)
    address = f"file:{own_copy}"
    findings = result("verify", address, code=1)
    assert any(finding["level"] == "error" and finding["entry"] == "orders-end" for finding in findings)
    refused = txnbuf("tail", address, "orders")
    assert refused.returncode == 4
    assert "orders-end" in refused.stderr
    assert "txnbuf recover" in refused.stderr
    assert result("recover", address, "orders", code=1)["differences"] != []
    result("recover", address, "orders", "--write")
    assert {finding["level"] for finding in result("verify", address)} == {"ok"}
    assert "one" in txnbuf("tail", address, "orders").stdout


def test_tail_prints_committed_records(directory: Path) -> None:
    lines = txnbuf("tail", f"file:{directory}", "orders").stdout.splitlines()
    assert [line.split("\t") for line in lines] == [
        ["orders", "1:0", "1", "-", "k0", "plain"],
        ["orders", "1:1", "2", "0:1", "k1", "one"],
        ["orders", "1:2", "3", "0:1", "k1", "two"],
    ]


def test_tail_prints_json_lines(directory: Path) -> None:
    done = txnbuf("tail", f"file:{directory}", "orders", "--output", "json", "--from", "1:2", "--limit", "1")
    record = json.loads(done.stdout)
    assert (record["position"], record["seqno"], record["txn"], record["value"]) == ("1:2", 3, "0:1", "two")


def test_tail_uncommitted_prints_every_record(directory: Path) -> None:
    done = txnbuf("tail", f"file:{directory}", "orders", "--isolation", "read_uncommitted")
    assert len(done.stdout.splitlines()) == 6


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["tail", "file:{d}", "nowhere"], 2, "there is no topic 'nowhere' to read: create it, correct the name, or"),
        (["tail", "file:{d}", "orders", "--from", "middle"], 2, "give beginning, end, a seqno, a position or a time"),
        (["tail", "smtp:x", "orders"], 2, "'smtp:x' is not a broker address"),
        (["tail", "file:{d}/none", "orders"], 4, "none"),
        (["inspect", "buffer", "file:{d}", "orders", "--txn", "x"], 2, "'x' is not a transaction id"),
        (["abort", "txnbuf://127.0.0.1:1", "foo"], 2, "'foo' is not a transaction id: write MOST:LEAST"),
        (["recover", "file:{d}", "orders", "--set", "log.colour=1"], 2, "unknown key log.colour"),
        (["recover", "file:{d}", "__txnbuffer_snapshots", "--write"], 2, "is internal and has no buffer"),
        (["verify", "file:{d}", "nowhere"], 2, "there is no data topic 'nowhere'"),
        (["verify", "file:{d}", "orders", "--plain"], 2, "is not the address of a Pulsar cluster"),
        (["verify", "file:{d}", "--plain"], 2, "--plain needs a TOPIC"),
        (["inspect", "snapshot", "file:{d}", "nowhere"], 2, "there is no topic 'nowhere'"),
        (["demo", "--dir", "{d}"], 2, "is not empty"),
        (["demo", "--dir", "{d}/lock/x"], 2, "the demo cannot use the directory"),
        (["demo", "--broker", "pulsar"], 2, "needs a Pulsar server distribution"),
        (["demo", "--broker", "pulsar", "--pulsar-home", "{d}"], 2, "it has no executable bin/pulsar"),
        (["demo", "--broker", "pulsar", "--dir", "{d}/new"], 2, "--dir works with --broker file"),
        (["nonsense"], 2, "No such command"),
    ],
)
def test_bad_input_is_one_clear_error(directory: Path, arguments: list[str], code: int, message: str) -> None:
    done = txnbuf(*(argument.format(d=directory) for argument in arguments))
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_unknown_variable_is_rejected(directory: Path) -> None:
    done = txnbuf("recover", f"file:{directory}", "orders", environ={"TXNBUFFER_LOG_COLOUR": "1"})
    assert done.returncode == 2
    assert "TXNBUFFER_LOG_COLOUR: unknown key log.colour" in done.stderr


def test_foreign_directory_is_rejected_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    done = txnbuf("inspect", "log", f"file:{tmp_path}")
    assert done.returncode == 4
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["letter.txt"]


def piped(command: str) -> subprocess.CompletedProcess[str]:
    """Run a shell line in which `txnbuf` is that of this tree."""
    line = command.replace("txnbuf ", f"{sys.executable} -m txnbuffer ")
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, timeout=200, check=False
    )


def test_closed_pipe_ends_the_command_quietly(own_copy: Path) -> None:
    with open_broker(f"file:{own_copy}") as broker:
        TopicWriter(broker, "many").plain(*["x" * 100] * 20_000)
    for output in ("table", "json"):
        done = piped(f"txnbuf tail file:{own_copy} many --output {output} | head -n 1")
        assert (done.returncode, done.stderr) == (141, "")
        assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    "command", ["tail file:{d} orders", "inspect log file:{d}", "verify file:{d} --output json", "--help"]
)
def test_output_that_cannot_be_written_is_one_clear_error(directory: Path, command: str) -> None:
    done = piped(f"txnbuf {command.format(d=directory)} > /dev/full")
    assert done.returncode == 5
    assert done.stderr == "txnbuf: cannot write to stdout: No space left on device; redirect the output\n"


def test_closed_output_changes_nothing_else(directory: Path) -> None:
    done = piped(f"txnbuf verify file:{directory} >&-")
    assert (done.returncode, done.stderr) == (0, "0 errors in 1 topic\n")


ODD = [
    (b"\xff", b"0xff"),
    (b"0xff", b"\xff"),
    (b"a\tb", b"l1\nl2\r\x1b[31m\\ \xc2\x85 \xe2\x80\xae \xed\xa0\x80 \xc3\xbf"),
    (b"\\xff", b"\\n"),
    (b"-", b"(deleted)"),
    (None, None),
]


def odd_records(place: Path) -> str:
    with open_broker(f"file:{place}") as broker:
        broker.create_topic("odd")
        with broker.writer("odd") as writer:
            writer.append(Batch.of([Message(key, value) for key, value in ODD])).result(120)
    return f"file:{place}"


def test_tail_escapes_unprintable_bytes_unambiguously(own_copy: Path) -> None:
    lines = txnbuf("tail", odd_records(own_copy), "odd").stdout.splitlines()
    assert [tuple(line.split("\t")[4:]) for line in lines] == [
        (r"\xff", "0xff"),
        ("0xff", r"\xff"),
        (r"a\tb", r"l1\nl2\r\x1b[31m\\ \u0085 \u202e \xed\xa0\x80 ÿ"),
        (r"\\xff", r"\\n"),
        (r"\x2d", r"\x28deleted)"),
        ("-", "(deleted)"),
    ]


def test_tail_in_json_has_every_byte(own_copy: Path) -> None:
    def exact(record: dict[str, Any], name: str) -> bytes | None:
        if f"{name}_base64" in record:
            return base64.b64decode(record[f"{name}_base64"])
        return None if record[name] is None else str(record[name]).encode()

    done = txnbuf("tail", odd_records(own_copy), "odd", "--output", "json")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(exact(record, "key"), exact(record, "value")) for record in records] == ODD


def test_inspect_escapes_unprintable_bytes(own_copy: Path) -> None:
    lines = txnbuf("inspect", "log", odd_records(own_copy), "odd").stdout.splitlines()
    assert len(lines) == 1 + len(ODD)
    assert "\x1b" not in "".join(lines)


def test_verify_and_inspect_report_lost_state(own_copy: Path) -> None:
    with open_broker(f"file:{own_copy}") as broker:
        broker.delete_topic("__txnbuffer_snapshots")
    (finding,) = result("verify", f"file:{own_copy}", code=1)
    assert finding["level"] == "error"
    assert "txnbuf recover ADDRESS orders --write" in finding["what"]
    result("recover", f"file:{own_copy}", "orders", "--write")
    assert [finding["level"] for finding in result("verify", f"file:{own_copy}")] == ["ok"]
