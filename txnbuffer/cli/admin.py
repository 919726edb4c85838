"""Commands that ask a service, or else the log itself: `txnbuf list`, `describe`, `find-hanging`, `abort`, `streams`,
`cursors`
"""

from __future__ import annotations

import contextlib
import re
import sys
from typing import Any

import click

from broker_io import is_cluster
from broker_io.errors import TopicNotFound
from broker_io.partitions import partition_name
from broker_io.port import Broker, PartitionedBroker
from txnbuffer.buffer.held_back import HeldBack
from txnbuffer.cli.admin_client import (
    SHOWN,
    ServiceAddress,
    answers,
    call_owner,
    changed,
    from_service,
    opened,
    service_at,
)
from txnbuffer.cli.commands import AddressCommand, CommandGroup, address_argument, topic_argument
from txnbuffer.cli.options import LogAddress, log_options, parse_txn
from txnbuffer.cli.output import narrate, output_option, show_line, show_record, show_rows
from txnbuffer.model import Outcome, TxnId

TOPIC_COLUMNS = (
    *("topic", "transactions", "ledgers", "bytes", "end", "max_read_position", "open", "aborts", "problem"),
    "held_back",
)
"""The columns of the table of `txnbuf list`."""
TOTALS = ("ledgers", "bytes", "messages", "open", "aborts")
STREAM_COLUMNS = (
    *("topic", "stream", "state", "last_sent_seqno", "items_remaining", "items_sent", "bytes_sent", "snapshots_sent"),
    *("backfill_disk_items", "unacked_bytes", "paused_current_reason"),
)
"""The columns of the table of `txnbuf streams`, after the peer."""


@click.command("list", cls=AddressCommand)
@address_argument
@log_options
@output_option
def list_command(log: LogAddress, output: str) -> None:
    """List the topics that a running service has open; with file:DIR, or without a service of a cluster, all topics.

    `max_read_position` is the last position that readers of committed records can see; `open` counts the
    open transactions of the topic. `held_back` counts the messages that readers do not get before the oldest
    of them has ended, which is named on stderr.
    """
    responses = answers(log, "List")
    show_rows(held_back_counted(responses.rows("topic"), output), output, title="topics")
    responses.check()


def held_back_counted(rows: list[dict[str, Any]], output: str) -> list[dict[str, Any]]:
    """Rows for a table: with the number of messages that are held back, once stderr has named the transactions."""
    if output == "json":
        return rows
    for found in {row["topic"]: row["held_back"] for row in rows if row.get("held_back")}.values():
        narrate(str(HeldBack.of_json(found)))
    return [row | {"held_back": row["held_back"]["messages"] if row.get("held_back") else 0} for row in rows]


@click.command("describe", cls=AddressCommand)
@address_argument
@topic_argument()
@log_options
@output_option
def describe_command(topic: str, log: LogAddress, output: str) -> None:
    """Show the state of TOPIC and what its readers wait for; of a partitioned topic, the sums and each partition.

    Names the transaction that blocks max_read_position, its age and its client, if a service answers. With file:DIR, or
    if no service of a cluster answers, the state is that of the log.
    """
    try:
        answer, *partitions = _described(log, topic)
    except TopicNotFound as error:
        if not re.fullmatch(r"\d+(:\d+)?", topic):
            raise
        raise TopicNotFound(
            f"{error}. If it is a transaction: `txnbuf find-hanging` shows open transactions with their topics"
        ) from None
    if partitions:
        _show_partitions(topic, [answer, *partitions], output)
        return
    if output == "json":
        show_record(answer, output)
        return
    transactions = answer.pop("transactions") if isinstance(answer["transactions"], list) else []
    show_record(answer, output, title=f"topic {topic}")
    if transactions:
        show_rows(transactions, output, title="open transactions, oldest first")


def _described(log: LogAddress, topic: str) -> list[dict[str, Any]]:
    """The state of a topic, or of each of its partitions."""
    with opened(log) as broker:
        if broker is None:
            return [call_owner(service_at(log), "Describe", topic=topic)]
        count = broker.partitions(topic) if isinstance(broker, PartitionedBroker) else 0
        names = [partition_name(topic, number) for number in range(count)] or [topic]

        def ask(service: ServiceAddress | None) -> list[dict[str, Any]]:
            return [_state_of(service, broker, name) for name in names]

        found = from_service(log, broker, ask, SHOWN)
        return ask(None) if found is None else found


def _state_of(service: ServiceAddress | None, broker: Broker, topic: str) -> dict[str, Any]:
    """The state of a topic as its service has it; as the log has it, if the service does not have it open."""
    from txnbuffer.service.stored import StoredAnswers

    if service is not None:
        with contextlib.suppress(TopicNotFound):
            return dict(call_owner(service, "Describe", topic=topic))
    return dict(StoredAnswers(broker).answer("Describe", topic=topic))


def _show_partitions(topic: str, partitions: list[dict[str, Any]], output: str) -> None:
    sums = {name: sum(one[name] or 0 for one in partitions) for name in TOTALS}
    whole = {"topic": topic, "partitions": len(partitions), **sums}
    if output == "json":
        show_record(whole | {"each": partitions}, output)
        return
    show_record(whole, output, title=f"topic {topic}")
    rows = [{name: one[name] for name in TOPIC_COLUMNS} for one in partitions]
    show_rows(held_back_counted(rows, output), output, title="partitions")


@click.command("find-hanging", cls=AddressCommand)
@address_argument
@click.option("--older-than", "seconds", default=10.0, show_default=True, type=click.FloatRange(0),
              help="Show transactions whose first record is at least this many seconds old.")  # fmt: skip
@log_options
@output_option
def find_hanging_command(seconds: float, log: LogAddress, output: str) -> None:
    """Find transactions that have been open for long, the oldest first.

    Each one blocks the readers of all topics that it wrote to. --older-than 0 shows all that are open. The service
    aborts a transaction at its timeout; `txnbuf abort` aborts it now. A client announces a transaction up to 2 seconds
    after its begin; until then it is shown as "not known to the coordinator yet".

    If no service of a cluster answers, or with file:DIR, it reads the topics and the decision log itself.
    """
    responses = answers(log, "FindHanging", complete=True, seconds=seconds)
    show_rows(_merged(responses.each), output, title="open transactions", empty=f"none older than {seconds:g} s")
    responses.check()


def _merged(answers: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row per transaction from the rows of all shards: each knows its own topics, the coordinator the rest."""
    found: dict[str, dict[str, Any]] = {}
    for row in (row for answer in answers for row in answer):
        known = found.setdefault(row["txn"], row)
        if known is not row:
            better = row if known["session"] is None else known
            ages = [one["open_seconds"] for one in (row, known) if one["open_seconds"] is not None]
            topics = sorted({*known["topics"], *row["topics"]})
            found[row["txn"]] = better | {"topics": topics, "open_seconds": max(ages, default=None)}
    return sorted(found.values(), key=lambda row: -(row["open_seconds"] or 0))


@click.command("abort", cls=AddressCommand)
@address_argument
@click.argument("txn", metavar="MOST:LEAST")
@log_options
@output_option
def abort_command(txn: str, log: LogAddress, output: str) -> None:
    """Abort a transaction of any client, and show its outcome.

    MOST:LEAST is its id, as `txnbuf find-hanging` prints it.

    A committed transaction stays committed; its outcome is then COMMIT, and the exit code 1.

    If no service of a cluster runs, or with file:DIR, the command does the service's work until the transaction is
    aborted. It then also aborts the transactions that a new service would abort. It refuses while a service owns the
    log, even one that does not answer.
    """
    wanted = parse_txn(txn)
    with opened(log) as broker:
        otherwise = "So this command owns the log meanwhile"
        answer = from_service(log, broker, lambda service: call_owner(service, "Abort", txn=str(wanted)), otherwise)
    if answer is None:
        answer = _abort_without_service(log, wanted)
    show_record(answer, output)
    sys.exit(1 if answer["outcome"] == Outcome.COMMIT.name else 0)


def _abort_without_service(log: LogAddress, txn: TxnId) -> dict[str, Any]:
    import asyncio

    from txnbuffer.service.offline import aborted

    cluster_mode = is_cluster(log.address)
    with log.open_for_writing() as broker:
        return asyncio.run(aborted(broker, txn, "txnbuf abort", cluster_mode=cluster_mode))


@click.command("streams", cls=AddressCommand)
@address_argument
@log_options
@output_option
def streams_command(log: LogAddress, output: str) -> None:
    """Show the open change streams and their progress.

    With --output json: one object per shard with the connections and their streams, the mutation manager and cursors
    of each topic, and the memory in use. `items_remaining` is an upper bound of the items still to be sent.
    """
    responses = answers(log, "Streams")
    if output == "json":
        for response in responses.each:
            show_line(response)
    else:
        rows = [
            {"peer": connection["peer"], **{name: stream[name] for name in STREAM_COLUMNS}}
            for response in responses.each
            for connection in response["connections"]
            for stream in connection["streams"]
        ]
        memory = [response["memory"] for response in responses.each if response["memory"]["bytes"] is not None]
        used, budget = (sum(one[name] for one in memory) for name in ("bytes", "budget"))
        title = f"change streams; {used:,} of {budget:,} bytes of memory" if memory else "change streams"
        show_rows(rows, output, title=title)
    responses.check()


@click.group("cursors", cls=CommandGroup)
def cursors_command() -> None:
    """List and change durable cursors: each keeps in the log what its reader has not read yet.

    A cursor is a named position on a topic of a running service. Retention does not trim the log after it. A cursor
    that keeps more than streams.cursor_bytes is dropped.
    """


@cursors_command.command("list")
@address_argument
@log_options
@output_option
def list_cursors(log: LogAddress, output: str) -> None:
    """Show all cursors, their positions and what they keep in the log.

    `items_remaining` is the number of mutations after the cursor; `first_ledger` is the first ledger that it keeps.
    """
    responses = answers(log, "Cursors")
    show_rows(responses.rows("topic", "cursor"), output, title="durable cursors", empty="none")
    responses.check()


@cursors_command.command("add")
@address_argument
@topic_argument()
@click.argument("cursor")
@click.option("--at", default="beginning", show_default=True, metavar="PLACE",
              help="Position: beginning, now, a seqno or a resume token.")  # fmt: skip
@log_options
@output_option
def add_cursor(topic: str, cursor: str, at: str, log: LogAddress, output: str) -> None:
    """Add CURSOR to TOPIC. A cursor that exists keeps its position."""
    show_record(changed(log, "AddCursor", topic=topic, cursor=cursor, at=at), output)


@cursors_command.command("advance")
@address_argument
@topic_argument()
@click.argument("cursor")
@click.argument("place")
@log_options
@output_option
def advance_cursor(topic: str, cursor: str, place: str, log: LogAddress, output: str) -> None:
    """Move CURSOR of TOPIC forward to PLACE, the seqno or resume token that its reader has processed.

    A cursor never moves back.
    """
    show_record(changed(log, "AdvanceCursor", topic=topic, cursor=cursor, at=place), output)


@cursors_command.command("remove")
@address_argument
@topic_argument()
@click.argument("cursor")
@log_options
@output_option
def remove_cursor(topic: str, cursor: str, log: LogAddress, output: str) -> None:
    """Remove CURSOR of TOPIC, so that retention may trim what it kept."""
    show_record(changed(log, "RemoveCursor", topic=topic, cursor=cursor), output)
