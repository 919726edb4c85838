"""What a log says without its service: the answers to those requests of operators that only read

The fields are those of the service. What is only in its memory is None or missing: open change streams, members of
consumer groups, the clients of transactions. Nothing is written and nothing is owned, so a service may own the log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from broker_io.environment import current
from broker_io.errors import Error, TopicNotFound
from broker_io.port import Broker
from snapshots.format import check_data_topic, is_internal
from snapshots.shard_count import shards_of
from snapshots.shards import Shard
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.held_back import HeldBack
from txnbuffer.buffer.state import OpenTxn
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.history import History
from txnbuffer.errors import DecisionsLost
from txnbuffer.follow import LogFollower, SequencedFollower, held_back, publish_time
from txnbuffer.model import Outcome, TxnId
from txnbuffer.recovery.decision_log import read_decisions, read_history, replayed_topics
from txnbuffer.recovery.restore import LoadedTopic, SnapshotLoader
from txnbuffer.service.servers.admin import (
    NO_TRANSACTIONS,
    Answer,
    buffer_facts,
    oldest_open,
    plain_consumers,
    position_rows,
    readers_wait_for,
    stored_messages,
    stored_size,
    topic_row,
    with_lag,
)
from txnbuffer.service.streams.stream_topic import cursor_rows

NOT_STORED = {
    "Groups": "members and stages of groups, which are in its memory, are unknown",
    "Streams": "open change streams, which are in its memory, are unknown",
    "Cursors": "a cursor may have advanced since its topic's last snapshot",
}
"""What is missing in the answer of a log, by request, as part of a sentence about its service."""


class StoredAnswers:
    """The log of a broker, which is read again for each answer."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._shards = shards_of(broker)

    def answer(self, method: str, **request: Any) -> Any:
        """Answer a request that only reads, as the service does. Raises the errors of readers."""
        methods: dict[str, Callable[..., Any]] = {
            "List": self._list,
            "Describe": self._describe,
            "FindHanging": lambda seconds: hanging(self._broker, seconds),
            "Groups": self._groups,
            "Streams": self._streams,
            "Cursors": self._cursors,
        }
        return methods[method](**request)

    def _list(self) -> list[Answer]:
        return [self._summary(name, found, self._replay) for name, found in self._loaded(self._names())]

    def _summary(self, name: str, found: LoadedTopic | Error, follow: Callable[[LoadedTopic], None]) -> Answer:
        """The row of a topic, which `follow` applies up to the end of its log."""
        buffer: TransactionBuffer | None = None
        held: HeldBack | None = None
        problem = found if isinstance(found, Error) else None
        if isinstance(found, LoadedTopic) and found.registered:
            try:
                follow(found)
                held = self._held_back(found)
                buffer = found.buffer
            except Error as error:
                problem = error
        row = topic_row(name, buffer, problem) | stored_size(self._broker, name)
        return row | {"held_back": None if held is None else held.as_json()}

    def _describe(self, topic: str) -> Answer:
        check_data_topic(topic)
        if topic not in self._broker.topics():
            raise TopicNotFound(f"there is no topic {topic!r}: `txnbuf list` lists all")
        ((_, found),) = self._loaded([topic])
        answer = self._summary(topic, found, self._sequence) | {
            "waits_for": NO_TRANSACTIONS,
            "plain_consumers": plain_consumers(self._broker, topic, None),
            "service": [],
            **stored_messages(self._broker, topic),
        }
        if answer["problem"] is not None:
            return answer | {"waits_for": f"the topic can't be followed: {answer['problem']}"}
        if not isinstance(found, LoadedTopic) or not found.registered:
            return answer
        histories, now = self._histories(), current().clock.now_ms() / 1000
        rows = [_row(self._broker, topic, one, histories, now) for one in oldest_open(found.buffer)]
        waits_for = readers_wait_for(found.buffer, rows[0] if rows else None)
        return answer | {"waits_for": waits_for} | buffer_facts(found.buffer, found.sequencer.next_seqno, rows)

    def _groups(self, group: str | None = None) -> list[Answer]:
        rows: list[Answer] = []
        for history in self._histories():
            for name, state in sorted(history.consumers.items()):
                if group in (None, name):
                    rows += position_rows(
                        {"group": name, "generation": state.generation, "stage": None}, state.positions, {}
                    )
        topics = {row["topic"] for row in rows}
        loaded = self._loaded(name for name in self._names() if name in topics)
        held = {name: self._summary(name, found, self._replay)["held_back"] for name, found in loaded}
        rows = with_lag(self._broker, rows, {}, all_known=False)
        return [row | {"held_back": held.get(row["topic"])} for row in rows]

    def _streams(self) -> Answer:
        unknown = {"bytes": None, "budget": None}
        backfills = {"active": None, "pending": None, "items": None}
        cursors = {"cursors": self._cursors(), "cursors_dropped": None}
        return {"connections": [], "managers": [], "memory": unknown, "backfills": backfills, **cursors}

    def _cursors(self) -> list[Answer]:
        rows: list[Answer] = []
        for name, found in self._loaded(self._names()):
            if isinstance(found, Error):
                raise found
            if found.cursors:
                self._sequence(found)
                rows += cursor_rows(name, found.cursors, found.sequencer)
        return rows

    def _names(self) -> list[str]:
        return [name for name in self._broker.topics() if not is_internal(name)]

    def _loaded(self, names: Iterable[str]) -> Iterator[tuple[str, LoadedTopic | Error]]:
        """The snapshots of topics, or why one can't be read; without topics that were deleted meanwhile."""
        names = [*names]
        with SnapshotLoader(self._broker, names) as snapshots:
            for name in names:
                try:
                    yield name, snapshots.load(name)
                except TopicNotFound:
                    continue
                except Error as error:
                    yield name, error

    def _replay(self, found: LoadedTopic) -> None:
        """Apply the log of a topic up to its end."""
        with LogFollower(self._broker, found.topic, found.buffer, found.resume) as log:
            log.replay()

    def _sequence(self, found: LoadedTopic) -> None:
        """Apply the log of a topic, of which nothing is applied yet, and number its decided records."""
        with SequencedFollower(
            self._broker,
            found.topic,
            found.buffer,
            found.resume,
            decided_after=found.sequenced,
            sequencer=found.sequencer,
        ) as log:
            log.replay()
            log.sequence_all()

    def _held_back(self, found: LoadedTopic) -> HeldBack | None:
        oldest = found.buffer.ongoing.oldest()
        return None if oldest is None else held_back(self._broker, found.topic, oldest, found.buffer.applied)

    def _histories(self) -> list[History]:
        """The decision logs of all shards. Raises DecisionsLost for one that has no end."""
        histories = []
        for number in range(self._shards):
            decisions = Shard(number, self._shards).topic(DECISIONS)
            history, gone = read_history(self._broker, decisions)
            if gone is not None:
                raise DecisionsLost(decisions, gone)
            histories.append(history)
        return histories


def hanging(broker: Broker, seconds: float) -> list[Answer]:
    """Open transactions of a log without a service, as the service answers FindHanging. Nothing is written.

    Raises as `read_decisions`.
    """
    count = shards_of(broker)
    buffers = replayed_topics(broker, count)
    histories = [read_decisions(broker, Shard(number, count), buffers).history for number in range(count)]
    now = current().clock.now_ms() / 1000
    found: dict[TxnId, Answer] = {}
    for topic, entry in ((topic, entry) for topic, buffer in buffers.items() for entry in buffer.ongoing.values()):
        if (known := found.get(entry.txn)) is None:
            found[entry.txn] = _row(broker, topic, entry, histories, now)
        else:
            known["topics"].append(topic)
    rows = [row for row in found.values() if (row["open_seconds"] or 0) >= seconds]
    return sorted(rows, key=lambda row: -(row["open_seconds"] or 0))


def _row(broker: Broker, topic: str, entry: OpenTxn, histories: Sequence[History], now: float) -> Answer:
    started: int | None = None
    with contextlib.suppress(Error):
        started = publish_time(broker, topic, entry.first)
    return {
        "txn": str(entry.txn),
        "state": _state(entry.txn, histories),
        "open_seconds": None if started is None else round(max(now - started / 1000, 0.0), 3),
        "aborted_in_seconds": None,
        "session": None,
        "client": "unknown: only its service knows it",
        "first": str(entry.first),
        "records": entry.accepted,
        "topics": [topic],
    }


def _state(txn: TxnId, histories: Sequence[History]) -> str:
    if txn.most >= len(histories):
        return "of no shard of this log"
    for group in histories[txn.most].groups.values():
        for row in group.rows:
            if row.least == txn.least:
                return "committing" if row.outcome is Outcome.COMMIT else "aborting"
    return "open"
