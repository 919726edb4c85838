"""How commands ask a running service."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from broker_io.errors import InvalidAddress
from txnbuffer.errors import Error, ServiceUnavailable

Function = TypeVar("Function", bound=Callable[..., Any])

TIMEOUT = 30.0
DEFAULT = "127.0.0.1:7711"


def service_option(function: Function) -> Function:
    """`--service HOST:PORT`, also from the environment."""
    return click.option(
        "--service",
        default=DEFAULT,
        show_default=True,
        metavar="HOST:PORT",
        envvar="TXNBUFFER_SERVICE",
        help="The running service; also txnbuf://HOST:PORT. Environment: TXNBUFFER_SERVICE.",
    )(function)


def ask(service: str, method: str, **question: Any) -> Any:
    """The answer of a service to one question of an operator. Raises what the service answered, or that it is away."""
    import grpc

    from txnbuffer.service.names import ADMIN_SERVICE

    target = service.removeprefix("txnbuf://")
    if ":" not in target:
        raise InvalidAddress(f"{service!r} is no service: write HOST:PORT")
    with grpc.insecure_channel(target) as channel:
        call = channel.unary_unary(f"/{ADMIN_SERVICE}/{method}")
        try:
            return json.loads(call(json.dumps(question).encode(), timeout=TIMEOUT))
        except grpc.RpcError as error:
            raise _named(error, target) from None


def _named(error: Any, target: str) -> Error:
    """The error that a service raised, as one of the same class."""
    from txnbuffer.service.names import ERROR_FAULT, ERROR_NAME
    from txnbuffer.wire.faults import told

    known = dict(error.trailing_metadata() or ())
    if ERROR_NAME not in known:
        return ServiceUnavailable(f"no service answers at {target} ({error.details()}): start it, or give --service")
    fields = {"name": known[ERROR_NAME], "fault": known.get(ERROR_FAULT, ""), "message": error.details(), "details": {}}
    return told(fields)
