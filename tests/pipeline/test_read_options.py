"""Options of the data source: parsing, and errors that name the wrong option."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from broker_io.errors import CallerError, Error, InvalidTopicName, TopicNotFound
from broker_io.memory import MemoryBroker
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import Position
from txnbuffer.pipeline.options import COLUMNS, ReadOptions
from txnbuffer.pipeline.planning import names

USUAL = {"broker": "file:log", "topics": "orders"}


def test_defaults() -> None:
    options = ReadOptions.of(USUAL)
    assert options.topics == ("orders",)
    assert options.columns == COLUMNS
    assert (options.start_of("orders"), options.end_of("orders")) == ("beginning", "end")
    assert options.fail_on_data_loss
    assert options.max_messages is None


def test_all_options() -> None:
    options = ReadOptions.of(
        {
            "Broker": "pulsar://h:6650/t/n",
            "topics": '["a, b", "c"]',
            "start": '{"c": "3:4:5"}',
            "end": "2026-01-31T12:00:00+00:00",
            "columns": "value, seqno,value,outcome",
            "include_aborted": "TRUE",
            "max_messages_per_trigger": "500",
            "fail_on_data_loss": "false",
        }
    )
    assert options.topics == ("a, b", "c")
    assert options.start_of("c") == Position(3, 4, 5)
    assert options.start_of("a, b") == "beginning"
    assert options.end_of("c") == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert options.columns == ("value", "seqno", "outcome")
    assert options.max_messages == 500


@pytest.mark.parametrize(
    ("given", "topics"),
    [({"path": "orders"}, ("orders",)), ({"PATHS": '["a, b", "c"]'}, ("a, b", "c")), ({"path": "c", **USUAL}, None)],
)
def test_the_path_names_the_topics(given: dict[str, str], topics: tuple[str, ...] | None) -> None:
    options = {"broker": "file:log", **given}
    if topics is not None:
        assert ReadOptions.of(options).topics == topics
        return
    with pytest.raises(InvalidRequest, match="the path is c and option topics is orders"):
        ReadOptions.of(options)


def test_options_contain_the_certificates_of_a_ca_file(tmp_path: Path) -> None:
    """Tasks on other machines do not have the file."""
    (file := tmp_path / "ca.pem").write_text(text := "-----BEGIN CERTIFICATE-----\n")
    options = ReadOptions.of({"broker": "txnbuf://h:1", "topics": "orders", "tls_ca": str(file)})
    file.unlink()
    assert options.broker_options == {"root_certificates": text.encode()}


def test_a_pattern_does_not_match_internal_topics() -> None:
    options = ReadOptions.of({"broker": "file:log", "pattern": "(__)?or.*"})
    known = ["__orders", "__txnbuffer_decisions", "flavor", "orders", "orders-2"]
    assert options.chosen(known) == ["__orders", "orders", "orders-2"]
    assert ReadOptions.of({"broker": "file:log", "pattern": ".*"}).chosen(known) == [known[0], *known[2:]]


def test_a_partitioned_topic_is_all_its_partitions() -> None:
    known = ["big-partition-0", "big-partition-10", "big-partition-2", "bigger-partition-0", "small"]
    big = ["big-partition-0", "big-partition-2", "big-partition-10"]
    assert ReadOptions.of({**USUAL, "topics": "small,big,big-partition-2,none"}).chosen(known) == [
        "small",
        *big,
        "none",
    ]
    assert ReadOptions.of({"broker": "file:log", "pattern": "b.g"}).chosen(known) == sorted(big)
    options = ReadOptions.of({**USUAL, "topics": "big", "start": '{"big": "end", "big-partition-2": "3:4"}'})
    assert [options.start_of(name) for name in ("big-partition-0", "big-partition-2")] == ["end", Position(3, 4)]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"topics": "big", "start": '{"big": "3:4"}'},
            InvalidRequest,
            "option start has position 3:4 for big",
        ),
        ({"topics": "big", "end": '{"bug": "end"}'}, InvalidRequest, "option end has topic bug, which is not read"),
        ({"pattern": "b.*", "start": '{"boo": "end", "mall": "end"}'}, InvalidRequest, "option start has topic mall"),
        ({"topics": "__txnbuffer_snapshots"}, InvalidTopicName, "is internal and has no buffer"),
        ({"topics": "big,none"}, TopicNotFound, "topic 'none' does not exist"),
    ],
)
def test_the_error_names_a_wrong_place_or_topic(changed: dict[str, str], error: type[Error], message: str) -> None:
    with MemoryBroker() as broker:
        for topic in ("__txnbuffer_snapshots", "big-partition-0", "big-partition-1", "small"):
            broker.create_topic(topic)
        with pytest.raises(error, match=message):
            names(broker, ReadOptions.of({"broker": "file:log", **changed}))
        assert names(broker, ReadOptions.of({"broker": "file:log", "topics": "big"})) == [
            "big-partition-0", "big-partition-1",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"broker": ""}, "option broker is missing"),
        ({"broker": "orders"}, "is not a broker address"),
        ({"broker": "memory:x"}, "option broker can't be memory:x"),
        ({"topics": ""}, "one of the options topics and pattern"),
        ({"pattern": "a.*"}, "one of the options topics and pattern"),
        ({"topics": "[1]"}, "option topics must be a list of names"),
        ({"topics": "["}, "option topics must be JSON"),
        ({"topics": "", "pattern": "("}, "option pattern must be a regular expression"),
        ({"isolation": "dirty"}, "option isolation must be read_committed or read_uncommitted, got 'dirty'"),
        ({"isolation": "read_uncommitted", "include_aborted": "true"}, "option include_aborted requires isolation"),
        ({"start": "yesterday"}, "option start can't be 'yesterday'"),
        ({"end": '{"orders": 3}'}, "option end must be a JSON object of places"),
        ({"columns": "key,kye"}, "option columns has kye: use"),
        ({"columns": " , "}, "option columns has no column: use"),
        ({"columns": "outcome"}, "column outcome requires the option include_aborted"),
        ({"partition_bytes": "0"}, "option partition_bytes must be a whole number above 0"),
        ({"max_messages_per_trigger": "1e6"}, "option max_messages_per_trigger must be a whole number above 0"),
        ({"fail_on_data_loss": "no"}, "option fail_on_data_loss must be true or false"),
        ({"latest": "yes"}, "option latest must be true or false"),
        ({"latest": "true", "columns": "key,value"}, "option latest also requires the columns topic, position"),
        ({"latest": "true", "include_aborted": "true"}, "option latest reads visible records only"),
        ({"tls_ca": "ca.pem"}, "such as pulsar.tls_trust, for a cluster"),
        ({"broker": "txnbuf://h:1", "tls_ca": "/missing.pem"}, "cannot read the CA certificates in /missing.pem"),
        ({"start": "-5:-5"}, "option start can't be '-5:-5': no ledger or entry has this number"),
        ({"end": '{"orders": "99999999999999999999:1"}'}, "option end can't be '99999999999999999999:1'"),
        ({"end": "3:1:-2"}, "option end can't be '3:1:-2'"),
        ({"config": "/nope"}, "option config is for clusters, and broker is file:log"),
        ({"broker": "txnbuf://h:1", "pulsar.admn": "x"}, "option pulsar.admn is for clusters"),
        ({"broker": "pulsar://h:1/a/b", "pulsar.admn": "x"}, "^option pulsar.admn: unknown key"),
        (
            {"broker": "pulsar://h:1/a/b", "pulsar.token": "", "pulsar.max_unavailable": "--set 5"},
            "^option pulsar.max_unavailable: ",
        ),
        ({"start": "12h30"}, "a date and time such as"),
        ({"topics": "[]"}, "option topics is empty"),
        ({"failondataloss": "true"}, "unknown option failondataloss"),
    ],
)
def test_the_error_names_a_wrong_option(changed: dict[str, str], message: str) -> None:
    with pytest.raises(CallerError, match=message.replace("(", r"\(")):
        ReadOptions.of({**USUAL, **changed})
