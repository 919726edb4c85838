"""`txnbuf produce`: lines become records in transactions."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from client_world import read_all

from broker_io import open_broker
from txnbuffer.cli.produce import produce_command
from txnbuffer.client.reading.records import Record
from txnbuffer.errors import Error, InvalidRequest
from txnbuffer.testing import ServiceProcess


class Log:
    def __init__(self, directory: Path) -> None:
        self.address = f"file:{directory / 'log'}"

    def produce(self, text: str | bytes, *options: str) -> Result:
        return CliRunner().invoke(produce_command, [self.address, "log", "--output", "json", *options], input=text)

    def produced(self, text: str | bytes, *options: str) -> dict[str, Any]:
        result = self.produce(text, *options)
        assert result.exception is None, result.exception
        return json.loads(result.stdout)

    def refused(self, text: str | bytes, *options: str) -> Error:
        error = self.produce(text, *options).exception
        assert isinstance(error, Error)
        return error

    def records(self, topic: str = "log") -> list[Record]:
        with open_broker(self.address, read_only=True) as broker:
            return read_all(broker, topic)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def test_lines_are_values(log: Log) -> None:
    assert log.produced(b"one\ntwo\r\n\nfour", "--per-transaction", "3") == {"records": 4, "transactions": 2}
    records = log.records()
    assert [record.value for record in records] == [b"one", b"two\r", b"", b"four"]
    assert len({record.txn for record in records}) == 2
    assert log.produced("") == {"records": 0, "transactions": 0}


def test_keys_before_a_separator(log: Log) -> None:
    log.produced("a=1\nb=2=3\n", "--key-separator", "=")
    assert [(record.key, record.value) for record in log.records()] == [(b"a", b"1"), (b"b", b"2=3")]
    error = log.refused("a=1\nb\n", "--key-separator", "=")
    assert isinstance(error, InvalidRequest)
    assert "line 2" in str(error)


def test_json_lines(log: Log) -> None:
    rows = [
        {"value": "text", "key": "k", "properties": {"p": "1"}, "event_time": 5, "ordering_key": "o"},
        {"value": {"n": [1]}},
        {"value_base64": base64.b64encode(b"\xff").decode(), "topic": "other"},
        {"key": "k", "delete": True},
    ]
    log.produced("\n".join(map(json.dumps, rows)), "--json")
    first, second, deleted = log.records()
    assert (first.key, first.value, first.event_time) == (b"k", b"text", 5)
    assert first.properties == {"p": "1", "ordering_key": "o"}
    assert second.value == b'{"n":[1]}'
    assert (deleted.key, deleted.value) == (b"k", None)
    assert [record.value for record in log.records("other")] == [b"\xff"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 is not a record"),
        ('{"value": "v", "valeu": 1}', "line 2 is not a record (unknown field valeu)"),
        ("{}", 'needs exactly one of "value" and "value_base64"'),
        ('{"value": "v", "value_base64": ""}', "exactly one"),
        ('{"value_base64": "?"}', "not base64"),
        ('{"value": "v", "event_time": "now"}', "milliseconds"),
    ],
)
def test_invalid_line_aborts_its_transaction(log: Log, line: str, message: str) -> None:
    log.produced("before")
    error = log.refused('{"value": "v"}\n' + line, "--json")
    assert message in str(error)
    log.produced("after")
    assert [record.value for record in log.records()] == [b"before", b"after"]


def test_name_makes_a_repetition_safe(log: Log) -> None:
    text = "".join(f"k={index}\n" for index in range(10))
    options = ("--key-separator", "=", "--per-transaction", "4", "--name", "import")
    log.refused(text + "no separator", *options)
    assert [record.value for record in log.records()] == [str(index).encode() for index in range(8)]
    result = log.produce(text, *options)
    assert json.loads(result.stdout) == {"records": 2, "transactions": 1}
    assert "8 lines" in result.stderr
    assert [record.value for record in log.records()] == [str(index).encode() for index in range(10)]


def test_to_a_service(txnbuf_service: ServiceProcess) -> None:
    result = CliRunner().invoke(produce_command, [txnbuf_service.address, "log"], input="one\ntwo\n")
    assert result.exception is None
    assert result.stdout.split() == ["records", "2", "transactions", "1"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"delete": "false", "key": "k"}', "\"delete\" must be true or false, got 'false'"),
        ('{"delete": true, "key": "k", "value": "v"}', "deletes a key: remove value"),
        ('{"value": "x", "event_time": 9223372036854775808}', "an event time must be"),
        ('{"value": "x", "key": "\\ud800"}', "a key cannot be encoded as UTF-8"),
        ('{"value": "x", "topic": 7}', "topic name 7 is not text"),
    ],
)
def test_contradictory_line_is_rejected(tmp_path: Path, line: str, text: str) -> None:
    log = Log(tmp_path)
    assert text in str(log.refused(line, "--json"))
    assert log.produced('{"value": "fine", "delete": false}', "--json")["records"] == 1
    assert [record.value for record in log.records()] == [b"fine"]
