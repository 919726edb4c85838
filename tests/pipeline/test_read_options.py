"""Options of the data source: what they come to, and what is wrong with them in one sentence."""

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


def test_what_can_be_said() -> None:
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


def test_certificates_to_trust_go_with_the_options(tmp_path: Path) -> None:
    """Tasks on other machines have no such file."""
    (file := tmp_path / "ca.pem").write_text(text := "-----BEGIN CERTIFICATE-----\n")
    options = ReadOptions.of({"broker": "txnbuf://h:1", "topics": "orders", "tls_ca": str(file)})
    file.unlink()
    assert options.broker_options == {"root_certificates": text.encode()}


def test_a_pattern_chooses_topics_of_data() -> None:
    options = ReadOptions.of({"broker": "file:log", "pattern": "(__)?or.*"})
    known = ["__orders", "__txnbuffer_decisions", "flavor", "orders", "orders-2"]
    assert options.chosen(known) == ["__orders", "orders", "orders-2"]
    assert ReadOptions.of({"broker": "file:log", "pattern": ".*"}).chosen(known) == [known[0], *known[2:]]


def test_a_topic_with_partitions_is_all_of_these() -> None:
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
        ({"topics": "big", "start": '{"big": "3:4"}'}, InvalidRequest, "3:4 is in one partition of big"),
        ({"topics": "big", "end": '{"bug": "end"}'}, InvalidRequest, "option end names bug, which is not read"),
        ({"pattern": "b.*", "start": '{"boo": "end", "mall": "end"}'}, InvalidRequest, "option start names mall"),
        ({"topics": "__txnbuffer_snapshots"}, InvalidTopicName, "is internal and has no buffer"),
        ({"topics": "big,none"}, TopicNotFound, "there is no topic 'none' to read"),
    ],
)
def test_what_is_not_there_to_read_is_told(changed: dict[str, str], error: type[Error], message: str) -> None:
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
        ({"broker": "memory:x"}, "lives in one process"),
        ({"topics": ""}, "one of the options topics and pattern"),
        ({"pattern": "a.*"}, "one of the options topics and pattern"),
        ({"topics": "[1]"}, "no list of names"),
        ({"topics": "["}, "option topics is no JSON"),
        ({"topics": "", "pattern": "("}, "no regular expression"),
        ({"isolation": "dirty"}, "isolation 'dirty' is none of"),
        ({"isolation": "read_uncommitted", "include_aborted": "true"}, "include_aborted tells outcomes"),
        ({"start": "yesterday"}, "option start can't be 'yesterday'"),
        ({"end": '{"orders": 3}'}, "no object of places"),
        ({"columns": "key,kye"}, "option columns names kye"),
        ({"columns": " , "}, "option columns names none"),
        ({"columns": "outcome"}, "with option include_aborted only"),
        ({"partition_bytes": "0"}, "option partition_bytes is a whole number above 0"),
        ({"max_messages_per_trigger": "1e6"}, "option max_messages_per_trigger is a whole number above 0"),
        ({"fail_on_data_loss": "no"}, "option fail_on_data_loss is true or false"),
        ({"latest": "yes"}, "option latest is true or false"),
        ({"latest": "true", "columns": "key,value"}, "option latest needs the columns topic, position"),
        ({"latest": "true", "include_aborted": "true"}, "latest is about visible records"),
        ({"tls_ca": "ca.pem"}, "a cluster has pulsar.tls_trust"),
        ({"broker": "txnbuf://h:1", "tls_ca": "/missing.pem"}, "can't read the certificates to trust in /missing.pem"),
        ({"start": "-5:-5"}, "option start can't be '-5:-5': there is no such ledger"),
        ({"end": '{"orders": "99999999999999999999:1"}'}, "option end can't be '99999999999999999999:1'"),
        ({"end": "3:1:-2"}, "option end can't be '3:1:-2'"),
        ({"config": "/nope"}, "option config is for clusters, and file:log is none"),
        ({"broker": "txnbuf://h:1", "pulsar.admn": "x"}, "option pulsar.admn is for clusters"),
        ({"broker": "pulsar://h:1/a/b", "pulsar.admn": "x"}, "^option pulsar.admn=x: unknown key"),
        (
            {"broker": "pulsar://h:1/a/b", "pulsar.token": "", "pulsar.max_unavailable": "--set 5"},
            "^option pulsar.max_unavailable=--set 5: ",
        ),
        ({"start": "12h30"}, "a time with its date such as"),
        ({"topics": "[]"}, "option topics names none"),
        ({"failondataloss": "true"}, "option failondataloss is unknown"),
    ],
)
def test_what_is_wrong_is_told(changed: dict[str, str], message: str) -> None:
    with pytest.raises(CallerError, match=message.replace("(", r"\(")):
        ReadOptions.of({**USUAL, **changed})
