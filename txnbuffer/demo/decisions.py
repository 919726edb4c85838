"""How the demo's writer decides transactions over two topics so that a kill leaves none half done.

Topic `demo-decisions`, one message a decision: key the transaction id, value a JSON object with `hour`,
`outcome` (COMMIT or ABORT), `counts` (records by topic), `final` (false: killed before it was decided,
its hour is written again under a new id) and `low_water_mark` (every id up to it has ended with all
its markers durable). A decision is durable before any marker of it is written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from broker_io.batch import Batch, Message
from broker_io.port import Broker
from txnbuffer.model import Outcome, TxnId

TOPIC = "demo-decisions"
COORDINATOR = 0


class Decision(NamedTuple):
    txn: TxnId
    hour: int
    outcome: Outcome
    counts: dict[str, int]
    final: bool

    def to_message(self, low_water_mark: int) -> Message:
        body = {
            "hour": self.hour,
            "outcome": self.outcome.name,
            "counts": self.counts,
            "final": self.final,
            "low_water_mark": low_water_mark,
        }
        return Message(str(self.txn).encode(), json.dumps(body).encode())


@dataclass(slots=True)
class DecisionLog:
    """All decisions so far, as read from the log; `append` adds to both."""

    broker: Broker
    by_txn: dict[TxnId, Decision] = field(default_factory=dict)
    low_water_mark: int = 0

    @classmethod
    def read(cls, broker: Broker) -> DecisionLog:
        decisions = cls(broker)
        end = broker.last_position(TOPIC)
        with broker.reader(TOPIC) as reader:
            last = None
            while end is not None and last != end and (batch := reader.read(timeout=10.0)) is not None:
                last = batch.positions.last
                for message in batch.messages:
                    decisions._take(message)
        return decisions

    @property
    def finished_hours(self) -> set[int]:
        return {decision.hour for decision in self.by_txn.values() if decision.final}

    def append(self, group: Sequence[Decision], low_water_mark: int) -> None:
        """Make decisions durable; they count from then on, and the low-water mark with them."""
        if not group:
            return
        messages = [decision.to_message(low_water_mark) for decision in group]
        with self.broker.writer(TOPIC) as writer:
            writer.append(Batch.of(messages)).result()
        for message in messages:
            self._take(message)

    def _take(self, message: Message) -> None:
        body = json.loads(message.value or b"{}")
        txn = TxnId.parse((message.key or b"").decode())
        self.by_txn[txn] = Decision(txn, body["hour"], Outcome[body["outcome"]], body["counts"], body["final"])
        self.low_water_mark = max(self.low_water_mark, body["low_water_mark"])
