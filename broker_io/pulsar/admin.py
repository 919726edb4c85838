"""Client of Pulsar's admin REST interface, with connections that are reused.

A takeover asks for the end of each topic, so the processor time of a request counts: it uses urllib3, which takes less
than httpx2.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import SplitResult, urljoin, urlsplit

from urllib3 import PoolManager
from urllib3.exceptions import ClosedPoolError, HTTPError, NewConnectionError, ProtocolError
from urllib3.exceptions import TimeoutError as NoAnswer

from broker_io.addresses import shown_address
from broker_io.errors import CallerError, ClusterRefused, InvalidAddress, NotAuthorized, ServiceUnavailable
from broker_io.pulsar.answers import AnswerKind, classify_status, read_answer
from broker_io.pulsar.credentials import Bearer, Credentials, check_hop
from broker_io.waits import RetryPolicy

CALL_SECONDS = 30.0
"""Timeout of one request that changes something; shorter if `max_unavailable` is shorter."""
QUERY_SECONDS = 10.0
"""Timeout of one query, which is repeated: a broker whose machine vanished never closes the connections to it."""
LEAST_SECONDS = 2.0
ASK_SECONDS = 5.0
"""Timeout of a request to each of the brokers, of which some may be gone."""
MOST_REDIRECTS = 5
REASON_CHARACTERS = 200

T = TypeVar("T")

_REDIRECTS = (301, 302, 307, 308)
MOST_KEPT = 1024
"""Connections that are kept, at most."""


def _parts(url: str) -> SplitResult:
    """The parts of the address of an admin interface. Raises InvalidAddress for another one."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        bare = parts.path in ("", "/") and not (parts.query or parts.fragment)
        if parts.scheme in ("http", "https") and parts.hostname and bare and parts.port != 0:
            return parts
    raise InvalidAddress(f"{shown_address(url)!r} is not the address of an admin interface: write http://HOST:PORT")


class AdminClient:
    """Requests to the interface at `url`; safe from any thread."""

    def __init__(self, url: str, credentials: Credentials, retry: RetryPolicy) -> None:
        if not isinstance(url, str):
            raise InvalidAddress(f"admin_url must be a text, got {url!r}: write http://HOST:PORT")
        parts = _parts(url)
        if "@" in parts.netloc:
            raise InvalidAddress(f"{shown_address(url)!r} has a user or a password in it: give a token instead")
        credentials.check_sent_to(url)
        self.url = url.rstrip("/")
        self.refused = False  # whether nothing listened there at the last request that failed
        self._retry = retry
        self._call_seconds = min(CALL_SECONDS, max(LEAST_SECONDS, retry.seconds))
        self._credentials = credentials
        self._bearer = Bearer(credentials)
        self._pools = PoolManager(maxsize=MOST_KEPT, ssl_context=credentials.tls_context())

    def at(self, url: str) -> AdminClient:
        """A client of the same cluster at another broker, with the same credentials, which waits for ASK_SECONDS."""
        made = AdminClient(url, self._credentials, self._retry)
        made._call_seconds = ASK_SECONDS
        return made

    def ask(self, method: str, path: str, body: Any = None, *, retry: bool = True) -> Any:
        """The decoded answer, None if it is empty. `path` follows `/admin/v2/`.

        Raises ClusterRefused with the status, NotAuthorized, InvalidAddress if a page comes instead of JSON, and
        ServiceUnavailable; with `retry` only after the cluster was unavailable for too long. A change without `retry`
        is sent once: after ServiceUnavailable it may have been made.
        """
        if not retry:
            return self._ask(method, path, body, once=method != "GET")
        return self._retry(f"the answer to {method} {path}", lambda: self._ask(method, path, body, once=False))

    def query(self, path: str, read: Callable[[Any], T], *, retry: bool = True) -> T:
        """What `read` finds in the answer to GET; raises as `ask`, and ClusterRefused for an answer of another form."""
        return read_answer(f"the answer to GET {path}", self.ask("GET", path, retry=retry), read)

    def close(self) -> None:
        """Close the connections; those that requests use once they have their answers."""
        self._pools.clear()

    def _ask(self, method: str, path: str, body: Any, *, once: bool) -> Any:
        data = None if body is None else json.dumps(body).encode()
        place = f"{self.url}/admin/v2/{path}"
        for _ in range(MOST_REDIRECTS):
            status, content, location = self._call(method, place, data, once=once)
            if status not in _REDIRECTS or not location:
                return self._checked_answer(method, path, status, content)
            try:
                place = urljoin(place, location)
            except ValueError:
                raise ServiceUnavailable(f"{self.url} redirected {method} {path} to no address: {location!r}") from None
            check_hop(self.url, place, self._credentials)
        raise ServiceUnavailable(
            f"{self.url} redirected {method} {path} {MOST_REDIRECTS} times: wait until its topic has moved"
        )

    def _checked_answer(self, method: str, path: str, status: int, content: bytes) -> Any:
        """The content of an answer. Raises ClusterRefused, InvalidAddress, NotAuthorized, ServiceUnavailable."""
        reason = "" if status < 300 else _reason(content)
        means = classify_status(status, reason)
        if means is AnswerKind.DONE:
            try:
                return json.loads(content) if content else None
            except (ValueError, RecursionError):
                text = content.decode(errors="replace")
                if text.lstrip().startswith("<"):
                    raise InvalidAddress(
                        f"{self.url} answered {method} {path} with a page instead of JSON: check that admin_url is "
                        f"the admin interface of the cluster"
                    ) from None
                return text
        reason = reason[:REASON_CHARACTERS]
        what = f"{self.url} answered {method} {path} with {status} ({reason})"
        if means is AnswerKind.UNAUTHORIZED:
            raise NotAuthorized(f"{what}: use credentials with that permission")
        if means is AnswerKind.LOOKUP:
            raise ServiceUnavailable(f"{what}: the topic is moving, or its broker is starting")
        if means is AnswerKind.TRANSIENT:
            raise ServiceUnavailable(f"{what}: the cluster is busy or starting, see the broker's log")
        raise ClusterRefused(what, status, reason)

    def _call(self, method: str, place: str, data: bytes | None, *, once: bool) -> tuple[int, bytes, str | None]:
        headers = {"Content-Type": "application/json", "Accept": "*/*", **self._bearer.headers()}
        seconds = min(self._call_seconds, QUERY_SECONDS if method == "GET" else CALL_SECONDS)
        if once:
            self.close()  # a kept connection may have ended, and then nobody knows whether the request arrived
        repeatable = not once
        while True:
            try:
                response = self._pools.request(
                    method, place, body=data, headers=headers, timeout=seconds, redirect=False, retries=False
                )
                return response.status, response.data, response.headers.get("Location")
            except ClosedPoolError:
                continue  # by another thread, before anything was sent
            except HTTPError as error:
                lost = isinstance(error, ProtocolError)
                self.refused = isinstance(error, NewConnectionError)
                if lost or isinstance(error, NoAnswer):
                    self.close()  # all kept connections may have ended, or be dead
                if lost and repeatable:
                    repeatable = False
                    continue
                raise ServiceUnavailable(
                    f"no admin interface answers at {shown_address(place).partition('/admin/')[0]} ({error}): is the "
                    "cluster running, and is this its address? Change the setting pulsar.admin_url, or in Python give "
                    "broker_options={'admin_url': …}"
                ) from None
            except ValueError as error:  # its text may show a header
                raise CallerError(f"the request to {place} can't be sent ({type(error).__name__})") from None


def _reason(content: bytes) -> str:
    """The reason in the body of an answer, which is JSON, or the page of a web server, or a whole stack trace."""
    try:
        said = str(json.loads(content)["reason"])
    except (ValueError, KeyError, TypeError, RecursionError):
        said = content.decode(errors="replace")
    return " ".join(said.split()) or "no reason given"
