"""The demo's reader process: follows both topics live and judges at the end what it saw."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, TypeAlias

from txnbuffer.demo.flights import TOPICS, Hour, record_id
from txnbuffer.demo.sites import Way
from txnbuffer.model import TxnId

if TYPE_CHECKING:
    from txnbuffer import PlainClient
    from txnbuffer.client.records import Record, RecordBatch

Seen: TypeAlias = "dict[str, list[RecordBatch]]"


def follow(pipe: Connection, way: Way, hours: list[Hour]) -> None:
    """Read live until the conductor tells how all transactions ended; then read all again, compare, and report."""
    with contextlib.closing(way.open_plain()) as client:
        live = read(client, pipe)
        again = read(client, None)
        pipe.send(("verdict", judge(hours, pipe.recv(), live, again)))


def judge(hours: list[Hour], ended: Mapping[int, str | None], live: Seen, again: Seen) -> dict[str, int]:
    """Compare record by record what two readers saw with what the source says must be there.

    `ended`: the id of the transaction that ended each hour, None where its producer died before it could tell.
    """
    verdict: Counter[str] = Counter(records_expected=0, records_read=0, lost=0, duplicated=0, uncommitted_seen=0)
    hour_of = {
        record_id(message.value or b""): hour.number
        for hour in hours
        for messages in hour.records.values()
        for message in messages
    }
    aborted = {hour.number for hour in hours if hour.aborted_on_purpose}
    for topic in TOPICS:
        expected = Counter(
            (message.key, message.value, message.event_time)
            for hour in hours
            if hour.number not in aborted
            for message in hour.records[topic]
        )
        verdict["records_expected"] += expected.total()
        for seen in (live, again):
            records = list(itertools.chain.from_iterable(seen[topic]))
            found = Counter((record.key, record.value, record.event_time) for record in records)
            verdict["lost"] += (expected - found).total()
            verdict["duplicated"] += (found - expected).total()
            verdict["duplicated"] += sum(record.seqno != n for n, record in enumerate(records, 1))
            verdict["uncommitted_seen"] += sum(not _committed(record, hour_of, aborted, ended) for record in records)
        verdict["records_read"] += sum(map(len, live[topic]))
    return dict(verdict)


def _committed(record: Record, hour_of: Mapping[int, int], aborted: set[int], ended: Mapping[int, str | None]) -> bool:
    """Whether a record belongs to the very transaction that committed its hour, as far as anybody was told."""
    try:
        hour = hour_of[record_id(record.value or b"")]
    except (ValueError, KeyError):
        return False
    if hour in aborted or record.txn is None:
        return False
    told = ended.get(hour)
    return told is None or TxnId.parse(told) == record.txn


def read(client: PlainClient, pipe: Connection | None) -> Seen:
    """Read both topics from the beginning to their end; with a pipe, live until there is a word in it."""
    seen: Seen = {topic: [] for topic in TOPICS}
    with client.reader(TOPICS) as reader:
        while True:
            batch = reader.read(timeout=0.2)
            if batch is not None:
                seen[batch.topic].append(batch)
            elif (pipe is None or pipe.poll()) and not any(lag.behind for lag in reader.lag().values()):
                return seen
