"""Commands that ask a service answer the same from the log in a directory, with and without its owner."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from commands import txnbuf
from service_process import ServiceProcess

from txnbuffer import connect

IN_MEMORY = {
    "client": "unknown: only its service knows it",
    **dict.fromkeys(("aborted_in_seconds", "session", "stage", "member", "until")),
}
"""The fields of which only the service knows the value, and what the log has instead."""
MEASURED = {"open_seconds", "waits_for"}
"""The fields that depend on the time."""
QUESTIONS = (
    ("list",),
    ("describe", "orders"),
    ("describe", "plain"),
    ("find-hanging", "--older-than", "0"),
    ("groups", "list"),
    ("groups", "list", "cents"),
    ("cursors", "list"),
)


class Answers(NamedTuple):
    """The answers of a service, and of its directory while it runs and later; the files before and after the latter."""

    service: list[Any]
    meanwhile: list[Any]
    later: list[Any]
    before: dict[str, str]
    after: dict[str, str]
    log: str


def asked(address: str) -> list[Any]:
    answers = []
    for words in QUESTIONS:
        command = 2 if words[0] in ("groups", "cursors") else 1
        done = txnbuf(*words[:command], address, *words[command:], "--output", "json")
        assert done.returncode == 0, (words, done.stderr)
        answers.append(json.loads(done.stdout))
    return answers


def digests(directory: Path) -> dict[str, str]:
    return {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in directory.rglob("*")
        if file.is_file()
    }


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    directory = tmp_path_factory.mktemp("stored") / "log"
    log = f"file:{directory}"
    service = ServiceProcess(directory).wait_serving()
    address = f"txnbuf://127.0.0.1:{service.port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("txnbuffer.client.session.session_requests.COLLECT_BYTES", 0)
        with connect(address, max_unavailable=1.0) as client:
            with client.transaction() as txn:
                txn.send("orders", "1", key="a")
                txn.send("orders", "2", key="b")
            client.process("orders", "cents", lambda txn, record: txn.send("cents", "100"), idle_timeout=0.5)
            client.send("plain", "x")
            client.cursors.add("orders", "cache")
            hanging = client.transaction(timeout=3600).begin()
            hanging.send("orders", "3")
            client.send("orders", "4")
            while '"state": "open"' not in txnbuf("describe", address, "orders", "--output", "json").stdout:
                pass  # the client announces the transaction later
            found, meanwhile = asked(address), asked(log)
            service.kill()
    before = digests(directory)
    later = asked(log)
    return Answers(found, meanwhile, later, before, digests(directory), log)


def as_stored(value: Any) -> Any:
    """An answer of a service as its log has it."""
    if isinstance(value, dict):
        return {name: IN_MEMORY.get(name, as_stored(one)) for name, one in value.items() if name not in MEASURED}
    return [as_stored(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("number", range(len(QUESTIONS)), ids=map(" ".join, QUESTIONS))
def test_a_directory_answers_as_its_service(answers: Answers, number: int) -> None:
    wanted = as_stored(answers.service[number])
    assert wanted not in ([], {})
    for found in (answers.meanwhile[number], answers.later[number]):
        rows = found if isinstance(found, list) else [found]
        shown = answers.service[number] if isinstance(found, list) else [answers.service[number]]
        assert [[*row] for row in rows] == [[*row] for row in shown], "the same columns in the same order"
        assert as_stored(found) == wanted


def test_what_only_the_service_knows_is_said_in_one_sentence(answers: Answers) -> None:
    for words, text in (
        (("groups", "list"), "members and stages of groups, which are in its memory, are unknown"),
        (("cursors", "list"), "a cursor may have advanced since its topic's last snapshot"),
        (("streams",), "open change streams, which are in its memory, are unknown"),
    ):
        done = txnbuf(*words, answers.log)
        said = [line for line in done.stderr.splitlines() if "held back" not in line]
        assert (done.returncode, len(said)) == (0, 1), done.stderr
        assert text in said[0]
    streams = json.loads(txnbuf("streams", answers.log, "--output", "json").stdout)
    assert (streams["connections"], streams["memory"]) == ([], {"bytes": None, "budget": None})
    assert [row["cursor"] for row in streams["cursors"]] == ["cache"]


def test_the_directory_stays_as_it_is(answers: Answers) -> None:
    assert answers.after == answers.before


def test_a_missing_topic_and_a_missing_log_are_named(answers: Answers, tmp_path: Path) -> None:
    missing = txnbuf("describe", answers.log, "order")
    assert (missing.returncode, "there is no topic 'order'" in missing.stderr) == (2, True), missing.stderr
    assert "Did you mean 'orders'?" in missing.stderr
    assert txnbuf("list", f"file:{tmp_path / 'none'}").returncode == 4
    assert not (tmp_path / "none").exists()


def test_changes_wait_for_nobody_and_are_made_without_a_service(tmp_path: Path) -> None:
    log, as_json = f"file:{tmp_path / 'log'}", ("--output", "json")
    with connect(log) as client:
        with client.transaction() as txn:
            txn.send("orders", "1")
            txn.send("orders", "2")
        client.process("orders", "cents", lambda txn, record: None, idle_timeout=0.5)
        refused = txnbuf("groups", "forget", log, "cents")
        assert refused.returncode == 5
        assert "or give the address of its service, txnbuf://HOST:PORT" in refused.stderr
    assert json.loads(txnbuf("cursors", "add", log, "orders", "cache", *as_json).stdout)["seqno"] == 0
    assert json.loads(txnbuf("cursors", "advance", log, "orders", "cache", "1", *as_json).stdout)["seqno"] == 1
    (row,) = json.loads(txnbuf("cursors", "list", log, *as_json).stdout)
    assert (row["cursor"], row["seqno"], row["items_remaining"]) == ("cache", 1, 1)
    (row,) = json.loads(txnbuf("groups", "list", log, *as_json).stdout)
    assert (row["group"], row["lag"]) == ("cents", 0)
    assert txnbuf("groups", "forget", log, "cents").returncode == 0
    assert json.loads(txnbuf("groups", "list", log, *as_json).stdout) == []
    assert txnbuf("cursors", "remove", log, "orders", "cache").returncode == 0
    assert json.loads(txnbuf("cursors", "list", log, *as_json).stdout) == []
