"""A process that runs out of file descriptors: the embedded log needs few, and a lack of them does not stop it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from file_logs import DIRECTORY, World, append, messages, numbered, submit

from broker_io.batch import Batch
from broker_io.errors import DiskFailed, TooManyFiles
from broker_io.testing import SimulatedDisk
from broker_io.testing.disk import SimulatedFile

MANY_TOPICS = """
import resource, sys
from broker_io.batch import Batch, Message
from broker_io.filelog.log import FileBroker
from broker_io.position import LATEST
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
names = [f"t{number}" for number in range(450)]
with FileBroker.open(sys.argv[1], watermark_bytes=0, journal_bytes=100_000) as owner:
    for name in names:
        owner.create_topic(name)
    writers = {name: owner.writer(name) for name in names}
    for broker in (owner, FileBroker.open(sys.argv[1], read_only=True)):
        readers = {name: broker.reader(name, LATEST) for name in names}
        for turn in range(3):
            value = b"%d" % turn
            futures = [writer.append(Batch.of([Message(value=value)] * 3)) for writer in writers.values()]
            for future in futures:
                future.result(60)
        for turn in range(3):
            for name, reader in readers.items():
                for limit in (1, 2):
                    batch = reader.read(limit=limit)
                    assert batch is not None and len(batch) == limit, (name, turn)
                    assert all(row.message.value == b"%d" % turn for row in batch), (name, turn)
        for reader in readers.values():
            reader.close()
"""

NO_DESCRIPTOR = """
import os, resource, sys
from broker_io.batch import Batch, Message
from broker_io.errors import TooManyFiles
from broker_io.filelog.log import FileBroker
resource.setrlimit(resource.RLIMIT_NOFILE, (150, 150))
with FileBroker.open(sys.argv[1], watermark_bytes=0) as owner:
    owner.create_topic("t")
    writer, reader = owner.writer("t"), owner.reader("t")
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    told = []
    for act in (lambda: writer.append(Batch.of([Message()])).result(60), lambda: owner.create_topic("u")):
        try:
            act()
        except TooManyFiles as error:
            told.append(str(error))
    assert len(told) == 2 and all("ulimit -n" in text for text in told), told
    for descriptor in taken:
        os.close(descriptor)
    writer.append(Batch.of([Message(value=b"later")])).result(60)
    owner.create_topic("u")
    assert [row.message.value for row in reader.read()] == [b"later"]
with FileBroker.open(sys.argv[1], watermark_bytes=0) as owner:
    assert owner.topics() == ["t", "u"] and not owner.report, owner.report
"""


@pytest.mark.parametrize("script", [MANY_TOPICS, NO_DESCRIPTOR], ids=["many topics", "no descriptor"])
def test_a_process_of_few_descriptors(script: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", script, str(tmp_path / "log")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": os.getcwd()}, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


class FewFiles(SimulatedDisk):
    """A disk on which opening a path that ends with `refused` fails `times` times."""

    refused = "nothing"
    times = 0

    def _refuse(self, path: str) -> None:
        if path.endswith(self.refused) and self.times:
            self.times -= 1
            raise OSError(errno.EMFILE, "Too many open files", path)

    def open(self, path: str, *, write: bool = False, create: bool = False) -> SimulatedFile:
        self._refuse(path)
        return super().open(path, write=write, create=create)

    def sync_directory(self, path: str) -> None:
        self._refuse(path)
        super().sync_directory(path)


def few_files() -> tuple[FewFiles, World]:
    disk = FewFiles()
    return disk, World(disk)


def test_journal_blocks_reach_their_segment_with_a_descriptor_of_another() -> None:
    disk, world = few_files()
    with world.own() as broker:
        for topic in "tu":
            broker.create_topic(topic)
        log = broker._log
        futures = [submit(log, log.topic(topic), Batch.of(numbered(2))) for topic in "tu"]
        disk.refused, disk.times = "topics/2/1-0.log", 1
        log.flush()
        assert [len(future.result(0)) for future in futures] == [2, 2]
        assert disk.times == 0
        assert messages(broker, "u") == numbered(2)


def test_log_that_cannot_write_journal_blocks_to_segments_stops() -> None:
    disk, world = few_files()
    broker = world.own()
    for topic in "tu":
        broker.create_topic(topic)
    log = broker._log
    futures = [submit(log, log.topic(topic), Batch.of(numbered(2))) for topic in "tu"]
    disk.refused, disk.times = "topics/2/1-0.log", 9
    log.flush()
    for future in futures:
        assert isinstance(future.exception(0), DiskFailed)
    assert isinstance(log.failure, DiskFailed)
    assert "raise the limit (ulimit -n)" in str(log.failure)
    assert "disk" not in str(log.failure)
    with World(world.disk.kill()).own() as again:
        assert messages(again, "u") == numbered(2)


@pytest.mark.parametrize("refused", ["/topics/1/2-0.log", "/topics/1", "/journal-2", "/manifest.new", DIRECTORY])
def test_change_without_a_descriptor_succeeds_later(refused: str) -> None:
    disk, world = few_files()
    with world.own() as broker:
        broker.create_topic("t")
        append(broker, "t", numbered(2))
        disk.refused, disk.times = refused, 1
        try:
            broker.roll("t")
        except TooManyFiles:
            assert len(broker.ledgers("t")) == 1
            append(broker, "t", numbered(1, 2))
            broker.roll("t")
            append(broker, "t", numbered(1, 3))
        else:
            append(broker, "t", numbered(2, 2))
        assert disk.times == 0
        assert len(broker.ledgers("t")) == 2
        assert messages(broker, "t") == numbered(4)
    with World(world.disk.kill()).own() as again:
        assert messages(again, "t") == numbered(4)
        assert again.report == []


def test_manifest_that_cannot_be_synced_stops_the_log() -> None:
    disk, world = few_files()
    broker = world.own()
    broker.create_topic("t")
    append(broker, "t", numbered(2))
    disk.refused, disk.times = "/manifest.new", 2
    with pytest.raises(DiskFailed):
        broker.roll("t")
    with pytest.raises(DiskFailed):
        append(broker, "t", numbered(2))
    with World(world.disk.kill()).own() as again:
        assert messages(again, "t") == numbered(2)
