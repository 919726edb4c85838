"""`txnbuf topics create` and `delete` on a directory and on a service."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import txnbuf
from service_process import ServiceProcess

from txnbuffer import connect
from txnbuffer.cli.admin import describe_command, list_command
from txnbuffer.cli.topics import topics_command

LONG = "x" * 500


@pytest.fixture(params=["directory", "service"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "directory":
        with connect(f"file:{tmp_path / 'log'}") as client:
            client.send("orders", "1")
        yield f"file:{tmp_path / 'log'}"
        return
    with ServiceProcess(tmp_path / "log") as service:
        with connect(f"txnbuf://127.0.0.1:{service.port}") as client:
            client.send("orders", "1")
        yield f"txnbuf://127.0.0.1:{service.port}"


def test_a_topic_is_created_written_and_deleted(address: str) -> None:
    made = txnbuf("topics", "create", address, "new", "--output", "json")
    assert (made.returncode, json.loads(made.stdout)) == (0, {"topic": "new", "partitions": None}), made.stderr
    again = txnbuf("topics", "create", address, "new")
    assert (again.returncode, "topic 'new' exists already" in again.stderr) == (2, True)
    with connect(address) as client:
        with client.transaction() as txn:
            txn.send("new", "1")
        client.cursors.add("new", "cache")
    used = txnbuf("topics", "delete", address, "new", "--yes")
    assert (used.returncode, "the durable cursor 'cache' is on it" in used.stderr) == (2, True), used.stderr
    assert txnbuf("cursors", "remove", address, "new", "cache").returncode == 0
    gone = txnbuf("topics", "delete", address, "new", "--yes", "--output", "json")
    assert (gone.returncode, json.loads(gone.stdout)) == (0, {"topic": "new"}), gone.stderr
    missing = txnbuf("topics", "delete", address, "new", "--yes")
    assert (missing.returncode, "there is no topic 'new' to delete" in missing.stderr) == (2, True)
    assert [row["topic"] for row in json.loads(txnbuf("topics", "list", address, "--output", "json").stdout)] == [
        "orders"
    ]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("__txnbuffer_decisions",), "is internal"),
        (("persistent://public/default/new",), "is a full name: write 'new'"),
        ((LONG,), "topic"),
        (("new", "--partitions", "2"), "topics of an embedded log have no partitions"),
    ],
)
def test_a_topic_that_cannot_be_created_is_refused(tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    with connect(f"file:{tmp_path / 'log'}") as client:
        client.send("orders", "1")
    refused = txnbuf("topics", "create", f"file:{tmp_path / 'log'}", *words)
    assert (refused.returncode, text in refused.stderr) == (2, True), refused.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_deletion_is_confirmed_on_a_terminal_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = f"file:{tmp_path / 'log'}"
    with connect(log) as client:
        client.send("orders", "1")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    refused = txnbuf("topics", "delete", log, "orders")
    assert (refused.returncode, "give --yes" in refused.stderr) == (2, True)
    monkeypatch.setattr("sys.stdin", Terminal("\n"))
    refused = txnbuf("topics", "delete", log, "orders")
    assert (refused.returncode, "Delete topic 'orders' with all its records? [y/N]" in refused.stderr) == (2, True)
    assert json.loads(txnbuf("list", log, "--output", "json").stdout)[0]["topic"] == "orders"
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert txnbuf("topics", "delete", log, "orders").returncode == 0
    assert json.loads(txnbuf("list", log, "--output", "json").stdout) == []


def test_one_command_has_both_names() -> None:
    assert topics_command.commands["list"] is list_command
    assert topics_command.commands["describe"] is describe_command
