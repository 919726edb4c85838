"""`txnbuf materialize`: topics as tables of a SQLite file"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from broker_io.errors import InvalidAddress
from txnbuffer.cli.commands import AddressCommand, address_argument, topic_argument
from txnbuffer.cli.options import LogAddress, log_options
from txnbuffer.cli.output import narrate, output_option, show_rows
from txnbuffer.cli.stopping import client_until_signal
from txnbuffer.errors import InvalidRequest
from txnbuffer.progress import is_reported

if TYPE_CHECKING:
    from txnbuffer.client.connection import PendingConnection
    from txnbuffer.sinks.runner import OnProgress, SinkProgress

SCHEME = "sqlite:"

PROGRESS_INTERVAL = 5.0
"""Seconds between two lines about the progress of a topic."""


@click.command("materialize", cls=AddressCommand)
@address_argument
@topic_argument("topics", nargs=-1, required=True, metavar="TOPIC…")
@click.argument("target", metavar="sqlite:FILE")
@click.option("--to", metavar="SEQNO|now", help="Stop at this seqno, or at the present end. Default: never.")
@click.option("--table", metavar="NAME", help="Table for a single topic; by default named after the topic.")
@click.option("--binary", is_flag=True, help="Store all keys and values as BLOB, also those that are text.")
@click.option("--rebuild", "replace", is_flag=True, help="Drop the tables of these topics and build them again.")
@click.option("--cursor", metavar="NAME", help="Use a durable cursor, so that the log keeps what is not in FILE yet.")
@click.option("--max-unavailable", default=60.0, show_default=True, type=click.FloatRange(0), metavar="SECONDS",
              help="Give up after this many seconds without a service.")  # fmt: skip
@log_options
@output_option
def materialize_command(
    log: LogAddress,
    target: str,
    to: str | None,
    max_unavailable: float,
    output: str,
    **wanted: Any,
) -> None:
    """Keep the latest value of each key of topics in tables of a SQLite file; each mutation is applied exactly once.

    A table has the name of its topic and the columns key, value, properties, event_time, publish_time, seqno and
    position; NAME_keyless has the records without a key. Any program can read the file at any time. The table
    txnbuffer_topics shows the position of each topic, and whether its table is complete, that is equal to the topic
    at that position.

    Runs until the first SIGTERM or SIGINT. After a restart it continues where it stopped, also after a kill. If the
    history of a topic branched, the table rolls back to what both branches share and continues from there.
    """
    import asyncio

    from txnbuffer.opening import connect

    if not target.startswith(SCHEME) or target == SCHEME:
        raise InvalidAddress(f"{target!r} is not a sink: give sqlite:FILE")
    wanted |= {"path": target.removeprefix(SCHEME), "to": _end(to), "on_progress": _progress_printer()}
    progress = asyncio.run(_run(connect(log.address, **log.connect_options(max_unavailable)), wanted))
    show_rows([_row(one) for one in progress], output, empty="stopped before anything was read")


def _end(to: str | None) -> int | str | None:
    if to is None or to == "now":
        return to
    if not to.isdecimal():
        raise InvalidRequest(f"--to {to} is invalid: give a seqno or now")
    return int(to)


async def _run(connection: PendingConnection, wanted: dict[str, Any]) -> list[SinkProgress]:
    from txnbuffer.sinks.runner import materialize

    async with client_until_signal(connection) as (client, stop):
        return [] if client is None else await materialize(client, stop=stop, **wanted)


def _progress_printer() -> OnProgress:
    """A function that prints the progress of each topic: when it has caught up, at a rollback, and at intervals."""
    began = time.monotonic()
    shown: dict[str, tuple[float, bool, int]] = {}

    def show(progress: SinkProgress) -> None:
        if progress.token is None:
            return
        at, caught_up, rollbacks = shown.get(progress.topic, (began, False, 0))
        topic, seqno, now = progress.topic, progress.token.seqno, time.monotonic()
        if progress.rollbacks > rollbacks:
            narrate(f"{topic}: history branched, rolled back to seqno {seqno:,}")
        elif progress.caught_up and not caught_up:
            narrate(f"{topic}: caught up at seqno {seqno:,}")
        elif now - at > PROGRESS_INTERVAL and not is_reported():
            narrate(f"{topic}: at seqno {seqno:,}")
        else:
            return
        shown[topic] = now, caught_up or progress.caught_up, progress.rollbacks

    return show


def _row(progress: SinkProgress) -> dict[str, Any]:
    token = progress.token
    return {
        "topic": progress.topic,
        "seqno": 0 if token is None else token.seqno,
        "complete": token is None or token.complete,
        "caught_up": progress.caught_up,
        "mutations": progress.mutations,
        "rollbacks": progress.rollbacks,
    }
