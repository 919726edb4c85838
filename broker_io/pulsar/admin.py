"""Client of Pulsar's admin REST interface, with connections that are reused."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from broker_io.environment import current
from broker_io.errors import ClusterRefused, InvalidAddress, NotAuthorized, ServiceUnavailable
from broker_io.pulsar.answers import AnswerKind, classify_status
from broker_io.pulsar.credentials import Bearer, Credentials
from broker_io.waits import RetryPolicy

CALL_SECONDS = 30.0
"""Timeout of one request that changes something; shorter if `max_unavailable` is shorter."""
QUERY_SECONDS = 10.0
"""Timeout of one query, which is repeated: a broker whose machine vanished never closes the connections to it."""
LEAST_SECONDS = 2.0
MOST_REDIRECTS = 5
REASON_CHARACTERS = 200

_REDIRECTS = (301, 302, 307, 308)


class AdminClient:
    """Requests to the interface at `url`; safe from any thread."""

    def __init__(self, url: str, credentials: Credentials, retry: RetryPolicy) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise InvalidAddress(f"{url!r} is not the address of an admin interface: write http://HOST:PORT")
        self.url = url.rstrip("/")
        self._retry = retry
        self._call_seconds = min(CALL_SECONDS, max(LEAST_SECONDS, retry.seconds))
        self._bearer = Bearer(credentials)
        self._tls = credentials.tls_context() if parts.scheme == "https" else None
        self._credentials = credentials
        self._lock = current().threads.lock()
        self._idle: list[tuple[str, http.client.HTTPConnection]] = []

    def ask(self, method: str, path: str, body: Any = None, *, retry: bool = True) -> Any:
        """The decoded answer, None if it is empty. `path` follows `/admin/v2/`.

        Raises ClusterRefused with the status, NotAuthorized, and ServiceUnavailable; with `retry` only after the
        cluster was unavailable for too long.
        """
        if not retry:
            return self._ask(method, path, body)
        return self._retry(f"the answer to {method} {path}", lambda: self._ask(method, path, body))

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def _ask(self, method: str, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        place = f"{self.url}/admin/v2/{path}"
        for _ in range(MOST_REDIRECTS):
            status, content, location = self._call(method, place, data)
            if status not in _REDIRECTS or not location:
                return self._checked_answer(method, path, status, content)
            place = location
        raise ServiceUnavailable(
            f"{self.url} redirected {method} {path} {MOST_REDIRECTS} times: wait until its topic has moved"
        )

    def _checked_answer(self, method: str, path: str, status: int, content: bytes) -> Any:
        reason = "" if status < 300 else _reason(content)
        means = classify_status(status, reason)
        if means is AnswerKind.DONE:
            try:
                return json.loads(content) if content else None
            except ValueError:
                return content.decode(errors="replace")
        reason = reason[:REASON_CHARACTERS]
        what = f"{self.url} answered {method} {path} with {status} ({reason})"
        if means is AnswerKind.UNAUTHORIZED:
            raise NotAuthorized(f"{what}: use credentials with that permission")
        if means is AnswerKind.LOOKUP:
            raise ServiceUnavailable(f"{what}: the topic is moving, or its broker is starting")
        if means is AnswerKind.TRANSIENT:
            raise ServiceUnavailable(f"{what}: the cluster is busy or starting, see the broker's log")
        raise ClusterRefused(what, status, reason)

    def _call(self, method: str, place: str, data: bytes | None) -> tuple[int, bytes, str | None]:
        parts = urlsplit(place)
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        headers = {"Content-Type": "application/json", "Accept": "*/*", **self._bearer.headers()}
        connection, used = self._connection(parts.scheme, parts.netloc)
        while True:
            _limit(connection, min(self._call_seconds, QUERY_SECONDS if method == "GET" else CALL_SECONDS))
            try:
                connection.request(method, target, data, headers)
                response = connection.getresponse()
                content = response.read()
                break
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if isinstance(error, TimeoutError):
                    self.close()  # all kept ones may be dead
                    used = False
                if not used:
                    raise ServiceUnavailable(
                        f"no admin interface answers at {parts.scheme}://{parts.netloc} ({error!r}): is the cluster "
                        "running, and admin_url right?"
                    ) from None
                connection, used = self._connect(parts.scheme, parts.netloc), False  # a kept one may have ended
        if response.will_close:
            connection.close()
        else:
            with self._lock:
                self._idle.append((parts.netloc, connection))
        return response.status, content, response.getheader("Location")

    def _connection(self, scheme: str, netloc: str) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            for index, (kept, connection) in enumerate(self._idle):
                if kept == netloc:
                    del self._idle[index]
                    return connection, True
        return self._connect(scheme, netloc), False

    def _connect(self, scheme: str, netloc: str) -> http.client.HTTPConnection:
        if scheme == "https":
            context = self._tls or self._credentials.tls_context()
            return http.client.HTTPSConnection(netloc, timeout=self._call_seconds, context=context)
        return http.client.HTTPConnection(netloc, timeout=self._call_seconds)


def _limit(connection: http.client.HTTPConnection, seconds: float) -> None:
    """Limit the time of the next request, also on a connection that was kept."""
    connection.timeout = seconds
    if connection.sock is not None:
        connection.sock.settimeout(seconds)


def _reason(content: bytes) -> str:
    """The reason in the body of an answer, which is JSON, or the page of a web server, or a whole stack trace."""
    try:
        said = str(json.loads(content)["reason"])
    except (ValueError, KeyError, TypeError):
        said = content.decode(errors="replace")
    return " ".join(said.split()) or "no reason given"
