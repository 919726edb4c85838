"""How commands ask a running service."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import click

from broker_io.errors import Error, InvalidAddress, ServiceUnavailable, TopicNotFound
from txnbuffer.cli.opening import tls_option
from txnbuffer.errors import ForeignTopic, ForeignTransaction
from txnbuffer.rpc.discovery import read_ca_file

TIMEOUT = 30.0
DEFAULT = "127.0.0.1:7711"


class ServiceAddress(NamedTuple):
    """A running service, or that of each shard with commas between.

    `tls_ca` is the file of the certificate that signs its own, None where it has no TLS.
    """

    address: str
    tls_ca: str | None = None

    @property
    def each(self) -> list[ServiceAddress]:
        """Each once: who is named twice has one answer."""
        addresses = [address.strip() for address in self.address.split(",")]
        return [
            ServiceAddress(one, self.tls_ca) for one in {at.removeprefix("txnbuf://"): at for at in addresses}.values()
        ]


def service_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--service HOST:PORT` and `--tls-ca FILE`, also from the environment, as one argument `service`."""

    @functools.wraps(function)
    def with_service(*arguments: Any, service: str, tls_ca: str | None, **named: Any) -> Any:
        return function(*arguments, service=ServiceAddress(service, tls_ca), **named)

    decorated = tls_option(with_service)
    return click.option(
        "--service",
        default=DEFAULT,
        show_default=True,
        metavar="HOST:PORT,…",
        envvar="TXNBUFFER_SERVICE",
        help="The running service, also as txnbuf://HOST:PORT; with shards that of each, with commas between. "
        "Environment: TXNBUFFER_SERVICE.",
    )(decorated)


class ServiceAnswers(NamedTuple):
    """What the services said, and by address why some did not."""

    each: list[Any]
    missing: dict[str, Error]

    def rows(self, *order: str) -> list[dict[str, Any]]:
        """The rows of all; of several services sorted by what stands under the names of `order`."""
        rows = [row for answer in self.each for row in answer]
        if len(self.each) + len(self.missing) == 1:
            return rows
        return sorted(rows, key=lambda row: [str(row[name]) for name in order])

    def check(self) -> None:
        """Raises ServiceUnavailable where some did not answer: what was shown is not all there is."""
        if self.missing:
            who = "; ".join(str(error) for error in self.missing.values())
            asked = len(self.each) + len(self.missing)
            raise ServiceUnavailable(f"{len(self.missing)} of {asked} services told nothing, this is without it: {who}")


def ask_owner(service: ServiceAddress, method: str, **question: Any) -> Any:
    """The answer of the shard that a question is for, whoever else is away.

    Raises what that one answered, or that a service is away which may be the one.
    """
    refused: Error | None = None
    away: Error | None = None
    for one in service.each:
        try:
            return ask(one, method, **question)
        except (ForeignTopic, ForeignTransaction) as error:
            refused = refused or error
        except TopicNotFound as error:
            refused = error
        except ServiceUnavailable as error:
            away = away or error
    raise away or refused or AssertionError("there is no service without an address")


def ask_all(service: ServiceAddress, method: str, **question: Any) -> ServiceAnswers:
    """The answers of all shards. Raises ServiceUnavailable if there is none: show what there is, and `check` it."""
    found = ServiceAnswers([], {})
    for one in service.each:
        try:
            found.each.append(ask(one, method, **question))
        except ServiceUnavailable as error:
            found.missing[one.address] = error
    if not found.each:
        raise next(iter(found.missing.values()))
    return found


def ask(service: ServiceAddress, method: str, *, timeout: float = TIMEOUT, **question: Any) -> Any:
    """The answer of a service to one question of an operator. Raises what the service answered, or that it is away."""
    import grpc

    from txnbuffer.client.links import named
    from txnbuffer.rpc.frames import ADMIN_SERVICE

    target = service.address.removeprefix("txnbuf://")
    host, _, port = target.rpartition(":")
    if not host or not port.isdecimal() or "/" in target:
        cluster = "the address of a cluster" if "pulsar" in target.partition("://")[0] else "no service"
        raise InvalidAddress(f"{service.address!r} is {cluster}: write HOST:PORT of the service")
    with _channel(target, service.tls_ca) as channel:
        call = channel.unary_unary(f"/{ADMIN_SERVICE}/{method}")
        try:
            return json.loads(call(json.dumps(question).encode(), timeout=timeout))
        except grpc.RpcError as error:
            raise named(error, target) from None


def _channel(target: str, tls_ca: str | None) -> Any:
    import grpc

    if tls_ca is None:
        return grpc.insecure_channel(target)
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(read_ca_file(tls_ca)))
