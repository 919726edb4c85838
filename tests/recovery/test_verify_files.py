"""`verify` finds in the files of a log what an owner would refuse to open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from broker_io import open_broker
from broker_io.batch import Batch, Message
from broker_io.errors import Damaged
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.decisions import Owner, encode
from txnbuffer.recovery.verify import Level, verify


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A decision log and a data topic without transactions, each of two segments."""
    place = tmp_path / "log"
    with open_broker(f"file:{place}", watermark_bytes=0) as broker:
        for topic, message in ((DECISIONS, encode(Owner(1, "me", ""))), ("plain", Message(None, b"v"))):
            broker.create_topic(topic)
            for _ in range(2):
                with broker.writer(topic) as writer:
                    writer.append(Batch.of([message])).result()
                broker.roll(topic)
    return place


def segments(log: Path, topic: str) -> list[Path]:
    """Oldest first; topics are numbered in the order of their creation."""
    number = {DECISIONS: 1, "plain": 2}[topic]
    return sorted(log.glob(f"topics/{number}/*.log"))


def errors(log: Path, topic: str | None = None) -> list[tuple[str, str]]:
    with open_broker(f"file:{log}", read_only=True) as broker:
        return [(found.topic, found.what) for found in verify(broker, topic) if found.level is Level.ERROR]


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def shorter(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_nothing_is_found_in_a_sound_log(log: Path) -> None:
    assert errors(log) == []


@pytest.mark.parametrize("topic", [DECISIONS, "plain"])
@pytest.mark.parametrize("damage", [longer, shorter, Path.unlink])
def test_what_an_owner_refuses_is_found(log: Path, topic: str, damage: Callable[[Path], None]) -> None:
    path = segments(log, topic)[0]
    damage(path)
    ((name, what),) = errors(log)
    assert name == topic
    assert str(path) in what
    with pytest.raises(Damaged):
        open_broker(f"file:{log}")


def test_one_topic_is_verified_with_what_it_depends_on(log: Path) -> None:
    longer(segments(log, DECISIONS)[0])
    longer(segments(log, "plain")[0])
    assert [name for name, _ in errors(log, "plain")] == [DECISIONS, "plain"]
    with open_broker(f"file:{log}", read_only=True) as broker:
        assert [found.topic for found in verify(broker)] == [DECISIONS, "plain"]


def test_a_newest_segment_that_is_gone_is_found(log: Path) -> None:
    segments(log, "plain")[-1].unlink()
    assert [name for name, _ in errors(log)] == ["plain"]


def test_decisions_that_nobody_can_read_are_found(log: Path) -> None:
    with open_broker(f"file:{log}", watermark_bytes=0) as broker, broker.writer(DECISIONS) as writer:
        writer.append(Batch.of([Message(b"owner", b"\xff\xff")])).result()
    ((name, what),) = errors(log)
    assert name == DECISIONS
    assert "can't be read to its end" in what
