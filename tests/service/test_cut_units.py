"""A log whose last unit was cut off anywhere has none of it: records, markers, decisions, numbers and positions."""

from __future__ import annotations

from collections import Counter
from typing import Any

from log_history import content_of, open_log
from raw_session import RawSession, transactional
from service_setup import engine_on, session_on, visible

from broker_io.filelog.log.broker import FileBroker
from broker_io.filelog.log.layout import journal_path
from broker_io.position import EARLIEST, Position
from broker_io.testing import SimulatedClock, SimulatedDisk, Unsynced
from txnbuffer import Outcome, TxnId
from txnbuffer.coordinator.messages import Commit, ConsumerPosition, GroupHeartbeat, ProducerSequence
from txnbuffer.rpc.frames import ClientFrame, NamedRequest, Send
from txnbuffer.service.engine.engine import Engine

TOPICS = ("t", "u", "in")
OPTIONS = {"segment_bytes": 1_000_000, "journal_bytes": 1_000_000}
POSITIONS = [EARLIEST, Position(1, 0), Position(1, 1)]


def frames(number: int, ids: range, epoch: int, generation: int) -> list[ClientFrame]:
    """A number of a producer on two topics with a position of a group, and a transaction on one topic."""
    named, alone = ids[2 * number], ids[2 * number + 1]
    value = b"%d" % number
    commit = Commit(
        1000 + number,
        TxnId(0, named),
        ("t", "u"),
        (2, 1),
        sequence=ProducerSequence("shop", number, epoch),
        positions=(ConsumerPosition("group", "in", generation, *POSITIONS[number - 1 : number + 1]),),
    )
    sends = Send("t", transactional([named], value, size=2)), Send("u", transactional([named], value))
    return [
        ClientFrame(sends=sends, commits=(commit,)),
        ClientFrame(
            sends=(Send("t", transactional([alone], value)),),
            commits=(Commit(2000 + number, TxnId(0, alone), ("t",), (1,)),),
        ),
    ]


async def committed(broker: FileBroker) -> tuple[Any, ...]:
    """What a new owner has: the visible records, the number of the producer, and the position of the group."""
    async with engine_on(broker) as engine:
        session, _ = await session_on(engine)
        opened = await session.ask(open_names=lambda request: (NamedRequest(request, "shop"),))
        return visible(broker, "t"), visible(broker, "u"), opened.committed, position(engine)


def position(engine: Engine) -> Position:
    ((_, _, positions),) = engine.coordinator.consumer_groups.all_groups()
    return positions["in"]


def expected(last: int) -> tuple[Any, ...]:
    values = [b"%d" % number for number in range(1, last + 1)]
    return Counter(dict.fromkeys(values, 3)), Counter(values), last, POSITIONS[last]


async def unit(session: RawSession, sent: list[ClientFrame], *requests: int) -> None:
    for frame in sent:
        session.link.send(frame)
    await session.until(lambda: all(request in session.answers for request in requests))
    assert [session.answers[request] for request in requests] == [Outcome.COMMIT] * len(requests)


async def two_units(disk: SimulatedDisk) -> tuple[str, int, bytes, SimulatedDisk]:
    """The journal of a log, where its last unit begins, its content, and the disk without what was not synced."""
    broker = open_log(disk, committer=False, **OPTIONS)
    async with engine_on(broker, clock=SimulatedClock()) as engine:  # nothing is written because time has passed
        session, ids = await session_on(engine, *TOPICS)
        opened = await session.ask(open_names=lambda request: (NamedRequest(request, "shop"),))
        joined = await session.ask(
            members=lambda request: (GroupHeartbeat(request, "group", "member", ("in",), ("in",)),)
        )
        path = journal_path("/log", broker._log.journal.number)
        for number in (1, 2):
            start, last = disk.files()[path], broker._log.journal.end.lsn
            sent = frames(number, ids, opened.epoch, joined.generation)
            await unit(session, sent, 1000 + number, 2000 + number)
        assert broker._log.journal.end.lsn == last + 1
        return path, start, disk.content(path), disk.crash(Unsynced.LOST)


async def test_a_journal_cut_at_every_byte_of_a_unit_has_all_of_it_or_nothing() -> None:
    path, start, content, ended = await two_units(SimulatedDisk())
    samples = {start, start + 1, (start + len(content)) // 2, len(content) - 1, len(content)}
    before = None
    for size in range(start, len(content) + 1):
        cut = ended.copy()
        cut.put(path, content[:size])
        with open_log(cut, committer=False, **OPTIONS) as again:
            found = {topic: [message for _, message in rows.rows] for topic, rows in content_of(again).items()}
            before = before or found
            assert (found == before) is (size < len(content)), size
            if size in samples:
                assert await committed(again) == expected(2 if size == len(content) else 1), size
