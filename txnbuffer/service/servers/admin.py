"""The admin service: queries and commands of operators on a running service; answers are ready for JSON.

Ids and positions are text, times are in seconds. The answer says what a topic or transaction waits for, and for which
client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any

from broker_io.compaction import CompactingBroker, CompactionPolicy
from broker_io.errors import Error, TopicNotFound
from broker_io.port import Broker, PlugInBroker
from broker_io.position import Position
from broker_io.waits import long_waits
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.held_back import HeldBack
from txnbuffer.buffer.state import OpenTxn
from txnbuffer.checks import check_name
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.coordinator.messages import State
from txnbuffer.coordinator.transaction import Session, TransactionState
from txnbuffer.errors import InvalidRequest
from txnbuffer.follow import held_back, publish_time
from txnbuffer.model import Outcome, TxnId
from txnbuffer.service.door.needs import ADMIN_REQUESTS, POLICY_KEYS, AdminRequest
from txnbuffer.service.engine.compaction import CompactionRun, CompactionScheduler, check_policy
from txnbuffer.service.engine.deletion import delete_topic
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.topics.appends import ServiceTopic
from txnbuffer.service.topics.backups import BackupRun
from txnbuffer.service.topics.group_lag import NumberedLog, records_after
from txnbuffer.service.topics.topics import check_owned
from txnbuffer.streams.failover import ResumeToken

Answer = dict[str, Any]
SHOWN_OPEN = 20
NO_TRANSACTIONS = "nothing: the topic has no transactions"


def group_rows(coordinator: Coordinator, wanted: str | None) -> list[Answer]:
    """The partitions and members of one group, or of all, sorted by name; a member without a partition has no topic."""
    rows: list[Answer] = []
    for name, generation, positions in sorted(coordinator.consumer_groups.all_groups()):
        if wanted not in (None, name):
            continue
        members = coordinator.consumer_groups.members(name)
        group = {"group": name, "generation": generation, "stage": members.stage.value}
        rows += position_rows(group, positions, members.holders)
        spare = sorted({*members.by_name} - {*members.holders.values()})
        rows += [group | {"topic": None, "member": member, "position": None} for member in spare]
    return rows


def position_rows(group: Answer, positions: Mapping[str, Position], holders: Mapping[str, str]) -> list[Answer]:
    """The partitions of one group, sorted by name, each with its member and its position."""
    return [
        group | {"topic": topic, "member": holders.get(topic), "position": positions.get(topic)}
        for topic in sorted({*positions, *holders})
    ]


def with_lag(broker: Broker, rows: list[Answer], known: dict[str, NumberedLog], *, all_known: bool) -> list[Answer]:
    """Add the `lag` to rows: committed records after the position. Runs in another thread.

    `known`: topics of this service that had transactions; all of the namespace if `all_known`.
    """
    for row in rows:
        topic, position = row["topic"], row["position"]
        row |= {"position": _text(position), "lag": None}
        if topic is None:
            continue
        with contextlib.suppress(Error):  # the broker fails to answer
            log = known.get(topic)
            if log is None and not all_known:
                log = NumberedLog.load(broker, topic)
            row["lag"] = records_after(broker, topic, position, log)
    return rows


def topic_row(name: str, buffer: TransactionBuffer | None, problem: object) -> Answer:
    """What a buffer says of its topic; it is None for a topic without transactions, and for one with a problem."""
    return {
        "topic": name,
        "transactions": buffer is not None,
        "ledgers": None,
        "bytes": None,
        "end": None,
        "max_read_position": None if buffer is None else _text(buffer.max_read_position),
        "open": 0 if buffer is None else len(buffer.ongoing),
        "aborts": 0 if buffer is None else len(buffer.aborted),
        "problem": _text(problem),
    }


def stored_size(broker: Broker, name: str) -> Answer:
    """The stored size of a topic; None where the broker fails to answer. Runs in another thread."""
    facts: Answer = {"ledgers": None, "bytes": None, "end": None}
    with contextlib.suppress(Error):
        ledgers = broker.ledgers(name)
        facts["ledgers"], facts["bytes"] = len(ledgers), sum(ledger.bytes for ledger in ledgers)
        facts["end"] = _text(broker.last_position(name))
    return facts


def stored_messages(broker: Broker, name: str) -> Answer:
    """How many messages of a topic are stored, and the first one; as `stored_size`."""
    facts: Answer = {"messages": None, "first": None}
    with contextlib.suppress(Error):
        facts["messages"] = sum(ledger.entries for ledger in broker.ledgers(name))
        facts["first"] = _text(broker.first_position(name))
    return facts


def plain_consumers(broker: Broker, name: str, plug_in: str | None) -> Answer | None:
    """The state of the brokers' plug-in: of the cluster, and what its broker says of a topic. In another thread."""
    if not isinstance(broker, PlugInBroker):
        return None
    answer: Answer = {"plug_in": plug_in}
    with contextlib.suppress(Error):  # the broker fails to answer
        answer |= broker.plug_in_state(name)
    return answer


def buffer_facts(buffer: TransactionBuffer, next_seqno: int, transactions: list[Answer]) -> Answer:
    """What `Describe` says of a topic with transactions besides its row; `transactions`: the oldest open ones."""
    return {
        "applied": _text(buffer.applied),
        "next_seqno": next_seqno,
        "segments": len(buffer.segments.summaries),
        "counters": buffer.counters._asdict(),
        "transactions": transactions,
    }


def oldest_open(buffer: TransactionBuffer) -> list[OpenTxn]:
    """The open transactions that `Describe` shows."""
    return [*islice(buffer.ongoing.values(), SHOWN_OPEN)]


def readers_wait_for(buffer: TransactionBuffer, oldest: Answer | None) -> str:
    """What readers of committed records wait for; `oldest`: the oldest open transaction."""
    if oldest is None:
        return "nothing: every transaction is decided"
    since = "" if oldest["open_seconds"] is None else f", for {oldest['open_seconds']:.1f} s"
    left = "" if oldest["aborted_in_seconds"] is None else f"; it is aborted in {oldest['aborted_in_seconds']:.0f} s"
    return (
        f"transaction {oldest['txn']}: {oldest['state']} since {oldest['first']}{since}, of {oldest['client']}{left}. "
        f"Readers see all up to {_text(buffer.max_read_position) or 'the beginning'}; "
        f"`txnbuf abort {oldest['txn']}` unblocks them"
    )


def compaction_row(compaction: CompactionScheduler, topic: str) -> Answer:
    """The policy of a topic, how much of it is dirty, and its newest compaction. Runs in another thread."""
    state, backlog, _ = compaction.stored(topic)
    run = compaction.runs.get(topic)
    stage = "idle" if run is None else run.state.value
    return {
        "topic": topic,
        "state": "quarantined" if topic in compaction.quarantined else stage,
        "policy": _policy(state.policy),
        "dirty_ratio": round(backlog.ratio, 4),
        "dirty_bytes": backlog.dirty,
        "cleaned": state.cleaned,
        "purged": state.purged,
        "problem": _text(compaction.failures().get(topic)),
        "run": None if run is None else _run(run),
    }


def _run(run: CompactionRun) -> Answer:
    report, size = run.report, max(run.report.bytes_before, 1)
    return {
        "number": run.number,
        "upto": run.upto,
        "bytes_done": run.bytes_done,
        "bytes_expected": run.bytes_expected,
        "problem": _text(run.problem),
        "statistics": {
            "records_in": report.records,
            "records_out": report.records - report.emptied - report.purged,
            "purged": report.purged,
            "bytes_in": report.bytes_before,
            "bytes_out": report.bytes_after,
            "ledgers": report.ledgers,
            "rewritten": report.rewritten,
            "passes": report.passes,
            "read_amplification": round(report.bytes_read / size, 3),
            "write_amplification": round(report.bytes_written / size, 3),
            "dirty_ratio_before": round(run.before.ratio, 4),
            "dirty_ratio_after": round(run.after.ratio, 4),
            "seconds": round(run.seconds, 3),
        },
    }


def _backup(run: BackupRun) -> Answer:
    return {
        "path": run.path,
        "run": run.number,
        "state": run.state.value,
        "bytes_done": run.bytes_done,
        "bytes_expected": run.bytes_expected,
        "problem": _text(run.problem),
        "report": None if run.report is None else run.report._asdict(),
    }


def _policy(policy: CompactionPolicy | None) -> Answer | None:
    """A policy, times in seconds."""
    if policy is None:
        return None
    ratio, *times = policy
    return dict(zip(POLICY_KEYS, (ratio, *(ms / 1000 for ms in times)), strict=True))


class ServiceAdmin:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def methods(self) -> dict[str, Callable[[dict[str, Any]], Awaitable[Any]]]:
        """The methods by name; each takes a request and returns an answer, or raises an `Error`."""
        return {name: partial(self._answer, request) for name, request in ADMIN_REQUESTS.items() if request.method}

    async def _answer(self, asked: AdminRequest, request: dict[str, Any]) -> Any:
        if strange := {*request} - {*asked.keys}:
            known = ", ".join(asked.keys) or "none"
            raise InvalidRequest(f"unknown keys in the request: {', '.join(sorted(strange))}; known are {known}")
        return await getattr(self, asked.method)(request)

    async def status(self, request: dict[str, Any]) -> Answer:
        """The service as a whole."""
        engine = self._engine
        return {
            "shard": engine.coordinator.shard,
            "shards": engine.topics.shard.of,
            "epoch": engine.coordinator.epoch,
            "ready": engine.coordinator.ready,
            "draining": engine.requests.draining,
            "connections": len(engine.connections),
            "topics": len(engine.topics.by_name),
            "open": sum(one.state is State.OPEN for one in engine.coordinator.transactions()),
            "low_water_mark": str(TxnId(engine.coordinator.shard, engine.coordinator.low_water_mark)),
            "notes": engine.notes,
            "waits": [*map(str, long_waits())],
            "snapshot_problem": _text(engine.snapshots.problem),
            "retention_problem": _text(engine.retention.problem),
            "compaction_problems": {name: str(error) for name, error in sorted(engine.compaction.failures().items())},
            "damaged": {name: str(error) for name, error in sorted(engine.verification.damages.items())},
            "plug_in": engine.plug_ins.found.state.value,
            "plug_in_problem": _text(engine.plug_ins.problem),
            "policy_problems": {name: str(danger) for name, danger in sorted(engine.policy_checks.dangers.items())},
        }

    async def list_topics(self, request: dict[str, Any]) -> list[Answer]:
        """All topics that the service has open, sorted by name."""
        topics = [topic for _, topic in sorted(self._engine.topics.by_name.items())]
        held = await self._all_held_back(topics)
        return [row | {"held_back": held.get(row["topic"])} for row in await self._summaries(topics)]

    async def describe(self, request: dict[str, Any]) -> Answer:
        """The topic `topic`, and what its readers wait for."""
        topic = self._topic(request.get("topic"))
        (summary,) = await self._summaries([topic])
        held = await self._held_back(topic)
        answer = summary | {
            "held_back": None if held is None else held.as_json(),
            "waits_for": await self._waits_for(topic),
            "plain_consumers": await asyncio.to_thread(
                plain_consumers, self._engine.broker, topic.name, self._engine.plug_ins.found.state.value
            ),
            "service": [*map(str, long_waits())],
            **await asyncio.to_thread(stored_messages, self._engine.broker, topic.name),
        }
        if topic.followed is None:
            return answer
        buffer, next_seqno = topic.followed.buffer, topic.followed.numbered.next_seqno
        return answer | buffer_facts(
            buffer, next_seqno, [await self._ongoing(topic, one) for one in oldest_open(buffer)]
        )

    async def find_hanging(self, request: dict[str, Any]) -> list[Answer]:
        """Open transactions that wrote their first record more than `seconds` ago, the oldest first."""
        least = _seconds(request.get("seconds", 0))
        found: dict[TxnId, Answer] = {}
        for topic in self._engine.topics.by_name.values():
            for entry in () if topic.followed is None else list(topic.followed.buffer.ongoing.values()):
                known = found.get(entry.txn)
                if known is None:
                    found[entry.txn] = await self._ongoing(topic, entry)
                else:
                    known["topics"].append(topic.name)
        hanging = [answer for answer in found.values() if (answer["open_seconds"] or 0) >= least]
        return sorted(hanging, key=lambda answer: -(answer["open_seconds"] or 0))

    async def abort(self, request: dict[str, Any]) -> Answer:
        """Abort `txn`, whichever client has it open; the answer is its actual outcome."""
        try:
            txn = TxnId.parse(str(request.get("txn")))
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        engine, coordinator = self._engine, self._engine.coordinator
        result = await engine.ask(lambda request: coordinator.abort("", request, txn, (), engine.now(), operator=True))
        if isinstance(result, Error):
            raise result
        engine.effects.ask()
        return {"txn": str(txn), "outcome": result.name if isinstance(result, Outcome | State) else str(result)}

    async def groups(self, request: dict[str, Any]) -> list[Answer]:
        """All consumer groups, or `group`: members, their partitions and positions.

        `held_back` is known for the topics of this service.
        """
        rows = group_rows(self._engine.coordinator, request.get("group"))
        topics = self._engine.topics
        found = {row["topic"]: topics.get(row["topic"]) for row in rows if row["topic"] is not None}
        known = {
            name: NumberedLog.of(topic.followed)
            for name, topic in found.items()
            if topic is not None and topic.followed is not None
        }
        alone, held = topics.shard.of == 1, await self._all_held_back(filter(None, found.values()))
        rows = await asyncio.to_thread(with_lag, self._engine.broker, rows, known, all_known=alone)
        return [row | {"held_back": held.get(row["topic"])} for row in rows]

    async def forget_group(self, request: dict[str, Any]) -> Answer:
        """Forget the positions of `group`, which must have no members, on `topic` or on all topics."""
        group, topic, engine = check_name(request.get("group"), "a group"), request.get("topic"), self._engine
        check_owned(engine.topics.shard, "group", group)
        where = None if topic is None else _topic(request)
        result = await engine.ask(lambda request: engine.coordinator.forget_group(request, group, where, engine.now()))
        if isinstance(result, Error):
            raise result
        return {"group": group, "topic": topic}

    async def sessions(self, request: dict[str, Any]) -> list[Answer]:
        """All sessions, connected or not."""
        return [
            {"session": session.name, "client": self._client(session), "ids": session.outstanding}
            for session in self._engine.coordinator.sessions()
        ]

    async def streams(self, request: dict[str, Any]) -> Answer:
        """Change streams: connections with their streams, and for each topic its manager with its cursors."""
        streams = self._engine.streams
        now = streams.now()
        connections = []
        for connection in streams.connections:
            facts = connection.server.statistics(now)
            rows = [stream._asdict() for stream in facts.streams]
            ends = dict(facts.stream_ends)
            connections.append({"peer": connection.peer, **facts._asdict(), "streams": rows, "stream_ends": ends})
        managers = [
            {
                "topic": feed.name,
                **feed.manager.statistics()._asdict(),
                "cursor": [cursor._asdict() for cursor in feed.manager.cursor_statistics()],
                "problem": _text(feed.problem),
            }
            for _, feed in sorted(streams.feeds.items())
        ]
        memory = {"bytes": streams.budget.account.bytes, "budget": streams.budget.budget}
        reads = streams.backfills
        backfills = {"active": reads.active, "pending": reads.pending, "items": reads.items}
        cursors = {"cursors": self._engine.cursors.rows(), "cursors_dropped": self._engine.cursors.dropped}
        return {"connections": connections, "managers": managers, "memory": memory, "backfills": backfills, **cursors}

    async def cursors(self, request: dict[str, Any]) -> list[Answer]:
        """Durable cursors: their seqnos and the ledgers that they need."""
        return self._engine.cursors.rows()

    async def add_cursor(self, request: dict[str, Any]) -> Answer:
        """Create a durable cursor `cursor` of `topic` at `at`: "beginning", "now", a seqno or a resume token."""
        topic, name, at = _topic(request), request.get("cursor"), request.get("at", "beginning")
        at = at if at in ("beginning", "now") else _cursor_position(at)
        return {"topic": topic, "cursor": name, "seqno": await self._engine.cursors.add(topic, name, at)}

    async def advance_cursor(self, request: dict[str, Any]) -> Answer:
        """Move a durable cursor to `at`, a seqno or a resume token."""
        topic, name, at = _topic(request), request.get("cursor"), _cursor_position(request.get("at"))
        return {"topic": topic, "cursor": name, "seqno": await self._engine.cursors.advance(topic, name, at)}

    async def remove_cursor(self, request: dict[str, Any]) -> Answer:
        """Remove a durable cursor."""
        topic, name = _topic(request), request.get("cursor")
        await self._engine.cursors.remove(topic, name)
        return {"topic": topic, "cursor": name}

    async def delete_topic(self, request: dict[str, Any]) -> Answer:
        """Delete `topic` with all its records, unless something uses it."""
        name = _topic(request)
        await delete_topic(self._engine, name)
        return {"topic": name}

    async def compact(self, request: dict[str, Any]) -> Answer:
        """Compact `topic` soon; the answer has the number of the run."""
        run = await self._engine.compaction.request(_topic(request))
        return {"topic": run.topic, "run": run.number}

    async def compactions(self, request: dict[str, Any]) -> list[Answer]:
        """Compaction of `topic`, or of all topics that have a policy or were compacted."""
        compaction = self._engine.compaction
        if "topic" in request:
            return [await asyncio.to_thread(compaction_row, compaction, _topic(request))]
        if not isinstance(self._engine.broker, CompactingBroker):
            return []
        names = sorted(self._engine.topics.by_name)
        rows = await asyncio.to_thread(lambda: [compaction_row(compaction, name) for name in names])
        return [row for row in rows if row["policy"] or row["cleaned"] or row["run"]]

    async def set_compaction(self, request: dict[str, Any]) -> Answer:
        """Set the policy of `topic`; remove it if no value is given."""
        topic, policy = _topic(request), check_policy(**{name: request.get(name) for name in POLICY_KEYS})
        await self._engine.compaction.set_policy(topic, policy)
        return {"topic": topic, "policy": _policy(policy)}

    async def back_up(self, request: dict[str, Any]) -> Answer:
        """Begin to write a backup to the file `path` of this machine; the answer has the number of the run."""
        path = request.get("path")
        if not isinstance(path, str):
            raise InvalidRequest(f"{path!r} is not a path: give text")
        run = self._engine.backups.start(path)
        return {"path": run.path, "run": run.number}

    async def backups(self, request: dict[str, Any]) -> list[Answer]:
        """The newest backup since the start of the service, if there is one."""
        run = self._engine.backups.run
        return [] if run is None else [_backup(run)]

    def _topic(self, name: object) -> ServiceTopic:
        name = _topic({"topic": name})
        topic = self._engine.topics.get(name)
        if topic is None:
            raise TopicNotFound(f"the service has no topic {name!r} open: `txnbuf list` lists the open ones")
        return topic

    async def _summaries(self, topics: list[ServiceTopic]) -> list[Answer]:
        broker, names = self._engine.broker, [topic.name for topic in topics]
        stored = await asyncio.to_thread(lambda: [stored_size(broker, name) for name in names])
        return [self._summary(topic) | facts for topic, facts in zip(topics, stored, strict=True)]

    def _summary(self, topic: ServiceTopic) -> Answer:
        buffer = None if topic.followed is None else topic.followed.buffer
        return topic_row(topic.name, buffer, topic.obstacle or self._engine.policy_checks.dangers.get(topic.name))

    async def _held_back(self, topic: ServiceTopic) -> HeldBack | None:
        """What readers of committed records do not get yet."""
        followed = topic.followed
        oldest = None if followed is None else followed.buffer.ongoing.oldest()
        if followed is None or oldest is None:
            return None
        ends = self._engine.coordinator.ends_by(oldest.txn)
        until = None if ends is None else int(ends * 1000)
        work = partial(held_back, self._engine.broker, topic.name, oldest, followed.buffer.applied, until)
        return await self._engine.topics.work(work)

    async def _all_held_back(self, topics: Iterable[ServiceTopic]) -> dict[str, Answer]:
        """What readers of these topics do not get yet, by topic; without those where the broker fails to answer."""
        found: dict[str, Answer] = {}
        for topic in topics:
            with contextlib.suppress(Error):
                if (held := await self._held_back(topic)) is not None:
                    found[topic.name] = held.as_json()
        return found

    async def _waits_for(self, topic: ServiceTopic) -> str:
        """Describe what readers of committed records wait for."""
        if topic.problem is not None:
            state = "has stopped" if topic.stopped else "can't be followed now and is retried"
            return f"the topic {state}: {topic.problem}"
        if topic.followed is None:
            return NO_TRANSACTIONS
        buffer = topic.followed.buffer
        oldest = buffer.ongoing.oldest()
        return readers_wait_for(buffer, None if oldest is None else await self._ongoing(topic, oldest))

    async def _ongoing(self, topic: ServiceTopic, entry: OpenTxn) -> Answer:
        """One transaction with undecided records in a topic."""
        engine = self._engine
        transaction = engine.coordinator.transaction(entry.txn)
        session = None if transaction is None else transaction.session
        other_shard = None if entry.txn.most == engine.coordinator.shard else entry.txn.most
        started = await engine.topics.work(publish_time, engine.broker, topic.name, entry.first)
        ends = engine.coordinator.ends_by(entry.txn)
        left = None if ends is None else max(ends - engine.now(), 0.0)
        return {
            "txn": str(entry.txn),
            "state": _state(transaction) if other_shard is None else f"as shard {other_shard} decides",
            "open_seconds": None if started is None else round(max(engine.now() - started / 1000, 0.0), 3),
            "aborted_in_seconds": None if left is None else round(left, 3),
            "session": None if session is None else session.name,
            "client": "unknown" if session is None else self._client(session),
            "first": str(entry.first),
            "records": entry.accepted,
            "topics": [topic.name],
        }

    def _client(self, session: Session) -> str:
        connection = self._engine.requests.connections.get(session.name)
        if connection is not None:
            return f"session {session.name} ({connection.peer})"
        if session.disconnected_since is None:
            return f"session {session.name}"
        away = self._engine.now() - session.disconnected_since
        limit = self._engine.coordinator.config.session_timeout
        return f"session {session.name}, disconnected for {away:.1f} s (ended after {limit:g} s)"


def _state(transaction: TransactionState | None) -> str:
    if transaction is None:
        return "not known to the coordinator yet"
    if transaction.state is State.OPEN:
        return "open" if transaction.plan is None else "its records are being counted"
    return transaction.state.name.lower()


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise InvalidRequest(f"{value!r} is not a number of seconds: give 0 or more")
    return float(value)


def _topic(request: dict[str, Any]) -> str:
    name = request.get("topic")
    if not isinstance(name, str):
        raise InvalidRequest(f"{name!r} is not a topic name: give text")
    return name


SEQNO_DIGITS = 19


def _cursor_position(at: Any) -> int | ResumeToken:
    """A seqno, or a resume token as text. Raises InvalidRequest, and UnreadableToken."""
    if isinstance(at, str) and not (at.isascii() and at.isdigit() and len(at) <= SEQNO_DIGITS):
        return ResumeToken.parse(at)
    if isinstance(at, bool) or not isinstance(at, int | str):
        raise InvalidRequest(f"{at!r} is not a cursor position: give a seqno or a resume token")
    return int(at)


def _text(value: object) -> str | None:
    return None if value is None else str(value)
