"""`-v`, `-q` and `--log-format`: what commands print to stderr besides errors, and the log lines of a service"""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from commands import BAR_AT_ONCE, txnbuf
from service_process import ServiceProcess

from txnbuffer import connect
from txnbuffer.cli import app
from txnbuffer.cli.commands import AddressCommand, CommandGroup
from txnbuffer.cli.logs import EVENTS, LEVELS, log_event, log_lines

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (debug|info|warning|error) ")


@pytest.fixture
def log(tmp_path: Path) -> str:
    address = f"file:{tmp_path / 'log'}"
    with connect(address) as client:
        client.send("orders", "1")
        client.send("orders", "2")
    return address


@pytest.mark.parametrize("words", [("-q", "inspect", "log"), ("inspect", "-q", "log"), ("inspect", "log", "--quiet")])
def test_quiet_is_accepted_everywhere_and_leaves_out_messages(words: tuple[str, ...], log: str) -> None:
    loud = txnbuf("inspect", "log", log, "orders", "--limit", "1")
    assert "there are more messages" in loud.stderr
    done = txnbuf(*words, log, "orders", "--limit", "1")
    assert (done.returncode, done.stdout, done.stderr) == (0, loud.stdout, "")


def test_quiet_prints_errors(log: str) -> None:
    done = txnbuf("-q", "tail", log, "ordres")
    assert done.returncode == 2
    assert done.stderr.startswith("txnbuf: there is no topic 'ordres'")


def test_quiet_shows_no_progress_bar(log: str) -> None:
    shown = {}
    for options in ((), ("-q",)):
        read, write = pty.openpty()
        command = [sys.executable, "-c", BAR_AT_ONCE, *options, "verify", log]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=write, check=True)
        os.write(write, b"\n")  # a read of nothing would wait
        os.close(write)
        shown[options] = os.read(read, 65536).strip()
        os.close(read)
    assert b"0 of 1 topics" in shown[()]
    assert shown["-q",] == b""


def test_verbose_and_quiet_exclude_each_other(log: str) -> None:
    done = txnbuf("-v", "tail", log, "orders", "-q")
    assert done.returncode == 2
    assert "-v and -q exclude each other" in done.stderr


@pytest.mark.parametrize("words", [("-v", "tail"), ("tail", "-v")])
def test_verbose_says_what_is_used_and_where_an_error_comes_from(words: tuple[str, ...], log: str) -> None:
    done = txnbuf(*words, log, "orders")
    assert "debug txnbuffer.cli.commands: txnbuf tail" in done.stderr
    assert log in done.stderr
    assert all(LINE.match(line) for line in done.stderr.splitlines())
    assert "Traceback" not in txnbuf("tail", log, "ordres").stderr
    assert "Traceback" in txnbuf(*words, log, "ordres").stderr


def test_verbose_names_each_request_to_a_service() -> None:
    done = txnbuf("-v", "streams", "txnbuf://127.0.0.1:1")
    assert done.returncode == 3
    assert "debug txnbuffer.cli.admin_client: request Streams to the service at 127.0.0.1:1" in done.stderr


def test_messages_can_be_json(log: str) -> None:
    done = txnbuf("inspect", "log", log, "orders", "--limit", "1", "--log-format", "json")
    (line,) = map(json.loads, done.stderr.splitlines())
    assert (line["event"], line["level"], line["logger"]) == ("message", "info", "txnbuffer.messages")
    assert line["message"].startswith("there are more messages")


def test_a_service_logs_json_unless_asked_for_text(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "json") as service:
        service.terminate()
        service.finish()
    assert {event["level"] for event in service.events} == {"info"}
    assert all(LINE.match(f"{event['timestamp']} {event['level']} ") for event in service.events)

    command = [sys.executable, "-m", "txnbuffer", "serve", f"file:{tmp_path / 'text'}", "--log-format", "text"]
    command += ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if " serving " in line:
                process.terminate()
    assert process.returncode == 0
    assert all(LINE.match(line) for line in lines)
    assert re.search(r"Z info serving address=txnbuf://127\.0\.0\.1:\d+ port=\d+ http=\d+\n", "".join(lines))


def test_a_quiet_service_logs_errors_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with log_lines(quiet=True, json_lines=True):
        for event in ("serving", *LEVELS):
            log_event(event, n=1)
        logging.getLogger("some.library").warning("careful")
        logging.getLogger("some.library").error("broken")
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert {line["level"] for line in told} == {"error"}
    assert [line["event"] for line in told][-1] == "library"
    assert {"problem", "failed"} < {line["event"] for line in told}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "a"), ("", '""'), ("two words", '"two words"'), ("a=b", '"a=b"'), ("\x1b[31m", r"\x1b[31m"),
        ("a\nb", r"a\nb"), ('say "x"', r'"say \"x\""'), (1.5, "1.5"), (None, "null"), (True, "true"),
        ([1, 2], '"[1, 2]"'),
    ],
)  # fmt: skip
def test_each_event_is_one_line_of_text(value: Any, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with log_lines():
        log_event("problem", what=value)
    assert capsys.readouterr().err.partition("Z ")[2] == f"error problem what={text}\n"


def test_logging_is_as_before_after_a_command(log: str) -> None:
    def state() -> list[Any]:
        loggers = [logging.getLogger(name) for name in ("", "txnbuffer", EVENTS.name, "broker_io")]
        return [(logger.level, [*logger.handlers]) for logger in loggers]

    before = state()
    txnbuf("tail", "-v", log, "orders")
    txnbuf("tail", "-q", log, "missing")
    assert state() == before


def commands(group: click.Group) -> Iterator[click.Command]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield command
        if isinstance(command, click.Group):
            yield from commands(command)


def test_every_command_accepts_the_options_of_txnbuf() -> None:
    for command in commands(app.app):
        assert isinstance(command, AddressCommand | CommandGroup), command.name
        accepted = {text for one in command.get_params(click.Context(command)) for text in one.opts}
        assert {"-v", "--verbose", "-q", "--quiet", "--log-format", "--profile"} <= accepted, command.name
