"""The tables that txnbuffer keeps in a database of the application, version 1

    txnbuffer_outbox     a row for each record that a committed transaction of the database wants published
      id                 increases in the order in which rows are inserted; gaps are normal
      outbox             the name of the outbox, which belongs to one named producer
      grp                the same number in all rows of one transaction of the database; no other transaction has it
      topic, part        where to publish; part is the partition, null: the key chooses
      key, value         bytes, as stored in the topic; a null value deletes the key
      properties         a JSON object of text, null: none
      event_time         milliseconds since 1970, null: none
      created            when the row was inserted, milliseconds since 1970 by the clock of the database

    txnbuffer_outboxes   a row for each outbox that has had a publisher
      outbox             its name
      identity           random; the log has it, too, so that another table is not published under this name
      home               what identifies the database that the row was made in; another one is a copy
      published          the highest number that housekeeping knows as published

    txnbuffer_inbox      the positions of consumers that keep theirs in the database
      consumer, topic    the name of the consumer, and the topic or partition
      position           text `ledger:entry:index` of the last record, or the resume token of a change stream

    txnbuffer_version    one row: the version of these tables

A program that finds a version that it does not know stops with UnsafeDatabase, which names both. The
statements that create the tables do nothing where they exist.
"""

from __future__ import annotations

from collections.abc import Sequence

VERSION = 1
OUTBOX, OUTBOXES, INBOX, VERSIONS = "txnbuffer_outbox", "txnbuffer_outboxes", "txnbuffer_inbox", "txnbuffer_version"
SEQUENCE = "txnbuffer_outbox_id"

_COLUMNS = """
    outbox {text} NOT NULL,
    grp {number} NOT NULL,
    topic {text} NOT NULL,
    part {number},
    key {blob},
    value {blob},
    properties {long},
    event_time {number},
    created {number} NOT NULL DEFAULT ({now})
"""
_OTHERS = (
    f"""CREATE TABLE IF NOT EXISTS {OUTBOXES} (
        outbox {{text}} NOT NULL PRIMARY KEY,
        identity {{text}} NOT NULL,
        home {{text}} NOT NULL,
        published {{number}} NOT NULL)""",
    f"""CREATE TABLE IF NOT EXISTS {INBOX} (
        consumer {{text}} NOT NULL,
        topic {{text}} NOT NULL,
        position {{long}} NOT NULL,
        PRIMARY KEY (consumer, topic))""",
    f"CREATE TABLE IF NOT EXISTS {VERSIONS} (version {{number}} NOT NULL PRIMARY KEY)",
)
NOW = {
    "postgresql": "(extract(epoch FROM clock_timestamp()) * 1000)::bigint",
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
    "mysql": "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS SIGNED)",
}
"""Milliseconds since 1970."""
_TYPES = {
    "postgresql": {"text": "text", "long": "text", "number": "bigint", "blob": "bytea"},
    "sqlite": {"text": "TEXT", "long": "TEXT", "number": "INTEGER", "blob": "BLOB"},
    "mysql": {"text": "varchar(250)", "long": "longtext", "number": "bigint", "blob": "longblob"},
}
_FIRST = {
    "postgresql": (
        f"CREATE SEQUENCE IF NOT EXISTS {SEQUENCE}",
        f"CREATE TABLE IF NOT EXISTS {OUTBOX} (id bigint PRIMARY KEY, {_COLUMNS})",
        f"CREATE INDEX IF NOT EXISTS {OUTBOX}_grp ON {OUTBOX} (grp)",
    ),
    "sqlite": (
        f"CREATE TABLE IF NOT EXISTS {OUTBOX} (id INTEGER PRIMARY KEY AUTOINCREMENT, {_COLUMNS})",
        f"CREATE INDEX IF NOT EXISTS {OUTBOX}_grp ON {OUTBOX} (grp)",
    ),
    "mysql": (
        f"""CREATE TABLE IF NOT EXISTS {OUTBOX} (id bigint AUTO_INCREMENT PRIMARY KEY, {_COLUMNS},
            KEY {OUTBOX}_grp (grp)) ENGINE=InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin""",
    ),
}
_SUFFIX = {"mysql": " ENGINE=InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"}
_VERSION_ROW = {
    "postgresql": f"INSERT INTO {VERSIONS} VALUES ({VERSION}) ON CONFLICT DO NOTHING",  # noqa: S608
    "sqlite": f"INSERT OR IGNORE INTO {VERSIONS} VALUES ({VERSION})",  # noqa: S608
    "mysql": f"INSERT IGNORE INTO {VERSIONS} VALUES ({VERSION})",  # noqa: S608
}
_KEY = {"mysql": "`key`"}
"""How a dialect spells the column `key`, if not so."""


def create_statements(dialect: str) -> Sequence[str]:
    """The statements that create the tables in a database of this dialect, in order."""
    types = {**_TYPES[dialect], "now": NOW[dialect]}
    suffix = _SUFFIX.get(dialect, "")
    statements = [*_FIRST[dialect], *(statement + suffix for statement in _OTHERS)]
    made = [statement.format(**types) for statement in statements]
    if dialect in _KEY:
        made[0] = made[0].replace(" key ", f" {_KEY[dialect]} ")
    return [" ".join(statement.split()) for statement in [*made, _VERSION_ROW[dialect]]]


def drop_statements(dialect: str) -> Sequence[str]:
    """The statements that remove the tables with all rows, also those that are not published."""
    tables = [f"DROP TABLE IF EXISTS {table}" for table in (OUTBOX, OUTBOXES, INBOX, VERSIONS)]
    return [*tables, *([f"DROP SEQUENCE IF EXISTS {SEQUENCE}"] if dialect == "postgresql" else [])]
