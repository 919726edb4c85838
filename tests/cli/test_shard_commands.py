"""Commands that ask the services of several shards, and make one answer of theirs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from broker_io.errors import TopicNotFound
from txnbuffer.cli import asking
from txnbuffer.cli.app import app
from txnbuffer.cli.asking import Service
from txnbuffer.errors import Error, ForeignTransaction, ServiceUnavailable

BOTH = "first:1,second:2"


def row(txn: str, topic: str, session: str | None, seconds: float) -> dict[str, Any]:
    state = "open" if session else "as shard 1 decides"
    return {"txn": txn, "state": state, "session": session, "open_seconds": seconds, "topics": [topic]}


ANSWERS: dict[tuple[str, str], Any] = {
    ("first:1", "List"): [{"topic": "a"}, {"topic": "c"}],
    ("second:2", "List"): [{"topic": "b"}],
    ("first:1", "FindHanging"): [row("1:7", "a", None, 20.0), row("0:1", "a", "s", 30.0)],
    ("second:2", "FindHanging"): [row("1:7", "b", "t", 40.0)],
    ("first:1", "Describe"): TopicNotFound("not here"),
    ("second:2", "Describe"): {"topic": "b", "transactions": None},
    ("first:1", "Abort"): ForeignTransaction("of coordinator 1"),
    ("second:2", "Abort"): {"txn": "1:7", "outcome": "ABORT"},
}


@pytest.fixture(autouse=True)
def _services(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(service: Service, method: str, **_: Any) -> Any:
        answer = ANSWERS.get((service.address, method), ServiceUnavailable(f"no service answers at {service.address}"))
        if isinstance(answer, Error):
            raise answer
        return answer

    monkeypatch.setattr(asking, "ask", ask)


def asked(*words: str, service: str = BOTH) -> Any:
    result = CliRunner().invoke(app, [*words, "--service", service, "--output", "json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_topics_of_all_shards_are_listed_in_order() -> None:
    assert [found["topic"] for found in asked("list")] == ["a", "b", "c"]
    assert [found["topic"] for found in asked("list", service="first:1")] == ["a", "c"]


def test_a_transaction_across_shards_hangs_once() -> None:
    found = asked("find-hanging")
    assert [(one["txn"], one["topics"], one["session"], one["open_seconds"]) for one in found] == [
        ("1:7", ["a", "b"], "t", 40.0),
        ("0:1", ["a"], "s", 30.0),
    ]


def test_the_shard_that_it_concerns_answers() -> None:
    assert asked("describe", "b")["topic"] == "b"
    assert asked("abort", "1:7")["outcome"] == "ABORT"


def test_a_shard_that_is_away_is_told() -> None:
    result = CliRunner().invoke(app, ["list", "--service", "first:1,third:3"])
    assert result.exit_code != 0
    assert "no service answers at third:3" in f"{result.output}{result.exception}"
