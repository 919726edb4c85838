"""`txnbuf outbox`: the tables of a database, and the publisher of its outboxes"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from broker_io.errors import MissingDependency
from txnbuffer.cli.commands import CommandGroup, address_argument
from txnbuffer.cli.options import LogAddress, log_options
from txnbuffer.cli.output import narrate, output_option, show_record, show_rows
from txnbuffer.cli.stopping import client_until_signal
from txnbuffer.errors import InvalidRequest

if TYPE_CHECKING:
    from txnbuffer.client.database_transaction import OutboxStatus

DIALECTS = ("postgresql", "sqlite", "mysql")

database_option = click.option(
    "--database", required=True, metavar="URL", envvar="TXNBUFFER_DATABASE", show_envvar=True,
    help="The database, as a URL of SQLAlchemy. Other users of this machine see an option: give a URL with a password "
    "in the variable.",
)  # fmt: skip
name_argument = click.argument("name", metavar="NAME")


@click.group("outbox", cls=CommandGroup)
def outbox_command() -> None:
    """Create the tables of an outbox in a database, and publish its rows.

    A URL is for example postgresql+psycopg://user@host/shop or sqlite:///shop.db. NAME is that of the outbox: the name
    of the database in `connect(databases=…)`.
    """


def engine_of(url: str) -> Any:
    """The engine of a database. Raises InvalidRequest, and MissingDependency."""
    try:
        from sqlalchemy import create_engine
        from sqlalchemy.exc import ArgumentError
    except ImportError:
        raise MissingDependency("txnbuf outbox needs SQLAlchemy: pip install 'txnbuffer[sqlalchemy]'") from None
    try:
        return create_engine(url)
    except ArgumentError as error:
        raise InvalidRequest(f"DATABASE is not a URL of SQLAlchemy: {error}") from None
    except ImportError as error:
        raise MissingDependency(f"the driver of the database is not installed: {error}") from None


@outbox_command.command("create")
@database_option
def create_command(database: str) -> None:
    """Create the tables, as far as they are not there."""
    from txnbuffer.databases.admin import create_tables
    from txnbuffer.databases.worker import opened

    with ExitStack() as opening:
        create_tables(opened(engine_of(database), opening))
    narrate("the tables are there")


@outbox_command.command("sql")
@click.argument("dialect", type=click.Choice(DIALECTS))
@click.option("--drop", is_flag=True, help="Statements that remove the tables, with all rows.")
def sql_command(dialect: str, drop: bool) -> None:
    """Print the statements that create the tables, for a migration."""
    from txnbuffer.databases.tables import create_statements, drop_statements

    for statement in (drop_statements if drop else create_statements)(dialect):
        click.echo(f"{statement};")


@outbox_command.command("status")
@database_option
@output_option
def status_command(database: str, output: str) -> None:
    """Show the outboxes of a database: rows that wait, the age of the oldest, and the transaction that holds them back.

    `waiting` counts published rows too, until the publisher has deleted them. Exit code 1 if rows wait.
    """
    from txnbuffer.databases.admin import outboxes
    from txnbuffer.databases.worker import opened

    with ExitStack() as opening:
        found = outboxes(opened(engine_of(database), opening))
    rows: list[dict[str, Any]] = [
        {
            "outbox": one.outbox,
            "waiting": one.waiting,
            "oldest_seconds": one.seconds,
            "published": one.published,
            "held_back_by": None if one.held_back is None else one.held_back.process,
            "held_back_seconds": None if one.held_back is None else one.held_back.seconds,
        }
        for one in found
    ]
    show_rows(rows, output, title="outboxes", empty="none")
    sys.exit(1 if any(one.waiting for one in found) else 0)


@outbox_command.command("run")
@address_argument
@name_argument
@database_option
@click.option("--dead-letter", metavar="TOPIC", help="Send records there that cannot be published. Default: they wait, "
              "with those after them.")  # fmt: skip
@log_options
def run_command(log: LogAddress, name: str, database: str, dead_letter: str | None) -> None:
    """Publish the rows of outbox NAME until SIGTERM or SIGINT.

    Several processes may run; one publishes at a time. Ends with an error if the database and the log do not belong
    together; all other errors are logged, and it tries again.
    """
    import asyncio

    asyncio.run(_publish(log, engine_of(database), name, dead_letter))


async def _publish(log: LogAddress, engine: Any, name: str, dead_letter: str | None) -> None:
    import asyncio

    from txnbuffer.databases.links import Database, OutboxLink
    from txnbuffer.opening import connect

    async with client_until_signal(connect(log.address, **log.connect_options(60.0))) as (client, stop):
        if client is None:
            return
        link = OutboxLink(client, client, name, Database(engine, dead_letter=dead_letter))
        link.on_status(_StatusPrinter())
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await link.wait_stopped(stopping)
        finally:
            stopping.cancel()
            await link.close()


class _StatusPrinter:
    """Prints each change of a publisher's state."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, status: OutboxStatus) -> None:
        shown = f"outbox {status.name}: {status.state}"
        if status.error is not None:
            shown += f": {status.error}"
        if shown != self._last:
            narrate(shown)
        self._last = shown


@outbox_command.command("adopt")
@address_argument
@name_argument
@database_option
@click.option("--republish", is_flag=True, help="Publish the rows that count as published again.")
@click.option("--yes", is_flag=True, help="Do it; without this, only show what would be done.")
@log_options
@output_option
def adopt_command(log: LogAddress, name: str, database: str, republish: bool, yes: bool, output: str) -> None:
    """Let outbox NAME continue on a log that refused it: after a restore, or as a replacement.

    Stop the publishers and the writers before. Rows with ids up to the number that the log has count as published;
    with --republish they get new ids, and are published, some of them perhaps again.
    """
    import asyncio

    show_record(asyncio.run(_adopt(log, engine_of(database), name, republish=republish, yes=yes)), output)


async def _adopt(log: LogAddress, engine: Any, name: str, *, republish: bool, yes: bool) -> dict[str, Any]:
    from txnbuffer.databases.admin import adopt, examine
    from txnbuffer.databases.worker import worker_for
    from txnbuffer.opening import connect

    async with connect(log.address, **log.connect_options(60.0)) as client:
        worker = worker_for(engine)
        try:
            wanted = await examine(client, worker, name)
            if yes:
                await adopt(client, worker, wanted, republish=republish)
        finally:
            await worker.close()
    if not yes:
        narrate("nothing was changed: repeat with --yes")
    return {
        "outbox": name,
        "number": wanted.number,
        "rows_that_count_as_published": 0 if republish else wanted.skipped,
        "rows_that_get_new_ids": wanted.skipped if republish else 0,
        "done": yes,
    }
