"""A pair of services in two other processes, for the figures of replication."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from bench.service_process import started
from txnbuffer.cli.admin_client import ServiceAddress, call

JOINING = 60.0
"""Seconds within which the backup must be in sync."""


@contextmanager
def pair(*settings: str) -> Iterator[str]:
    """The address of two `txnbuf serve` processes on a new log, both in sync, with a lock in a file."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as services:
        ports = [free_port(), free_port()]
        addresses = []
        for number, event in enumerate(("serving", "standing by")):
            command = [sys.executable, "-m", "txnbuffer", "serve", f"file:{directory}/log{number}", "--http", ""]
            command += ["--listen", "127.0.0.1:0", f"--pair-lock=file:{directory}/lock"]
            command += [f"--pair-listen=127.0.0.1:{ports[number]}", f"--backup-of=127.0.0.1:{ports[1 - number]}"]
            command += [word for setting in settings for word in ("--set", setting)]
            command += [] if number else ["--found"]
            _, facts = services.enter_context(started(command, event))
            addresses.append(f"127.0.0.1:{facts['port']}")
        wait_in_sync(ServiceAddress(addresses[0]))
        yield f"txnbuf://{','.join(addresses)}"


def wait_in_sync(service: ServiceAddress) -> None:
    deadline = time.monotonic() + JOINING
    while len(call(service, "Replication")["in_sync"]) < 2:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the backup is not in sync within {JOINING:g} s: {call(service, 'Replication')}")
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


ECHO = "import socket, sys; s = socket.socket(fileno=int(sys.argv[1]))\nwhile data := s.recv(64): s.send(data)"


def round_trip_ms(count: int = 200) -> float:
    """Median milliseconds of a small message to another process of this machine and back."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number = far.fileno()
        echo = subprocess.Popen([sys.executable, "-c", ECHO, str(number)], pass_fds=[number])
        times = []
        for _ in range(count):
            began = time.perf_counter()
            near.send(b"x")
            near.recv(1)
            times.append(time.perf_counter() - began)
        near.shutdown(socket.SHUT_WR)
        echo.wait(10)
    return sorted(times)[count // 2] * 1000
