"""The `txnbuf` command itself: its table of commands and its exit codes

Results go to stdout, messages and progress to stderr. Exit codes: 0 success; 1 success, and the command found a problem
in what it examined; 2 the request is invalid; 3 another process failed or fenced this one; 4 the storage failed; 5 this
machine lacks something, or another process has the log; 130 interrupted; 141 the reader of the output closed it, as
`head` does, and nothing more is printed. An exception that is not a `broker_io.errors.Error` is a bug and shows its
traceback.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import click

from broker_io.environment import set_up_grpc
from broker_io.errors import EnvironmentFault, Error
from txnbuffer import __version__
from txnbuffer.cli.commands import CommandGroup
from txnbuffer.cli.global_options import SHOWN

COMMANDS = {
    "serve": ("serve", "Serve transactions on a log until SIGTERM."),
    "produce": ("produce", "Send lines of standard input as records in transactions."),
    "status": ("status", "Show what is at an address, and what needs attention."),
    "list": ("admin", "List topics and how far they can be read."),
    "describe": ("admin", "Show the state of a topic and which transaction its readers wait for."),
    "topics": ("topics", "List, describe, create and delete topics."),
    "find-hanging": ("admin", "Find long-open transactions that block readers."),
    "abort": ("admin", "Abort an open transaction of any client."),
    "groups": ("groups", "Show consumer groups, their members, positions and lag; move or forget them."),
    "streams": ("admin", "Show open change streams and their progress."),
    "cursors": ("admin", "List, add, advance and remove durable cursors of change streams."),
    "compact": ("compact", "Compact a topic of an embedded log, or set when the service does."),
    "backup": ("backup", "Write all topics of an embedded log to one file."),
    "restore": ("backup", "Restore an embedded log from a backup, or verify a backup."),
    "replication": ("replication", "Show and command the pair of an embedded log."),
    "inspect": ("inspect", "Show what is stored: messages, the transaction state of a topic, snapshots."),
    "verify": ("recovery", "Check snapshots against their logs without changing anything."),
    "recover": ("recovery", "Rebuild transaction state from the log and compare it with the snapshot."),
    "audit": ("audit", "Compare the latest value of each key with another copy of a topic."),
    "tail": ("tail", "Print records as they become visible."),
    "consume": ("consume", "Print each committed record once for a consumer group, or run a command for it."),
    "relay": ("relay", "Copy the committed records of a topic to another topic, exactly once."),
    "materialize": ("materialize", "Keep the latest value of each key in a SQLite table."),
    "outbox": ("outbox", "Create the tables of an outbox in a database, and publish its rows."),
    "pipeline": ("pipeline", "Run Spark jobs: export, audit, recover, compact and profile."),
    "plugin": ("plugin", "Install the plug-in of brokers for plain consumers, and check which have it."),
    "bench": ("installation", "Run the benchmarks and print one JSON object per line."),
    "token": ("access", "Create, list and revoke tokens for a service."),
    "access": ("access", "Check a policy, and what it allows."),
    "config": ("installation", "Show the configuration, and where each value comes from."),
    "man": ("manual", "Print the manual page."),
    "completions": ("installation", "Print the completion script of a shell."),
    "demo": ("demo", "Write a year of flights in transactions while processes are killed."),
}
"""Command name → its module in this package, which is imported when the command runs, and its help line."""

SECTIONS = {
    "Read and write": ("produce", "tail", "consume", "relay", "materialize", "outbox"),
    "Topics and transactions": (
        "list", "describe", "topics", "find-hanging", "abort", "groups", "streams", "cursors",
    ),
    "Run a service": ("serve", "status", "replication", "token", "access", "plugin"),
    "Check and keep what is stored": (
        "inspect", "verify", "recover", "audit", "compact", "backup", "restore", "pipeline",
    ),
    "This program": ("config", "man", "completions", "demo", "bench"),
}  # fmt: skip
"""The headings of `txnbuf --help`, and the commands under each."""

INTERRUPTED = 130
OUTPUT_CLOSED = 141
"""128 + SIGPIPE, as shells report a process that a broken pipe ended."""

OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""The errors that a write to stdout can fail with; any other OSError has another cause."""


class OutputFailed(EnvironmentFault):
    """Writing to stdout failed."""


class OutputClosed(Exception):
    """The reader of stdout has closed it."""


@contextlib.contextmanager
def output_errors() -> Iterator[None]:
    """Turn errors of writing to stdout into our own; click would exit with 1, which has another meaning here."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise OutputClosed from None
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS or error.filename is not None:
            raise

        raise OutputFailed(f"cannot write to stdout: {error.strerror}; redirect the output") from error


def can_run_benchmarks() -> bool:
    """Whether the benchmarks can be imported: they are in the source tree, not in the installed package."""
    return importlib.util.find_spec("bench") is not None and importlib.util.find_spec("bench.harness") is not None


def sections() -> dict[str, list[str]]:
    """The commands that this installation has, by heading."""
    return {
        heading: [name for name in names if name in COMMANDS and (name != "bench" or can_run_benchmarks())]
        for heading, names in SECTIONS.items()
    }


class Commands(CommandGroup):
    """A group that imports a command only when it runs, so that `txnbuf --help` is fast."""

    inherited = ()

    def make_context(self, *arguments: Any, **named: Any) -> click.Context:
        with output_errors():
            return super().make_context(*arguments, **named)

    def invoke(self, ctx: click.Context) -> Any:
        with output_errors():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in sections().values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"txnbuffer.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.list_commands(ctx)))  # the same in all sections
        for heading, names in sections().items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:<{width}}", COMMANDS[name][1]) for name in names])


@click.group(cls=Commands, params=[*SHOWN], context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="txnbuf")
def app() -> None:
    """Transactions for Apache Pulsar from Python.

    An ADDRESS is file:DIR for an embedded log, txnbuf://HOST:PORT for a running service, or
    pulsar://HOST:PORT/TENANT/NAMESPACE for a Pulsar namespace. Without ADDRESS a command works on that of
    TXNBUFFER_ADDRESS, else of the profile, else on the service at txnbuf://127.0.0.1:7711. Profiles are in
    ~/.config/txnbuffer.toml, or the file of TXNBUFFER_CONFIG. These options are accepted after a command as well.

    Exit codes: 0 success; 1 success, but the command found a problem in what it examined; 2 invalid
    request; 3 another process failed or fenced this one; 4 storage failed; 5 this machine lacks something,
    or another process has the log; 130 interrupted; 141 the reader of the output closed it.
    """


def main() -> NoReturn:
    """Run `txnbuf` and exit with its code."""
    set_up_grpc()
    if sys.stdout is None:  # the parent process closed it
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
        code = OUTPUT_CLOSED
    try:
        sys.stdout.flush()
    except OSError:
        # The error has been reported; the interpreter must not report it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code if isinstance(code, int) else 0)
