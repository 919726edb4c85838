"""The simulated disk behaves like a real one without faults, and loses exactly unsynced changes."""

import contextlib
import errno
import itertools
import tempfile
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker_io.environment import Disk
from broker_io.system import SystemDisk
from broker_io.testing import Crash, Operation, SeededRandomness, SimulatedClock, SimulatedDisk, Unsynced

NAMES = st.sampled_from(["a", "b", "sub/a", "sub/deep/b", "sub", "nowhere/a"])
STEP = st.one_of(
    st.tuples(st.just("write"), NAMES, st.integers(0, 40), st.binary(max_size=30)),
    st.tuples(st.just("read"), NAMES, st.integers(0, 40), st.integers(0, 60)),
    st.tuples(st.just("truncate"), NAMES, st.integers(0, 50)),
    st.tuples(st.just("create"), NAMES),
    st.tuples(st.just("rename"), NAMES, NAMES),
    st.tuples(st.just("remove"), NAMES),
    st.tuples(st.just("make_directory"), st.sampled_from(["sub", "sub/deep"])),
    st.tuples(st.just("list"), st.sampled_from(["", "sub", "sub/deep", "a", "nowhere"])),
    st.tuples(st.just("exists"), NAMES),
    st.tuples(st.just("content"), NAMES),
    st.tuples(st.just("sync_directory"), st.sampled_from(["", "sub", "nowhere"])),
)


def do(disk: Disk, root: str, step: tuple) -> object:
    kind, path, *rest = step
    place = f"{root}/{path}"
    if kind in ("exists", "list", "remove", "make_directory", "sync_directory"):
        return getattr(disk, kind)(place)
    if kind == "content":
        return disk.read(place)
    if kind == "rename":
        return disk.rename(place, f"{root}/{rest[0]}")
    file = disk.open(place, write=kind != "read", create=kind == "create")
    try:
        if kind == "write":
            file.write(rest[0], [rest[1][:7], memoryview(rest[1])[7:]])
            file.sync()
        elif kind == "read":
            return file.read(rest[0], rest[1])
        elif kind == "truncate":
            file.truncate(rest[0])
        return file.size()
    finally:
        file.close()


def outcome(action: Callable[[], object]) -> object:
    try:
        return action()
    except FileNotFoundError:
        return "missing"
    except OSError:
        return "refused"


@given(st.lists(STEP, max_size=30))
def test_results_are_those_of_a_real_disk(steps: list[tuple]) -> None:
    simulated = SimulatedDisk()
    simulated.make_directory("/root")
    with tempfile.TemporaryDirectory() as root:
        for step in steps:
            if step[0] in ("create", "remove", "rename") and "sub" in step[1:]:
                continue  # a directory, which is never moved or removed
            assert outcome(lambda step=step: do(simulated, "/root", step)) == outcome(
                lambda step=step: do(SystemDisk(), root, step)
            ), step


def written(disk: SimulatedDisk, path: str, data: bytes, offset: int = 0) -> None:
    file = disk.open(path, write=True, create=True)
    file.write(offset, [data])
    file.close()


def stable(disk: SimulatedDisk, path: str, data: bytes) -> None:
    file = disk.open(path, write=True, create=True)
    file.write(0, [data])
    file.sync()
    disk.sync_directory("/")


@pytest.mark.parametrize("unsynced", Unsynced)
@given(seed=st.integers(0, 1000))
@settings(max_examples=20)
def test_synced_data_survives_every_power_loss(unsynced: Unsynced, seed: int) -> None:
    disk = SimulatedDisk()
    stable(disk, "/a", b"stable" * 300)
    written(disk, "/a", b"more" * 300, offset=1800)
    found = disk.crash(unsynced, seed)
    assert found.content("/a")[:1800] == b"stable" * 300


def test_lost_and_kept_are_the_two_extremes() -> None:
    disk = SimulatedDisk()
    stable(disk, "/a", b"old")
    written(disk, "/a", b"new")
    written(disk, "/b", b"b")
    lost, kept = disk.crash(Unsynced.LOST), disk.crash(Unsynced.KEPT)
    assert lost.files() == {"/a": 3}
    assert lost.content("/a") == b"old"
    assert kept.files() == {"/a": 3, "/b": 1}
    assert kept.content("/a") == b"new"


def test_prefix_leaves_any_prefix_and_nothing_else() -> None:
    disk = SimulatedDisk()
    stable(disk, "/a", b"")
    written(disk, "/a", b"01234")
    written(disk, "/a", b"56789", offset=5)
    found = {disk.crash(Unsynced.PREFIX, seed).content("/a") for seed in range(400)}
    assert found == {b"0123456789"[:size] for size in range(11)}


def test_sectors_are_kept_whole_and_independently() -> None:
    disk = SimulatedDisk()
    stable(disk, "/a", bytes(2048))
    written(disk, "/a", b"x" * 1536, offset=256)
    found = {disk.crash(Unsynced.SECTORS, seed).content("/a") for seed in range(200)}
    pieces = [(256, 512), (512, 1024), (1024, 1536), (1536, 1792)]
    every = set()
    for chosen in itertools.product([False, True], repeat=len(pieces)):
        data = bytearray(2048)
        for (start, stop), kept in zip(pieces, chosen, strict=True):
            data[start:stop] = (b"x" if kept else b"\0") * (stop - start)
        every.add(bytes(data))
    assert found == every


def test_a_size_can_be_kept_without_the_bytes() -> None:
    disk = SimulatedDisk()
    stable(disk, "/a", b"")
    written(disk, "/a", b"x" * 512)
    found = {disk.crash(Unsynced.SECTORS, seed).content("/a") for seed in range(50)}
    assert found == {b"", bytes(512), b"x" * 512}


def test_names_need_their_directory_synced() -> None:
    disk = SimulatedDisk()
    stable(disk, "/old", b"1")
    file = disk.open("/new", write=True, create=True)
    file.write(0, [b"2"])
    file.sync()
    disk.rename("/new", "/old")
    assert disk.files() == {"/old": 1}
    assert disk.crash(Unsynced.LOST).content("/old") == b"1"
    disk.sync_directory("/")
    assert disk.crash(Unsynced.LOST).content("/old") == b"2"


def test_a_rename_without_a_sync_of_the_data_can_name_an_empty_file() -> None:
    disk = SimulatedDisk()
    stable(disk, "/old", b"1")
    written(disk, "/new", b"2")
    disk.rename("/new", "/old")
    disk.sync_directory("/")
    assert disk.crash(Unsynced.LOST).content("/old") == b""


def test_unsynced_removal_is_undone() -> None:
    disk = SimulatedDisk()
    stable(disk, "/a", b"1")
    disk.remove("/a")
    assert not disk.exists("/a")
    assert disk.crash(Unsynced.LOST).content("/a") == b"1"
    assert disk.crash(Unsynced.KEPT).files() == {}


def test_any_subset_of_name_changes_is_kept() -> None:
    disk = SimulatedDisk()
    stable(disk, "/a", b"1")
    disk.remove("/a")
    written(disk, "/b", b"")
    found = {tuple(disk.crash(Unsynced.SECTORS, seed).files()) for seed in range(50)}
    assert found == {("/a",), ("/a", "/b"), ("/b",), ()}


def test_files_are_lost_with_an_unsynced_directory() -> None:
    disk = SimulatedDisk()
    disk.make_directory("/d")
    file = disk.open("/d/a", write=True, create=True)
    file.sync()
    disk.sync_directory("/d")
    assert disk.crash(Unsynced.LOST).files() == {}
    disk.sync_directory("/")
    assert disk.crash(Unsynced.LOST).files() == {"/d/a": 0}


def test_a_killed_process_loses_nothing_and_syncs_nothing() -> None:
    disk = SimulatedDisk()
    stable(disk, "/a", b"1")
    written(disk, "/a", b"2")
    found = disk.kill()
    assert found.content("/a") == b"2"
    assert found.crash(Unsynced.LOST).content("/a") == b"1"
    with pytest.raises(Crash):
        disk.exists("/a")


@pytest.mark.parametrize("torn", [0, 1, 3])
def test_stops_at_an_operation_and_stays_dead(torn: int) -> None:
    disk = SimulatedDisk()
    file = disk.open("/a", write=True, create=True)
    disk.stop_at(2, written=torn)
    file.write(0, [b"x"])
    with pytest.raises(Crash):
        file.write(1, [b"yz", b"!"])
    for call in (file.sync, file.size, lambda: file.read(0, 1), lambda: disk.list("/"), lambda: disk.lock("/l")):
        with pytest.raises(Crash):
            call()
    file.close()
    assert disk.kill().content("/a") == b"xyz!"[: 1 + torn]


def test_fails_an_operation_once() -> None:
    disk = SimulatedDisk()
    file = disk.open("/a", write=True, create=True)
    disk.fail_at(1, errno.EIO, written=1)
    with pytest.raises(OSError) as caught:
        file.write(0, [b"xy"])
    assert (caught.value.errno, disk.content("/a")) == (errno.EIO, b"x")
    file.write(0, [b"zz"])
    assert disk.content("/a") == b"zz"


def test_after_a_failed_sync_only_writing_again_helps() -> None:
    disk = SimulatedDisk()
    stable(disk, "/a", b"1")
    file = disk.open("/a", write=True)
    file.write(0, [b"2"])
    disk.fail_at(1, errno.EIO)
    with pytest.raises(OSError):
        file.sync()
    file.sync()
    assert disk.content("/a") == b"2"
    assert disk.crash(Unsynced.LOST).content("/a") == b"1"
    file.write(0, [b"2"])
    file.sync()
    assert disk.crash(Unsynced.LOST).content("/a") == b"2"


def test_next_process_can_sync_after_a_crash_at_a_sync() -> None:
    disk = SimulatedDisk()
    stable(disk, "/a", b"1")
    file = disk.open("/a", write=True)
    file.write(0, [b"2"])
    disk.stop_at(1)
    with pytest.raises(Crash):
        file.sync()
    found = disk.kill()
    found.open("/a").sync()
    assert found.crash(Unsynced.LOST).content("/a") == b"2"


def test_counts_every_operation_that_changes_the_disk() -> None:
    disk = SimulatedDisk()
    disk.make_directory("/d/e")
    file = disk.open("/d/a", write=True, create=True)
    file.write(0, [b"xyz"])
    file.truncate(1)
    file.sync()
    disk.rename("/d/a", "/d/b")
    disk.sync_directory("/d")
    disk.remove("/d/b")
    disk.remove("/d/b")
    assert disk.history == [
        Operation("make_directory", "/d"),
        Operation("make_directory", "/d/e"),
        Operation("create", "/d/a"),
        Operation("write", "/d/a", 3),
        Operation("truncate", "/d/a", 1),
        Operation("sync", "/d/a"),
        Operation("rename", "/d/b"),
        Operation("sync_directory", "/d"),
        Operation("remove", "/d/b"),
    ]


def test_a_full_disk_cuts_a_write_short() -> None:
    disk = SimulatedDisk(capacity=5)
    written(disk, "/a", b"abc")
    with pytest.raises(OSError) as caught:
        written(disk, "/b", b"xyz")
    assert caught.value.errno == errno.ENOSPC
    assert disk.content("/b") == b"xy"
    written(disk, "/a", b"ABC")
    disk.capacity = 9
    written(disk, "/b", b"xyz")
    assert disk.free_bytes("/") == 3


def test_locks_exclude_until_closed_or_dead() -> None:
    disk = SimulatedDisk()
    held = disk.lock("/lock")
    assert held is not None
    assert disk.lock("/lock") is None
    held.close()
    again = disk.lock("/lock")
    assert again is not None
    assert disk.kill().lock("/lock") is not None


def test_identity_changes_with_the_file_of_a_name() -> None:
    disk = SimulatedDisk()
    written(disk, "/a", b"1")
    before = disk.identity("/a")
    assert disk.identity("/a") == before
    written(disk, "/b", b"1")
    disk.rename("/b", "/a")
    assert disk.identity("/a") != before


def test_removed_file_stays_readable_while_open() -> None:
    disk = SimulatedDisk()
    written(disk, "/a", b"1")
    file = disk.open("/a")
    disk.remove("/a")
    written(disk, "/a", b"2")
    assert file.read(0, 9) == b"1"


def test_flips_one_bit() -> None:
    disk = SimulatedDisk()
    written(disk, "/a", b"\x00\x00")
    disk.flip("/a", 9)
    assert disk.content("/a") == b"\x00\x02"
    assert disk.crash(Unsynced.LOST).files() == {}


def test_a_file_opened_to_read_refuses_to_write() -> None:
    disk = SimulatedDisk()
    written(disk, "/a", b"1")
    file = disk.open("/a")
    for call in (lambda: file.write(0, [b"2"]), lambda: file.truncate(0)):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.EBADF
    file.close()
    with pytest.raises(OSError):
        file.size()


def test_copy_is_independent() -> None:
    disk = SimulatedDisk()
    written(disk, "/a", b"1")
    copy = disk.copy()
    written(copy, "/a", b"2")
    copy.remove("/a")
    with contextlib.suppress(OSError):
        copy.content("/a")
    assert disk.content("/a") == b"1"


def test_time_passes_only_in_sleep() -> None:
    clock = SimulatedClock(now_ms=1000)
    assert (clock.now_ms(), clock.monotonic()) == (1000, 0.0)
    clock.sleep(0.25)
    assert (clock.now_ms(), clock.monotonic()) == (1250, 0.25)
    clock.set_ms(10)
    assert (clock.now_ms(), clock.monotonic()) == (10, 0.25)


def test_randomness_is_repeatable_for_a_seed() -> None:
    first, again, other = SeededRandomness(1), SeededRandomness(1), SeededRandomness(2)
    tokens = [first.token(16), first.token(16)]
    assert tokens == [again.token(16), again.token(16)]
    assert len({*tokens, other.token(16)}) == 3
