"""`max_unavailable` means one thing, whatever is away: the longest time that a call waits without a connection."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from service_process import kept_port

from broker_io import open_broker
from broker_io.errors import InvalidAddress
from txnbuffer import ServiceUnavailable, connect


class NoNamespace(BaseHTTPRequestHandler):
    """An admin interface that knows no namespace, which no client waits for."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def admin_at(port: int) -> Iterator[None]:
    server = HTTPServer(("127.0.0.1", port), NoNamespace)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def cluster(admin: int) -> tuple[str, dict[str, str]]:
    return f"pulsar://127.0.0.1:{kept_port()}/public/default", {"admin_url": f"http://127.0.0.1:{admin}"}


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("service", "no service for 3 s: no service answers at 127.0.0.1:[0-9]+ within 3 s"),
        ("cluster", "no admin interface answers at http://127.0.0.1"),
        ("broker of a service", "no service answers at 127.0.0.1"),
        ("broker of a cluster", "no admin interface answers at http://127.0.0.1"),
    ],
)
def test_calls_wait_for_an_unavailable_peer_for_max_unavailable(kind: str, told: str) -> None:
    address, options = f"txnbuf://127.0.0.1:{kept_port()}", {}
    if "cluster" in kind:
        address, options = cluster(kept_port())
    began = time.monotonic()
    with pytest.raises(ServiceUnavailable, match=told):
        if kind.startswith("broker"):
            open_broker(address, max_unavailable=3.0, **options)
        else:
            given = {"broker_options": options} if options else {}
            with connect(address, max_unavailable=3.0, **given):
                raise AssertionError
    assert time.monotonic() - began > 1.5  # the last attempt may have ended before the time does


def test_admin_interface_that_does_not_answer_is_waited_for_as_long_as_a_closed_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address, options = cluster(silent.getsockname()[1])
        began = time.monotonic()
        with pytest.raises(ServiceUnavailable, match="timed out"):
            open_broker(address, max_unavailable=2.0, **options)
        assert time.monotonic() - began < 20.0  # an answer may else take 30 s


def test_cluster_that_becomes_available_in_time_is_used() -> None:
    port = kept_port()
    address, options = cluster(port)
    failed: list[BaseException] = []

    def opens() -> None:
        try:
            connect(address, max_unavailable=60.0, broker_options=options).open_sync()
        except BaseException as error:
            failed.append(error)

    opening = threading.Thread(target=opens)
    opening.start()
    time.sleep(1.0)
    assert opening.is_alive()
    with admin_at(port):
        opening.join(60)
    assert [type(error) for error in failed] == [InvalidAddress]


async def test_an_error_that_is_raised_again_and_again_does_not_grow() -> None:
    """Without a service each call raises the same error, whose traceback is that of the call."""
    async with connect("memory:growing") as client:
        client.session._unreachable = ServiceUnavailable("no service")
        frames = []
        for _ in range(3):
            with pytest.raises(ServiceUnavailable) as found:
                await client.transaction().begin()
            frames.append(sum(1 for _ in traceback.walk_tb(found.value.__traceback__)))
        client.session._unreachable = None
    assert len({*frames}) == 1
