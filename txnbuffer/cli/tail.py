"""`txnbuf tail`: records as they become visible, or with `--stream` a change stream"""

from __future__ import annotations

import itertools
import json
import sys
from collections import deque
from collections.abc import Set
from datetime import datetime
from typing import Any, Literal

import click

from broker_io.partitions import partition_name
from broker_io.port import Broker, PartitionedBroker
from txnbuffer.cli.commands import AddressCommand, address_argument, topic_argument
from txnbuffer.cli.options import LogAddress, given, log_options
from txnbuffer.cli.output import escaped, has_style, narrate, output_option, plain, show_line
from txnbuffer.client.reading.reader import ISOLATIONS, CommittedReader
from txnbuffer.client.reading.records import Record
from txnbuffer.client.reading.starts import WORDS, Isolation, Seqno, Start
from txnbuffer.client.streams.streams import Rollback
from txnbuffer.client.streams.tokens import FileTokens
from txnbuffer.model import Position, TxnId
from txnbuffer.opening import connect

COLUMNS = ("topic", "position", "seqno", "transaction", "key", "value")
NO_KEY = "-"
DELETED = "(deleted)"

POLL = 0.5
"""Seconds of one wait, so that an interrupt is noticed soon."""


@click.command("tail", cls=AddressCommand)
@address_argument
@topic_argument("topics", nargs=-1, required=True, metavar="TOPIC…")
@click.option("--from", "start", default="beginning", show_default=True, metavar="START",
              help="beginning, end, a seqno, a position ledger:entry, or a time: 2026-01-31T12:00+00:00.")  # fmt: skip
@click.option("--isolation", type=click.Choice(ISOLATIONS), default="read_committed", show_default=True,
              help="read_uncommitted also prints records of open and aborted transactions.")  # fmt: skip
@click.option("-n", "--last", type=click.IntRange(0), metavar="N", help="Begin with the last N records of each topic.")
@click.option("--limit", type=click.IntRange(1), help="Stop after this many records; not with --tokens.")
@click.option("-f", "--follow/--no-follow", default=False, help="Wait for more records at the end.")
@click.option("--header/--no-header", default=None, help="Print the names of the columns; by default on a terminal.")
@click.option("--stream", is_flag=True, help="Print a change stream: the newest record of each key, and deletions.")
@click.option("--tokens", metavar="FILE", help="With --stream: keep the resume token in this file, and resume from it.")
@log_options
@output_option
def tail_command(
    log: LogAddress,
    topics: tuple[str, ...],
    start: str,
    isolation: Isolation,
    last: int | None,
    limit: int | None,
    follow: bool,
    header: bool | None,
    stream: bool,
    tokens: str | None,
    output: str,
) -> None:
    r"""Print the visible records of topics in log order, one a line.

    The columns are topic, position, seqno, transaction, key and value, separated by tabs; a terminal also gets a line
    with their names. Unprintable characters
    are escaped (\n, \t, \xff, \\); in JSON, bytes that are not UTF-8 become value_base64 and key_base64. Prints
    committed records up to the oldest open transaction, unless --isolation is read_uncommitted, and says on stderr what
    that transaction holds back.

    With --stream the service sends the newest record of each key in each snapshot, and --from is beginning, now or
    a resume token.
    """
    if stream:
        check(topics, isolation, last, limit, tokens)
        show_header(header, output)
        batches = records(log, topics[0], start, tokens, follow=follow, as_json=output == "json")
        for record in itertools.islice(itertools.chain.from_iterable(batches), limit):
            _show(record, output)
        batches.close()
        return
    if tokens is not None:
        raise click.BadParameter("only change streams have resume tokens: add --stream", param_hint="--tokens")
    if last is not None and given("start"):
        raise click.UsageError("-n and --from exclude each other: give one of them")
    with log.open_for_reading() as broker:
        starts: Start | dict[str, Start] = parse_start(start)
        if last is not None:
            starts = {name: start_of_last(broker, name, last, isolation) for name in _logs(broker, topics)}
        with CommittedReader(broker, topics, start=starts, isolation=isolation) as reader:
            show_header(header, output)
            _read(reader, limit, follow, output)


def _read(reader: CommittedReader, limit: int | None, follow: bool, output: str) -> None:
    left = limit
    warned: Set[tuple[str, TxnId]] = frozenset()
    while left is None or left > 0:
        batch = reader.read(limit=min(left or 10_000, 10_000), timeout=POLL if follow else 0.0)
        if batch is None:
            warned = _narrate_held_back(reader, warned)
            if follow:
                continue
            return
        for record in batch:
            _show(record, output)
        left = None if left is None else left - len(batch)


def _narrate_held_back(reader: CommittedReader, warned: Set[tuple[str, TxnId]]) -> Set[tuple[str, TxnId]]:
    """Say what open transactions hold back, each once; returns what was said so far."""
    found = {(one.topic, one.txn): one for one in reader.held_back()}
    for key, one in found.items():
        if key not in warned:
            narrate(str(one))
    return warned | found.keys()


def _logs(broker: Broker, topics: tuple[str, ...]) -> list[str]:
    """The topics, with its partitions in place of a partitioned one."""
    names: list[str] = []
    for topic in topics:
        partitions = broker.partitions(topic) if isinstance(broker, PartitionedBroker) else 0
        names += [partition_name(topic, one) for one in range(partitions)] or [topic]
    return names


def start_of_last(broker: Broker, topic: str, count: int, isolation: Isolation) -> Start:
    """The start from which a reader returns the last `count` records of a topic. Reads little more than these."""
    messages = count
    while count:
        begin = _messages_before_end(broker, topic, messages)
        positions: deque[Position] = deque(maxlen=count)
        with CommittedReader(broker, topic, start=begin, isolation=isolation) as reader:
            while (batch := reader.read()) is not None:
                positions += batch.positions
        if len(positions) == count or begin == "beginning":
            return positions[0] if positions else "beginning"
        messages *= 4
    return "end"


def _messages_before_end(broker: Broker, topic: str, count: int) -> Start:
    """The position of the message that is followed by `count - 1` others, or of one before it."""
    for ledger in reversed(broker.ledgers(topic)):
        if ledger.entries >= count:
            return Position(ledger.ledger, ledger.entries - count)
        count -= ledger.entries
    return "beginning"


SEQNO_DIGITS = 18
"""Longest number of a record, in digits; anything longer is no number of a record."""


def parse_start(text: str, option: str = "--from") -> Start:
    """Parse where to start. Raises click.BadParameter."""
    if text.isdecimal() and len(text) <= SEQNO_DIGITS and int(text):
        return Seqno(int(text))
    if text in WORDS:
        return WORDS[text]
    for read in (Position.parse, datetime.fromisoformat):
        try:
            return read(text)
        except ValueError:
            continue
    raise click.BadParameter(
        f"{text!r} is not a start: give beginning, end, a seqno, a position or a time", param_hint=option
    )


def show_header(wanted: bool | None, output: str) -> None:
    """Print the names of the columns if they are wanted; None: on a terminal."""
    if output == "table" and (sys.stdout.isatty() if wanted is None else wanted):
        names = "\t".join(COLUMNS)
        click.echo(click.style(names, bold=True) if has_style() else names)


def _show(record: Record, output: str) -> None:
    click.echo(record_line(record, output))
    if output == "json":
        sys.stdout.flush()


def record_line(record: Record, output: str) -> str:
    """A record as one line: columns separated by tabs, or a JSON object."""
    if output == "json":
        return json.dumps(plain({**record._asdict(), "properties": dict(record.properties)}))
    key = NO_KEY if record.key is None else escaped(record.key, NO_KEY)
    value = DELETED if record.value is None else escaped(record.value, DELETED)
    return f"{record.topic}\t{record.position}\t{plain(record.seqno) or '-'}\t{record.txn or '-'}\t{key}\t{value}"


def records(log: LogAddress, topic: str, start: str, tokens: str | None, *, follow: bool, as_json: bool) -> Any:
    """Lists of records as they arrive, without end if `follow`; requesting the next list acknowledges the last one.

    A rollback is reported on stderr, and with `as_json` on stdout too.
    """
    from_ = "now" if start == "end" else start
    store = None if tokens is None else FileTokens(tokens)
    to: Literal["now"] | None = None if follow else "now"
    with (
        connect(log.address, **log.connect_options()) as client,
        client.stream(topic, from_=from_, to=to, store=store) as stream,
    ):
        for item in stream:
            if isinstance(item, Rollback):
                narrate(f"history branched: records of {topic} printed after seqno {item.seqno} are no longer valid")
                if as_json:
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


def check(topics: tuple[str, ...], isolation: str, last: int | None, limit: int | None, tokens: str | None) -> None:
    """Raises a usage error for options that a change stream does not have."""
    if last is not None:
        raise click.BadParameter("a change stream has no last records: use --from, or --limit", param_hint="-n")
    if len(topics) != 1:
        raise click.BadParameter("a change stream has one topic: run one command per topic", param_hint="TOPIC…")
    if isolation != "read_committed":
        raise click.BadParameter("change streams have committed records only: remove it", param_hint="--isolation")
    if limit is not None and tokens is not None:
        text = "--limit may cut a batch, and resume tokens are valid between batches only: give one of them"
        raise click.BadParameter(text, param_hint="--limit")
