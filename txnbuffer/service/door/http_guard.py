"""Protects the HTTP server from pages of foreign sites, and from bodies that are too large or never end

A browser of somebody who reaches the service would make requests for any page that it shows. So requests are refused

- to a host name that is not the service's (`Host`), because a page's name can be made to resolve to any address;
- of pages (`Origin`, `Sec-Fetch-Site`), other than of this host itself;
- that change something and have another type than `application/json`, which a form can't send.

No answer allows another origin to read it (CORS); each answer has HEADERS.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from txnbuffer.errors import Error, InvalidRequest, LimitExceeded, NotAuthorized

HEADERS = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
}
"""Headers of each answer: it is no page, in no frame, of its declared type, not stored, and for no other origin."""
STATUSES = {
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "ALREADY_EXISTS": 409,
    "FAILED_PRECONDITION": 409,
    "RESOURCE_EXHAUSTED": 429,
    "INVALID_ARGUMENT": 400,
    "OUT_OF_RANGE": 400,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
}
"""The HTTP status of an error by that of gRPC; 500 for others."""
MAX_BODY = 64 * 1024
"""Bytes of the body of a request."""
BODY_SECONDS = 10.0
"""Seconds in which it must arrive."""
JSON = "application/json"
CHANGING = ("POST", "PUT", "PATCH", "DELETE")
OWN_SITE = ("same-origin", "none")
"""Values of Sec-Fetch-Site for a page of the service, and for an address that somebody has typed."""
SHOWN = 200
"""Characters of a header that an error shows."""

Asgi = Callable[..., Any]


HOST = re.compile(r"(?:\[[0-9a-f:.]+\]|[\w.-]+)(?::\d{1,5})?", re.ASCII | re.IGNORECASE)
"""What a Host header may be: another one would be understood in different ways."""


def host_of(host: str) -> str:
    """The name or address in a Host header, or in HOST:PORT."""
    name = host.rsplit("]", 1)[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    return name.removesuffix(".").lower()


def page_refusal(headers: Mapping[str, str], scheme: str, names: frozenset[str]) -> NotAuthorized | None:
    """Why a request may come from the page of a foreign site; None if it does not.

    `headers`: by lower-case name. `names`: those of the service; loopback and addresses need not be among them.
    """
    host, origin, site = headers.get("host"), headers.get("origin"), headers.get("sec-fetch-site")
    if host is not None and not (HOST.fullmatch(host) and _is_known(host_of(host), names)):
        return NotAuthorized(f"{host[:SHOWN]!r} is no name of this service: use its address, or set service.advertise")
    if origin is not None and origin.lower() != f"{scheme}://{(host or '').lower()}":
        return NotAuthorized(f"requests of pages of {origin[:SHOWN]!r} are refused: no page may use this service")
    if site is not None and site not in OWN_SITE:
        return NotAuthorized(f"requests of other sites ({site[:SHOWN]!r}) are refused: no page may use this service")
    return None


def _is_known(name: str, names: frozenset[str]) -> bool:
    if name == "localhost" or name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def error_body(error: Error) -> bytes:
    """What a request is answered with that failed."""
    found = {"error": type(error).__name__, "message": str(error), "retryable": error.retryable}
    if isinstance(error, LimitExceeded):
        found |= {"limit": error.limit, "retry_after": error.retry_after}
    return json.dumps(found).encode()


def status_of(error: Error) -> int:
    return STATUSES.get(error.grpc_status, 500)


class HttpGuard:
    """Middleware around an ASGI application. `refused` is called with the error and the client of a refused request."""

    def __init__(self, app: Asgi, names: frozenset[str], refused: Callable[[NotAuthorized, str], None]) -> None:
        self._app = app
        self._names = names
        self._refused = refused

    async def __call__(self, scope: Any, receive: Asgi, send: Asgi) -> None:
        if scope["type"] != "http":
            return
        send = _with_headers(send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        foreign = page_refusal(headers, scope["scheme"], self._names)
        if foreign is not None:
            self._refused(foreign, peer_of(scope))
            await _answer(send, 403, foreign)
            return
        if scope["method"] in CHANGING:
            if headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
                await _answer(send, 415, InvalidRequest(f"the body must be JSON: send the header content-type: {JSON}"))
                return
            body = await self._body(receive, send)
            if body is None:
                return
            receive = _with_body(body, receive)
        await self._app(scope, receive, send)

    async def _body(self, receive: Asgi, send: Asgi) -> bytes | None:
        """The body of a request; None if it was refused, or its client has gone."""
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > MAX_BODY:
                        await _answer(send, 413, InvalidRequest(f"the body has over {MAX_BODY} bytes: send less"))
                        return None
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            await _answer(send, 408, InvalidRequest(f"the body did not arrive in {BODY_SECONDS:g} s: send it again"))
            return None


def peer_of(scope: Any) -> str:
    """The client of a request as the log names it."""
    host, port = scope.get("client") or ("?", 0)
    return f"http:{host}:{port}"


def _with_headers(send: Asgi) -> Asgi:
    async def sending(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            given = [*message.get("headers", ())]
            message = message | {"headers": given + [(name.encode(), text.encode()) for name, text in HEADERS.items()]}
        await send(message)

    return sending


def _with_body(body: bytes, receive: Asgi) -> Asgi:
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receiving() -> Any:
        return messages.pop() if messages else await receive()

    return receiving


async def _answer(send: Asgi, status: int, error: Error) -> None:
    """Answer with an error; the connection ends, because the rest of a body may come."""
    body = error_body(error)
    headers = [
        (b"content-type", JSON.encode()), (b"content-length", str(len(body)).encode()), (b"connection", b"close"),
    ]  # fmt: skip
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
