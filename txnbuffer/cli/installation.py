"""Commands about this installation: `txnbuf config`, `txnbuf bench` and `txnbuf completions`"""

from __future__ import annotations

import os
import sys

import click
from click.shell_completion import get_completion_class

from broker_io.addresses import shown_address
from broker_io.errors import MissingDependency
from txnbuffer.cli.commands import AddressCommand, CommandGroup
from txnbuffer.cli.global_options import load_given
from txnbuffer.cli.options import config_options
from txnbuffer.cli.output import output_option, show_record, show_rows
from txnbuffer.config import CONNECTION, PREFIX, shown


@click.group("config", cls=CommandGroup)
def config_command() -> None:
    """Show the configuration: a file, its profile, the environment, then --set; the last one takes precedence."""


@config_command.command("show")
@config_options
@output_option
@click.pass_context
def show_config(ctx: click.Context, config_path: str | None, flags: tuple[str, ...], output: str) -> None:
    """Show every setting with its value, and where it comes from.

    The environment variable of SECTION.KEY is TXNBUFFER_SECTION_KEY. The file is that of --config, else of
    TXNBUFFER_CONFIG, else ~/.config/txnbuffer.toml if it exists.
    """
    loaded = load_given(ctx, config_path, flags)
    settings, sources = shown(loaded.config), {**loaded.sources}
    connection: dict[str, str] = {**loaded.connection}
    for key in CONNECTION:
        if text := os.environ.get(variable := f"{PREFIX}{key}".upper()):
            connection[key], sources[key] = shown_address(text), f"environment variable {variable}"
    if output == "json":
        file = {"file": loaded.path, "profile": loaded.profile}
        show_record(settings | {"connection": connection, "sources": sources} | file, output)
        return
    values = connection | {f"{name}.{key}": value for name, table in settings.items() for key, value in table.items()}
    rows = [
        {"setting": name, "value": str(value), "source": sources.get(name, "default")} for name, value in values.items()
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
