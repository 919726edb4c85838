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
    """Answers the first request of each connection; later ones only if it has not vanished.

    If it `drops`, a later request ends its connection without an answer; with `drops_all` the first one too.
    """

    def __init__(self) -> None:
        self.vanished = self.drops = self.drops_all = False
        self.requests = 0
        self.connections = 0
        self.together: threading.Barrier | None = None
        """Requests wait for one another here, so that each has a connection."""
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
                self.requests += 1
                if self.drops_all or (answered and self.drops):
                    return
                if not (answered and self.vanished):
                    answered += 1
                    if self.together is not None:
                        self.together.wait()
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
    server.together = threading.Barrier(kept)
    threads = [threading.Thread(target=client.ask, args=("GET", "namespaces")) for _ in range(kept)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.together = None
    assert server.connections == kept
    return client


def test_a_query_is_repeated_on_a_new_connection_after_one_timeout(
    server: Vanishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_module, "QUERY_SECONDS", 1.0)
    client = client_of(server, 5)
    server.vanished = True
    began = time.monotonic()
    assert client.ask("GET", "namespaces") == 1
    assert time.monotonic() - began < admin_module.CALL_SECONDS / 2
    assert server.connections == 6
    assert server.requests == 5 + 1 + 1, "the other kept connections are not used"
    client.close()


def test_a_request_that_meets_the_end_of_a_kept_connection_is_repeated(server: Vanishing) -> None:
    client = client_of(server, 2)
    server.drops = True
    assert client.ask("GET", "x", retry=False) == 1
    assert server.requests == 2 + 1 + 1
    assert client.ask("PUT", "x") == 1
    assert server.requests == 4 + 1 + 1
    server.drops_all = True
    with pytest.raises(ServiceUnavailable):
        client.ask("GET", "x", retry=False)
    assert server.requests == 6 + 2, "one on a new connection is the last one"
    client.close()


def test_a_change_without_retries_is_sent_once_on_a_new_connection(server: Vanishing) -> None:
    client = client_of(server, 2)
    server.drops = True
    assert client.ask("DELETE", "x", retry=False) == 1
    assert [server.requests, server.connections] == [2 + 1, 3]
    server.drops_all = True
    with pytest.raises(ServiceUnavailable):
        client.ask("DELETE", "x", retry=False)
    assert [server.requests, server.connections] == [2 + 1 + 1, 4]
    client.close()


def test_a_request_has_its_answer_though_the_connections_are_closed_meanwhile(server: Vanishing) -> None:
    client = client_of(server, 2)
    server.together = threading.Barrier(2)
    answers: list[object] = []
    slow = threading.Thread(target=lambda: answers.append(client.ask("GET", "namespaces", retry=False)))
    slow.start()
    while server.requests < 3:
        time.sleep(0.01)
    client.close()
    server.together.wait()
    slow.join()
    server.together = None
    assert answers == [1]
    assert client.ask("GET", "namespaces") == 1
    assert server.connections == 3
    client.close()


def test_a_query_without_retries_ends_after_one_timeout(server: Vanishing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_module, "QUERY_SECONDS", 1.0)
    client = client_of(server, 1)
    server.vanished = True
    with pytest.raises(ServiceUnavailable, match="timed out"):
        client.ask("GET", "namespaces", retry=False)
    assert server.connections == 1
    client.close()


def test_a_request_takes_no_longer_than_its_retries(server: Vanishing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_module, "LEAST_SECONDS", 0.1)
    client = AdminClient(server.url, Credentials(), RetryPolicy(0.2, lambda: None))
    assert client.ask("GET", "namespaces") == 1
    server.vanished = True
    began = time.monotonic()
    with pytest.raises(ServiceUnavailable, match="timed out"):
        client.ask("GET", "namespaces", retry=False)
    assert time.monotonic() - began < admin_module.QUERY_SECONDS / 2
    client.close()
