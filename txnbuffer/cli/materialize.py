"""`txnbuf materialize`: topics as tables of a SQLite file, kept up to date."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from broker_io.errors import InvalidAddress
from txnbuffer.cli.opening import address_argument, connect_options, tls_option, with_config
from txnbuffer.cli.output import narrate, output_option, show_rows
from txnbuffer.config import Config
from txnbuffer.errors import InvalidRequest

if TYPE_CHECKING:
    from txnbuffer.sinks.runner import SinkProgress

SCHEME = "sqlite:"

TELL_EVERY = 5.0
"""Seconds between two lines about how far a topic has come."""


@click.command("materialize")
@address_argument
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC…")
@click.argument("target", metavar="sqlite:FILE")
@click.option("--to", metavar="SEQNO|now", help="Stop there; without it go on until SIGTERM.")
@click.option("--table", metavar="NAME", help="Name of a single topic's table; else it has that of the topic.")
@click.option("--binary", is_flag=True, help="Keep all keys and values as blobs, also those that are text.")
@click.option("--anew", is_flag=True, help="Replace the tables of these topics by new ones.")
@click.option("--cursor", metavar="NAME", help="Keep in the log what is not in FILE yet, with a durable cursor.")
@click.option("--max-unavailable", default=60.0, show_default=True, type=click.FloatRange(0), metavar="SECONDS",
              help="Give up after so long without a service.")  # fmt: skip
@tls_option
@with_config
@output_option
def command(
    address: str,
    target: str,
    to: str | None,
    max_unavailable: float,
    tls_ca: str | None,
    config: Config,
    output: str,
    **wanted: Any,
) -> None:
    """Keep the latest value of each key of topics as tables of a SQLite file, each mutation exactly once.

    A table is named after its topic and has the columns key, value, properties, event_time, publish_time, seqno
    and position; NAME_keyless has the records without a key. Whatever reads SQLite may read, at any time. In table
    txnbuffer_topics stands how far each topic has come, and whether its table is complete: what the topic was there.

    It goes on until the first SIGTERM or SIGINT. Killed and begun again it goes on where it stood. Where the topic's
    history branched, the table goes back to what both branches have, and on from there.
    """
    import asyncio

    if not target.startswith(SCHEME) or target == SCHEME:
        raise InvalidAddress(f"{target!r} is nothing to fill: write sqlite:FILE")
    wanted |= {"path": target.removeprefix(SCHEME), "to": _end(to), "tell": ProgressPrinter().tell}
    options = connect_options(address, config, tls_ca, max_unavailable)
    filled = asyncio.run(_run(address, options, wanted))
    show_rows([_row(one) for one in filled], output, empty="stopped before anything was read")


def _end(to: str | None) -> int | str | None:
    if to is None or to == "now":
        return to
    if not to.isdecimal():
        raise InvalidRequest(f"{to!r} is no end: give a seqno, or now")
    return int(to)


async def _run(address: str, options: dict[str, Any], wanted: dict[str, Any]) -> list[SinkProgress]:
    import asyncio
    import signal

    from txnbuffer.client.connection import connect
    from txnbuffer.sinks.runner import materialize

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    opening = asyncio.ensure_future(connect(address, **options).open())

    def end() -> None:
        stop.set()
        opening.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    try:
        client = await opening
    except asyncio.CancelledError:
        return []
    try:
        return await materialize(client, stop=stop, **wanted)
    finally:
        await client.close()


class ProgressPrinter:
    """Says how far each topic has come: when it has caught up, at a rollback, and now and then."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._told: dict[str, tuple[float, bool, int]] = {}

    def tell(self, filled: SinkProgress) -> None:
        """Of every write."""
        if filled.token is None:
            return
        at, caught_up, rollbacks = self._told.get(filled.topic, (self._began, False, 0))
        topic, seqno, now = filled.topic, filled.token.seqno, time.monotonic()
        if filled.rollbacks > rollbacks:
            narrate(f"{topic}: history branched, back at seqno {seqno:,}")
        elif filled.caught_up and not caught_up:
            narrate(f"{topic}: caught up at seqno {seqno:,}")
        elif now - at > TELL_EVERY:
            narrate(f"{topic}: at seqno {seqno:,}")
        else:
            return
        self._told[topic] = now, caught_up or filled.caught_up, filled.rollbacks


def _row(filled: SinkProgress) -> dict[str, Any]:
    token = filled.token
    return {
        "topic": filled.topic,
        "seqno": 0 if token is None else token.seqno,
        "complete": token is None or token.complete,
        "caught_up": filled.caught_up,
        "mutations": filled.mutations,
        "rollbacks": filled.rollbacks,
    }
