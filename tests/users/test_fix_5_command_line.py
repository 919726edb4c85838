"""Fix 5: the command line, each of its items by name."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import txnbuf
from service_process import ServiceProcess
from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io import open_broker
from broker_io.batch import Batch, Message
from broker_io.memory import MemoryBroker
from txnbuffer import connect
from txnbuffer.cli.app import COMMANDS
from txnbuffer.cli.options import LogAddress
from txnbuffer.demo.sites import DemoFailed
from txnbuffer.errors import counted
from txnbuffer.recordset import pack
from txnbuffer.rpc.discovery import ServiceDiscovery
from txnbuffer.service.topics.group_lag import NumberedLog, records_after

NOBODY = "txnbuf://127.0.0.1:1"
"""The address of a service that does not run."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service with the topics `orders`, ten records, and `payments`, one."""
    with ServiceProcess(tmp_path_factory.mktemp("served") / "log") as running:
        with connect(f"txnbuf://127.0.0.1:{running.port}") as client, client.transaction() as txn:
            for number in range(10):
                txn.send("orders", f"order {number}", key=f"k{number}")
            txn.send("payments", "1 euro")
        yield running


@pytest.fixture
def address(service: ServiceProcess) -> str:
    return f"txnbuf://127.0.0.1:{service.port}"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = f"file:{tmp_path_factory.mktemp('logs') / 'log'}"
    with connect(place) as client, client.transaction() as txn:
        for number in range(10):
            txn.send("orders", f"order {number}", key=f"k{number}")
        txn.send("payments", "1 euro")
    return place


def values(printed: str) -> list[str]:
    return [line.split("\t")[-1] for line in printed.splitlines()]


# Exit code 3 where help says 3


@pytest.mark.parametrize(
    "arguments",
    [
        ("list",),
        ("describe", "orders"),
        ("abort", "0:1"),
        ("groups", "list"),
        ("cursors", "list"),
        ("compact", "orders"),
        ("compact",),
        ("backup", "/tmp/never.backup"),
        ("replication", "status"),
        ("replication", "switch", "--timeout", "0"),
        ("replication", "promote", "--force", "--timeout", "0"),
    ],
)
def test_exit_code_3_if_no_service_answers(arguments: tuple[str, ...]) -> None:
    done = txnbuf(*arguments, environ={"TXNBUFFER_ADDRESS": NOBODY})
    assert (done.returncode, "127.0.0.1:1" in done.stderr) == (3, True), done.stderr


def test_exit_code_3_if_a_process_of_the_demo_fails() -> None:
    assert DemoFailed.exit_code == 3
    assert "3 if a process of the demo failed" in " ".join(txnbuf("demo", "--help").stdout.split())


# No raw gRPC lines among JSON

RAW = """
import logging, sys, threading, time, warnings
def lines():
    while not logging.getLogger().handlers:
        time.sleep(0.01)
    logging.getLogger("grpc._cython.cygrpc").error("Unexpected error raised by a method")
    logging.getLogger("asyncio").error("Exception in callback PollerCompletionQueue._handle_events()")
threading.Thread(target=lines, daemon=True).start()
sys.argv[0] = "txnbuf"
from txnbuffer.cli import main
main()
"""


def test_a_service_logs_json_only(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "log", python=("-c", RAW)) as running:
        event = running.wait_event("library")
        with connect(f"txnbuf://127.0.0.1:{running.port}") as client:
            client.send("orders", "1")
        running.terminate()
        running.finish()
    assert (event["logger"], event["level"]) == ("grpc._cython.cygrpc", "error")
    assert "Unexpected error" in event["message"]
    assert [line for line in running.lines if not isinstance(json.loads(line), dict)] == []
    assert "PollerCompletionQueue" not in "".join(running.lines)


# bench is not listed where it cannot run


def test_bench_is_listed_only_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "  bench" in txnbuf("--help").stdout
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bench" else find(name))
    listed = txnbuf("--help").stdout
    assert "  bench" not in listed
    assert "  demo" in listed


# One way to name the service for all commands


def test_every_command_takes_the_address_first(address: str) -> None:
    listed = json.loads(txnbuf("list", address, "--output", "json").stdout)
    assert [row["topic"] for row in listed] == ["orders", "payments"]
    assert json.loads(txnbuf("describe", address, "orders", "--output", "json").stdout)["topic"] == "orders"
    assert values(txnbuf("tail", address, "payments").stdout) == ["1 euro"]
    assert txnbuf("groups", "list", address).returncode == 0
    assert txnbuf("cursors", "add", address, "payments", "reader").returncode == 0
    assert json.loads(txnbuf("cursors", "list", address, "--output", "json").stdout)[0]["cursor"] == "reader"
    assert txnbuf("compact", address).returncode == 0


def test_the_variable_names_the_service_for_all_commands(address: str) -> None:
    environ = {"TXNBUFFER_ADDRESS": address}
    assert txnbuf("describe", "orders", environ=environ).returncode == 0
    assert values(txnbuf("tail", "payments", environ=environ).stdout) == ["1 euro"]
    assert "1:" in txnbuf("inspect", "log", "orders", environ=environ).stdout
    assert txnbuf("verify", "orders", environ=environ).returncode in (0, 1)


def test_the_address_of_a_cluster_names_its_services(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogAddress, "open_for_reading", lambda _: MemoryBroker())
    hostport = address.removeprefix("txnbuf://")
    monkeypatch.setattr(ServiceDiscovery, "newest_address", lambda _: hostport)
    listed = txnbuf("list", "pulsar://127.0.0.1:1/public/default", "--set", "pulsar.max_unavailable=1")
    assert (listed.returncode, "orders" in listed.stdout) == (0, True), listed.stderr
    refused = txnbuf("list", address, "--set", "pulsar.max_unavailable=1")
    assert (refused.returncode, "with the address of a cluster only" in refused.stderr) == (2, True)


def test_the_variable_of_an_earlier_release_is_refused(address: str) -> None:
    """A command that ignored it would work on the service of this machine."""
    refused = txnbuf("list", environ={"TXNBUFFER_SERVICE": address})
    assert (refused.returncode, "TXNBUFFER_SERVICE: unknown key" in refused.stderr) == (2, True)


def test_help_names_the_default_address() -> None:
    for words in (["list"], ["tail"], ["compact"], ["inspect", "log"], ["pipeline", "export"]):
        text = " ".join(txnbuf(*words, "--help").stdout.split())
        assert "[ADDRESS]" in text
        assert (
            "Without ADDRESS: that of the environment variable TXNBUFFER_ADDRESS, else of the profile, else "
            "txnbuf://127.0.0.1:7711." in text
        )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("list", "127.0.0.1:7711"), "'127.0.0.1:7711' is not an address: write txnbuf://127.0.0.1:7711"),
        (("describe", "smtp:x", "orders"), "smtp:x"),
        (("tail", "HERE", "orders"), "is a directory: for the log in it, write file:HERE"),
        (("describe", "here", "orders"), "'here' is not an address: write file:DIR, txnbuf://HOST:PORT or pulsar://"),
    ],
)
def test_an_address_that_is_none_is_one_clear_error(tmp_path: Path, arguments: tuple[str, ...], why: str) -> None:
    done = txnbuf(*(one.replace("HERE", str(tmp_path)) for one in arguments))
    assert (done.returncode, why.replace("HERE", str(tmp_path)) in done.stderr) == (2, True), done.stderr


# tail -f, -n and a header


def test_tail_n_prints_the_last_records(log: str, address: str) -> None:
    for at in (log, address):
        assert values(txnbuf("tail", at, "orders", "-n", "3").stdout) == ["order 7", "order 8", "order 9"]
        assert sorted(values(txnbuf("tail", at, "orders", "payments", "-n", "1").stdout)) == ["1 euro", "order 9"]
        assert len(values(txnbuf("tail", at, "orders", "-n", "100").stdout)) == 10
        assert txnbuf("tail", at, "orders", "-n", "0").stdout == ""


def test_tail_n_counts_committed_records_only(tmp_path: Path) -> None:
    with connect(f"file:{tmp_path / 'log'}") as client:
        with client.transaction() as txn:
            txn.send_many("orders", [f"order {number}" for number in range(5)])
        for _ in range(50):
            with pytest.raises(ValueError, match="never"), client.transaction() as txn:
                txn.send("orders", "never")
                raise ValueError("never")
    found = txnbuf("tail", f"file:{tmp_path / 'log'}", "orders", "-n", "2").stdout
    assert [line.split("\t")[2:] for line in found.splitlines()] == [
        ["4", "0:1", "-", "order 3"],
        ["5", "0:1", "-", "order 4"],
    ]


def test_tail_n_begins_within_a_record_set(tmp_path: Path) -> None:
    with open_broker(f"file:{tmp_path / 'log'}") as broker:
        broker.create_topic("orders")
        with broker.writer("orders") as writer:
            records = Batch.of([Message(None, str(number).encode(), {}) for number in range(100)])
            writer.append(Batch.of([pack(records)])).result(120)
    assert values(txnbuf("tail", f"file:{tmp_path / 'log'}", "orders", "-n", "2").stdout) == ["98", "99"]


def test_tail_f_waits_for_more(address: str) -> None:
    command = [sys.executable, "-m", "txnbuffer", "tail", "-f", "-n", "1", address, "payments"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert values(process.stdout.readline()) == ["1 euro"]
        with connect(address) as client:
            client.send("payments", "2 euros")
        try:
            assert values(process.stdout.readline()) == ["2 euros"]
        finally:
            process.kill()


def test_a_terminal_gets_a_header(log: str) -> None:
    header = ["topic", "position", "seqno", "transaction", "key", "value"]
    assert "topic\t" not in txnbuf("tail", log, "payments").stdout
    shown = txnbuf("tail", log, "payments", "--header").stdout.splitlines()
    assert (shown[0].split("\t"), len(shown)) == (header, 2)
    primary, secondary = pty.openpty()
    done = subprocess.run([sys.executable, "-m", "txnbuffer", "tail", log, "payments"], stdout=secondary, check=True)
    os.close(secondary)
    seen = os.read(primary, 10_000).decode()
    os.close(primary)
    assert done.returncode == 0
    assert "transaction" in seen.splitlines()[0]
    assert txnbuf("tail", log, "payments", "--header", "--output", "json").stdout.startswith('{"topic"')


@pytest.mark.parametrize(
    "options", [("-n", "1", "--from", "end"), ("-n", "1", "--stream")], ids=["-n and --from", "-n and --stream"]
)
def test_tail_n_excludes_other_beginnings(log: str, options: tuple[str, ...]) -> None:
    assert txnbuf("tail", log, "orders", *options).returncode == 2


# Did you mean


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("lst",), "'list'"),
        (("inspect", "snapshots"), "'snapshot'"),
        (("replication", "statsu"), "'status'"),
        (("tail", "--form", "x"), "--from"),
    ],
)
def test_did_you_mean_this_command_or_option(arguments: tuple[str, ...], meant: str) -> None:
    done = txnbuf(*arguments)
    assert done.returncode == 2
    assert meant in done.stderr.partition("Did you mean")[2]


def test_did_you_mean_this_topic(log: str, address: str) -> None:
    for words in (
        ("tail", log, "ordres"),
        ("inspect", "log", log, "ordres"),
        ("verify", log, "ordres"),
        ("tail", address, "payments", "ordres"),
        ("describe", address, "ordres"),
    ):
        done = txnbuf(*words)
        assert done.returncode == 2, words
        assert "Did you mean 'orders'?" in done.stderr, words
    assert "Did you mean" not in txnbuf("tail", log, "zzz").stderr


# Completion of topic names


def completed(*words: str) -> list[str]:
    """The words that the completion of bash offers for the last one."""
    environ = {"_TXNBUF_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(["txnbuf", *words])}
    environ["COMP_CWORD"] = str(len(words))
    script = "from txnbuffer.cli.app import app; app(prog_name='txnbuf')"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **environ}, check=False
    )
    assert "Traceback" not in done.stderr
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_topic_names_are_completed(log: str, address: str) -> None:
    assert completed("tail", log, "o") == ["orders"]
    assert completed("tail", log, "orders", "p") == ["payments"]
    assert completed("describe", address, "p") == ["payments"]
    assert completed("inspect", "buffer", log, "") == ["orders", "payments"]
    assert completed("pipeline", "profile", log, "--topic", "o") == ["orders"]
    began = time.monotonic()
    assert completed("tail", NOBODY, "o") == []
    assert time.monotonic() - began < 45


# Correct plurals


def test_plurals_are_correct(log: str) -> None:
    assert [counted(number, "record") for number in (0, 1, 2, 1200)] == [
        "0 records",
        "1 record",
        "2 records",
        "1,200 records",
    ]
    assert txnbuf("verify", log, "orders").stderr == "0 errors in 1 topic\n"
    assert "in 2 topics" in txnbuf("verify", log).stderr


# Group lag counts records, not markers


def lag(address: str) -> Any:
    (row,) = json.loads(txnbuf("groups", "list", address, "g", "--output", "json").stdout)
    return row["lag"]


def test_group_lag_counts_records_not_markers(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "log") as running, connect(at := f"txnbuf://127.0.0.1:{running.port}") as client:
        for number in range(3):
            with client.transaction() as txn:
                txn.send("orders", str(number))
        client.process("orders", "g", lambda _txn, _record: None, idle_timeout=0.2)
        assert lag(at) == 0
        for number in range(5):
            with client.transaction() as txn:
                txn.send("orders", str(number))
        with pytest.raises(ValueError, match="never"), client.transaction() as txn:
            txn.send("orders", "never")
            raise ValueError("never")
        assert lag(at) == 5
        with client.transaction() as txn:
            txn.send_many("orders", ["a", "b"])
        client.send("orders", "c")
        assert lag(at) == 8


def test_group_lag_counts_the_rest_of_a_record_set(tmp_path: Path) -> None:
    with open_broker(f"file:{tmp_path / 'log'}") as broker, LogOwner(broker) as manager:
        manager.recover()
        manager.register("orders")
        log = TopicWriter(broker, "orders")
        log.records(1, "one")
        with broker.writer("orders") as writer:
            records = Batch.of([Message(None, str(number).encode(), {}) for number in range(100)])
            first = writer.append(Batch.of([pack(records)])).result(120).first
        log.commit(1)
        log.records(2, "open")
        manager.pump()
        manager.snapshot("orders")
        known = NumberedLog.load(broker, "orders")
        for position, left in ((None, 101), (first._replace(batch=9), 90), (first._replace(batch=99), 0), (first, 0)):
            assert records_after(broker, "orders", position, known) == left


# The demo removes its log


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_demo_removes_its_log(tmp_path: Path, number: signal.Signals | None) -> None:
    kills, transactions = ("1", "100") if number is None else ("4", "500")  # a signal comes before its end
    command = [sys.executable, "-m", "txnbuffer", "demo", "--kills", kills, "--transactions", transactions]
    command += ["--seed", "1"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "will follow" in line and number is not None:
                time.sleep(2.0)
                os.killpg(process.pid, number)
        process.wait(300)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("txnbuf-demo")] == []


# pulsar://host without a namespace says which one it uses


def test_an_address_without_a_namespace_says_which_one_it_uses() -> None:
    limit = ("--set", "pulsar.max_unavailable=0")
    done = txnbuf("tail", "pulsar://127.0.0.1:1", "orders", *limit)
    assert "pulsar://127.0.0.1:1 names no namespace: using pulsar://127.0.0.1:1/public/default" in done.stderr
    assert "names no namespace" not in txnbuf("tail", "pulsar://127.0.0.1:1/public/default", "orders", *limit).stderr


def test_a_service_says_which_namespace_it_uses(tmp_path: Path) -> None:
    process = ServiceProcess("pulsar://127.0.0.1:1", "--set", "pulsar.max_unavailable=0")
    event = process.wait_event("namespace")
    process.finish()
    assert (event["given"], event["used"]) == ("pulsar://127.0.0.1:1", "pulsar://127.0.0.1:1/public/default")


def test_every_command_has_help() -> None:
    for name in COMMANDS:
        assert txnbuf(name, "--help").returncode == 0, name
