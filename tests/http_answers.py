"""HTTP requests to a service on this machine."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple


def get(port: int, path: str) -> tuple[int, str]:
    """Status and text of the answer, also of an error."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


class HttpAnswer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    port: int,
    path: str,
    body: Any = None,
    *,
    method: str = "",
    headers: Mapping[str, str] | None = None,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> HttpAnswer:
    """The answer to a request; a `body` is sent as JSON. Names of headers in the answer are lower case."""
    given = {} if token is None else {"Authorization": f"Bearer {token}"}
    data = None
    if body is not None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given["Content-Type"] = "application/json"
    made = http.client.HTTPConnection if tls is None else partial(http.client.HTTPSConnection, context=tls)
    connection = made("localhost", port, timeout=60)
    with contextlib.closing(connection):
        connection.request(method or ("GET" if body is None else "POST"), path, data, given | {**(headers or {})})
        answer = connection.getresponse()
        return HttpAnswer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
