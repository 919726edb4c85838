"""The arguments and options that many commands share, and the logs that they open"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import click

from broker_io import canonical_address, is_cluster, open_broker
from broker_io.errors import InvalidAddress, Locked
from broker_io.port import Broker
from txnbuffer.cli.global_options import load_given
from txnbuffer.config import Config
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import TxnId
from txnbuffer.rpc.service_access import NO_ACCESS, ServiceAccess, broker_options_of

LOG = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])


ACCESS = ("tls_ca", "tls_cert", "tls_key", "token_file")
"""The parameters of `access_options`."""


def access_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--tls-ca`, `--tls-cert`, `--tls-key` and `--token-file`, or their environment variables, as argument `access`.

    A token itself is accepted in the environment only: other users can see the arguments of a process.
    """

    @functools.wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        access = access_of(click.get_current_context())
        access.check()
        for name in ACCESS:
            del named[name]
        return function(*arguments, access=access, **named)

    decorated = wrapped
    for name, text in (
        ("--tls-ca", "Connect to the service with TLS and this CA certificate (PEM)."),
        ("--tls-cert", "Certificate of this client for the service (PEM)."),
        ("--tls-key", "Private key of this certificate (PEM)."),
        ("--token-file", "File with the token for the service; or TXNBUFFER_TOKEN has the token."),
    ):
        variable = f"TXNBUFFER_{name[2:].replace('-', '_').upper()}"
        option = click.option(name, metavar="FILE", envvar=variable, help=f"{text} Environment: {variable}.")
        decorated = option(decorated)
    return decorated


def access_of(ctx: click.Context) -> ServiceAccess:
    """How the command connects to a service: its options, else the environment, else the configuration file.

    What the file says is for the address in it, and not sent to another one.
    """
    given = {name: ctx.params.get(name) for name in ACCESS}
    token = None if given["token_file"] is not None else os.environ.get("TXNBUFFER_TOKEN") or None
    connection = load_given(ctx, ctx.params.get("config_path")).connection
    if connection.get("address") == ctx.params.get("address"):
        names = [name for name in ACCESS if given[name] is None and not (name == "token_file" and token)]
        given |= {name: connection.get(name) for name in names}
    return ServiceAccess(**given, token=token)


def with_config(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--config FILE` and `--set KEY=VALUE`; they, the environment and a profile give one argument `config`."""

    @functools.wraps(function)
    def wrapped(*arguments: Any, config_path: str | None, flags: tuple[str, ...], **named: Any) -> Any:
        loaded = load_given(click.get_current_context(), config_path, flags)
        LOG.debug("configuration file %s, profile %s", loaded.path or "-", loaded.profile or "-")
        return function(*arguments, config=loaded.config, **named)

    return config_options(wrapped)


def config_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--config FILE` and `--set KEY=VALUE`, as arguments `config_path` and `flags`."""
    settings = click.option("--set", "flags", multiple=True, metavar="SECTION.KEY=VALUE",
                            help="One setting; repeatable.")  # fmt: skip
    path = click.option("--config", "config_path", metavar="FILE", help="Configuration file (TOML).")
    return path(settings(function))


class LogAddress(NamedTuple):
    """The ADDRESS of a command, and how to connect to it; `access` is for a service."""

    address: str
    config: Config
    access: ServiceAccess = NO_ACCESS

    @property
    def place(self) -> str:
        """One text for all addresses of one directory, or of one namespace of a cluster. Raises InvalidAddress."""
        scheme, _, path = self.address.partition(":")
        return f"file:{os.path.realpath(path)}" if scheme == "file" else canonical_address(self.address)

    def check_not_in_memory(self) -> None:
        """Raises InvalidAddress for a log in memory, which is an empty one of the command itself."""
        if self.address.partition(":")[0] == "memory":
            raise InvalidAddress(
                f"{self.address!r} is an empty log in the memory of this command, not that of another process: give "
                "file:DIR, or the address of the service"
            )

    def open_for_reading(self, max_unavailable: float | None = None) -> Broker:
        """Open a broker that another process may own. `max_unavailable`: seconds to wait for a service or a cluster."""
        options: dict[str, Any] = {}
        if self.address.startswith("file:"):
            options = {"read_only": True}
        elif is_cluster(self.address):
            options = self.config.pulsar.options()
        elif self.address.startswith("txnbuf:"):
            options = broker_options_of(self.access.load())
        if max_unavailable is not None and not self.address.startswith(("file:", "memory:")):
            options["max_unavailable"] = max_unavailable
        return open_broker(self.address, **options)

    def open_for_writing(self, *, compacted: str | None = None) -> Broker:
        """Open a broker as its owner. `compacted`: a topic of a cluster that may be compacted."""
        if is_cluster(self.address):
            more = {} if compacted is None else {"compacted_prefix": compacted}
            return open_broker(self.address, **self.config.pulsar.options() | more)
        if not self.address.startswith("file:"):
            return self.open_for_reading()
        try:
            return open_broker(self.address, **self._log_options())
        except Locked as error:
            owned = str(error).partition(", or open the log")[0]
            raise Locked(f"{owned}, or give the address of its service, txnbuf://HOST:PORT") from None

    def open_to_serve(self) -> Broker:
        """Open a broker as its owner, or as one of a pair if one is configured."""
        if not self.config.pair.lock:
            return self.open_for_writing()
        from broker_io.filelog.pair.broker import PairBroker, PairOptions

        options = PairOptions(**dataclasses.asdict(self.config.pair))
        return PairBroker.open_member(self.address.partition(":")[2], pair=options, **self._log_options())

    def _log_options(self) -> dict[str, Any]:
        log = self.config.log
        return {
            "segment_bytes": log.segment_bytes,
            "compression": None if log.compression == "none" else log.compression,
            "watermark_bytes": log.watermark_bytes,
            "max_message_bytes": log.max_message_bytes,
            "compaction_bytes": log.compaction_bytes,
        }

    def connect_options(self, max_unavailable: float | None = None) -> dict[str, Any]:
        """The arguments of `connect` besides the address.

        `max_unavailable`: seconds to wait without a connection; None means the configured value for clusters, and the
        default of `connect` elsewhere.
        """
        given = {} if max_unavailable is None else {"max_unavailable": max_unavailable}
        cluster = {"broker_options": self.config.pulsar.options() | given} if is_cluster(self.address) else {}
        return {**{name: getattr(self.access, name) for name in (*ACCESS, "token")}, **given, **cluster}


def log_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`access_options` and the options of `with_config`; they and the argument `address` give one argument `log`."""

    @functools.wraps(function)
    def wrapped(*arguments: Any, address: str, config: Config, access: ServiceAccess, **named: Any) -> Any:
        return function(*arguments, log=LogAddress(address, config, access), **named)

    return access_options(with_config(wrapped))


def given(*parameters: str) -> str:
    """Those of some parameters of the running command that are on its command line, as options: `--config and --set`.

    The environment does not count: it is meant for all commands.
    """
    context = click.get_current_context()
    typed = click.core.ParameterSource.COMMANDLINE
    there = [name for name in parameters if context.get_parameter_source(name) is typed]
    return " and ".join(one.opts[-1] for one in context.command.params if one.name in there)


def parse_txn(text: str) -> TxnId:
    """Parse a transaction id. Raises InvalidRequest."""
    try:
        return TxnId.parse(text)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
