"""Commands about this installation: `txnbuf config`, `txnbuf bench` and `txnbuf completions`"""

from __future__ import annotations

import sys

import click
from click.shell_completion import get_completion_class

from broker_io.errors import MissingDependency
from txnbuffer.cli.commands import AddressCommand, CommandGroup
from txnbuffer.cli.options import with_config
from txnbuffer.cli.output import output_option, show_record, show_rows
from txnbuffer.config import PREFIX, Config, shown


@click.group("config", cls=CommandGroup)
def config_command() -> None:
    """Show the configuration: TOML file, then environment, then --set; the last one wins."""


@config_command.command("show")
@with_config
@output_option
def show_config(config: Config, output: str) -> None:
    """Show every setting with its value and its environment variable."""
    settings = shown(config)
    if output == "json":
        show_record(settings, output)
        return
    rows = [
        {"setting": f"{section}.{key}", "value": str(value), "environment": f"{PREFIX}{section}_{key}".upper()}
        for section, values in settings.items()
        for key, value in values.items()
    ]
    show_rows(rows, output, title="configuration")


@click.command("bench", cls=AddressCommand)
@click.argument("prefix", default="")
def bench_command(prefix: str) -> None:
    """Run all benchmarks, or those whose names start with PREFIX.

    Prints one JSON object per line: figure, value, unit, goal, and the system that it is compared with,
    measured in the same run. The benchmarks are part of the source tree, not of the installed package.
    """
    try:
        from bench.harness import main
    except ModuleNotFoundError:
        raise MissingDependency("the benchmarks are in the source tree: run `txnbuf bench` from its root") from None
    sys.exit(main([prefix] if prefix else []))


@click.command("completions", cls=AddressCommand)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completions_command(shell: str) -> None:
    """Print the completion script for SHELL.

    In bash: eval "$(txnbuf completions bash)"; in fish: txnbuf completions fish | source.
    """
    from txnbuffer.cli.app import app

    found = get_completion_class(shell)
    if found is None:
        raise click.ClickException(f"there is no completion for {shell}: use bash, zsh or fish")
    click.echo(found(app, {}, "txnbuf", "_TXNBUF_COMPLETE").source())
