"""The `txnbuf` command itself: the table of its commands, and how errors end it.

Results go to stdout, narration and progress to stderr. Exit codes: 0 done; 1 done, and something is
wrong with what was looked at; 2 the request can't be; 3 another process; 4 storage; 5 this machine;
130 interrupted; 141 whoever read our output left, as `head` does: then nothing is said. An error that is
no `broker_io.errors.Error` is a defect and shows its traceback.

Errors of the command line alone; the tree's root is `broker_io.errors`.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import click

from broker_io.errors import EnvironmentFault

COMMANDS = {
    "serve": "Serve transactions on a log until SIGTERM.",
    "produce": "Send lines of standard input as records, in transactions.",
    "list": "List the topics of a running service.",
    "describe": "Tell all about a topic, and what its readers wait for.",
    "find-hanging": "Find open transactions that hold readers back.",
    "abort": "Abort a transaction, whoever has it open.",
    "groups": "Show how far consumer groups have come.",
    "streams": "Show change streams and how far each has come.",
    "cursors": "Show, make, move and remove durable cursors of change streams.",
    "inspect": "Show what is stored: topics and messages, a buffer's state, snapshot entries.",
    "verify": "Check every buffer snapshot against its log; changes nothing.",
    "recover": "Rebuild a buffer's state from its log and show how the snapshot differs.",
    "tail": "Print records as they become visible.",
    "relay": "Append what commits in a topic to a clean one, exactly once.",
    "materialize": "Keep the latest value of each key as a SQLite table.",
    "pipeline": "Jobs on Spark: export, audit, recover and profile.",
    "bench": "Measure this machine, one JSON object a line.",
    "config": "Show the configuration and where each value can be set.",
    "completions": "Print the completion script of a shell.",
    "demo": "Write a year of flights in transactions while processes are killed.",
}
"""Command name → its help line. The module of the same name in this package is imported when it runs."""


INTERRUPTED = 130
READER_LEFT = 141
"""As a shell tells of a process that a broken pipe ended."""

OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""What a write to stdout can fail with; anything else of the operating system is not about our output."""


class OutputClosed(Exception):
    """Nobody reads our output any more."""


@contextlib.contextmanager
def output_told() -> Iterator[None]:
    """Name what keeps our output from being written; click itself would end with 1, which says something else here."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise OutputClosed from None
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS or error.filename is not None:
            raise

        raise OutputFailed(f"the output can't be written: {error.strerror}; send it somewhere else") from error


class Commands(click.Group):
    """A group that imports a command only when it runs, so that `txnbuf --help` is immediate."""

    def make_context(self, *arguments: Any, **named: Any) -> click.Context:
        with output_told():
            return super().make_context(*arguments, **named)

    def invoke(self, ctx: click.Context) -> Any:
        with output_told():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"txnbuffer.cli.{cmd_name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="txnbuffer", prog_name="txnbuf")
def app() -> None:
    """Transactions for Apache Pulsar from Python.

    Where a command takes an ADDRESS, write file:DIR for an embedded log, txnbuf://HOST:PORT for a
    running service, pulsar://HOST:PORT/TENANT/NAMESPACE for a cluster.

    Exit codes: 0 done; 1 done, and something is wrong with what was looked at; 2 the request can't be;
    3 another process; 4 storage; 5 this machine; 130 interrupted; 141 the reader of our output left.
    """


def main() -> NoReturn:
    """Run `txnbuf` and exit with its code."""
    from broker_io.errors import Error

    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it stays open to the end
    try:
        code = app.main(prog_name="txnbuf", standalone_mode=False)
    except click.exceptions.Abort:
        code = INTERRUPTED
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except Error as error:
        click.echo(f"txnbuf: {error}", err=True)
        code = error.exit_code
    except OutputClosed:
        code = READER_LEFT
    try:
        sys.stdout.flush()
    except OSError:
        # That was told; a second failure at exit would only be noise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code if isinstance(code, int) else 0)


class OutputFailed(EnvironmentFault):
    """What a command prints could not be written."""
