"""`txnbuf tail`: records as they become visible.

What `txnbuf tail --stream` does: a change stream, printed.
"""

from __future__ import annotations

import itertools
from datetime import datetime
from typing import Any

import click

from txnbuffer.cli.opening import address_argument, connect_options, open_for_reading, tls_option, with_config
from txnbuffer.cli.output import escaped, narrate, output_option, plain, show_line
from txnbuffer.client.connection import connect
from txnbuffer.client.reader import ISOLATIONS, CommittedReader
from txnbuffer.client.records import Record
from txnbuffer.client.routing import Start
from txnbuffer.client.streams import Rollback
from txnbuffer.client.tokens import FileTokens
from txnbuffer.config import Config
from txnbuffer.model import Position

NO_KEY = "-"
DELETED = "(deleted)"

POLL = 0.5
"""Seconds of one wait, so that an interrupt is heard at once."""


@click.command("tail")
@address_argument
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC…")
@click.option("--from", "start", default="beginning", show_default=True, metavar="START",
              help="beginning, end, a position ledger:entry, or a time such as 2026-01-31T12:00:00+00:00.")  # fmt: skip
@click.option("--isolation", type=click.Choice(ISOLATIONS), default="read_committed", show_default=True)
@click.option("--limit", type=click.IntRange(1), help="Stop after so many records; not with --tokens.")
@click.option("--follow/--no-follow", default=False, help="Wait for more at the end.")
@click.option("--stream", is_flag=True, help="Print a change stream: of each key the newest, and deletions.")
@click.option("--tokens", metavar="FILE", help="With --stream: keep the resume token there, and go on from it.")
@tls_option
@with_config
@output_option
def command(
    address: str,
    topics: tuple[str, ...],
    start: str,
    isolation: str,
    limit: int | None,
    follow: bool,
    stream: bool,
    tokens: str | None,
    tls_ca: str | None,
    config: Config,
    output: str,
) -> None:
    r"""Print the visible records of topics in log order, one a line.

    Columns, with a tab between: topic, position, seqno, transaction, key, value. What is not printable is
    escaped (\n, \t, \xff, \\); in JSON, bytes that are no text stand as value_base64 and key_base64. Only what
    committed is printed, and only up to the oldest open transaction, unless --isolation says otherwise.

    With --stream the records come from the service, each key once a snapshot, and --from is beginning, now or a
    resume token.
    """
    if stream:
        check(topics, isolation, limit, tokens)
        json = output == "json"
        options = connect_options(address, config, tls_ca)
        batches = records(address, options, topics[0], start, tokens, follow=follow, json=json)
        for record in itertools.islice(itertools.chain.from_iterable(batches), limit):
            _show(record, output)
        batches.close()
        return
    if tokens is not None:
        raise click.BadParameter("only a change stream has resume tokens: give --stream", param_hint="--tokens")
    with (
        open_for_reading(address, config, tls_ca) as broker,
        CommittedReader(broker, topics, start=parse_start(start), isolation=isolation) as reader,
    ):
        _read(reader, limit, follow, output)


def _read(reader: CommittedReader, limit: int | None, follow: bool, output: str) -> None:
    left = limit
    while left is None or left > 0:
        batch = reader.read(limit=min(left or 10_000, 10_000), timeout=POLL if follow else 0.0)
        if batch is None:
            if follow:
                continue
            return
        for record in batch:
            _show(record, output)
        left = None if left is None else left - len(batch)


def parse_start(text: str) -> Start:
    """A start as people write it. Raises a usage error that quotes it."""
    if text in ("beginning", "end"):
        return text
    for read in (Position.parse, datetime.fromisoformat):
        try:
            return read(text)
        except ValueError:
            continue
    raise click.BadParameter(f"{text!r} is neither beginning, end, a position nor a time", param_hint="--from")


def _show(record: Record, output: str) -> None:
    if output == "json":
        show_line({**record._asdict(), "properties": dict(record.properties)})
        return
    key = NO_KEY if record.key is None else escaped(record.key, NO_KEY)
    value = DELETED if record.value is None else escaped(record.value, DELETED)
    click.echo(f"{record.topic}\t{record.position}\t{plain(record.seqno) or '-'}\t{record.txn or '-'}\t{key}\t{value}")


def records(
    address: str, options: dict[str, Any], topic: str, start: str, tokens: str | None, *, follow: bool, json: bool
) -> Any:
    """Lists of records as they come, without end if `follow`; asking for the next says that one is done with.

    `options` are those of `connect`.
    A rollback is told on stderr, and in JSON on stdout.
    """
    from_ = "now" if start == "end" else start
    store = None if tokens is None else FileTokens(tokens)
    to = None if follow else "now"
    with (
        connect(address, **options) as client,
        client.stream(topic, from_=from_, to=to, store=store) as stream,
    ):
        for item in stream:
            if isinstance(item, Rollback):
                narrate(f"history branched: what was printed of {topic} behind seqno {item.seqno} is void")
                if json:
                    show_line({"topic": topic, "rollback": item.seqno})
                continue
            yield [
                Record(
                    topic,
                    row.position,
                    row.seqno,
                    row.key,
                    row.value,
                    row.properties,
                    row.event_time,
                    row.publish_time,
                    None,
                )
                for row in item
            ]


def check(topics: tuple[str, ...], isolation: str, limit: int | None, tokens: str | None) -> None:
    """Raises a usage error for what a change stream can't be."""
    if len(topics) != 1:
        raise click.BadParameter("a change stream is of one topic; run one command for each", param_hint="TOPIC…")
    if isolation != "read_committed":
        raise click.BadParameter("a change stream has what committed", param_hint="--isolation")
    if limit is not None and tokens is not None:
        text = "it would cut a batch, and resume tokens stand between batches: give one of --limit and --tokens"
        raise click.BadParameter(text, param_hint="--limit")
