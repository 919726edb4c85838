"""How commands ask a running service."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import click

from broker_io.errors import InvalidAddress
from txnbuffer.cli.opening import tls_option
from txnbuffer.client.trust import certificates

TIMEOUT = 30.0
DEFAULT = "127.0.0.1:7711"


class Service(NamedTuple):
    """A running service; `tls_ca` is the file of the certificate that signs its own, None where it has no TLS."""

    address: str
    tls_ca: str | None = None


def service_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--service HOST:PORT` and `--tls-ca FILE`, also from the environment, as one argument `service`."""

    @functools.wraps(function)
    def with_service(*arguments: Any, service: str, tls_ca: str | None, **named: Any) -> Any:
        return function(*arguments, service=Service(service, tls_ca), **named)

    decorated = tls_option(with_service)
    return click.option(
        "--service",
        default=DEFAULT,
        show_default=True,
        metavar="HOST:PORT",
        envvar="TXNBUFFER_SERVICE",
        help="The running service; also txnbuf://HOST:PORT. Environment: TXNBUFFER_SERVICE.",
    )(decorated)


def ask(service: Service, method: str, *, timeout: float = TIMEOUT, **question: Any) -> Any:
    """The answer of a service to one question of an operator. Raises what the service answered, or that it is away."""
    import grpc

    from txnbuffer.client.admin_link import SERVICE, named

    target = service.address.removeprefix("txnbuf://")
    if ":" not in target:
        raise InvalidAddress(f"{service.address!r} is no service: write HOST:PORT")
    with _channel(target, service.tls_ca) as channel:
        call = channel.unary_unary(SERVICE + method)
        try:
            return json.loads(call(json.dumps(question).encode(), timeout=timeout))
        except grpc.RpcError as error:
            raise named(error, target) from None


def _channel(target: str, tls_ca: str | None) -> Any:
    import grpc

    if tls_ca is None:
        return grpc.insecure_channel(target)
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(certificates(tls_ca)))
