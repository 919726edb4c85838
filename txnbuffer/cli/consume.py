"""`txnbuf consume`: the records of topics for a consumer group, printed or passed to a command

A line is printed before the position of the group commits. A transaction that aborts after its lines were printed is
repeated without printing them, so that a run prints no record twice.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from broker_io.errors import CallerError
from txnbuffer.cli.commands import AddressCommand, address_argument, topic_argument
from txnbuffer.cli.options import LogAddress, given, log_options
from txnbuffer.cli.output import narrate, output_option
from txnbuffer.cli.piped import LinesOut
from txnbuffer.cli.stopping import client_until_signal
from txnbuffer.cli.tail import parse_start, record_line, show_header
from txnbuffer.errors import counted
from txnbuffer.model import Position

if TYPE_CHECKING:
    from txnbuffer.client.client import Client
    from txnbuffer.client.groups.handling import OnError, Processed
    from txnbuffer.client.reading.records import Record, RecordBatch
    from txnbuffer.client.reading.starts import Start
    from txnbuffer.client.transaction import Transaction

BATCH = 100
"""Records in a transaction by default, without a command."""
END_IDLE = 0.2
"""Seconds without a record after which --until-end ends, if other members consume the rest."""
TO_TOPIC = "dead-letter:"


class CommandFailed(CallerError):
    """The command of --exec ended with another exit code than 0."""

    exit_code = 3


@dataclass
class Consumption:
    """Which records were printed or passed to the command, and how many more may be.

    `done`: those of each topic or partition that are not known to be committed, each with the number of bytes of output
    up to its end. `ends`: where to end on topics and partitions that have not been consumed so far; None: nowhere.
    """

    stop: asyncio.Event
    left: int | None
    ends: dict[str, Position] | None
    done: dict[str, dict[Position, int]] = field(default_factory=dict)
    attempts: dict[str, tuple[Transaction, list[Position]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ends == {}:
            self.stop.set()

    def fresh(self, records: RecordBatch) -> RecordBatch:
        """The records to do now, without those that were done in transactions that aborted."""
        done = self._count_done(records)
        return records.take(slice(done, done + self._room(records, done)))

    def _count_done(self, records: RecordBatch) -> int:
        """How many of the first records were done before, in transactions that aborted."""
        done = self.done.setdefault(records.topic, {})
        txn, positions = self.attempts.get(records.topic, (None, ()))
        if txn is not None and txn.committed:
            for position in positions:
                done.pop(position, None)
        if records.positions.first not in done:
            done.clear()
        return sum(position in done for position in records.positions)

    def _room(self, records: RecordBatch, done: int) -> int:
        """How many records after the first `done` may be done now."""
        if self.stop.is_set():
            return 0
        room = len(records) - done
        if self.ends is not None and self.ends.keys() == {records.topic}:
            room = records.positions.search(self.ends[records.topic], right=True) - done
        return max(room if self.left is None else min(room, self.left), 0)

    def add(self, records: RecordBatch, offsets: Sequence[int]) -> None:
        """These records are done: all, or as many as there are offsets."""
        positions = [*records.positions][: len(offsets)]
        self.done[records.topic] |= zip(positions, offsets, strict=True)
        if self.left is not None:
            self.left -= len(positions)
        if self.ends is not None and positions and positions[-1] >= self.ends.get(records.topic, positions[-1]):
            self.ends.pop(records.topic, None)
        if self.left == 0 or self.ends == {}:
            self.stop.set()

    def handled(self, txn: Transaction, records: RecordBatch, offset: int) -> int:
        """How many of the first records this transaction may commit: those whose output ends at or before `offset`."""
        done = self.done[records.topic]
        positions = [position for position in records.positions if done.get(position, offset + 1) <= offset]
        self.attempts[records.topic] = txn, positions
        return len(positions)


@dataclass
class Printer:
    """Prints records, and lets them commit once the reader of the output has read them."""

    progress: Consumption
    out: LinesOut
    output: str

    async def work(self, txn: Transaction, records: RecordBatch) -> int:
        fresh = self.progress.fresh(records)
        if len(fresh):
            lines = [f"{record_line(record, self.output)}\n".encode(errors="surrogateescape") for record in fresh]
            self.progress.add(fresh, await self.out.write(lines, self.progress.stop))
        return self.progress.handled(txn, records, await self.out.read(self.progress.stop))


@dataclass
class Runner:
    """Passes records to a command: one at a time, or all of a transaction as lines."""

    progress: Consumption
    command: str
    group: str
    output: str
    single: bool

    async def work(self, txn: Transaction, records: RecordBatch) -> int:
        fresh = self.progress.fresh(records)
        if len(fresh):
            await self._run(fresh)
            self.progress.add(fresh, [0] * len(fresh))
        return self.progress.handled(txn, records, 0)

    async def _run(self, records: RecordBatch) -> None:
        """Raises CommandFailed."""
        rows = [*records]
        if self.single and self.output == "table":
            given = rows[0].value or b""
        else:
            given = "".join(f"{record_line(row, self.output)}\n" for row in rows).encode(errors="surrogateescape")
        environment = {**os.environ, "RECORD_GROUP": self.group, "RECORD_TOPIC": records.topic}
        environment |= _described(rows[0]) if self.single else {}
        # In a process group of its own, so that an interrupt at the terminal lets it end.
        process = await asyncio.create_subprocess_shell(
            self.command, stdin=asyncio.subprocess.PIPE, env=environment, process_group=0
        )
        try:
            await process.communicate(given)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
        if process.returncode:
            code = process.returncode
            ended = f"exited with {code}" if code > 0 else f"was ended by signal {-code}"
            raise CommandFailed(
                f"{self.command!r} {ended} for the record at {records.positions.first} of {records.topic!r}"
                if len(records) == 1
                else f"{self.command!r} {ended} for {len(records)} records from {records.positions.first} of "
                f"{records.topic!r}"
            )


def _described(record: Record) -> dict[str, str]:
    """The environment of a command for one record."""
    described = {
        "RECORD_POSITION": str(record.position),
        "RECORD_SEQNO": "" if record.seqno is None else str(record.seqno),
        "RECORD_TRANSACTION": str(record.txn or ""),
        "RECORD_DELETED": "1" if record.value is None else "",
        "RECORD_EVENT_TIME": str(record.event_time or ""),
        "RECORD_PUBLISH_TIME": str(record.publish_time),
        "RECORD_PROPERTIES": json.dumps(dict(record.properties)),
    }
    if record.key is None:
        return described
    try:
        text = record.key.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:  # the environment can't have it
        return described | {"RECORD_KEY_BASE64": base64.b64encode(record.key).decode()}
    return described | {"RECORD_KEY": text}


def _on_error(_: click.Context, __: click.Parameter, text: str) -> OnError:
    from txnbuffer.client.groups.handling import dead_letter

    if text.startswith(TO_TOPIC) and text != TO_TOPIC:
        return dead_letter(text.removeprefix(TO_TOPIC))
    if text == "stop":
        return "stop"
    if text == "skip":
        return "skip"
    raise click.BadParameter(f"{text!r} is invalid: give stop, skip or {TO_TOPIC}TOPIC")


@click.command("consume", cls=AddressCommand)
@address_argument
@topic_argument("topics", nargs=-1, required=True, metavar="TOPIC…")
@click.option("--group", required=True, metavar="GROUP", help="The consumer group whose positions commit.")
@click.option("--start", default="beginning", show_default=True, metavar="START",
              help="Where a new group begins: beginning, end, a seqno, a position or a time.")  # fmt: skip
@click.option("--limit", type=click.IntRange(1), help="End after this many records.")
@click.option("--until-end", is_flag=True, help="End at the last record that is there now.")
@click.option("--idle", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
              help="End after this many seconds without a record.")  # fmt: skip
@click.option("--batch", type=click.IntRange(1), metavar="N",
              help=f"Commit after at most N records. [default: {BATCH}; with --exec 1]")  # fmt: skip
@click.option("--exec", "command", metavar="COMMAND", help="Run this command of the shell for each record.")
@click.option("--on-error", default="stop", show_default=True, callback=_on_error,
              metavar=f"stop|skip|{TO_TOPIC}TOPIC", help="What follows when COMMAND has failed.")  # fmt: skip
@click.option("--retries", type=click.IntRange(0), default=0, show_default=True,
              help="How often a COMMAND that failed runs again.")  # fmt: skip
@log_options
@output_option
def consume_command(log: LogAddress, topics: tuple[str, ...], group: str, **wanted: Any) -> None:
    """Print each committed record of topics once for a consumer group, over all runs and members.

    Lines are those of `txnbuf tail`. Several commands with the same GROUP share the partitions. With file:DIR the
    command owns the log while it runs.

    A line is printed, then its position commits. So after an end with exit code 0 each record was printed exactly once.
    If the command is killed, or its host or the service fails, the lines of the last transaction, at most N of --batch,
    may be printed again by the next run: a reader that must not see them twice remembers the last position of each
    topic. SIGTERM and SIGINT end the command after all that is printed is committed; a second one ends it at once.

    If the output is a pipe, lines commit after its reader has read them. If the reader closes it, as `head` does, lines
    that it has not read are not committed, and the exit code is 141. A reader may read more than it uses: with
    --batch 1 each record commits before the next one is printed, and --limit ends exactly.

    --exec COMMAND runs once per record, with the value on its standard input (or with --output json, the JSON line) and
    RECORD_TOPIC, RECORD_POSITION, RECORD_SEQNO, RECORD_KEY (RECORD_KEY_BASE64 if it is not text), RECORD_PROPERTIES (a
    JSON object), RECORD_TRANSACTION, RECORD_EVENT_TIME, RECORD_PUBLISH_TIME (milliseconds), RECORD_DELETED (1 if the
    record deletes its key) and RECORD_GROUP in its environment. With --batch N it runs for up to N records, which are
    lines on its standard input. The position commits after the command has exited with 0, so a crash in between runs it
    again for the same records. Any other exit code is an error, which --on-error handles.
    """
    from txnbuffer.opening import connect

    log.check_not_in_memory()
    if wanted["command"] is None and (ignored := given("on_error", "retries")):
        raise click.UsageError(f"{ignored} can be used with --exec only")
    start = parse_start(wanted.pop("start"), "--start")
    if wanted["command"] is None:
        show_header(None, wanted["output"])
    out = LinesOut()
    done = asyncio.run(_consume(connect(log.address, **log.connect_options()), topics, group, start, out, **wanted))
    if done is not None and (done.skipped or done.dead_letters):
        narrate(f"{counted(done.skipped, 'record')} skipped, {counted(done.dead_letters, 'dead letter')}")
    if out.closed:
        raise BrokenPipeError


async def _consume(
    connection: Any, topics: tuple[str, ...], group: str, start: Start, out: LinesOut, *,
    limit: int | None, until_end: bool, idle: float | None, batch: int | None, command: str | None,
    on_error: OnError, retries: int, output: str,
) -> Processed | None:  # fmt: skip
    from txnbuffer.client.groups.handling import HandlerTask
    from txnbuffer.client.groups.processing import GroupSource, process

    async with client_until_signal(connection) as (client, stop):
        if client is None:
            return None
        progress = Consumption(stop, limit, await _ends(client, topics) if until_end else None)
        handler = (
            Printer(progress, out, output).work
            if command is None
            else Runner(progress, command, group, output, single=batch is None).work
        )
        size = batch or (BATCH if command is None else 1)
        idle = END_IDLE if until_end and idle is None else idle
        task = HandlerTask(None, None, on_error, retries, work=handler, stop=stop)
        watching = asyncio.create_task(out.watch(stop))
        try:
            return await process(client, GroupSource([*topics], group, start, size, idle), task)
        finally:
            watching.cancel()


async def _ends(client: Client, topics: Sequence[str]) -> dict[str, Position]:
    """The last visible record of each topic and partition that has one."""
    from txnbuffer.client.reading.starts import ReadTopics

    read = await asyncio.to_thread(lambda: ReadTopics(client.open_broker(), [*topics], "beginning"))
    found = {name: await client.last_visible(name) for name, _ in read.parts()}
    return {name: position for name, position in found.items() if position is not None}
