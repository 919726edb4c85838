"""`txnbuf completions`: completion scripts of shells."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completions")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of a SHELL.

    In bash: eval "$(txnbuf completions bash)"; in fish: txnbuf completions fish | source.
    """
    from txnbuffer.cli.app import app

    found = get_completion_class(shell)
    if found is None:
        raise click.ClickException(f"no completion for {shell}")
    click.echo(found(app, {}, "txnbuf", "_TXNBUF_COMPLETE").source())
