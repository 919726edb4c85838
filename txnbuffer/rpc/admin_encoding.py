"""Requests of operators as messages of `admin.proto`"""

from __future__ import annotations

import json
from typing import Any

from broker_io.rpc.encoding import parse, serialize
from txnbuffer.errors import InvalidRequest, MalformedFrame
from txnbuffer.rpc.admin_pb2 import AdminAnswer, AdminRequest

ADMIN_SERVICE = "txnbuffer.v1.Admin"
ADMIN_PATH = f"/{ADMIN_SERVICE}"


def encode_admin_request(arguments: dict[str, Any]) -> AdminRequest:
    """Return the message of a request; arguments that are None are left out. Raises InvalidRequest."""
    given = {name: value for name, value in arguments.items() if value is not None}
    if isinstance(at := given.get("at"), int) and not isinstance(at, bool):
        given["at"] = str(at)
    try:
        return AdminRequest(**given)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"these are not arguments of a request: {error}") from None


def decode_admin_request(data: bytes) -> dict[str, Any]:
    """Return the arguments of a request. Raises InvalidRequest."""
    try:
        return {field.name: value for field, value in parse(AdminRequest, data).ListFields()}
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def decode_admin_body(body: bytes) -> dict[str, Any]:
    """Return the arguments in JSON of a request over HTTP, as its message would have them. Raises InvalidRequest."""
    try:
        given = json.loads(body) if body.strip() else {}
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise InvalidRequest("the body is no JSON object: send one with the arguments of the request, or {}")
    return decode_admin_request(serialize(encode_admin_request(given)))


def decode_admin_answer(data: bytes) -> Any:
    """Return what a service answered. Raises MalformedFrame."""
    try:
        return json.loads(parse(AdminAnswer, data).json)
    except (ValueError, RecursionError) as error:
        raise MalformedFrame(f"cannot read an answer of the service: {error}; use a client of its release") from None
