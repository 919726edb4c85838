"""The classes of commands and groups: the ADDRESS that a command works on, and suggestions for misspelt names

Commands that work on a log or a service take its ADDRESS as their first argument. If the first argument is not an
address, they work on the one of `TXNBUFFER_ADDRESS`, else on that of the configuration file, or else on the service of
this machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from broker_io import canonical_address, is_cluster
from broker_io.addresses import shown_address
from broker_io.errors import Error, InvalidAddress, TopicNotFound
from txnbuffer import __version__
from txnbuffer.cli.global_options import HIDDEN, NAMES, is_quiet, load_given, logging_as_given

if TYPE_CHECKING:
    from txnbuffer.cli.options import LogAddress

Function = TypeVar("Function", bound=Callable[..., Any])

LOG = logging.getLogger(__name__)
VARIABLE = "TXNBUFFER_ADDRESS"
DEFAULT = "txnbuf://127.0.0.1:7711"
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:.*", re.DOTALL)
HOST_PORT = re.compile(r"(?!\d+:\d+$)[\w.-]+:\d+(,[\w.-]+:\d+)*")
"""An address without its scheme; two numbers are a transaction."""
COMPLETION_SECONDS = 1.0
"""How long a completion waits for a service or a cluster."""


def default_address(ctx: click.Context, path: str | None = None, profile: str | None = None) -> str:
    """The address of a command that was given none; empty if none is set. `HOST:PORT` is that of a service."""
    address = os.environ.get(VARIABLE) or load_given(ctx, path, profile=profile).connection.get("address", "")
    return f"txnbuf://{address}" if HOST_PORT.fullmatch(address) else address


def is_address(text: str) -> bool:
    """Whether the first argument of a command is its ADDRESS. Raises InvalidAddress for one without its scheme."""
    if HOST_PORT.fullmatch(text):
        raise InvalidAddress(f"{text!r} is not an address: write txnbuf://{text}")
    return SCHEME.fullmatch(text) is not None


def suggestion(name: str, names: Iterable[str]) -> str:
    """The question which name was meant: ` Did you mean 'orders'?`; nothing if no name is similar."""
    close = get_close_matches(name, names)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def _show_namespace(address: str) -> None:
    """Say which namespace is used if an address of a cluster names none."""
    from txnbuffer.cli.output import narrate

    with contextlib.suppress(InvalidAddress):  # the command reports it
        if (used := canonical_address(address)) != address.rstrip("/"):
            narrate(f"{address} names no namespace: using {used}")


class AddressCommand(click.Command):
    """A command; one with an argument `address` works on the default address if it is given none."""

    logs_events = False
    """Whether it is a service, whose log programs read, and which does not use the configuration file of a user."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *HIDDEN]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if any(isinstance(one, AddressArgument) for one in self.params):
            with contextlib.suppress(Error) if ctx.resilient_parsing else contextlib.nullcontext():
                args = self._with_address(ctx, args)
        return super().parse_args(ctx, args)

    def _with_address(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The arguments with an ADDRESS before them, if they have none."""
        options = click.Command(None, params=[one for one in self.get_params(ctx) if isinstance(one, click.Option)])
        try:
            given, positional, _ = options.make_parser(click.Context(options)).parse_args([*args])
        except click.UsageError:  # the actual parser reports it
            # In a completion the last word is an option whose value is completed.
            return self._with_address(ctx, args[:-1]) if ctx.resilient_parsing and args else args
        first = positional[0] if positional else ""
        if is_address(first):
            return args
        others = [
            one for one in self.params if isinstance(one, click.Argument) and not isinstance(one, AddressArgument)
        ]
        if len(positional) > len(others) and all(one.nargs == 1 for one in others):
            raise InvalidAddress(
                f"{shown_address(first)!r} is not an address: write file:DIR, txnbuf://HOST:PORT or "
                "pulsar://HOST:PORT/TENANT/NAMESPACE"
            )
        if os.path.isdir(first) and any(isinstance(one, TopicArgument) for one in self.params):
            raise InvalidAddress(f"{first!r} is a directory: for the log in it, write file:{first}")
        address = default_address(ctx, given.get("config_path"), given.get("profile"))
        return [address or ("" if self._needs_cluster else DEFAULT), *args]

    @property
    def _needs_cluster(self) -> bool:
        return any(isinstance(one, ClusterArgument) for one in self.params)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        if any(isinstance(one, AddressArgument) for one in self.params):
            formatter.write_paragraph()
            otherwise = "" if self._needs_cluster else f", else {DEFAULT}"
            formatter.write_text(
                f"Without ADDRESS: that of the environment variable {VARIABLE}, else of the profile{otherwise}."
            )
        formatter.write_paragraph()
        formatter.write_text(f"Also: {NAMES}, see txnbuf --help.")

    def invoke(self, ctx: click.Context) -> Any:
        from txnbuffer.progress import progress_bar, reporting

        with logging_as_given(ctx, logs_events=self.logs_events), progress_bar() as bar:
            address = str(ctx.params.get("address") or "")
            LOG.debug("%s %s, address %s", ctx.command_path, __version__, shown_address(address) if address else "-")
            if address.startswith("pulsar") and not self.logs_events:  # a service logs it
                _show_namespace(address)
            try:
                with reporting(bar if bar.shows and not is_quiet(ctx) else None):
                    return super().invoke(ctx)
            except Error as error:
                LOG.debug("the command failed", exc_info=True)
                if isinstance(error, TopicNotFound):
                    raise _with_suggestion(error, ctx) from None
                raise


class CommandGroup(click.Group):
    """A group of commands that suggests what was meant instead of an unknown one."""

    command_class = AddressCommand
    inherited: Sequence[click.Option] = HIDDEN
    """The options of `txnbuf` itself that it accepts as well."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *self.inherited]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not ctx.resilient_parsing and not name.startswith("-"):
            ctx.fail(f"No such command {name!r}.{suggestion(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


CommandGroup.group_class = CommandGroup


class AddressArgument(click.Argument):
    """The argument ADDRESS, for which an `AddressCommand` has a default."""


address_argument = click.argument("address", metavar="[ADDRESS]", cls=AddressArgument)


class ClusterArgument(AddressArgument):
    """An ADDRESS that is that of a cluster: the service of this machine is no default for it."""

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        if not ctx.resilient_parsing:
            if not value:
                raise click.UsageError(f"Missing argument 'ADDRESS': write pulsar://HOST:PORT, or set {VARIABLE}.", ctx)
            check_cluster(value)
        return super().process_value(ctx, value)


cluster_argument = click.argument("address", metavar="[ADDRESS]", cls=ClusterArgument)


def check_cluster(address: str) -> None:
    """Raises InvalidAddress for another address than that of a cluster, without opening it."""
    if not is_cluster(address):
        raise InvalidAddress(
            f"{shown_address(address)} is not the address of a Pulsar cluster, whose brokers can have the plug-in: "
            f"write pulsar://HOST:PORT, as ADDRESS or in {VARIABLE}"
        )


def topic_argument(name: str = "topic", **settings: Any) -> Callable[[Function], Function]:
    """An argument for a topic, or for several, which the shell can complete."""
    return click.argument(name, cls=TopicArgument, **settings)


class TopicArgument(click.Argument):
    """An argument that is the name of a topic, or several, at the address of the command."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return complete_topic(ctx, self, incomplete)


def complete_topic(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The topics at the address of a command that begin with a text; `shell_complete` of options."""
    return [CompletionItem(name) for name in topic_names(ctx) if name.startswith(incomplete)]


def topic_names(ctx: click.Context) -> list[str]:
    """The topics at the address of a command; none if they can't be listed in a moment."""
    try:
        log = _log(ctx)
        with log.open_for_reading(max_unavailable=COMPLETION_SECONDS) as broker:
            return [name for name in broker.topics() if not name.startswith("__")]
    except (Error, KeyError, OSError):
        return []


def _log(ctx: click.Context) -> LogAddress:
    from txnbuffer.cli.options import LogAddress, access_of

    config = load_given(ctx, ctx.params.get("config_path"), ctx.params.get("flags") or ()).config
    return LogAddress(ctx.params["address"], config, access_of(ctx))


def _with_suggestion(error: TopicNotFound, ctx: click.Context) -> TopicNotFound:
    """The error without what it advises about Python, and with the topics that may have been meant."""
    text = str(error).partition("; with wait=True")[0]
    params = [one.name for one in ctx.command.params if isinstance(one, TopicArgument)]
    values = [ctx.params.get(name or "") for name in params]
    wanted = [name for value in values for name in (value if isinstance(value, tuple) else (value,)) if name]
    names = topic_names(ctx)
    hints = [suggestion(name, names) for name in wanted if name not in names]
    return TopicNotFound(f"{text}.{''.join(hints)}" if any(hints) else text)
