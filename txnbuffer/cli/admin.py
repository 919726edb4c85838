"""Commands on a running service: `txnbuf list`, `describe`, `find-hanging`, `abort`, `streams`, `cursors`

`find-hanging` and `abort` also work on a log that no service has open.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from broker_io import is_cluster
from broker_io.errors import ServiceUnavailable, TopicNotFound
from broker_io.port import Broker
from txnbuffer.buffer.held_back import HeldBack
from txnbuffer.cli.admin_client import (
    ServiceAddress,
    call_all,
    call_owner,
    service_at,
    services_of,
    with_service,
)
from txnbuffer.cli.commands import AddressCommand, CommandGroup, address_argument, topic_argument
from txnbuffer.cli.options import LogAddress, log_options, parse_txn
from txnbuffer.cli.output import narrate, output_option, show_line, show_record, show_rows
from txnbuffer.model import Outcome, TxnId

Answer = TypeVar("Answer")
SHOWN = "Its transactions are shown as the log has them"

STREAM_COLUMNS = (
    *("topic", "stream", "state", "last_sent_seqno", "items_remaining", "items_sent", "bytes_sent", "snapshots_sent"),
    *("backfill_disk_items", "unacked_bytes", "paused_current_reason"),
)
"""The columns of the table of `txnbuf streams`, after the peer."""


@click.command("list", cls=AddressCommand)
@address_argument
@with_service
@output_option
def list_command(service: ServiceAddress, output: str) -> None:
    """List the topics that a running service has open.

    `max_read_position` is the last position that readers of committed records can see; `open` counts the
    open transactions of the topic. `held_back` counts the messages that readers do not get before the oldest
    of them has ended, which is named on stderr.
    """
    responses = call_all(service, "List")
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
@with_service
@output_option
def describe_command(topic: str, service: ServiceAddress, output: str) -> None:
    """Show the state of TOPIC and what its readers wait for.

    Names the transaction that blocks max_read_position, its age and its client.
    """
    try:
        answer = call_owner(service, "Describe", topic=topic)
    except TopicNotFound as error:
        if not re.fullmatch(r"\d+(:\d+)?", topic):
            raise
        raise TopicNotFound(
            f"{error}. If it is a transaction: `txnbuf find-hanging` shows open transactions with their topics"
        ) from None
    if output == "json":
        show_record(answer, output)
        return
    transactions = answer.pop("transactions") if isinstance(answer["transactions"], list) else []
    show_record(answer, output, title=f"topic {topic}")
    if transactions:
        show_rows(transactions, output, title="open transactions, oldest first")


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
    with _opened(log) as broker:
        responses = _from_service(log, broker, lambda service: call_all(service, "FindHanging", seconds=seconds), SHOWN)
        answers = [] if responses is None else list(responses.each)
        if broker is not None and (responses is None or responses.missing):
            from txnbuffer.service.offline import hanging

            answers.append(hanging(broker, seconds))
            for problem in () if responses is None else responses.missing.values():
                narrate(f"{problem}. {SHOWN}")
    show_rows(_merged(answers), output, title="open transactions", empty=f"none older than {seconds:g} s")
    if broker is None and responses is not None:
        responses.check()


@contextlib.contextmanager
def _opened(log: LogAddress) -> Iterator[Broker | None]:
    """The cluster or the directory at an address, opened for reading; None at the address of a service."""
    log.check_not_in_memory()
    if is_cluster(log.address) or log.address.startswith("file:"):
        with log.open_for_reading() as broker:
            yield broker
    else:
        yield None


def _from_service(
    log: LogAddress, broker: Broker | None, ask: Callable[[ServiceAddress], Answer], otherwise: str
) -> Answer | None:
    """What the service answers; None if there is none and the log is opened, which `otherwise` tells the user."""
    if broker is not None and not is_cluster(log.address):
        return None
    try:
        return ask(service_at(log) if broker is None else services_of(broker, log))
    except ServiceUnavailable as error:
        if broker is None:
            raise
        narrate(f"{error}. {otherwise}")
        return None


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
    with _opened(log) as broker:
        otherwise = "So this command owns the log meanwhile"
        answer = _from_service(log, broker, lambda service: call_owner(service, "Abort", txn=str(wanted)), otherwise)
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
@with_service
@output_option
def streams_command(service: ServiceAddress, output: str) -> None:
    """Show the open change streams and their progress.

    With --output json: one object per shard with the connections and their streams, the mutation manager and cursors
    of each topic, and the memory in use. `items_remaining` is an upper bound of the items still to be sent.
    """
    responses = call_all(service, "Streams")
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
        used, budget = (sum(response["memory"][name] for response in responses.each) for name in ("bytes", "budget"))
        show_rows(rows, output, title=f"change streams; {used:,} of {budget:,} bytes of memory")
    responses.check()


@click.group("cursors", cls=CommandGroup)
def cursors_command() -> None:
    """List and change durable cursors: each keeps in the log what its reader has not read yet.

    A cursor is a named position on a topic of a running service. Retention does not trim the log after it. A cursor
    that keeps more than streams.cursor_bytes is dropped.
    """


@cursors_command.command("list")
@address_argument
@with_service
@output_option
def list_cursors(service: ServiceAddress, output: str) -> None:
    """Show all cursors, their positions and what they keep in the log.

    `items_remaining` is the number of mutations after the cursor; `first_ledger` is the first ledger that it keeps.
    """
    responses = call_all(service, "Cursors")
    show_rows(responses.rows("topic", "cursor"), output, title="durable cursors", empty="none")
    responses.check()


@cursors_command.command("add")
@address_argument
@topic_argument()
@click.argument("cursor")
@click.option("--at", default="beginning", show_default=True, metavar="PLACE",
              help="Position: beginning, now, a seqno or a resume token.")  # fmt: skip
@with_service
@output_option
def add_cursor(topic: str, cursor: str, at: str, service: ServiceAddress, output: str) -> None:
    """Add CURSOR to TOPIC. A cursor that exists keeps its position."""
    show_record(call_owner(service, "AddCursor", topic=topic, cursor=cursor, at=at), output)


@cursors_command.command("advance")
@address_argument
@topic_argument()
@click.argument("cursor")
@click.argument("place")
@with_service
@output_option
def advance_cursor(topic: str, cursor: str, place: str, service: ServiceAddress, output: str) -> None:
    """Move CURSOR of TOPIC forward to PLACE, the seqno or resume token that its reader has processed.

    A cursor never moves back.
    """
    show_record(call_owner(service, "AdvanceCursor", topic=topic, cursor=cursor, at=place), output)


@cursors_command.command("remove")
@address_argument
@topic_argument()
@click.argument("cursor")
@with_service
@output_option
def remove_cursor(topic: str, cursor: str, service: ServiceAddress, output: str) -> None:
    """Remove CURSOR of TOPIC, so that retention may trim what it kept."""
    show_record(call_owner(service, "RemoveCursor", topic=topic, cursor=cursor), output)
