"""The arguments and options that many commands share, and the brokers that they open"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from broker_io import is_cluster, open_broker
from broker_io.port import Broker
from txnbuffer.config import Config, load_config
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import TxnId

Function = TypeVar("Function", bound=Callable[..., Any])


def address_argument(function: Function) -> Function:
    """The `ADDRESS` argument."""
    return click.argument("address", metavar="ADDRESS")(function)


def tls_option(function: Function) -> Function:
    """`--tls-ca FILE`, or its environment variable, as argument `tls_ca`."""
    return click.option(
        "--tls-ca",
        metavar="FILE",
        envvar="TXNBUFFER_TLS_CA",
        help="Connect to the service with TLS and this CA certificate (PEM). Environment: TXNBUFFER_TLS_CA.",
    )(function)


def config_options(function: Function) -> Function:
    """`--config FILE` and `--set KEY=VALUE`."""
    function = click.option(
        "--set",
        "flags",
        multiple=True,
        metavar="SECTION.KEY=VALUE",
        help="One setting; repeatable.",
    )(function)
    return click.option("--config", "config_path", metavar="FILE", help="Configuration file (TOML).")(function)


def with_config(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--config FILE` and `--set KEY=VALUE`; they and the environment give one argument `config`."""

    @functools.wraps(function)
    def with_it(*arguments: Any, config_path: str | None, flags: tuple[str, ...], **named: Any) -> Any:
        return function(*arguments, config=configuration(config_path, flags), **named)

    return config_options(with_it)


def configuration(config_path: str | None, flags: tuple[str, ...]) -> Config:
    return load_config(config_path, os.environ, flags)


def parse_txn(text: str) -> TxnId:
    """Parse a transaction id. Raises InvalidRequest."""
    try:
        return TxnId.parse(text)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def open_for_reading(address: str, config: Config, tls_ca: str | None = None) -> Broker:
    """Open a broker that another process may own."""
    if address.startswith("file:"):
        return open_broker(address, read_only=True)
    if is_cluster(address):
        return open_broker(address, **config.pulsar.options())
    if address.startswith("txnbuf:") and tls_ca is not None:
        from txnbuffer.rpc.discovery import read_ca_file

        return open_broker(address, root_certificates=read_ca_file(tls_ca))
    return open_broker(address)


def connect_options(
    address: str, config: Config, tls_ca: str | None, max_unavailable: float | None = None
) -> dict[str, Any]:
    """The arguments of `connect` besides the address; `tls_ca` is the file with the CA certificate of the service.

    `max_unavailable`: seconds to wait without a connection; None means the configured value for clusters, and the
    default of `connect` elsewhere.
    """
    given = {} if max_unavailable is None else {"max_unavailable": max_unavailable}
    cluster = {"broker_options": config.pulsar.options() | given} if is_cluster(address) else {}
    return {"tls_ca": tls_ca, **given, **cluster}


def open_for_writing(address: str, config: Config) -> Broker:
    """Open a broker as its owner."""
    if is_cluster(address):
        return open_broker(address, **config.pulsar.options())
    if not address.startswith("file:"):
        return open_broker(address)
    log = config.log
    return open_broker(
        address,
        segment_bytes=log.segment_bytes,
        compression=None if log.compression == "none" else log.compression,
        watermark_bytes=log.watermark_bytes,
        max_message_bytes=log.max_message_bytes,
    )
