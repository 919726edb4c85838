"""Pulsar's admin REST interface, as far as tests need it, and free ports for brokers."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from typing import Any

STARTING = 240.0
"""Seconds in which a broker must be up, on a machine that is busy with other tests."""


class NoPulsar(Exception):
    """There is no Pulsar to test with; the message is one sentence that says what to do."""


def ask(admin: str, path: str, method: str = "GET", body: Any = None, *, seconds: float = 30.0) -> Any:
    """Call `/admin/v2/PATH`: the decoded answer, or None for an empty one; `urllib.error.HTTPError` if refused."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{admin}/admin/v2/{path}", data, method=method)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        text = answer.read()
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text.decode()


def is_up(admin: str) -> bool:
    """Whether the broker can write and read a message of its own, which is more than answering."""
    try:
        return ask(admin, "brokers/health", seconds=10.0) == "ok"
    except (OSError, ValueError):
        return False


def wait_until_up(admin: str, alive: Callable[[], bool], report: Callable[[], str]) -> None:
    """Wait for a broker that starts; NoPulsar with the end of its log if it ends instead, or takes too long."""
    deadline = time.monotonic() + STARTING
    while not is_up(admin):
        ended = not alive()
        if ended or time.monotonic() > deadline:
            what = "ended while it started" if ended else f"isn't up after {STARTING:g} s"
            raise NoPulsar(f"the Pulsar broker at {admin} {what}; see what it said last:\n{report()}")
        time.sleep(0.2)


def make_namespace(admin: str) -> str:
    """Make a namespace, `public/…`, that nobody else uses."""
    name = f"public/tb-{uuid.uuid4().hex[:16]}"
    ask(admin, f"namespaces/{name}", "PUT", {})
    return name


class Port:
    """A free TCP port of 127.0.0.1, kept from others while this object lives.

    The socket is bound and never listens: a server that sets SO_REUSEADDR, as brokers do, can still take the port,
    also again after it was killed, and nobody who asks for any port gets it.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def free(self) -> None:
        self._socket.close()
