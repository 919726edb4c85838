"""`txnbuf pipeline`: invalid arguments are rejected before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commands import txnbuf


def test_help_lists_the_jobs() -> None:
    listing = txnbuf("pipeline", "--help").stdout
    for name in ("export", "audit", "recover", "profile", "compact"):
        assert f"  {name}" in listing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "memory:", "DIR"], "option broker can't be memory:"),
        (["export", "file:log", "s3://bucket/table"], "s3://bucket/table is not a directory"),
        (["export", "file:log", "DIR", "--pattern", "["], "option pattern must be a regular expression"),
        (["export", "file:log", "DIR", "--topic", "a", "--pattern", "b"], "one of the options topics and pattern"),
        (["export", "file:log", "DIR", "--set", "log.fsync=1"], "section pulsar only"),
        (["export", "file:log", "DIR", "--conf", "x"], "write KEY=VALUE"),
        (["audit", "file:log", "DIR"], "there is no export at"),
        (["profile", "nowhere"], "nowhere"),
        (["profile", "file:log", "--html", "no/where.html"], "cannot write the report to no/where.html"),
        (["audit", "file:log", "DIR", "--html", "/"], "cannot write the report to /"),
        (["export", "file:/no/log", "/no/log/topics/x"], "/no/log/topics/x is inside the log"),
        (["export", "file:///no/log", "/no/log"], "/no/log is inside the log"),
        (["export", "file:log", "DIR", "--columns", "colour"], "unknown column colour"),
        (["compact", "txnbuf://h:1"], "'txnbuf://h:1' is not a directory"),
        (["compact", "file:log", "--topic", "a", "--set", "pulsar.admin_url=http://h"], "for clusters"),
        (["compact", "file:no/log"], "no/log contains no log"),
        (["export", "file:no/log", "DIR"], "no/log contains no log"),
    ],
)
def test_invalid_arguments_are_rejected_at_once(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = txnbuf("pipeline", *[str(tmp_path / "export") if text == "DIR" else text for text in arguments])
    assert done.returncode == (4 if "no log" in message else 2), done.stderr
    assert message in done.stderr
    assert not (tmp_path / "export").exists()


def test_a_format_that_is_not_installed_is_named(tmp_path: Path) -> None:
    script = "import sys; sys.modules['deltalake'] = None; from txnbuffer.cli import main; main()"
    arguments = ["pipeline", "export", f"file:{tmp_path}/log", str(tmp_path / "export"), "--format", "delta"]
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 5, done.stderr
    assert "pip install 'txnbuffer[delta]'" in done.stderr
    assert not (tmp_path / "export").exists()
