"""Commands that call the services of several shards and merge their responses."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import pytest
from click.testing import CliRunner
from shard_world import App, shards_on, topics_of

from broker_io.errors import TopicNotFound
from broker_io.memory import open_memory
from txnbuffer.cli import admin_client
from txnbuffer.cli.admin_client import ServiceAddress
from txnbuffer.cli.app import app
from txnbuffer.cli.commands import VARIABLE
from txnbuffer.errors import Error, ForeignTopic, ForeignTransaction, ServiceUnavailable
from txnbuffer.model import Outcome

BOTH = "first:1,second:2"
(HERE,), (THERE,) = topics_of(2)


def row(txn: str, topic: str, session: str | None, seconds: float) -> dict[str, Any]:
    state = "open" if session else "as shard 1 decides"
    return {"txn": txn, "state": state, "session": session, "open_seconds": seconds, "topics": [topic]}


ANSWERS: dict[tuple[str, str], Any] = {
    ("first:1", "Status"): {"shards": 2},
    ("second:2", "Status"): {"shards": 2},
    ("first:1", "List"): [{"topic": "a"}, {"topic": "c"}],
    ("second:2", "List"): [{"topic": "b"}],
    ("first:1", "FindHanging"): [row("1:7", "a", None, 20.0), row("0:1", "a", "s", 30.0)],
    ("second:2", "FindHanging"): [row("1:7", "b", "t", 40.0)],
    ("first:1", "Groups"): [{"group": "g", "topic": "a"}],
    ("first:1", "ForgetGroup"): ForeignTopic("of shard 1"),
    ("second:2", "ForgetGroup"): {"group": "g", "topic": "b"},
    ("first:1", "Cursors"): [{"topic": "a", "cursor": "k"}],
    ("first:1", "Describe"): TopicNotFound("not here"),
    ("second:2", "Describe"): {"topic": "b", "transactions": None},
    ("first:1", "Abort"): ForeignTransaction("of coordinator 1"),
    ("second:2", "Abort"): {"txn": "1:7", "outcome": "ABORT"},
}


@pytest.fixture(autouse=True)
def _services(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(service: ServiceAddress, method: str, **_: Any) -> Any:
        answer = ANSWERS.get((service.address, method), ServiceUnavailable(f"no service answers at {service.address}"))
        if isinstance(answer, Error):
            raise answer
        return answer

    monkeypatch.setattr(admin_client, "call", call)


def called(*words: str, service: str = BOTH) -> Any:
    result = CliRunner().invoke(app, [*words, "--output", "json"], env={VARIABLE: service}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_topics_of_all_shards_are_listed_in_order() -> None:
    assert [found["topic"] for found in called("list")] == ["a", "b", "c"]
    assert [found["topic"] for found in called("list", service="first:1")] == ["a", "c"]
    assert [found["topic"] for found in called("list", service="first:1, first:1")] == ["a", "c"]


def test_a_transaction_across_shards_hangs_once() -> None:
    found = called("find-hanging")
    assert [(one["txn"], one["topics"], one["session"], one["open_seconds"]) for one in found] == [
        ("1:7", ["a", "b"], "t", 40.0),
        ("0:1", ["a"], "s", 30.0),
    ]


def test_the_owning_shard_responds() -> None:
    assert called("describe", "b")["topic"] == "b"
    assert called("abort", "1:7")["outcome"] == "ABORT"
    assert called("groups", "forget", "g", "--topic", "b") == {"group": "g", "topic": "b"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["forget"], "Missing argument 'GROUP'"),
        (["list", "g", "--topic", "b"], "No such option"),
        (["g", "--forget"], "No such command 'g'"),
    ],
)
def test_forget_needs_a_group_and_only_forget_has_a_topic(words: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["groups", *words], env={VARIABLE: BOTH})
    assert (result.exit_code, sentence in result.stderr) == (2, True), result.output


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("list",), [{"topic": "a"}, {"topic": "c"}]),
        (("find-hanging",), [row("0:1", "a", "s", 30.0), row("1:7", "a", None, 20.0)]),
        (("groups", "list"), [{"group": "g", "topic": "a"}]),
        (("cursors", "list"), [{"topic": "a", "cursor": "k"}]),
    ],
)
@pytest.mark.parametrize("services", ["first:1,third:3", "third:3,first:1"])
def test_the_other_shards_are_shown_when_one_is_unavailable(words: tuple[str, ...], shown: Any, services: str) -> None:
    result = CliRunner().invoke(app, [*words, "--output", "json"], env={VARIABLE: services})
    assert json.loads(result.stdout) == shown
    assert isinstance(result.exception, ServiceUnavailable)
    assert str(result.exception) == (
        "the output is incomplete: 1 of 2 services did not respond: no service answers at third:3"
    )


def test_nothing_is_shown_when_no_shard_responds() -> None:
    result = CliRunner().invoke(app, ["list", "txnbuf://third:3,fourth:4"])
    assert (result.stdout, str(result.exception)) == ("", "no service answers at third:3")


def test_the_owner_is_found_after_a_shard_that_is_unavailable() -> None:
    assert called("describe", "b", service="third:3,second:2")["topic"] == "b"
    for services in ("third:3,first:1", "first:1,third:3"):  # the unavailable one may own it
        result = CliRunner().invoke(app, ["describe", f"txnbuf://{services}", "b"])
        assert isinstance(result.exception, ServiceUnavailable)


@pytest.mark.parametrize(("name", "kind"), [("0:1", True), ("17", True), ("orders", False)])
def test_transaction_id_given_as_topic_gets_a_hint(name: str, kind: bool) -> None:
    result = CliRunner().invoke(app, ["describe", "txnbuf://first:1", name])
    assert isinstance(result.exception, TopicNotFound)
    assert ("find-hanging" in str(result.exception)) is kind


@pytest.fixture
def served() -> str:
    """The address of a log on which a transaction across two shards has committed."""
    name = f"shards-{uuid.uuid4().hex}"

    async def serve() -> None:
        async with shards_on(2, cluster=open_memory(name)) as world:
            writer = await App.on(world, 0, HERE, THERE)
            for topic in (HERE, THERE):
                await writer.write(topic, [1])
            assert await writer.commit(1, HERE, THERE, wait_visible=True) is Outcome.COMMIT

    asyncio.run(asyncio.wait_for(serve(), 60.0))
    return f"memory:{name}"


def looked(*words: str) -> tuple[int, Any]:
    result = CliRunner().invoke(app, [*words, "--output", "json"], catch_exceptions=False)
    return result.exit_code, json.loads(result.stdout)


def test_snapshots_of_all_shards_are_shown_checked_and_rebuilt(served: str) -> None:
    code, entries = looked("inspect", "snapshot", served)
    assert (code, [entry["entry"] for entry in entries]) == (0, sorted([f"{HERE}-end", f"{THERE}-end"]))
    assert [entry["entry"] for entry in looked("inspect", "snapshot", served, THERE)[1]] == [f"{THERE}-end"]
    epochs = {entry["entry"]: entry["epoch"] for entry in entries}
    assert looked("recover", served, THERE, "--write")[0] == 0
    rebuilt = {entry["entry"]: entry["epoch"] for entry in looked("inspect", "snapshot", served)[1]}
    assert rebuilt == epochs | {f"{THERE}-end": epochs[f"{THERE}-end"] + 1}
    code, findings = looked("verify", served)
    assert (code, {finding["topic"] for finding in findings}) == (0, {HERE, THERE})
    assert {finding["level"] for finding in looked("verify", served, THERE)[1]} == {"ok"}
