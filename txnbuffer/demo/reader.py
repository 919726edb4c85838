"""The demo's reader process: follows both topics live and judges at the end what it saw."""

from __future__ import annotations

import itertools
from collections import Counter
from multiprocessing.connection import Connection

from broker_io import open_broker
from broker_io.port import Broker
from txnbuffer.client.reader import CommittedReader
from txnbuffer.client.records import Record, RecordBatch
from txnbuffer.demo.decisions import DecisionLog
from txnbuffer.demo.flights import TOPICS, Hour
from txnbuffer.model import Outcome, TxnId

Seen = dict[str, list[RecordBatch]]


def follow(pipe: Connection, address: str, hours: list[Hour]) -> None:
    """Read until told to finish and at the end of every topic; then read all again, compare, and report."""
    with open_broker(address, read_only=True) as broker:
        live = _read(broker, pipe)
        again = _read(broker, None)
        pipe.send(("verdict", judge(broker, hours, live, again)))


def judge(broker: Broker, hours: list[Hour], live: Seen, again: Seen) -> dict[str, int]:
    """Compare record by record what two readers saw with what the source says must be there."""
    outcomes = {txn: decision.outcome for txn, decision in DecisionLog.read(broker).by_txn.items()}
    verdict: Counter[str] = Counter(records_expected=0, records_read=0, lost=0, duplicated=0, uncommitted_seen=0)
    for topic in TOPICS:
        expected = Counter(
            (message.key, message.value, message.event_time)
            for hour in hours
            if not hour.aborted_on_purpose
            for message in hour.records[topic]
        )
        verdict["records_expected"] += expected.total()
        for seen in (live, again):
            records = list(itertools.chain.from_iterable(seen[topic]))
            found = Counter((record.key, record.value, record.event_time) for record in records)
            verdict["lost"] += (expected - found).total()
            verdict["duplicated"] += (found - expected).total()
            verdict["duplicated"] += sum(record.seqno != n for n, record in enumerate(records, 1))
            verdict["uncommitted_seen"] += sum(not _committed(record, outcomes) for record in records)
        verdict["records_read"] += sum(map(len, live[topic]))
    return dict(verdict)


def _committed(record: Record, outcomes: dict[TxnId, Outcome]) -> bool:
    return record.txn is not None and outcomes.get(record.txn) is Outcome.COMMIT


def _read(broker: Broker, pipe: Connection | None) -> Seen:
    """Read both topics from the beginning; with a pipe, live until the conductor says to finish."""
    seen: Seen = {topic: [] for topic in TOPICS}
    finishing = pipe is None
    with CommittedReader(broker, TOPICS) as reader:
        while True:
            batch = reader.read(timeout=0.2)
            if batch is not None:
                seen[batch.topic].append(batch)
                continue
            if finishing and not any(lag.behind for lag in reader.lag().values()):
                return seen
            finishing = finishing or (pipe is not None and pipe.poll() and pipe.recv() == "finish")
