"""A flipped byte in the files of an embedded log: the damaged topic is named, and all others continue."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from http_answers import get
from raw_session import transactional
from service_process import STARTING, ServiceProcess
from service_setup import engine_on, eventually, session_on, visible

from broker_io.errors import Damaged
from broker_io.filelog.log import FileBroker
from snapshots.errors import TopicDamaged
from snapshots.format import SNAPSHOT_TOPIC
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.model import Outcome
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.servers.http_server import metrics
from txnbuffer.service.topics import upkeep

ROUNDS = 6


def own(directory: Path) -> FileBroker:
    return FileBroker.open(str(directory), watermark_bytes=0)


async def write_log(directory: Path) -> None:
    """Topics a and b, each with two closed ledgers and an open one; all is committed and cleanly closed."""
    with own(directory) as broker:
        async with engine_on(broker) as engine:
            session, ids = await session_on(engine, "a", "b")
            for number in range(ROUNDS):
                await write(session, ids[number], "a", "b")
                if number % 2:
                    broker.roll("a")
        for name in (DECISIONS, SNAPSHOT_TOPIC):
            assert broker.last_position(name) is not None


async def write(session, least: int, *topics: str):
    assert not await session.write(*((topic, transactional([least], b"v%d" % least)) for topic in topics))
    outcome = await session.commit(least, topics, [1] * len(topics))
    assert outcome is Outcome.COMMIT
    return outcome


def segments(directory: Path, topic: str) -> list[Path]:
    """The files of a topic's ledgers that are not empty, oldest first."""
    with FileBroker.open(str(directory), read_only=True) as broker:
        entry = broker.named(topic)
    found = [directory / "topics" / str(entry.number) / f"{one.ledger}-{one.generation}.log" for one in entry.ledgers]
    return [path for path in found if path.stat().st_size]


def flip(path: Path, at: float) -> None:
    """Change one byte at an offset of the file."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 0x10
    path.write_bytes(data)


def figures(engine: Engine) -> dict[str, float]:
    return {metric.name: metric.value for metric in metrics(engine)}


@pytest.mark.parametrize("at", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("which", [0, -1], ids=["sealed", "newest"])
async def test_a_damaged_topic_stops_and_the_others_continue(tmp_path, which, at):
    await write_log(tmp_path)
    flip(segments(tmp_path, "a")[which], at)
    with own(tmp_path) as broker:
        async with engine_on(broker) as engine:
            await eventually(lambda: engine.verification.done)
            assert [*engine.verification.damages] == ["a"]
            problem = engine.topics.get("a").problem
            assert isinstance(problem, TopicDamaged)
            assert "txnbuf verify" in str(problem)
            assert figures(engine)["topics_damaged"] == figures(engine)["topics_stopped"] == 1
            assert "damaged" in (await ServiceAdmin(engine).describe({"topic": "a"}))["waits_for"]
            assert [*(await ServiceAdmin(engine).status({}))["damaged"]] == ["a"]
            session, ids = await session_on(engine, "b")
            await write(session, ids[0], "b")
            (failure,) = await session.write(("a", transactional([ids[1]])))
            assert "topic 'a' is damaged" in str(failure.error)
            answer = await session.commit(ids[1], ("a", "b"), [1, 0])
            assert answer is not Outcome.COMMIT
            assert len(visible(broker, "b")) == ROUNDS + 1
            with pytest.raises(Damaged):
                visible(broker, "a")


@pytest.mark.parametrize("topics", [("a",), ("a", "b")], ids="-".join)
async def test_what_is_open_when_a_topic_turns_out_to_be_damaged_is_refused(tmp_path, topics):
    await write_log(tmp_path)
    with own(tmp_path) as broker:
        async with engine_on(broker) as engine:
            await eventually(lambda: engine.verification.done)
            session, ids = await session_on(engine, "a", "b")
            assert not await session.write(*((topic, transactional([ids[0]])) for topic in topics))
            engine.topics.mark_damaged("a", TopicDamaged("a", Damaged("1-0.log", 7, "the checksum does not hold")))
            answer = await session.commit(ids[0], topics, [1] * len(topics))
            assert isinstance(answer, Exception)
            assert "topic 'a' is damaged" in str(answer)
            await write(session, ids[1], "b")


def damaged_once_running(engine: Engine) -> bool:
    return [*engine.verification.damages] == ["a"] and engine.topics.get("a").problem is not None


@pytest.mark.parametrize("finder", ["reader", "query", "scrub", "compaction", "backup"])
async def test_damage_stops_the_topic_at_once_whatever_finds_it(tmp_path, finder):
    await write_log(tmp_path)
    with own(tmp_path) as broker:
        async with engine_on(broker) as engine:
            await eventually(lambda: engine.verification.done)
            path = segments(tmp_path, "a")[0]
            flip(path, 0.5)
            if finder == "reader":
                with pytest.raises(Damaged):
                    visible(broker, "a")
            elif finder == "query":
                flip(path, 0.0)
                with pytest.raises(Damaged):
                    broker.position_at("a", 0)
            elif finder == "scrub":
                with pytest.raises(Damaged):
                    broker.check_stored("a", broker.ledgers("a")[0].ledger)
            elif finder == "compaction":
                await engine.compaction.request("a")
                await eventually(lambda: engine.compaction.quarantined)
            else:
                with pytest.raises(Damaged):
                    broker.back_up(str(tmp_path.parent / f"{tmp_path.name}.backup"), lambda _done, _total: None)
            await eventually(lambda: damaged_once_running(engine))
            assert str(path) in str(broker.damaged_topics()["a"])
            assert figures(engine)["topics_damaged"] == 1
            session, ids = await session_on(engine, "b")
            (failure,) = await session.write(("a", transactional([ids[1]])))
            assert "topic 'a' is damaged" in str(failure.error)
            await write(session, ids[0], "b")


async def test_a_topic_whose_file_was_repaired_continues(tmp_path):
    await write_log(tmp_path)
    with own(tmp_path) as broker:
        async with engine_on(broker) as engine:
            await eventually(lambda: engine.verification.done)
            path = segments(tmp_path, "a")[0]
            good = path.read_bytes()
            flip(path, 0.5)
            with broker.reader("a") as reader:
                with pytest.raises(Damaged):
                    while reader.read() is not None:
                        pass
                await eventually(lambda: damaged_once_running(engine))
                path.write_bytes(good)
                broker._log.damage.mended(str(path))
                await eventually(lambda: not engine.verification.damages)
                assert reader.read() is not None
            assert engine.topics.get("a").problem is None
            assert figures(engine)["files_repaired"] == 1
            session, ids = await session_on(engine, "a")
            await write(session, ids[0], "a")
            assert len(visible(broker, "a")) == ROUNDS + 1


async def test_a_topic_whose_damaged_ledger_is_trimmed_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(upkeep, "LOOK", 0.01)
    await write_log(tmp_path)
    with own(tmp_path) as broker:
        async with engine_on(broker) as engine:
            flip(segments(tmp_path, "a")[0], 0.5)
            with pytest.raises(Damaged):
                visible(broker, "a")
            await eventually(lambda: damaged_once_running(engine))
            broker.trim("a", broker.ledgers("a")[1].ledger)
            await eventually(lambda: not engine.verification.damages)
            assert engine.topics.get("a").problem is None


async def test_a_damaged_index_is_rebuilt(tmp_path):
    await write_log(tmp_path)
    indexes = [path for path in (tmp_path / "topics").rglob("*") if path.is_file() and path.suffix != ".log"]
    assert indexes
    for path in indexes:
        flip(path, 0.5)
    with own(tmp_path) as broker:
        async with engine_on(broker) as engine:
            await eventually(lambda: engine.verification.done)
            assert not engine.verification.damages
            assert len(visible(broker, "a")) == len(visible(broker, "b")) == ROUNDS


@pytest.mark.parametrize("at", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("topic", [DECISIONS, SNAPSHOT_TOPIC])
async def test_nothing_is_served_without_what_the_service_needs(tmp_path, topic, at):
    await write_log(tmp_path)
    flip(segments(tmp_path, topic)[0], at)
    with own(tmp_path) as broker, pytest.raises(TopicDamaged, match=f"{topic}.*can't run without it.*newest copy"):
        await Engine.start(broker)


async def test_the_process_names_what_is_damaged(tmp_path):
    await write_log(tmp_path)
    flip(segments(tmp_path, "a")[0], 0.5)
    with ServiceProcess(tmp_path) as service:
        event = service.wait_event("problem")
        assert event["what"] == "topic a"
        assert "restore the whole directory" in event["error"]
        status, text = get(service.http, "/health")
        assert (status, json.loads(text)["damaged"]) == (200, ["a"])


async def test_the_process_ends_with_one_sentence_where_the_decision_log_is_damaged(tmp_path):
    await write_log(tmp_path)
    flip(segments(tmp_path, DECISIONS)[0], 0.5)
    service = ServiceProcess(tmp_path)
    assert service.finish(STARTING) == 4
    (told,) = [line for line in service.lines if not line.startswith("{")]
    assert told.startswith(f"txnbuf: topic '{DECISIONS}' is damaged: ")
