"""Key compaction of the embedded log against a naive model, with colliding hashes and crashes."""

import errno

import numpy as np
import pytest
from file_logs import DIRECTORY, World, append, messages, numbered, rows
from hypothesis import given, settings
from hypothesis import strategies as st

from broker_io import block
from broker_io.batch import Blobs, Message, PlacedMessage
from broker_io.errors import Damaged, DiskFull
from broker_io.filelog.log import FileBroker, key_columns
from broker_io.filelog.log.commit import BLOCK_BYTES
from broker_io.testing import Crash, Unsynced

KEYS = st.sampled_from([None, b"", b"a", b"b", b"c", b"\x00"])
STEPS = st.lists(
    st.tuples(st.lists(st.tuples(KEYS, st.none() | st.binary(max_size=3)), min_size=1, max_size=6), st.booleans()),
    min_size=1,
    max_size=8,
)


def survivors(history: list[PlacedMessage]) -> list[PlacedMessage]:
    """The messages that compaction keeps: the newest of each key that is no delete."""
    newest = {row.message.key: row for row in history if row.message.key is not None}
    return sorted(row for row in newest.values() if row.message.value is not None)


def fill(world: World, broker: FileBroker, steps: list[tuple[list[tuple[bytes | None, bytes | None]], bool]]) -> None:
    for pairs, roll in steps:
        world.clock.advance(1)
        append(broker, "t", [Message(key, value, {"n": str(len(pairs))}, 7) for key, value in pairs])
        if roll:
            broker.roll("t")


@given(STEPS, STEPS)
def test_newest_message_of_each_key_survives_at_its_position(
    first: list[tuple[list[tuple[bytes | None, bytes | None]], bool]],
    second: list[tuple[list[tuple[bytes | None, bytes | None]], bool]],
) -> None:
    world = World()
    with world.own() as broker:
        broker.create_topic("t")
        for steps in (first, second):
            fill(world, broker, steps)
            history = rows(broker, "t")
            last, entries = broker.last_position("t"), [ledger.entries for ledger in broker.ledgers("t")]
            broker.compact("t")
            assert rows(broker, "t") == survivors(history)
            assert broker.last_position("t") == last
            assert [ledger.entries for ledger in broker.ledgers("t")][: len(entries)] == entries
            for row in survivors(history):
                assert rows(broker, "t", row.position)[0] == row
        kept = rows(broker, "t")
    with world.own() as broker, world.follow() as follower:
        assert rows(broker, "t") == rows(follower, "t") == kept


@given(STEPS)
@settings(max_examples=50)
def test_keys_with_one_hash_do_not_hide_each_other(
    steps: list[tuple[list[tuple[bytes | None, bytes | None]], bool]],
) -> None:
    def same_hash(keys: Blobs, seed: int) -> bytes:
        return bytes(16) * len(keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block, "hash_keys", same_hash)
        world = World()
        with world.own() as broker:
            broker.create_topic("t")
            fill(world, broker, steps)
            history = rows(broker, "t")
            broker.compact("t")
            found = rows(broker, "t")
    latest = {row.message.key: row for row in found}
    assert sorted(row for row in latest.values() if row.message.value is not None) == survivors(history)
    assert all(row in history for row in found)


def test_delete_is_dropped_at_once() -> None:
    world = World()
    with world.own() as broker:
        broker.create_topic("t")
        append(broker, "t", [Message(b"a", b"1"), Message(b"b", b"2"), Message(b"a", None), Message(b"e", b"")])
        broker.compact("t")
        assert messages(broker, "t") == [Message(b"b", b"2"), Message(b"e", b"")], "an empty value is no delete"


def test_segment_that_loses_nothing_is_not_rewritten() -> None:
    world = World()
    with world.own() as broker:
        broker.create_topic("t")
        append(broker, "t", numbered(3))
        broker.roll("t")
        append(broker, "t", [Message(b"x", b"1")])
        append(broker, "t", [Message(b"x", b"2")])
        broker.compact("t")
        names = {path for path in world.disk.files() if path.endswith(".log")}
        assert names == {f"{DIRECTORY}/topics/1/{name}.log" for name in ("1-0", "2-1", "3-0")}
        before = len(world.disk.history)
        broker.compact("t")
        assert len(world.disk.history) == before, "a second compaction writes nothing"


def test_emptied_segment_keeps_its_entry_numbers() -> None:
    world = World()
    with world.own() as broker:
        broker.create_topic("t")
        append(broker, "t", [Message(None, b"keyless")] * 5)
        broker.compact("t")
        assert rows(broker, "t") == []
        assert [(ledger.ledger, ledger.entries, ledger.bytes) for ledger in broker.ledgers("t")] == [
            (1, 5, 0),
            (2, 0, 0),
        ]
        assert broker.first_position("t") is None
        assert broker.position_at("t", 0) is None
    with world.own() as broker:
        assert [*append(broker, "t", numbered(1))] == [(2, 0, -1)]


def test_small_blocks_are_merged_and_keep_their_publish_times() -> None:
    world = World()
    with world.own() as broker:
        broker.create_topic("t")
        for number in range(50):
            world.clock.advance(1)
            append(broker, "t", [Message(b"k%d" % (number % 40), b"v" * 30)])
        before = rows(broker, "t")
        size = broker.ledgers("t")[0].bytes
        broker.compact("t")
        assert rows(broker, "t") == survivors(before)
        assert broker.ledgers("t")[0].bytes < size / 2
        for row in survivors(before):
            assert broker.position_at("t", row.publish_time) == row.position
            assert broker.position_at("t", row.publish_time - 1) == row.position


def test_damage_stops_a_compaction_and_changes_nothing() -> None:
    world = World()
    with world.own() as broker:
        broker.create_topic("t")
        append(broker, "t", [Message(b"a", b"1"), Message(b"a", b"2" * 50)])
        broker.roll("t")
        path = f"{DIRECTORY}/topics/1/1-0.log"
        world.disk.flip(path, (world.disk.files()[path] - 20) * 8)
        files = set(world.disk.files())
        with pytest.raises(Damaged, match=r"1-0.log"):
            broker.compact("t")
        assert set(world.disk.files()) == files
        append(broker, "t", numbered(1))


def test_a_full_disk_stops_a_compaction_but_not_the_log() -> None:
    world = World()
    with world.own() as broker:
        broker.create_topic("t")
        append(broker, "t", [Message(b"a", b"1"), Message(b"a", b"2")])
        broker.roll("t")
        before, files = rows(broker, "t"), set(world.disk.files())
        for operation in range(1, 5):
            world.disk.fail_at(operation, errno.ENOSPC)
            with pytest.raises(DiskFull, match="not compacted; nothing changed"):
                broker.compact("t")
            assert set(world.disk.files()) == files
            assert rows(broker, "t") == before
        append(broker, "t", numbered(1))
        broker.compact("t")
        assert messages(broker, "t") == [Message(b"a", b"2"), *numbered(1)]


@pytest.mark.parametrize("unsynced", list(Unsynced))
def test_a_crash_at_any_step_leaves_the_log_before_or_after(unsynced: Unsynced) -> None:
    outcomes = set()
    for operation in range(1, 60):
        world = World()
        broker = world.own(segment_bytes=300)
        broker.create_topic("t")
        for number in range(12):
            append(broker, "t", [Message(b"k%d" % (number % 5), b"%d" % number)])
        before = rows(broker, "t")
        world.disk.stop_at(operation, written=operation % 90)
        try:
            broker.compact("t")
        except Crash:
            stopped = True
        else:
            stopped = False
        for disk in (world.disk.crash(unsynced, operation), world.disk.kill()):
            with World(disk).own() as again:
                found = rows(again, "t")
                assert found in (before, survivors(before))
                assert stopped or found == survivors(before)
                outcomes.add(len(found))
                again.compact("t")
                assert rows(again, "t") == survivors(before)
                named = {f"{ledger.ledger}-" for ledger in again.ledgers("t")}
                assert len([path for path in disk.files() if path.endswith(".log")]) == len(named)
        if not stopped:
            break
    assert not stopped
    assert outcomes == {12, 5}


def random_appends(broker: FileBroker, count: int, keys: int) -> None:
    choose = np.random.default_rng(3).integers(0, keys, count).tolist()
    for start in range(0, count, 500):
        append(broker, "t", [Message(b"key %d" % key, b"%d" % key or None) for key in choose[start : start + 500]])
        if start % 1500 == 0:
            broker.roll("t")


@pytest.mark.parametrize("memory", [0, 30_000, 1_000_000])
def test_more_keys_than_the_memory_holds_take_several_passes(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_columns, "MEMORY_BYTES", memory)
    monkeypatch.setattr(key_columns, "CHUNK_ROWS", 400)
    world = World()
    with world.own(compaction_bytes=65_536) as broker:
        broker.create_topic("t")
        random_appends(broker, 8_000, 4000)
        append(broker, "t", [Message(b"key 7", None), Message(b"long" * 20_000, b"1")])
        before = rows(broker, "t")
        broker.compact("t")
        assert rows(broker, "t") == survivors(before)
        assert not [path for path in world.disk.files() if path.endswith("/keys")]


def test_temporary_file_of_a_compaction_that_crashed_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_columns, "MEMORY_BYTES", 0)
    world = World()
    broker = world.own()
    broker.create_topic("t")
    append(broker, "t", numbered(10))
    broker.roll("t")
    world.disk.stop_at(3)
    with pytest.raises(Crash):
        broker.compact("t")
    disk = world.disk.kill()
    assert [path for path in disk.files() if path.endswith("/keys")]
    with World(disk).own() as again:
        assert messages(again, "t") == numbered(10)
        assert not [path for path in disk.files() if path.endswith("/keys")]


def test_large_block_that_loses_nothing_is_copied_as_it_is() -> None:
    world = World()
    large = [Message(b"large %d" % number, bytes(BLOCK_BYTES // 8)) for number in range(8)]
    with world.own(compression="zstd") as broker:
        broker.create_topic("t")
        append(broker, "t", [Message(b"a", b"1")] * 2)
        append(broker, "t", numbered(3))
    with world.own() as broker:
        append(broker, "t", large)
        append(broker, "t", [Message(b"b", b"2")])
        broker.roll("t")
        before = rows(broker, "t")
        stored = world.disk.files()[f"{DIRECTORY}/topics/1/1-0.log"]
        broker.compact("t")
        assert rows(broker, "t") == survivors(before)
        assert world.disk.files()[f"{DIRECTORY}/topics/1/1-1.log"] < stored
        broker.check_stored("t", 1)


def test_damaged_values_are_not_copied() -> None:
    world = World()
    with world.own() as broker:
        broker.create_topic("t")
        append(broker, "t", [Message(b"a", b"1")] * 2)
        append(broker, "t", [Message(b"large", bytes(BLOCK_BYTES))])
        broker.roll("t")
        path = f"{DIRECTORY}/topics/1/1-0.log"
        world.disk.flip(path, (world.disk.files()[path] - 20) * 8)
        with pytest.raises(Damaged, match=r"1-0.log.*values part"):
            broker.compact("t")
