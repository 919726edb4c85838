"""Readers of an embedded log that is restored from an older copy while they are open, or before they continue."""

from __future__ import annotations

import pytest
from file_logs import DIRECTORY, World, append, messages, numbered
from hypothesis import given, settings
from hypothesis import strategies as st

from broker_io.batch import Message
from broker_io.errors import LogRestored, PositionTrimmed
from broker_io.filelog.log import FileBroker
from broker_io.filelog.log.backup import restore_backup
from broker_io.filelog.log.reader import FileReader
from broker_io.position import EARLIEST, LATEST, Position

FILE = "/backup"


def silent(done: int, total: int) -> None:
    """Reports no progress."""


def put_back(world: World, file: str = FILE) -> None:
    """Replace the log by a backup."""
    disk, new = world.disk, f"/restored-{len(world.disk.files())}"
    restore_backup(world.environment, file, new, silent)
    for path in [*disk.files()]:
        if path.startswith(f"{DIRECTORY}/"):
            disk.remove(path)
    for path in [*disk.files()]:
        if path.startswith(f"{new}/"):
            disk.rename(path, path.replace(new, DIRECTORY, 1))


def backed_up(kept: int, lost: int) -> World:
    """A log of a topic with `lost` messages more than its backup."""
    world = World()
    with world.own() as owner:
        owner.create_topic("t")
        append(owner, "t", numbered(kept))
        owner.back_up(FILE, silent)
        append(owner, "t", numbered(lost, kept))
    return world


def write(world: World, count: int) -> None:
    with world.own() as owner:
        append(owner, "t", numbered(count, 100))


def new(reader: FileReader) -> list[Message]:
    """The next messages."""
    batch = reader.read()
    assert batch is not None
    return [*batch.messages]


def test_a_reader_that_has_read_what_is_lost_is_told_before_it_gets_anything_new() -> None:
    world = backed_up(5, 3)
    with world.follow() as broker, broker.reader("t") as reader:
        read = reader.read()
        assert read is not None
        assert len(read) == 8
        put_back(world)
        for _ in range(2):
            with pytest.raises(LogRestored, match="topic 't' lacks messages before 1:8"):
                reader.read()
        write(world, 4)
        with pytest.raises(LogRestored, match="open a new reader"):
            reader.read()
        with broker.reader("t") as fresh:
            assert fresh.read(limit=100) is not None


def test_a_reader_of_what_the_copy_has_continues() -> None:
    world = backed_up(5, 3)
    with world.follow() as broker, broker.reader("t") as reader:
        assert len(reader.read(limit=5) or ()) == 5
        put_back(world)
        write(world, 4)
        assert new(reader) == numbered(4, 100)


def test_messages_that_were_decoded_before_the_log_was_replaced_are_not_returned() -> None:
    world = backed_up(5, 3)
    with world.follow() as broker, broker.reader("t") as reader:
        assert len(reader.read(limit=5) or ()) == 5
        assert len(reader.read(limit=1) or ()) == 1
        put_back(world)
        with pytest.raises(LogRestored):
            reader.read()


def test_a_reader_that_waits_at_the_end_of_the_lost_log_is_told() -> None:
    world = backed_up(5, 3)
    with world.follow() as broker, broker.reader("t", LATEST) as reader:
        assert reader.read() is None
        put_back(world)
        with pytest.raises(LogRestored):
            reader.read()


def test_a_lost_position_is_refused_where_a_reader_continues_after_it() -> None:
    """`inclusive`, a program names the message itself, and gets it or the next one."""
    world = backed_up(5, 3)
    put_back(world)
    write(world, 4)
    with world.own() as owner, world.follow() as follower:
        for broker in (owner, follower):
            for entry in (5, 7):
                with pytest.raises(LogRestored):
                    broker.reader("t", Position(1, entry), inclusive=False)
                with broker.reader("t", Position(1, entry)) as reader:
                    assert new(reader) == numbered(4, 100)
            with broker.reader("t", Position(1, 4), inclusive=False) as reader:
                assert new(reader) == numbered(4, 100)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.data())
@settings(max_examples=60, deadline=None)
def test_exactly_the_positions_that_are_lost_are_refused(steps: list[int], data: st.DataObject) -> None:
    """A step appends messages, or begins a ledger if it is 0; the log is restored twice from two of its states."""
    world = World()
    backups = sorted(data.draw(st.lists(st.integers(0, len(steps)), min_size=2, max_size=2)))
    known: list[Position] = []
    kept: list[int] = []
    with world.own() as owner:
        owner.create_topic("t")
        for number, step in enumerate([*steps, None]):
            for file, at in enumerate(backups):
                if at == number:
                    owner.back_up(f"{FILE}{file}", silent)
                    kept.append(len(known))
            if step is not None:
                _take(owner, step, known)
    lost = known[kept[1] :]
    put_back(world, f"{FILE}1")
    known = known[: kept[1]]
    with world.own() as owner:
        for step in steps:
            _take(owner, step, known)
    _check(world, known, lost)
    lost += known[kept[0] :]
    put_back(world, f"{FILE}0")
    known = known[: kept[0]]
    with world.own() as owner:
        for step in steps:
            _take(owner, step, known)
    _check(world, known, lost)


def _take(owner: FileBroker, step: int, known: list[Position]) -> None:
    if step:
        known += append(owner, "t", numbered(step, len(known)))
    else:
        owner.roll("t")


def _check(world: World, known: list[Position], lost: list[Position]) -> None:
    with world.own() as owner, world.follow() as follower:
        for broker in (owner, follower):
            for number, position in enumerate([EARLIEST, *known]):
                with broker.reader("t", position, inclusive=False) as reader:
                    found: list[Position] = []
                    while (batch := reader.read(limit=1000)) is not None:
                        found += batch.positions
                    assert found == known[number:]
            for position in lost:
                with pytest.raises(LogRestored):
                    broker.reader("t", position, inclusive=False)


def test_a_trimmed_position_of_a_restored_log_is_refused_as_trimmed() -> None:
    world = backed_up(5, 3)
    put_back(world)
    with world.own() as owner:
        append(owner, "t", numbered(4, 100))
        owner.trim("t", owner.ledgers("t")[-1].ledger)
        assert messages(owner, "t") == numbered(4, 100)
        for entry in (2, 7):
            with pytest.raises((LogRestored, PositionTrimmed)):
                owner.reader("t", Position(1, entry), inclusive=False)
