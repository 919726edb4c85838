"""`txnbuf config show`: the configuration as commands read it"""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import click

from txnbuffer.cli.options import with_config
from txnbuffer.cli.output import output_option, show_record, show_rows
from txnbuffer.config import PREFIX, Config

HIDDEN = "(given)"
"""Shown instead of a secret."""


@click.group("config")
def command() -> None:
    """Show the configuration: TOML file, then environment, then --set; the last one wins."""


@command.command("show")
@with_config
@output_option
def show(config: Config, output: str) -> None:
    """Show every setting with its value and its environment variable."""
    if config.pulsar.token:
        config = replace(config, pulsar=replace(config.pulsar, token=HIDDEN))
    if output == "json":
        show_record(dataclasses.asdict(config), output)
        return
    rows = [
        {"setting": f"{section}.{key}", "value": str(value), "environment": f"{PREFIX}{section}_{key}".upper()}
        for section, values in dataclasses.asdict(config).items()
        for key, value in values.items()
    ]
    show_rows(rows, output, title="configuration")
