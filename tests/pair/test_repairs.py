"""A damaged file of one member is fetched from the other one, verified and put in place, while both are used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from file_logs import World, append, numbered
from pair.file_pairs import BrokerMember, BrokerPair, contents, put, segments

from broker_io.errors import Damaged, NotInSync
from broker_io.filelog.log import FileBroker
from broker_io.filelog.log import repair as module
from broker_io.filelog.log.damage import DamagedSegment
from broker_io.filelog.log.layout import segment_path
from broker_io.filelog.log.repair import fetch_segment, put_in_place
from broker_io.testing import Unsynced
from broker_io.testing.contract.base import eventually as until


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[BrokerPair]:
    """Two members in sync, with a topic of a closed and an open ledger."""
    made = BrokerPair(tmp_path)
    made.begin()
    a = made.a.broker
    a.create_topic("t")
    put(a, "t", *[f"{number}" for number in range(50)])
    a.roll("t")
    put(a, "t", *[f"open {number}" for number in range(50)])
    until(made.same)
    until(lambda: segments(made.a.directory) == segments(made.b.directory))
    yield made
    made.a.stop()
    made.b.stop()


def damage(member: BrokerMember, which: int, how: str = "flipped") -> Path:
    path = sorted(Path(member.directory).glob("topics/1/*.log"))[which]
    if how == "flipped":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        with path.open("r+b") as file:  # the same file: the log has it open
            file.write(data)
    elif how == "short":
        os.truncate(path, 7)
    else:
        path.unlink()
    return path


def meet(member: BrokerMember) -> None:
    """Let a reader find the damage, unless it is repaired by then."""
    with pytest.raises(Damaged):
        contents(member.broker, "t")


def whole(pair: BrokerPair) -> bool:
    return not (pair.a.broker.damaged_topics() or pair.b.broker.damaged_topics())


@pytest.mark.parametrize("how", ["flipped", "short", "missing"])
@pytest.mark.parametrize("name", ["a", "b"], ids=["live", "backup"])
def test_closed_ledger_is_repaired_from_the_other_member(pair: BrokerPair, name: str, how: str) -> None:
    member: BrokerMember = getattr(pair, name)
    before = segments(member.directory)
    path = damage(member, 0, how)
    meet(member)
    until(lambda: whole(pair))
    assert segments(member.directory) == before
    assert member.broker.repaired == (str(path),)
    assert contents(member.broker, "t")[:2] == ["0", "1"]
    assert member.broker.status()["repaired"] == 1
    put(pair.a.broker, "t", "after")
    until(pair.same)
    until(lambda: not member.broker.status()["problem"])


@pytest.mark.parametrize("name", ["a", "b"], ids=["live", "backup"])
def test_open_ledger_is_repaired_while_it_grows(pair: BrokerPair, name: str) -> None:
    member: BrokerMember = getattr(pair, name)
    damage(member, 1)
    meet(member)
    put(pair.a.broker, "t", "after")
    until(lambda: whole(pair))
    put(pair.a.broker, "t", "later")
    until(pair.same)
    assert contents(member.broker, "t")[-2:] == ["after", "later"]
    until(lambda: segments(pair.a.directory) == segments(pair.b.directory))


def test_damage_on_both_is_named_and_never_served(pair: BrokerPair) -> None:
    for member in (pair.a, pair.b):  # both before either meets it, and is repaired
        damage(member, 0)
    for member in (pair.a, pair.b):
        meet(member)
    for member in (pair.a, pair.b):
        until(lambda member=member: "damaged as well" in member.broker.status()["problem"])
        assert [*member.broker.status()["damaged"]] == ["t"]
        meet(member)
        assert not list(Path(member.directory).glob("topics/*/*repair*"))


def test_damage_without_a_link_is_repaired_once_there_is_one(pair: BrokerPair) -> None:
    pair.net.cut = True
    pair.net.break_links()
    until(lambda: not pair.a.broker.status()["linked"])
    damage(pair.a, 0)
    meet(pair.a)
    until(lambda: "not connected" in pair.a.broker.status()["problem"])
    pair.net.cut = False
    until(lambda: whole(pair))


def test_switch_to_a_damaged_backup_is_refused_until_it_is_repaired(
    pair: BrokerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair.a.broker, pair.b.broker
    with monkeypatch.context() as broken:
        broken.setattr(b._repairer, "_compared", lambda: None)
        damage(pair.b, 0)
        meet(pair.b)
        until(lambda: "'t'" in a.status()["cannot_switch"])
        with pytest.raises(NotInSync, match=r"topics 't', .*wait until they are repaired"):
            a.switch()
        put(a, "t", "after")
        assert (a.live, len(a.status()["in_sync"])) == (True, 2)
    until(lambda: not a.status()["cannot_switch"])
    assert whole(pair)
    a.switch()
    pair.b.live()
    assert contents(b, "t")[-1] == "after"


def test_switch_does_not_wait_for_damage_on_both(pair: BrokerPair) -> None:
    for member in (pair.a, pair.b):  # both before either meets it, and is repaired
        damage(member, 0)
    for member in (pair.a, pair.b):
        meet(member)
    a, b = pair.a.broker, pair.b.broker
    until(lambda: b._node._member.damaged_there == a._node._member.damaged_there == ("t",))
    a.switch()
    assert pair.b.live().status()["role"] == "live"


def test_damaged_backup_that_is_left_alone_serves_all_but_that_topic(pair: BrokerPair) -> None:
    """It refuses that one until the other member is back, and repairs it then."""
    a, b = pair.a.broker, pair.b.broker
    a.create_topic("other")
    put(a, "other", "x")
    until(pair.same)
    pair.net.cut = True
    damage(pair.b, 0)
    pair.net.break_links()
    pair.a.stop()
    meet(pair.b)
    pair.b.live()
    assert contents(b, "other") == ["x"]
    assert [*b.damaged_topics()] == ["t"]
    meet(pair.b)
    pair.net.cut = False
    pair.a.start()
    until(lambda: whole(pair))
    assert contents(b, "t")[:2] == ["0", "1"]


def test_bytes_that_come_over_a_link_that_has_ended_do_not_count(
    pair: BrokerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have answered: a store whose log was not compared."""
    links = iter(range(100))
    broken = True
    node = pair.a.broker._node
    compared = node.compared_link
    monkeypatch.setattr(pair.a.broker._repairer, "_compared", lambda: next(links) if broken else compared())
    damage(pair.a, 0)
    meet(pair.a)
    until(lambda: "ended meanwhile" in pair.a.broker.status()["problem"])
    assert pair.a.broker.repaired == ()
    broken = False
    until(lambda: whole(pair))


# --- a crash at each step ---


def damaged_log(which: int) -> tuple[World, FileBroker, DamagedSegment, bytes]:
    """A log with a damaged segment, and what that should have."""
    world = World()
    broker = FileBroker.open("/log", world.environment, committer=False)
    broker.create_topic("t")
    append(broker, "t", numbered(20))
    broker.roll("t")
    append(broker, "t", numbered(20))
    broker._log.checkpoint()
    entry = broker.named("t")
    path = segment_path("/log", entry, entry.ledgers[which])
    good = world.disk.content(path)
    world.disk.flip(path, len(good) * 4)
    with pytest.raises(Damaged):
        broker.check_stored("t", entry.ledgers[which].ledger)
    (segment,) = broker._log.damage.segments()
    return world, broker, segment, good


@pytest.mark.parametrize("unsynced", [*Unsynced])
@pytest.mark.parametrize("which", [0, 1], ids=["closed", "open"])
def test_crash_at_each_step_of_a_repair_leaves_damage_or_the_right_file(
    which: int, unsynced: Unsynced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_BYTES", 64)
    for step in range(1, 200):
        world, broker, segment, good = damaged_log(which)
        path = segment_path("/log", segment.topic, segment.ledger)
        world.disk.stop_at(step)
        crashed = False
        try:
            read = lambda at, size: good[at : at + size]  # noqa: B023, E731
            fetched = fetch_segment(world.disk, "/log", segment, read)
            put_in_place(broker._log, world.disk, "/log", segment, fetched)
        except BaseException:
            crashed = True
        disk = world.disk.crash(unsynced, step)
        with FileBroker.open("/log", World(disk).environment, committer=False) as again:
            names = [name for name in disk.files() if "repair" in name]
            assert not names
            content = disk.content(path)[: len(good)]
            if content != good:
                assert crashed
                with pytest.raises(Damaged):
                    again.check_stored("t", segment.ledger.ledger)
        if not crashed:
            assert content == good
            return
    raise AssertionError("the repair never ended")


def test_ledger_that_was_trimmed_meanwhile_is_not_put_back() -> None:
    world, broker, segment, good = damaged_log(0)
    fetched = fetch_segment(world.disk, "/log", segment, lambda at, size: good[at : at + size])
    broker.trim("t", segment.ledger.ledger + 1)
    assert not put_in_place(broker._log, world.disk, "/log", segment, fetched)
    assert not [name for name in world.disk.files() if "repair" in name or "/1-0" in name]
    assert broker.damaged_topics() == {}
    broker.close()


@pytest.mark.parametrize("change", [lambda good: good[:-1], lambda good: good[:30] + b"x" + good[31:], lambda _: b""])
def test_other_bytes_are_refused(change: Any) -> None:
    world, broker, segment, good = damaged_log(0)
    other = change(good)
    with pytest.raises(Damaged, match="damaged as well"):
        fetch_segment(world.disk, "/log", segment, lambda at, size: other[at : at + size])
    assert not [name for name in world.disk.files() if "repair" in name]
    broker.close()
