"""`txnbuf plugin`: the plug-in of brokers that shows plain consumers only what committed"""

from __future__ import annotations

import sys

import click

from broker_io.errors import InvalidAddress
from broker_io.port import PlugInBroker
from txnbuffer.cli.commands import CommandGroup, address_argument
from txnbuffer.cli.options import LogAddress, log_options
from txnbuffer.cli.output import output_option, show_rows


@click.group("plugin", cls=CommandGroup)
def plugin_command() -> None:
    """The plug-in of Pulsar's brokers that shows plain consumers only what committed."""


@plugin_command.command("check")
@address_argument
@log_options
@output_option
def check_plugin(log: LogAddress, output: str) -> None:
    """Show whether each broker of the cluster at ADDRESS has the plug-in, and which settings it lacks.

    A broker that lacks it shows plain consumers everything. Requires the credentials of a superuser of the cluster.

    Exit code 0 if all brokers have it, 1 if not.
    """
    with log.open_for_reading() as broker:
        if not isinstance(broker, PlugInBroker):
            raise InvalidAddress(
                f"{log.address} is not a Pulsar cluster, so there is no plug-in: write pulsar://HOST:PORT"
            )
        found = broker.plug_ins()
    show_rows([{**one._asdict(), "missing": ", ".join(one.missing)} for one in found], output, title="plug-in")
    sys.exit(1 if any(one.missing for one in found) else 0)
