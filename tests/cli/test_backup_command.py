"""`txnbuf backup` and `txnbuf restore`."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import BAR_AT_ONCE, txnbuf
from service_process import ServiceProcess

from txnbuffer import connect


def result(*arguments: str) -> Any:
    done = txnbuf(*arguments, "--output", "json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no progress bar without a terminal"
    return json.loads(done.stdout)


def write(address: str, count: int = 20) -> None:
    with connect(address) as client:
        for value in range(count):
            with client.transaction() as txn:
                txn.send("orders", f"v{value}")


def values(address: str) -> list[str]:
    return [line.split("\t")[-1] for line in txnbuf("tail", address, "orders").stdout.splitlines()]


def test_a_log_is_backed_up_and_restored(tmp_path: Path) -> None:
    log, new, file = f"file:{tmp_path / 'log'}", f"file:{tmp_path / 'new'}", str(tmp_path / "backup")
    write(log)
    written = result("backup", log, file)
    assert written["file"] == file
    assert written["bytes"] == Path(file).stat().st_size
    assert written["topics"] == 3
    assert result("restore", file, "--check") == written
    assert result("restore", file, new) == written | {"log": new}
    assert values(new) == values(log) == [f"v{value}" for value in range(20)]
    write(new, 3)
    assert values(new)[20:] == ["v0", "v1", "v2"]
    assert txnbuf("verify", new).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (("backup", "file:LOG", "OLD"), 2, "OLD exists"),
        (("backup", "file:LOG", "NONE/file"), 2, "there is no directory NONE"),
        (("backup", "file:LOG", "LOG/topics/file"), 2, "is in the directory of the log"),
        (("backup", "file:NONE", "FILE"), 4, "NONE contains no log"),
        (("backup", "memory:", "FILE"), 2, "'memory:' is an empty log"),
        (("backup", "pulsar://127.0.0.1:1/public/default", "FILE"), 2, "back up its cluster"),
        (("backup", "LOG", "FILE"), 2, "is not an address: write file:DIR, txnbuf://HOST:PORT or"),
        (("restore", "OLD"), 2, "give either ADDRESS or --check"),
        (("restore", "OLD", "file:NEW", "--check"), 2, "give either ADDRESS or --check"),
        (("restore", "OLD", "NEW"), 2, "'NEW' is not a broker address"),
        (("restore", "OLD", "file:LOG"), 2, "name an empty or missing directory"),
        (("restore", "OLD", "file:OLD"), 2, "OLD can't be a directory: name one that is missing or empty"),
        (("restore", "NONE", "file:NEW"), 2, "there is no file NONE: name a backup"),
        (("restore", "LOG/manifest", "file:NEW"), 4, "LOG/manifest, offset 0: this is not a backup"),
        (("restore", "LOG/manifest", "--check"), 4, "LOG/manifest, offset 0: this is not a backup"),
        (("restore", "LOG", "--check"), 4, "LOG: Is a directory: the backup can't be read"),
        (("restore", "OLD", "file:OLD/new"), 2, "can't be a directory"),
    ],
)
def test_a_wrong_request_gets_one_clear_error(tmp_path: Path, arguments: tuple[str, ...], code: int, why: str) -> None:
    places = {name: str(tmp_path / name.lower()) for name in ("LOG", "OLD", "NONE", "FILE", "NEW")}
    with connect(f"file:{places['LOG']}"):
        pass
    assert txnbuf("backup", f"file:{places['LOG']}", places["OLD"]).returncode == 0

    def filled(text: str) -> str:
        for name, place in places.items():
            text = text.replace(name, place)
        return text

    refused = txnbuf(*map(filled, arguments))
    assert (refused.returncode, filled(why) in refused.stderr) == (code, True), refused.stderr
    assert "Traceback" not in refused.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "old"], "the command creates nothing"


def test_a_log_of_a_running_service_is_not_opened(tmp_path: Path) -> None:
    service = ServiceProcess(tmp_path / "log").wait_serving()
    try:
        refused = txnbuf("backup", f"file:{tmp_path / 'log'}", str(tmp_path / "file"))
        assert (refused.returncode, "is owned by another process" in refused.stderr) == (5, True), refused.stderr
    finally:
        service.kill()


def test_a_service_backs_up_its_log(tmp_path: Path) -> None:
    file, new = str(tmp_path / "file"), f"file:{tmp_path / 'new'}"
    service = ServiceProcess(tmp_path / "log").wait_serving()
    try:
        write(f"txnbuf://127.0.0.1:{service.port}")
        written = result("backup", f"txnbuf://127.0.0.1:{service.port}", file)
        assert written["bytes"] == Path(file).stat().st_size
        for path, why in (("file", "'file' is not an absolute path"), (file, "exists on the machine of the service")):
            refused = txnbuf("backup", f"txnbuf://127.0.0.1:{service.port}", path)
            assert (refused.returncode, why in refused.stderr) == (2, True), refused.stderr
        failed = txnbuf("backup", f"txnbuf://127.0.0.1:{service.port}", str(tmp_path / "none" / "file"))
        assert (failed.returncode, "was not written: there is no directory" in failed.stderr) == (4, True)
    finally:
        service.kill()
    assert result("restore", file, new)["messages"] == written["messages"]
    assert values(new) == [f"v{value}" for value in range(20)]
    refused = txnbuf("backup", f"txnbuf://127.0.0.1:{service.port}", file)
    assert refused.returncode == 3, refused.stderr


@pytest.mark.parametrize("served", [True, False])
def test_a_terminal_gets_a_progress_bar(tmp_path: Path, served: bool) -> None:
    write(f"file:{tmp_path / 'log'}")
    service = ServiceProcess(tmp_path / "log").wait_serving() if served else None
    address = f"file:{tmp_path / 'log'}" if service is None else f"txnbuf://127.0.0.1:{service.port}"
    try:
        shown = on_a_terminal("backup", address, str(tmp_path / "file"))
    finally:
        if service is not None:
            service.kill()
    assert f"backup of {address}" in shown
    if not served:
        assert "check of" in on_a_terminal("restore", str(tmp_path / "file"), "--check")


def on_a_terminal(*arguments: str) -> str:
    """What a command shows on a terminal."""
    ours, terminal = pty.openpty()
    command = [sys.executable, "-c", BAR_AT_ONCE, *arguments]
    environment = {**os.environ, "COLUMNS": "300"}
    subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, timeout=120, check=True, env=environment)
    os.close(terminal)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    return shown


def test_an_interrupted_command_says_that_the_service_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(service: object, method: str, **request: object) -> Any:
        if method == "BackUp":
            return {"run": 1}
        raise KeyboardInterrupt

    monkeypatch.setattr("txnbuffer.cli.backup.call_owner", interrupted)
    stopped = txnbuf("backup", "txnbuf://127.0.0.1:1", "/file")
    assert (stopped.returncode, "the service continues to write" in stopped.stderr) == (130, True)


def test_a_service_that_was_restarted_has_no_backup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txnbuffer.cli.backup.call_owner", lambda service, method, **_: {"run": 1} if _ else [])
    failed = txnbuf("backup", "txnbuf://127.0.0.1:1", "/file")
    assert (failed.returncode, "the service has ended meanwhile" in failed.stderr) == (3, True)


def test_an_audit_compares_with_a_backup(tmp_path: Path) -> None:
    log, file = f"file:{tmp_path / 'log'}", str(tmp_path / "file")
    write(log)
    with connect(log) as client, client.transaction() as txn:
        txn.send("orders", "one", key="a")
    assert txnbuf("backup", log, file).returncode == 0
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    def audited(against: str) -> tuple[int, str]:
        done = txnbuf("audit", log, "orders", "--against", against, environ={"TMPDIR": str(temporary)})
        assert not [*temporary.iterdir()], "nothing is left"
        return done.returncode, done.stdout + done.stderr

    assert audited(f"backup:{file}")[0] == 0
    write(other := f"file:{tmp_path / 'other'}", 3)
    with connect(other) as client, client.transaction() as txn:
        txn.send("orders", "another", key="b")
    assert txnbuf("backup", other, str(tmp_path / "second")).returncode == 0
    assert audited(f"backup:{tmp_path / 'second'}")[0] == 1
    assert txnbuf("compact", log, "orders").returncode == 0
    assert audited(f"backup:{file}")[0] == 0
    changed = tmp_path / "changed"
    data = bytearray(Path(file).read_bytes())
    data[-20] ^= 1
    changed.write_bytes(data)
    code, said = audited(f"backup:{changed}")
    assert (code, "changed, offset" in said) == (4, True), said
    code, said = audited("backup:/none")
    assert (code, "there is no file /none" in said) == (2, True), said
