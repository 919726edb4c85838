"""`txnbuf tail --stream`, `txnbuf streams` and `txnbuf cursors` on a service in another process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import txnbuf
from service_process import ServiceProcess

from txnbuffer import ChangeBatch, connect


def test_stream_is_printed_and_resumes(tmp_path: Path) -> None:
    tokens = str(tmp_path / "tokens")
    with ServiceProcess(tmp_path / "log") as service:
        address = f"txnbuf://127.0.0.1:{service.port}"
        with connect(address) as client:
            with client.transaction() as txn:
                txn.send("orders", "one", key="a")
                txn.send("orders", "two", key="b")
            with client.stream("orders") as stream:
                found: list[tuple[int, bytes | None]] = []
                while len(found) < 2:
                    item = stream.next(timeout=120.0)
                    assert isinstance(item, ChangeBatch)
                    found += [(row.seqno, row.value) for row in item]
                assert found == [(1, b"one"), (2, b"two")]
                shown = txnbuf("streams", address, "--output", "json")
                (connection,) = json.loads(shown.stdout)["connections"]
                assert connection["streams"][0]["items_sent"] == 2
                assert "orders" in txnbuf("streams", address).stdout
            printed = txnbuf("tail", "--stream", address, "orders", "--tokens", tokens)
            assert [line.split("\t")[2:] for line in printed.stdout.splitlines()] == [
                ["1", "-", "a", "one"],
                ["2", "-", "b", "two"],
            ]
            with client.transaction() as txn:
                txn.delete("orders", "a")
        printed = txnbuf("tail", "--stream", address, "orders", "--tokens", tokens, "--output", "json")
        assert printed.returncode == 0, printed.stderr
        (record,) = map(json.loads, printed.stdout.splitlines())
        assert (record["seqno"], record["key"], record["value"]) == (3, "a", None)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--stream", "memory:", "a", "b"),
        ("--stream", "memory:", "a", "--isolation", "read_uncommitted"),
        ("--stream", "memory:", "a", "--tokens", "x", "--limit", "1"),
        ("memory:", "a", "--tokens", "x"),
    ],
)
def test_invalid_options_of_a_stream_are_rejected(arguments: tuple[str, ...]) -> None:
    refused = txnbuf("tail", *arguments)
    assert refused.returncode == 2
    assert "Invalid value for --" in refused.stderr or "Invalid value for TOPIC" in refused.stderr


def test_cursors_are_added_shown_advanced_and_removed(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "log") as service:
        at, as_json = f"txnbuf://127.0.0.1:{service.port}", ("--output", "json")
        with connect(f"txnbuf://127.0.0.1:{service.port}") as client, client.transaction() as txn:
            txn.send("orders", "one")
            txn.send("orders", "two")
        made = txnbuf("cursors", "add", at, "orders", "cache", *as_json)
        assert json.loads(made.stdout) == {"topic": "orders", "cursor": "cache", "seqno": 0}, made.stderr
        assert json.loads(txnbuf("cursors", "advance", at, "orders", "cache", "1", *as_json).stdout)["seqno"] == 1
        service.kill()
    with ServiceProcess(tmp_path / "log") as service:
        at, as_json = f"txnbuf://127.0.0.1:{service.port}", ("--output", "json")
        (row,) = json.loads(txnbuf("cursors", "list", at, *as_json).stdout)
        assert (row["topic"], row["cursor"], row["seqno"] <= 1) == ("orders", "cache", True)
        assert txnbuf("cursors", "remove", at, "orders", "cache", *as_json).returncode == 0
        assert json.loads(txnbuf("cursors", "list", at, *as_json).stdout) == []
        missing = txnbuf("cursors", "remove", at, "orders", "cache", *as_json)
        assert (missing.returncode, "no cursor 'cache'" in missing.stderr) == (2, True)
