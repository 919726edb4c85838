"""An admin interface whose machine vanished: nothing answers on connections that were kept, and nothing closes them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from broker_io.errors import ServiceUnavailable
from broker_io.pulsar import admin as admin_module
from broker_io.pulsar.admin import AdminClient
from broker_io.pulsar.credentials import Credentials
from broker_io.waits import RetryPolicy

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n1"


class Vanishing:
    """Answers the first request of each connection; later ones only if it has not vanished."""

    def __init__(self) -> None:
        self.vanished = False
        self.connections = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._server.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._answer, args=(accepted,), daemon=True).start()

    def _answer(self, accepted: socket.socket) -> None:
        answered = 0
        with accepted:
            while accepted.recv(65_536):
                if not (answered and self.vanished):
                    answered += 1
                    accepted.sendall(ANSWER)

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def server() -> Iterator[Vanishing]:
    found = Vanishing()
    yield found
    found.close()


def client_of(server: Vanishing, kept: int) -> AdminClient:
    """A client with connections that were kept."""
    client = AdminClient(server.url, Credentials(), RetryPolicy(60.0, lambda: None, from_start=True))
    taken = [client._connection("http", server.url.removeprefix("http://"))[0] for _ in range(kept)]
    for connection in taken:
        connection.request("GET", "/")
        connection.getresponse().read()
        client._idle.append((server.url.removeprefix("http://"), connection))
    return client


def test_a_query_is_repeated_on_a_new_connection_after_one_timeout(
    server: Vanishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_module, "QUERY_SECONDS", 0.2)
    client = client_of(server, 5)
    server.vanished = True
    began = time.monotonic()
    assert client.ask("GET", "namespaces") == 1
    assert time.monotonic() - began < admin_module.CALL_SECONDS / 2
    assert server.connections == 6
    client.close()


def test_a_query_without_retries_ends_after_one_timeout(server: Vanishing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_module, "QUERY_SECONDS", 0.2)
    client = client_of(server, 1)
    server.vanished = True
    with pytest.raises(ServiceUnavailable, match="timed out"):
        client.ask("GET", "namespaces", retry=False)
    assert server.connections == 1
    client.close()
