"""The demo's writer process: recovers, finishes what a kill left open, and writes the hours that are missing.

It is a transaction coordinator in small: decisions first, markers after them (see `demo.decisions`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from broker_io import open_broker
from broker_io.batch import Batch, Message
from broker_io.port import Broker
from broker_io.port import Writer as TopicWriter
from broker_io.position import Positions
from snapshots.keeper import BufferKeeper
from txnbuffer.demo.decisions import COORDINATOR, Decision, DecisionLog
from txnbuffer.demo.decisions import TOPIC as DECISIONS
from txnbuffer.demo.flights import TOPICS, Hour
from txnbuffer.model import Marker, MarkerItem, Outcome, TxnId
from txnbuffer.protocol import encode_marker, transactional

GROUP = 16
"""Transactions written side by side."""


def write(pipe: Connection, address: str, hours: list[Hour]) -> None:
    """One life of the writer; it tells the conductor when it recovers, is ready, gets on, and is done."""
    pipe.send(("recovering", None))
    started = time.monotonic()
    with open_broker(address) as broker, BufferKeeper(broker) as keeper:
        keeper.recover()
        for topic in TOPICS:
            keeper.register(topic)
        broker.create_topic(DECISIONS)
        year = YearWriter(broker, keeper, DecisionLog.read(broker))
        year.finish_open()
        pipe.send(("ready", time.monotonic() - started))
        finished = year.decisions.finished_hours
        missing = [hour for hour in hours if hour.number not in finished]
        for start in range(0, len(missing), GROUP):
            year.write(missing[start : start + GROUP])
            pipe.send(("progress", len(finished) + min(start + GROUP, len(missing))))
    pipe.send(("done", None))


@dataclass(slots=True)
class YearWriter:
    broker: Broker
    keeper: BufferKeeper
    decisions: DecisionLog
    last_id: int = 0
    writers: dict[str, TopicWriter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.writers = {topic: self.broker.writer(topic) for topic in TOPICS}

    def finish_open(self) -> None:
        """End every transaction that a kill left open: as it was decided, else with an abort."""
        ongoing = {topic: {entry.txn for entry in self.keeper.buffer(topic).ongoing} for topic in TOPICS}
        undecided = set().union(*ongoing.values()) - self.decisions.by_txn.keys()
        aborts = [Decision(txn, -1, Outcome.ABORT, {}, final=False) for txn in sorted(undecided)]
        self.decisions.append(aborts, self.decisions.low_water_mark)
        for topic, txns in ongoing.items():
            self._mark(topic, [self.decisions.by_txn[txn] for txn in sorted(txns)])
        self.keeper.pump()
        self.last_id = max((txn.least for txn in self.decisions.by_txn), default=0)

    def write(self, hours: Sequence[Hour]) -> None:
        """Write these hours as transactions side by side, decide them, and mark their ends."""
        txns = [TxnId(COORDINATOR, self.last_id + n) for n in range(1, len(hours) + 1)]
        # All ids below this group have ended and their markers are durable, so the group may say so.
        low_water_mark, self.last_id = self.last_id, txns[-1].least
        sends: list[Future[Positions]] = []
        for half in (0, 1):
            for hour, txn in zip(hours, txns, strict=True):
                sends += self._send_half(hour, txn, half)
        for send in sends:
            send.result()
        group = [
            Decision(
                txn,
                hour.number,
                Outcome.ABORT if hour.aborted_on_purpose else Outcome.COMMIT,
                hour.counts(),
                final=True,
            )
            for hour, txn in zip(hours, txns, strict=True)
        ]
        self.decisions.append(group, low_water_mark)
        for topic in TOPICS:
            self._mark(topic, group)
        self.keeper.pump()

    def _send_half(self, hour: Hour, txn: TxnId, half: int) -> list[Future[Positions]]:
        """Halves make the transactions of a group stand interleaved in the log."""
        sends = []
        for topic, records in hour.records.items():
            middle = (len(records) + 1) // 2
            part, first_seq = (records[:middle], 1) if half == 0 else (records[middle:], middle + 1)
            if part:
                sends.append(self.writers[topic].append(transactional(Batch.of(part), txn, first_seq)))
        return sends

    def _mark(self, topic: str, decisions: Sequence[Decision]) -> None:
        items = tuple(MarkerItem(d.txn, d.outcome, d.counts.get(topic, 0)) for d in decisions)
        if items:
            marker = Marker(COORDINATOR, self.keeper.epoch, self.decisions.low_water_mark, True, items)
            message: Message = encode_marker(marker)
            self.writers[topic].append(Batch.of([message])).result()
