"""`txnbuf produce`: records from standard input, in transactions"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

import click

from txnbuffer.cli.commands import AddressCommand, address_argument, topic_argument
from txnbuffer.cli.options import LogAddress, log_options
from txnbuffer.cli.output import narrate, output_option, show_record
from txnbuffer.errors import InvalidRequest, counted
from txnbuffer.progress import report

if TYPE_CHECKING:
    from txnbuffer.client.sync.sync_transaction import SyncTransaction

FIELDS = {"key", "value", "value_base64", "properties", "event_time", "ordering_key", "topic", "delete"}


@click.command("produce", cls=AddressCommand)
@address_argument
@topic_argument()
@click.option("--json", "as_json", is_flag=True, help="Each line is a JSON object, as described above.")
@click.option("--key-separator", metavar="TEXT", help="Each line is KEY, this text, VALUE.")
@click.option("--per-transaction", "size", type=click.IntRange(1), default=1000, show_default=True,
              help="Number of lines in one transaction.")  # fmt: skip
@click.option(
    "--name", metavar="NAME", help="Producer name: running the command again with the same input sends nothing twice."
)
@log_options
@output_option
def produce_command(
    log: LogAddress,
    topic: str,
    as_json: bool,
    key_separator: str | None,
    size: int,
    name: str | None,
    output: str,
) -> None:
    """Send each line of standard input as a record to TOPIC; transactions commit when full, the last one at the end.

    ADDRESS is txnbuf://HOST:PORT, pulsar://HOST:PORT/TENANT/NAMESPACE, or file:DIR if no other process has it open.

    With --json a line is an object with "value" (text, or any other JSON, which is sent as JSON) or
    "value_base64", and optionally "key", "properties", "event_time" (milliseconds), "ordering_key",
    "topic" (instead of TOPIC) and "delete": true (delete the key). A line ends with a newline; a
    carriage return before it belongs to the value. An invalid line ends the command: its
    transaction is aborted, earlier transactions stay committed.
    """
    from txnbuffer.opening import connect

    records = transactions = skipped = 0
    sending = report(f"sending to {topic}", "records")
    with connect(log.address, **log.connect_options()) as client, sending:
        last = 0 if name is None else client.committed_number(name)
        for number, lines in enumerate(_groups(sys.stdin.buffer, size), 1):
            if number <= last:
                skipped += len(lines)
                continue
            with client.transaction(name=name, number=None if name is None else number) as txn:
                for line, at in lines:
                    _send(txn, topic, line, at, as_json, key_separator)
            records += len(lines)
            transactions += 1
            sending.update(records)
    if skipped:
        were = "was already committed and is" if skipped == 1 else "were already committed and are"
        narrate(f"{counted(skipped, 'line')} {were} not sent again")
    show_record({"records": records, "transactions": transactions}, output)


def _groups(source: IO[bytes], size: int) -> Iterator[list[tuple[bytes, int]]]:
    """Lines with their line numbers, in groups of `size`."""
    group: list[tuple[bytes, int]] = []
    for at, line in enumerate(source, 1):
        group.append((line.removesuffix(b"\n"), at))
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _send(txn: SyncTransaction, topic: str, line: bytes, at: int, as_json: bool, key_separator: str | None) -> None:
    """Send a line of the input. Raises InvalidRequest for one that is not a record."""
    if as_json:
        _send_json(txn, topic, line, at)
    elif key_separator is None:
        txn.send(topic, line)
    else:
        key, found, value = line.partition(key_separator.encode())
        if not found:
            raise InvalidRequest(f"line {at} has no {key_separator!r} after its key: write KEY{key_separator}VALUE")
        txn.send(topic, value, key=key)


def _send_json(txn: SyncTransaction, topic: str, line: bytes, at: int) -> None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"line {at} is not JSON: {error}") from None
    if not isinstance(row, dict) or row.keys() - FIELDS:
        problem = (
            f"unknown field {', '.join(sorted(row.keys() - FIELDS))}" if isinstance(row, dict) else "not an object"
        )
        raise InvalidRequest(f"line {at} is not a record ({problem}): use the fields {', '.join(sorted(FIELDS))}")
    topic = row.get("topic", topic)
    deletes = row.get("delete", False)
    if not isinstance(deletes, bool):
        raise InvalidRequest(f'line {at}: "delete" must be true or false, got {deletes!r}')
    if deletes:
        if excess := sorted(row.keys() - {"delete", "key", "topic"}):
            raise InvalidRequest(f"line {at} deletes a key: remove {', '.join(excess)}")
        txn.delete(topic, row.get("key"))
        return
    txn.send(
        topic,
        _value(row, at),
        key=row.get("key"),
        ordering_key=row.get("ordering_key"),
        event_time=row.get("event_time"),
        properties=row.get("properties"),
    )


def _value(row: dict[str, Any], at: int) -> bytes:
    if ("value" in row) == ("value_base64" in row):
        raise InvalidRequest(f'line {at} needs exactly one of "value" and "value_base64"')
    if "value_base64" in row:
        try:
            return base64.b64decode(row["value_base64"], validate=True)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"line {at}: value_base64 is not base64 ({error})") from None
    value = row["value"]
    try:
        return (value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f'line {at}: "value" is not text: {error}') from None
