"""Stores of a pair on simulated disks, driven without a node: a primary whose records are committed at once, its
backup"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Any

from file_logs import submit

from broker_io.batch import Batch, Message
from broker_io.block import move_block, parse_header
from broker_io.environment import Environment, read_file
from broker_io.errors import DiskFailed, PeerError
from broker_io.filelog.log.layout import Options, TopicEntry, segment_path
from broker_io.filelog.log.numbers import NumberedOperation
from broker_io.filelog.log.operations import PrepareFiles, SwapFiles, WrittenFile, encode_operations
from broker_io.filelog.log.records import Fork, Kind, LogRecord, Mark, StoreLog, make_record
from broker_io.filelog.log.segment import file_digest
from broker_io.filelog.pair.port import StoreCopy
from broker_io.filelog.pair.store import DirectoryStore
from broker_io.filelog.replication.messages import BuildEpoch, DiskSpace, ReplacedFiles, RewriteFinished
from broker_io.position import Positions
from broker_io.testing import Crash, SeededRandomness, SimulatedClock, SimulatedDisk

DIRECTORY = "/store"
OPTIONS = Options(segment_bytes=4096, journal_bytes=16_384, watermark_bytes=0, compacted_prefix="")


class Events:
    """What a store has reported; `peer` has the prepared files."""

    def __init__(self) -> None:
        self.checkpoints: list[Mark] = []
        self.replaced: list[tuple[str, int]] = []
        self.rewrites: list[RewriteFinished] = []
        self.space: list[bool] = []
        self.failures: list[Exception] = []
        self.peer: Callable[[str, int, int], bytes] | None = None

    def checkpointed(self, mark: Mark) -> None:
        self.checkpoints.append(mark)

    def post(self, event: ReplacedFiles | RewriteFinished | DiskSpace) -> None:
        if isinstance(event, ReplacedFiles):
            self.replaced += event.files
        elif isinstance(event, DiskSpace):
            self.space.append(event.full)
        else:
            self.rewrites.append(event)

    def failed(self, error: Exception) -> None:
        self.failures.append(error)

    def fetch(self, name: str, offset: int, size: int) -> bytes:
        if self.peer is None:
            raise PeerError("there is no link to the other member: try again")
        return self.peer(name, offset, size)


class Member:
    """A store on a disk of its own."""

    def __init__(self, disk: SimulatedDisk | None = None, *, seed: int = 1, **options: Any) -> None:
        self.disk = disk or SimulatedDisk()
        self.seed = seed
        self.clock = SimulatedClock()
        self.environment = Environment(self.clock, self.disk, SeededRandomness(seed), process="4711")
        self.options = options
        self.store = DirectoryStore(DIRECTORY, OPTIONS, self.environment, **options)
        self.events = Events()
        self.opened: StoreLog

    def open(self) -> Member:
        self.opened = self.store.open_log(self.events)
        return self

    @property
    def end(self) -> Mark:
        return self.store.log.journal.end

    def restarted(self, disk: SimulatedDisk | None = None) -> Member:
        """The member after its process has ended, on a disk that is left of the present one."""
        disk = disk or self.disk.kill()
        self.abandon()
        return Member(disk, seed=self.seed + 100, **self.options).open()

    def abandon(self) -> None:
        """End the threads of a process that has stopped."""
        with suppress(Exception, Crash):
            self.store.close()

    def follow(self, records: Sequence[LogRecord], *, apply: bool = True) -> None:
        """Write the records that are missing, and apply them."""
        if missing := [record for record in records if record.lsn > self.end.lsn]:
            self.store.write(missing, self.end.lsn)
        if apply:
            self.store.apply(self.end.lsn)

    def receive(self, copy: StoreCopy) -> None:
        """Take a copy, as a node does."""
        self.store.mark_partial(True)
        with self.store.receive() as receiver:
            for chunk in copy:
                receiver.add(chunk)
            receiver.finish(copy.mark, copy.forks)
        copy.close()
        self.store.mark_partial(False)

    def manifest(self) -> tuple[Any, ...]:
        """What the manifest of a checkpoint says, but for what differs between members."""
        self.store.log.checkpoint()
        stored = self.store.log.manifest
        pair = self.store.log.pair
        numbers = stored.next_topic, stored.next_ledger, pair.structures, pair.prepared, pair.forks
        return stored.mark, stored.topics, numbers

    def state(self) -> dict[str, tuple[TopicEntry, list[bytes]]]:
        """Each topic by its name, with the bytes of its ledgers."""
        found = {}
        for topic in self.store.log.all_topics():
            data = []
            for ledger in topic.entry.ledgers:
                file = self.disk.open(segment_path(DIRECTORY, topic.entry, ledger))
                data.append(read_file(file)[: ledger.bytes])
                file.close()
            found[topic.entry.name] = topic.entry, data
        return found


class Live(Member):
    """A primary whose records are committed once they are durable here; `records` are all since its epoch began."""

    def __init__(self, disk: SimulatedDisk | None = None, **options: Any) -> None:
        super().__init__(disk, **{"founder": True, **options})
        self.epoch = 0
        self.records: list[LogRecord] = []
        self.unknown = False

    def begin(self, *, forced: bool = False) -> Live:
        """Begin an epoch; everything in the journal is committed."""
        self.store.apply(self.end.lsn)
        self.epoch += 1
        content = self.store.epoch_content(BuildEpoch(self.epoch, self.end, forced))
        self._write(content, Kind.FORCED if forced else Kind.EPOCH)
        self.store.apply(self.end.lsn)
        self.store.log.replicator = self
        return self

    def _write(self, content: bytes, kind: Kind = Kind.DATA) -> None:
        record = make_record(self.end, self.epoch, self.end.lsn, content, kind)
        self.store.write([record], self.end.lsn)
        self.records.append(record)

    # the engine's replicator

    def commit(self, operations: Sequence[NumberedOperation]) -> Mark:
        self._write(b"".join(encode_operations(operations)))
        return self.end

    def applied(self, mark: Mark) -> None:
        self.store.update_prepared()

    def may_answer(self) -> bool:
        return not self.unknown

    # what clients do

    def append(self, topic: str, *messages: bytes) -> Positions:
        log = self.store.log
        future = submit(log, log.topic(topic), Batch.of([Message(b"k", message) for message in messages]))
        log.flush()
        return future.result(0)

    def make(self, *topics: str) -> None:
        self.store.log.create_topics(topics)

    def delete(self, topic: str) -> None:
        self.store.log.delete_topic(topic)

    def roll(self, topic: str) -> None:
        self.store.log.roll(self.store.log.topic(topic))

    def trim(self, topic: str, ledger: int) -> None:
        self.store.log.trim(self.store.log.topic(topic), ledger)

    def prepare(self, topic: str) -> int:
        """Prepare the next generation of the first ledger of a topic: the same blocks in another file."""
        log = self.store.log
        entry = log.topic(topic).entry
        old, new = entry.ledgers[0], entry.ledgers[0]._replace(generation=entry.ledgers[0].generation + 1)
        path = segment_path(DIRECTORY, entry, new)
        with (
            closing(self.disk.open(segment_path(DIRECTORY, entry, old))) as source,
            closing(self.disk.open(path, write=True, create=True)) as target,
        ):
            data, at = source.read(0, old.bytes), 0
            while at < len(data):
                header = parse_header(data, at)
                target.write(at, move_block(data, at, header, entry.place(new)))
                at += header.length
            target.sync()
        self.disk.sync_directory(path.rpartition("/")[0])
        size, digest = file_digest(self.disk, path)
        return log.prepare(log.topic(topic), PrepareFiles((WrittenFile(old.ledger, old.generation + 1, size, digest),)))

    def do(self, kind: str, choice: int) -> None:
        """One of the things that clients do, to one of the topics, if it can be done."""
        log = self.store.log
        names = log.names()
        if kind == "make":
            first = log.manifest.next_topic
            self.make(*[f"topic {number}" for number in range(first, first + 1 + choice % 3)])
        elif kind == "forced":
            self.begin(forced=True)
        elif names:
            topic = names[choice % len(names)]
            ledgers = log.topic(topic).entry.ledgers
            prepared = [file.number for file in log.pair.prepared if file.topic == log.topic(topic).entry.number]
            if kind == "append":
                self.append(topic, *[b"%d" % number * 300 for number in range(1 + choice)])
            elif kind == "prepare" and len(ledgers) > 1 and not prepared:
                self.prepare(topic)
            elif kind == "swap" and prepared and len(ledgers) > 1:
                self.swap(topic, prepared[0])
            elif kind == "trim" and not prepared:
                self.trim(topic, ledgers[-1].ledger)
            elif kind in ("roll", "delete"):
                getattr(self, kind)(topic)

    def swap(self, topic: str, number: int) -> None:
        log = self.store.log
        old = log.topic(topic).entry.ledgers[0]
        new = old._replace(generation=old.generation + 1)
        log.swap(log.topic(topic), SwapFiles(number, (new,), old.ledger, 0))


def pair(**options: Any) -> tuple[Live, Member]:
    """A primary that has founded the pair, and a backup that has a copy of it."""
    live, backup = Live(seed=1, **options).open(), Member(seed=2, **options).open()
    assert isinstance(live, Live)
    live.begin()
    backup.receive(live.store.begin_copy())
    backup.events.peer = live.store.read_prepared
    return live, backup


KINDS = ("make", "append", "append", "append", "append", "roll", "trim", "prepare", "swap", "delete")

__all__ = ["DIRECTORY", "KINDS", "OPTIONS", "DiskFailed", "Events", "Fork", "Live", "Member", "pair"]
