"""`txnbuf inspect`: stored messages, transaction state and snapshots"""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Iterator

import click

from broker_io.batch import PlacedMessage
from broker_io.errors import TopicNotFound
from broker_io.port import Broker
from snapshots.errors import SnapshotError
from snapshots.format import (
    END,
    MUTATIONS,
    OVERFLOW,
    SEGMENT,
    SNAPSHOT_TOPIC,
    BadRecord,
    EndEntry,
    EntryKey,
    decode_end,
    state_bytes,
)
from snapshots.scan import TopicEntries, scan
from snapshots.shard_count import snapshot_topic_of, snapshot_topics
from txnbuffer.cli.commands import CommandGroup, address_argument, topic_argument
from txnbuffer.cli.log_picture import LogPicture, as_drawing, as_text, read_picture, stored_messages
from txnbuffer.cli.options import LogAddress, log_options, parse_txn
from txnbuffer.cli.output import Row, has_style, instant, narrate, output_option, show_record, show_rows
from txnbuffer.cli.tail import parse_start
from txnbuffer.client.reading.starts import start_point
from txnbuffer.errors import counted
from txnbuffer.follow import LogFollower, held_back
from txnbuffer.model import Outcome, Position, TxnId
from txnbuffer.protocol import MARKER, RECORDS, REMOVED, SEQ, TXN, decode_marker
from txnbuffer.recovery.codec import decode_state
from txnbuffer.recovery.restore import LoadedTopic, load

SHOWN_OPEN = 20
"""Open transactions shown one by one, oldest first."""


@click.group("inspect", cls=CommandGroup)
def inspect_command() -> None:
    """Show stored messages, transaction state and snapshots without changing anything."""


@inspect_command.command("log")
@address_argument
@topic_argument(required=False)
@click.option("--from", "start", default="beginning", show_default=True, help="beginning, end, a position or a time.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Number of messages to show.")
@click.option("--plot", is_flag=True, help="Draw the messages of TOPIC, their transactions and what readers get.")
@click.option("--svg", type=click.Path(dir_okay=False), metavar="FILE", help="Write this drawing as SVG to FILE.")
@log_options
@output_option
def inspect_log(
    log: LogAddress, topic: str | None, start: str, limit: int, plot: bool, svg: str | None, output: str
) -> None:
    """Show the topics of a log, or the stored messages of TOPIC: records, record sets and markers."""
    draws = plot or svg is not None
    if draws and (topic is None or output == "json"):
        raise click.UsageError("--plot and --svg draw one topic: name TOPIC, and leave --output away.")
    with log.open_for_reading() as broker:
        if draws and topic is not None:
            first = start_point(broker, topic, parse_start(start)).position
            _draw(read_picture(broker, topic, first, limit), svg, plot=plot)
        elif topic is None:
            show_rows([_topic_row(broker, name) for name in broker.topics()], output, empty="no topics")
        else:
            first = start_point(broker, topic, parse_start(start)).position
            rows = list(_message_rows(broker, topic, first, limit + 1))
            show_rows(rows[:limit], output, empty="no messages")
            if len(rows) > limit:
                _narrate_more(rows[limit]["position"])


def _narrate_more(first: Position) -> None:
    narrate(f"there are more messages: continue with --from {first}, or give a larger --limit")


def _draw(picture: LogPicture, svg: str | None, *, plot: bool) -> None:
    if not picture.rows:
        click.echo("no messages")
        return
    if plot:
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if terminal else None
        for line in as_text(picture, width, coloured=terminal and has_style()):
            click.echo(line)
    if svg is not None:
        with open(svg, "w", encoding="utf-8") as file:
            file.write(as_drawing(picture, "log").svg())
        narrate(f"wrote {svg}")
    if picture.more is not None:
        _narrate_more(picture.more)


def _topic_row(broker: Broker, topic: str) -> Row:
    ledgers = broker.ledgers(topic)
    return {
        "topic": topic,
        "ledgers": len(ledgers),
        "messages": sum(ledger.entries for ledger in ledgers),
        "bytes": sum(ledger.bytes for ledger in ledgers),
        "first": broker.first_position(topic),
        "last": broker.last_position(topic),
    }


def _message_rows(broker: Broker, topic: str, first: Position, limit: int) -> Iterator[Row]:
    for placed in stored_messages(broker, topic, first, limit):
        yield from map(_message_row, placed)


def _message_row(placed: PlacedMessage) -> Row:
    position, publish_time, (key, value, properties, _) = placed
    kind: str = "record"
    detail: str | bytes = "(deleted)" if value is None else value
    if MARKER in properties:
        kind, detail = "marker", _marker_text(value)
    elif REMOVED in properties:
        kind, detail = "emptied", "(by compaction)"
    elif RECORDS in properties:
        kind, detail = "set", f"{_records(properties[RECORDS])} in {counted(len(value or b''), 'byte')}"
    return {
        "position": position,
        "published": instant(publish_time),
        "kind": kind,
        "txn": properties.get(TXN),
        "seq": properties.get(SEQ),
        "key": key,
        "content": detail,
    }


def _records(number: str) -> str:
    return counted(int(number), "record") if number.isdecimal() else f"{number} records"


def _marker_text(value: bytes | None) -> str:
    try:
        marker = decode_marker(value)
    except ValueError as error:
        return f"undecodable: {error}"
    ends = ", ".join(f"{outcome.name} {txn} ({records})" for txn, outcome, records in marker.items)
    how = "decided" if marker.decided else "one-phase"
    return f"{how}, epoch {marker.epoch}, low-water mark {marker.low_water_mark}: {ends or 'epoch marker'}"


@inspect_command.command("buffer")
@address_argument
@topic_argument()
@click.option("--txn", "txn_text", metavar="MOST:LEAST", help="Show the state of this transaction only.")
@log_options
@output_option
def inspect_buffer(log: LogAddress, topic: str, txn_text: str | None, output: str) -> None:
    """Show the transaction state of TOPIC, restored from its snapshot and advanced to the end of its log."""
    txn = None if txn_text is None else parse_txn(txn_text)
    with log.open_for_reading() as broker:
        loaded = load(broker, topic)
        with LogFollower(broker, topic, loaded.buffer, loaded.resume) as follower:
            follower.replay()
        if txn is None:
            show_record(_buffer_record(broker, loaded), output, title=topic)
        else:
            show_record({"topic": topic, "txn": txn, "state": _txn_state(loaded, txn)}, output)


def _buffer_record(broker: Broker, loaded: LoadedTopic) -> Row:
    buffer = loaded.buffer
    state, oldest = buffer.snapshot_state(), buffer.ongoing.oldest()
    known = state.coordinators
    held = None if oldest is None else held_back(broker, loaded.topic, oldest, buffer.applied)
    return {
        "registered": loaded.registered,
        "applied": buffer.applied,
        "max_read_position": buffer.max_read_position,
        "log_end": broker.last_position(loaded.topic),
        "held_back": None if held is None else held.as_json(),
        "open_transactions": len(state.ongoing),
        "oldest_open": [
            f"{entry.txn} since {entry.first}, {counted(entry.accepted, 'record')}"
            for entry in itertools.islice(buffer.ongoing.values(), SHOWN_OPEN)
        ],
        "aborts": len(buffer.aborted),
        "suppressed_ranges": sum(1 for _ in buffer.suppressed.ranges()),
        "segments": len(state.segments),
        "unsealed": len(state.unsealed.least) + len(state.unsealed.firsts),
        "coordinators": [
            f"{most}: epoch {epoch}, low-water mark {mark}"
            for most, epoch, mark in zip(known.most, known.epochs, known.low_water_marks, strict=True)
        ],
        **buffer.counters._asdict(),
        "damage": [
            f"{txn} at {position}: {counted(expected, 'record')} expected, {accepted} found"
            for txn, position, expected, accepted in buffer.damage
        ],
    }


def _txn_state(loaded: LoadedTopic, txn: TxnId) -> str:
    buffer = loaded.buffer
    if txn in buffer.ongoing:
        return "OPEN"
    outcome = buffer.outcome(txn)
    if outcome is Outcome.COMMIT:
        return "COMMITTED"
    if outcome is Outcome.ABORT or buffer.is_aborted(txn):
        return "ABORTED"
    return "ended here, forgotten" if buffer.has_ended(txn) else "never seen here"


@inspect_command.command("snapshot")
@address_argument
@topic_argument(required=False)
@log_options
@output_option
def inspect_snapshot(log: LogAddress, topic: str | None, output: str) -> None:
    """Show the snapshot entries of all data topics, or of TOPIC."""
    with log.open_for_reading() as broker:
        try:
            names = snapshot_topics(broker) if topic is None else [snapshot_topic_of(broker, topic)]
            tables = [scan(broker, name, topic) for name in names]
        except TopicNotFound:
            raise TopicNotFound(f"{log.address} has no topic {SNAPSHOT_TOPIC}: no topic is registered there") from None
        found = {name: entries for table in tables for name, entries in table.topics.items()}
        if topic is not None and topic not in {*found, *broker.topics()}:
            raise TopicNotFound(f"there is no topic {topic!r}: `txnbuf inspect log {log.address}` lists the topics")
        rows = [row for name in sorted(found) for row in _entry_rows(name, found[name])]
        epochs = ", ".join(str(table.epoch) for table in tables)
        show_rows(rows, output, title=f"owner epoch {epochs}" if output == "table" else "", empty="no entries")


def _entry_rows(topic: str, entries: TopicEntries) -> Iterator[Row]:
    keys = [*([] if entries.end is None else [EntryKey(topic, END)]), *entries.keys(topic)]
    for key in keys:
        stored = entries.get(key)
        if stored is None:
            continue
        detail = ""
        if key.kind == END:
            try:
                end = decode_end(topic, stored)
                chains = (_segment_range(end, SEGMENT, ""), _segment_range(end, MUTATIONS, " of mutation snapshots"))
                state = decode_state(state_bytes(topic, end, entries.numbered[OVERFLOW])) if not end.deleted else None
                unsealed = 0 if state is None else len(state.unsealed_index)
                detail = (
                    f"format {stored.version}, snapshot {end.snapshot_id}, "
                    f"{', '.join(chains)} and {unsealed} unsealed, "
                    f"{len(end.overflow)} overflow {'entry' if len(end.overflow) == 1 else 'entries'}"
                )
                if end.deleted:
                    detail = f"snapshot {end.snapshot_id}: topic deleted by request"
            except (SnapshotError, BadRecord) as error:
                detail = str(error)
        yield {
            "entry": str(key),
            "position": stored.position,
            "epoch": stored.epoch,
            "bytes": len(stored.value or b""),
            "content": detail,
        }


def _segment_range(end: EndEntry, kind: str, of: str) -> str:
    numbers = end.numbers(kind)
    return f"segments{of} {numbers[0]} to {numbers[-1]}" if numbers else f"no segments{of}"
