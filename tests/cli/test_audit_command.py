"""`txnbuf audit` as people and programs run it."""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import google_crc32c
import pytest
from commands import txnbuf
from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io import open_broker
from broker_io.batch import Batch, Message

T = "orders"


def result(*arguments: str, code: int = 0) -> Any:
    done = txnbuf("audit", *arguments, "--output", "json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def make(place: Path, *rows: tuple[bytes, bytes | None]) -> str:
    """A log with these records in one transaction, the first in an aborted one."""
    with open_broker(f"file:{place}") as broker, LogOwner(broker) as manager:
        manager.recover()
        manager.register(T)
        log = TopicWriter(broker, T)
        log.records(1, "aborted", key="k1")
        log.abort(1)
        with broker.writer(T) as writer:
            writer.append(Batch.of([Message(*row) for row in rows])).result(120)
        manager.pump()
        manager.snapshot(T)
    return f"file:{place}"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("logs")
    return make(place / "log", (b"k1", b"1"), (b"k\n2", b"\xff"), (b"k3", b"3"), (b"k3", None))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("others")
    return make(place / "log", (b"k1", b"1"), (b"k\n2", b"other"), (b"k3", b"3"))


def test_a_copy_of_the_directory_is_the_same(log: str, tmp_path: Path) -> None:
    copy = shutil.copytree(log.removeprefix("file:"), tmp_path / "copy")
    found = result(log, T, "--against", f"file:{copy}")
    assert found == {
        "same": True,
        "topic": T,
        "up_to": 4,
        "log_records": 4,
        "log_keys": 2,
        "copy_records": 4,
        "copy_keys": 2,
        "unproven_keys": 0,
        "different_keys": 0,
        "differences": [],
    }
    assert "first different keys: none" in txnbuf("audit", log, T, "--against", f"file:{copy}").stdout
    refused = txnbuf("audit", log, T, "--against", f"file:{copy}", "--up-to", "5")
    assert refused.returncode == 2
    assert "ends at seqno 4" in refused.stderr


def test_differences_are_named_with_exit_code_1(log: str, other: str) -> None:
    found = result(log, T, "--against", other, code=1)
    assert (found["same"], found["up_to"], found["different_keys"]) == (False, 3, 1)
    assert found["differences"] == [
        {
            "key": "k\n2",
            "what": "different",
            "log_seqno": 2,
            "log_position": "1:3",
            "log_value_base64": "/w==",
            "copy_seqno": 2,
            "copy_position": "1:3",
            "copy_value": "other",
        }
    ]
    shown = txnbuf("audit", log, T, "--against", other)
    assert shown.returncode == 1
    assert r"k\n2  different" in shown.stdout
    assert result(log, T, "--against", other, "--first", "0", code=1)["differences"] == []
    assert result(log, T, "--against", other, "--up-to", "1", "--memory", "1")["up_to"] == 1
    assert shown.stderr == ""


def test_another_topic_of_the_same_address_can_be_the_copy(tmp_path: Path) -> None:
    log = make(tmp_path / "log", (b"k1", b"1"), (b"k2", b"2"))
    with open_broker(log) as broker:
        broker.create_topic("copy")
        with broker.writer("copy") as writer:
            writer.append(Batch.of([Message(b"k1", b"1"), Message(b"k2", b"2")])).result(120)
    assert result(log, T, "--against-topic", "copy")["same"] is True
    refused = txnbuf("audit", log, T, "--against-topic", "missing")
    assert refused.returncode == 2
    assert "missing" in refused.stderr


@pytest.mark.parametrize("name", [None, "log", "./log", "none/../log/", "link"])
def test_a_topic_is_no_copy_of_itself(name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = make(tmp_path / "log", (b"k1", b"1"))
    (tmp_path / "link").symlink_to("log")
    against = [] if name is None else ["--against", f"file:{name}"]
    refused = txnbuf("audit", log, T, *against, "--against-topic", T)
    assert refused.returncode == 2
    assert "the other copy is topic orders itself" in refused.stderr


def test_a_relayed_copy_is_compared_with_its_source(log: str, tmp_path: Path) -> None:
    target = f"file:{tmp_path / 'target'}"
    copy = shutil.copytree(log.removeprefix("file:"), tmp_path / "copy")
    assert txnbuf("relay", log, T, "clean", "--to", target, "--no-follow").returncode == 0
    for more in ([], ["--raw"]):
        found = result(log, T, "--against", target, "--against-topic", "clean", "--relayed", *more)
        assert (found["same"], found["up_to"], found["copy_keys"]) == (True, 4, 2)
    refused = txnbuf("audit", log, T, "--against", f"file:{copy}", "--relayed")
    assert refused.returncode == 2
    assert "was not written by a relay" in refused.stderr


def test_a_digest_of_one_audit_is_checked_by_another(log: str, other: str) -> None:
    found = result(log, T)
    assert (found["same"], found["compared_with"]) == (None, "nothing")
    assert (found["topic"], found["up_to"], found["log_records"], found["log_keys"]) == (T, 4, 4, 2)
    again = result(log, T, "--digest", found["digest"])
    assert again == {**found, "same": True, "compared_with": "given digest"}
    shorter = result(other, T)["digest"]
    assert result(other, T, "--digest", shorter)["digest"] == shorter
    lost = shorter[:-1] + ("0" if shorter[-1] != "0" else "1")
    wrong = txnbuf("audit", other, T, "--digest", lost)
    assert wrong.returncode == 1
    assert "differ from those of the digest, unless it was mistyped" in wrong.stderr
    for mistyped in (shorter[:-1], shorter + "0", shorter.replace("-", "_"), shorter[:-1] + "g", shorter.upper() + "A"):
        refused = txnbuf("audit", other, T, "--digest", mistyped)
        assert (refused.returncode, "is not a digest, START-END-DIGEST with two numbers and 48" in refused.stderr) == (
            2,
            True,
        )
    assert "(these are 47 characters)" in txnbuf("audit", other, T, "--digest", shorter[:-1]).stderr


def test_a_compaction_is_proven_by_a_copy_and_by_a_digest(tmp_path: Path) -> None:
    rows = [(b"k%d" % (number % 5), b"%d" % number) for number in range(50)]
    address = make(tmp_path / "log", *rows, (b"k3", None))
    copy = f"file:{shutil.copytree(tmp_path / 'log', tmp_path / 'copy')}"
    before = result(address, T)
    assert txnbuf("recover", address, "--decisions", "--write").returncode == 0  # this log has no decisions
    compacted = txnbuf("compact", address, T, "--output", "json")
    assert compacted.returncode == 0, compacted.stderr
    found = result(address, T, "--against", copy)
    assert (found["same"], found["up_to"], found["log_keys"]) == (True, 51, 4)
    assert found["log_records"] < found["copy_records"] == 51
    after = result(address, T, "--digest", before["digest"])
    assert (after["same"], after["log_keys"], after["log_records"]) == (True, 4, found["log_records"])
    stored = result(address, T)
    assert (stored["same"], stored["compared_with"], stored["stored_ledgers"]) == (True, "stored digests", 1)
    assert (stored["log_keys"], stored["log_records"]) == (4, found["log_records"])
    manifest = tmp_path / "log" / "manifest"
    before_it, name, digest = manifest.read_bytes().partition(b"\n")[2].partition(b'"digest":"')
    rest = before_it + name + (b"1" if digest.startswith(b"0") else b"0") + digest[1:]
    manifest.write_bytes(b"txnbuffer-log 2 %08x\n" % google_crc32c.value(rest) + rest)
    wrong = txnbuf("audit", address, T)
    assert wrong.returncode == 1
    assert "in 1 ledger, the first of them 1, differ from the digests that the last compaction has" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--relayed"], "--relayed and --up-to require --against"),
        (["--up-to", "1"], "--relayed and --up-to require --against"),
        (["--against-topic", T, "--raw"], "--raw requires --relayed"),
        (["--against-topic", T, "--digest", "x"], "give either another copy or --digest"),
        (["--digest", "x"], "'x' is not a digest"),
        (["--digest", "x" * 5000], "is not a digest"),
        (["--memory", "0"], "--memory"),
        (["--first", "5"], "--first requires --against"),
        (["--tls-ca", "ca.pem"], "--tls-ca can be used with the address of a service only"),
        (["--set", "pulsar.tls_trust=x"], "--set can be used with the address of a cluster only"),
        (["--against", "memory:"], "'memory:' is an empty log in the memory of this command"),
    ],
)
def test_bad_input_is_one_clear_error(log: str, arguments: list[str], message: str) -> None:
    refused = txnbuf("audit", log, T, *arguments)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_topic_of_the_service_is_refused(log: str) -> None:
    refused = txnbuf("audit", log, "__txnbuffer_snapshots")
    assert refused.returncode == 2


def test_a_temporary_directory_that_does_not_exist_is_refused(log: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    refused = txnbuf("audit", log, T, environ={"TMPDIR": str(missing)})
    assert refused.returncode == 2
    assert f"TMPDIR is {missing}, which is not a writable directory" in refused.stderr
    assert txnbuf("audit", log, T, environ={"TMPDIR": ""}).returncode == 0
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path))
    with mock.patch.object(tempfile, "mkdtemp", side_effect=full):
        failed = txnbuf("audit", log, T)
    assert failed.returncode == 4
    assert (
        f"{tmp_path}: No space left on device: an audit needs temporary files; set TMPDIR to another directory"
        in failed.stderr
    )
