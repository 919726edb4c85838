"""A service in another process, for the figures of the client."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any


@contextmanager
def service(*flags: str, program: Sequence[str] = ("-m", "txnbuffer")) -> Iterator[str]:
    """The address of a `txnbuf serve` process on a new log; `flags` are added to the command.

    `program` are the arguments of the interpreter that start `txnbuf`.
    """
    with serving(*flags, program=program) as (_, address):
        yield address


@contextmanager
def serving(*flags: str, program: Sequence[str] = ("-m", "txnbuffer")) -> Iterator[tuple[int, str]]:
    """The id of such a process, and its address."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, *program, "serve", f"file:{directory}/log"]
        command += ["--listen", "127.0.0.1:0", "--http", "", *flags]
        with started(command) as (process, facts):
            yield process.pid, str(facts["address"])


def as_installed() -> dict[str, str]:
    """An environment in which modules are compiled once, like those of an installed package, not at each start."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": _compiled()}


@functools.cache
def _compiled() -> str:
    directory = tempfile.TemporaryDirectory(prefix="txnbuffer-bench-")
    atexit.register(directory.cleanup)
    return directory.name


@contextmanager
def started(command: list[str], event: str = "serving") -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The process of a service that has logged an event, and the fields of that event."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=as_installed())
    output = process.stderr
    assert output is not None
    reading = threading.Thread(target=output.read, daemon=True)  # or a full pipe would block the service
    try:
        facts = _wait_for(output, event)
        reading.start()
        yield process, facts
    finally:
        process.terminate()
        process.wait(timeout=60)
        if reading.ident is not None:
            reading.join()
        output.close()


def _wait_for(output: IO[str], event: str) -> dict[str, Any]:
    lines = []
    for line in output:
        lines.append(line)
        if line.startswith("{"):
            facts: dict[str, Any] = json.loads(line)
            if facts["event"] == event:
                return facts
    raise RuntimeError(f"the service did not log {event!r}:\n{''.join(lines)}")
