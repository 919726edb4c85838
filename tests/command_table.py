"""What each command answers at each kind of address: the table, and the places that its rows run at

`test_address_table.py` runs it on a directory and on a service, `test_address_table_pulsar.py` on a cluster.
"""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias
from unittest import mock

import click
from commands import txnbuf

from txnbuffer import SyncClient
from txnbuffer.cli.app import app

Answer: TypeAlias = tuple[int, str]
"""The exit code of a command, and a text that it prints on stdout or stderr."""


class Row(NamedTuple):
    """A command line, and the answers of a directory, a service and a cluster with a service.

    In the line `{a}` is the address, `{files}` a directory for files, `{held}` and `{open}` are open transactions.
    """

    line: str
    file: Answer
    service: Answer
    cluster: Answer


SHARDS = "this log has one shard, not 2: only a cluster has several"
NO_PARTITIONS = "topics of an embedded log have no partitions"
NO_SERVICE = "is not a service address: give txnbuf://HOST:PORT of the service"
NO_PAIR = "this service has no pair: start it with --pair-lock"
NOT_CLUSTER = "is not the address of a Pulsar cluster"
NO_DIRECTORY = "is not a directory: give file:DIR"
CONF = "nothing"
PLUG_IN_CHECKED = 0 if os.environ.get("PULSAR_PLUG_IN") else 1

ROWS: tuple[Row, ...] = (
    Row("serve {a} --shards 2 --shard 5", (2, SHARDS), (2, SHARDS), (2, "shard")),
    Row("produce {a} written", *[(0, "transactions  1")] * 3),
    Row("status {a}", *[(0, "topics")] * 3),
    Row("list {a}", *[(0, "orders")] * 3),
    Row("describe {a} orders", *[(0, "every transaction is decided")] * 3),
    Row("describe {a} missing", (2, "there is no topic"), (2, "has no topic 'missing' open"), (2, "there is no topic")),
    Row("topics list {a}", *[(0, "orders")] * 3),
    Row("topics describe {a} orders", *[(0, "every transaction is decided")] * 3),
    Row("topics create {a} made", (0, "made"), (0, "made"), (0, "made")),
    Row("topics create {a} wide --partitions 2", (2, NO_PARTITIONS), (2, NO_PARTITIONS), (0, "partitions  2")),
    Row("topics create {a} orders", *[(2, "topic 'orders' exists already")] * 3),
    Row("topics delete {a} gone --yes", *[(0, "gone")] * 3),
    Row("topics delete {a} orders --yes", *[(2, "the durable cursor 'cache' is on it")] * 3),
    Row("find-hanging {a} --older-than 0", *[(0, "{held}")] * 3),
    Row("abort {a} {open}", *[(0, "ABORT")] * 3),
    Row("groups list {a}", *[(0, "cents")] * 3),
    Row("groups list {a} nobody", *[(2, "there is no consumer group 'nobody'")] * 3),
    Row("groups forget {a} old", *[(0, "old")] * 3),
    Row("groups forget {a} nobody", *[(2, "group 'nobody' has no position")] * 3),
    Row("groups seek {a} moved --topic orders --to beginning", *[(0, "group moved")] * 3),
    Row("streams {a}", *[(0, "change streams")] * 3),
    Row("cursors list {a}", *[(0, "cache")] * 3),
    Row("cursors add {a} orders new", *[(0, "new")] * 3),
    Row("cursors advance {a} orders later 1", *[(0, "later")] * 3),
    Row("cursors remove {a} orders old", *[(0, "old")] * 3),
    Row("compact {a} orders", (0, "records_out"), (0, "records_out"), (2, "compact")),
    Row("compact {a}", (2, "give the TOPIC"), (0, "compaction"), (2, "give the TOPIC")),
    Row("backup {a} {files}/backup", (0, "topics"), (0, "topics"), (2, "backup")),
    Row("restore {files}/missing {a}", (2, "there is no file"), (2, NO_DIRECTORY), (2, NO_DIRECTORY)),
    Row("replication dissolve {a}", (2, "give --pair-lock"), *[(2, "can't be dissolved")] * 2),
    Row("replication promote {a} --force", (2, NO_SERVICE), (2, NO_PAIR), (2, NO_PAIR)),
    Row("replication status {a}", (2, NO_SERVICE), (2, NO_PAIR), (2, NO_PAIR)),
    Row("replication switch {a}", (2, NO_SERVICE), (2, NO_PAIR), (2, NO_PAIR)),
    Row("inspect buffer {a} orders", *[(0, "max_read_position")] * 3),
    Row("inspect log {a} orders", *[(0, "COMMIT")] * 3),
    Row("inspect snapshot {a}", *[(0, "orders-end")] * 3),
    Row("verify {a}", *[(0, "0 errors")] * 3),
    Row("recover {a} orders", *[(0, "differences")] * 3),
    Row("audit {a} orders", *[(0, "digest")] * 3),
    Row("tail {a} orders --limit 1", *[(0, "orders\t")] * 3),
    Row("consume {a} orders --group new --until-end", *[(0, "orders")] * 3),
    Row("relay {a} orders copy --no-follow", *[(0, "records")] * 3),
    Row("materialize {a} orders sqlite:{files}/table --to now", *[(0, "orders")] * 3),
    Row("outbox adopt {a} shop --database sqlite:///{files}/none", *[(2, "has no tables of txnbuffer")] * 3),
    Row("outbox run {a} shop --database sqlite:///{files}/none", *[(2, "has no tables of txnbuffer")] * 3),
    Row("pipeline audit {a} {files}", *[(2, "there is no export at")] * 3),
    Row("pipeline compact {a}", (0, "no topic has a policy"), *[(2, NO_DIRECTORY)] * 2),
    Row("pipeline export {a} {files}/out --conf nothing", *[(2, CONF)] * 3),
    Row("pipeline profile {a} --conf nothing", *[(2, CONF)] * 3),
    Row("pipeline recover {a} --conf nothing", *[(2, CONF)] * 3),
    Row("plugin check {a}", (2, NOT_CLUSTER), (2, NOT_CLUSTER), (PLUG_IN_CHECKED, "plug_in")),
    Row("plugin lock {a}", (2, NOT_CLUSTER), (2, NOT_CLUSTER), (2, "lock")),
)
"""Rows run in any order: what one changes, no other needs."""


@dataclass
class Place:
    """An address at which commands run, and the open transactions there; `kind`: file, service or cluster."""

    kind: str
    address: str
    transactions: Mapping[str, str]
    environment: dict[str, str] = field(default_factory=dict)

    def printed(self, row: Row, files: object) -> subprocess.CompletedProcess[str]:
        """Run a row."""
        with mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a line\n"))):
            return txnbuf(*self._named(row.line, files).split(), environ=self.environment)

    def check(self, row: Row, files: object) -> None:
        """Run a row, and compare its answer with the table."""
        done = self.printed(row, files)
        code, text = getattr(row, self.kind)
        printed = done.stdout + done.stderr
        assert (done.returncode, self._named(text, files) in printed) == (code, True), printed
        assert "Traceback" not in printed

    def _named(self, text: str, files: object) -> str:
        return text.format(a=self.address, files=files, **self.transactions)


@contextmanager
def filled(client: SyncClient) -> Iterator[dict[str, str]]:
    """Write what the rows work on; the open transactions, until the context ends."""
    with client.transaction() as txn:
        txn.send("orders", "1", key="a")
        txn.send("orders", "2", key="b")
        txn.send("gone", "3")
    for group in ("cents", "old"):
        client.process("orders", group, lambda txn, record: None, idle_timeout=1.0)
    for cursor in ("cache", "later", "old"):
        client.cursors.add("orders", cursor)
    opened = {name: client.transaction(timeout=600).begin() for name in ("held", "open")}
    with mock.patch("txnbuffer.client.session.session_requests.COLLECT_BYTES", 0):
        for txn in opened.values():
            txn.send("open", "4")
        client.send("open", "5")
    with client.reader("open", isolation="read_uncommitted") as reader:
        for _ in range(3):  # all are in the log
            assert next(reader.records(timeout=120.0)) is not None
    yield {name: str(txn.id) for name, txn in opened.items()}


def commands_with_address() -> set[str]:
    """The names of all commands that have an address, such as `topics list`."""

    def found(command: click.Command, name: str) -> Iterator[str]:
        if isinstance(command, click.Group):
            context = click.Context(command)
            for each in command.list_commands(context):
                part = command.get_command(context, each)
                assert part is not None
                yield from found(part, f"{name} {each}".strip())
        elif any(one.name == "address" for one in command.params):
            yield name

    return {*found(app, "")}


def names_in_table() -> set[str]:
    """The names of the commands in the table."""
    known = commands_with_address()
    return {name for row in ROWS for name in known if f"{row.line} ".startswith(f"{name} ")}
