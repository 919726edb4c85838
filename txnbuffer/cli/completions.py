"""`txnbuf completions`: shell completion scripts"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completions")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script for SHELL.

    In bash: eval "$(txnbuf completions bash)"; in fish: txnbuf completions fish | source.
    """
    from txnbuffer.cli.app import app

    found = get_completion_class(shell)
    if found is None:
        raise click.ClickException(f"there is no completion for {shell}: use bash, zsh or fish")
    click.echo(found(app, {}, "txnbuf", "_TXNBUF_COMPLETE").source())
