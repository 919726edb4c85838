"""How commands end: exit codes that scripts rely on, and what is printed to programs instead of people."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from txnbuffer import connect
from txnbuffer.cli import admin_client
from txnbuffer.cli.app import app
from txnbuffer.cli.output import CELL_WIDTH, show_rows
from txnbuffer.client.connection import ADMIN_VARIABLE
from txnbuffer.errors import InvalidRequest

SERVICE = "txnbuf://first:1"


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the service answers to each admin call."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(admin_client, "call", lambda service, method, **_: found[method])
    return found


def run(*words: str) -> Result:
    return CliRunner().invoke(app, [*words])


@pytest.mark.parametrize(("outcome", "code"), [("ABORT", 0), ("COMMIT", 1)])
def test_abort_says_with_its_exit_code_if_the_transaction_has_committed(
    outcome: str, code: int, answers: dict[str, Any]
) -> None:
    answers["Abort"] = {"txn": "0:1", "outcome": outcome}
    done = run("abort", SERVICE, "0:1", "--output", "json")
    assert (json.loads(done.stdout), done.exit_code) == (answers["Abort"], code)


def test_group_that_does_not_exist_is_an_error(answers: dict[str, Any]) -> None:
    answers["Groups"] = []
    missing = run("groups", "list", SERVICE, "nobody")
    assert isinstance(missing.exception, InvalidRequest)
    assert missing.exception.exit_code == 2
    assert "'nobody'" in str(missing.exception)
    assert run("groups", "list", SERVICE).exit_code == 0, "no group at all is a fine answer"


@pytest.fixture
def log(tmp_path: Path) -> str:
    place = f"file:{tmp_path / 'log'}"
    with connect(place) as client:
        for number in range(5):
            client.send("orders", f"order {number}")
    return place


def test_missing_topic_is_not_answered_with_advice_about_python(log: str) -> None:
    for name, hint in (("nope", ""), ("ordres", "Did you mean 'orders'?")):
        done = run("tail", log, name)
        assert f"there is no topic {name!r}" in str(done.exception)
        assert hint in str(done.exception)
        assert "wait=True" not in str(done.exception)


def test_inspect_log_says_that_there_are_more_messages(log: str) -> None:
    first = run("inspect", "log", log, "orders", "--limit", "2", "--output", "json")
    assert len(json.loads(first.stdout)) == 2
    start = first.stderr.partition("--from ")[2].partition(",")[0]
    rest = run("inspect", "log", log, "orders", "--limit", "3", "--output", "json", "--from", start)
    assert [row["content"] for row in json.loads(rest.stdout)] == ["order 2", "order 3", "order 4"]
    assert rest.stderr == ""


def test_cells_are_cut_on_a_terminal_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    long = "x" * CELL_WIDTH + "the end"
    show_rows([{"problem": long}], "table")
    assert long in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show_rows([{"problem": long}], "table")
    assert "…" in capsys.readouterr().out


@pytest.mark.parametrize("words", [("inspect", "log"), ("tail",)])
@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}])
def test_no_color_leaves_no_escape_codes(words: tuple[str, ...], variables: dict[str, str], log: str) -> None:
    read, write = pty.openpty()
    environment = {**{name: text for name, text in os.environ.items() if name != "NO_COLOR"}, "TERM": "xterm"}
    subprocess.run(
        [sys.executable, "-m", "txnbuffer", *words, log, "orders"], stdout=write, stderr=subprocess.DEVNULL, check=True,
        env=environment | variables,
    )  # fmt: skip
    os.close(write)
    printed = os.read(read, 65536)
    os.close(read)
    assert (b"\x1b" in printed) == (not variables), printed


def test_connect_finds_the_admin_interface_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = "pulsar://127.0.0.1:6650/public/default"
    assert "admin_url" not in connect(cluster).cluster.broker
    monkeypatch.setenv(ADMIN_VARIABLE, "http://127.0.0.1:18080")
    assert connect(cluster).cluster.broker["admin_url"] == "http://127.0.0.1:18080"
    given = connect(cluster, broker_options={"admin_url": "http://127.0.0.1:28080"})
    assert given.cluster.broker["admin_url"] == "http://127.0.0.1:28080"
    with connect("memory:") as client:
        client.send("orders", "1")
