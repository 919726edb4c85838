"""A service in a process of its own, for the figures that go through a client."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def service() -> Iterator[str]:
    """`txnbuf serve` on a new log; its address."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "txnbuffer", "serve", f"file:{directory}/log"]
        command += ["--listen", "127.0.0.1:0", "--http", ""]
        with serving(command) as (_, address):
            yield address


@contextmanager
def serving(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of a service, and its address."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        address = _address(process)
        assert process.stderr is not None
        threading.Thread(target=process.stderr.read, daemon=True).start()  # or the service would wait for us
        yield process, address
    finally:
        process.terminate()
        process.wait(timeout=60)


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    told = []
    for line in process.stderr:
        told.append(line)
        if line.startswith("{") and json.loads(line)["event"] == "serving":
            return str(json.loads(line)["address"])
    raise RuntimeError(f"the service did not start:\n{''.join(told)}")
