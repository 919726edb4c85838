"""A log that two brokers of this process replicate: each has a directory, and faults of its link and its lock."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from etcd_server import EtcdServer, free_port
from fault_proxy import FaultProxy

from broker_io.batch import Batch, Message, PlacedMessage
from broker_io.errors import NotInSync
from broker_io.filelog.log.broker import FileBroker
from broker_io.filelog.pair import open_lock
from broker_io.filelog.pair.broker import PairBroker, PairOptions
from broker_io.filelog.replication.lock import LockRecord
from broker_io.testing.contract.base import WAIT_SECONDS, eventually, read_all

LEASE = 2.0
SILENCE = LEASE / 5
"""Seconds after which a primary continues without a backup that says nothing."""
T = "orders"


class Member:
    """A machine of the pair: its directory, the broker while it is open, and what stands between it and the others."""

    def __init__(self, log: ReplicatedLog, name: str) -> None:
        self.directory = log.directory / name
        self.listen = free_port()
        self.link = FaultProxy(0)
        self.lock = FaultProxy(log.etcd.port)
        self._log = log
        self._open: PairBroker | None = None

    @property
    def broker(self) -> PairBroker:
        assert self._open is not None, "the broker is closed"
        return self._open

    def open(self, *, found: bool = False, **options: Any) -> PairBroker:
        pair = PairOptions(
            lock=f"etcd://{self.lock.address}/{self._log.name}",
            listen=f"127.0.0.1:{self.listen}",
            peer=self.link.address,
            found=found,
            **{"lease_seconds": LEASE, **self._log.pair_options},
        )
        self._open = PairBroker.open_member(str(self.directory), pair=pair, **{**self._log.options, **options})
        return self._open

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def crash(self) -> None:
        """End without a word to the lock or to the other member."""
        self.isolate()
        self.close()
        self.heal()

    def isolate(self) -> None:
        for proxy in (self.link, self._log.other(self).link, self.lock):
            proxy.cut()

    def heal(self) -> None:
        for proxy in (self.link, self._log.other(self).link, self.lock):
            proxy.heal()

    def wipe(self) -> None:
        shutil.rmtree(self.directory)

    @property
    def store(self) -> bytes:
        return bytes.fromhex(self.broker.status()["store"])

    def open_files(self) -> list[str]:
        """The paths below the directory that this process has open."""
        found = []
        for entry in os.scandir("/proc/self/fd"):
            try:
                path = os.readlink(entry.path)
            except FileNotFoundError:  # that of the listing itself
                continue
            if path.startswith(f"{self.directory}/"):
                found.append(path)
        return found

    def segments(self) -> dict[str, bytes]:
        """The segments of all topics, by their path."""
        return {str(path.relative_to(self.directory)): path.read_bytes() for path in self.directory.rglob("*.log")}


class ReplicatedLog:
    """Two members, of which `a` founds the pair. `pair_options` are those of the pair, `options` those of the log."""

    def __init__(
        self, directory: Path, etcd: EtcdServer, pair_options: dict[str, Any], options: dict[str, Any]
    ) -> None:
        self.directory, self.etcd, self.name = directory, etcd, uuid.uuid4().hex
        self.pair_options, self.options = pair_options, {"watermark_bytes": 0, **options}
        self.a, self.b = Member(self, "a"), Member(self, "b")
        self.a.link.target, self.b.link.target = self.b.listen, self.a.listen
        self.proxies = [proxy for member in (self.a, self.b) for proxy in (member.link, member.lock)]
        for proxy in self.proxies:
            proxy.__enter__()

    def begin(self) -> None:
        """Found the pair at `a`, and wait until `b` is in sync; there is one topic."""
        self.a.open(found=True)
        eventually(lambda: self.a.broker.live)
        self.a.broker.create_topic(T)
        self.b.open()
        self.wait_in_sync()

    def other(self, member: Member) -> Member:
        return self.b if member is self.a else self.a

    def record(self) -> LockRecord:
        lock = open_lock(f"etcd://{self.etcd.address}/{self.name}")
        try:
            return lock.read().record
        finally:
            lock.close()

    def in_sync(self) -> bool:
        return {*self.record().in_sync} == {self.a.store, self.b.store}

    def wait_in_sync(self) -> None:
        eventually(self.in_sync)

    def wait_live(self, member: Member) -> PairBroker:
        eventually(lambda: member.broker.live)
        return member.broker

    def equal(self, topic: str = T) -> list[PlacedMessage]:
        """Wait until both have the same messages at the same positions; these messages."""
        found: list[PlacedMessage] = []

        def same() -> bool:
            found[:] = read_all(self.a.broker, topic)
            return found == read_all(self.b.broker, topic)

        eventually(same)
        return found

    def close(self) -> None:
        for member in (self.a, self.b):
            member.heal()
        for member in (self.b, self.a):
            member.close()
        for proxy in self.proxies:
            proxy.__exit__()


def write(broker: FileBroker, count: int, start: int = 0, topic: str = T, size: int = 0) -> None:
    """Append messages one by one, each durable before the next one; at least `size` bytes each."""
    with broker.writer(topic) as writer:
        for number in range(start, start + count):
            writer.append(message(number, size)).result(WAIT_SECONDS)


def message(number: int, size: int = 0) -> Batch:
    return Batch.of([Message(b"k%d" % number, b"%d".ljust(size) % number)])


def numbers(found: list[PlacedMessage]) -> list[int]:
    return [int(each.message.value or b"") for each in found]


def unchanged(look: Callable[[], Any], seconds: float) -> bool:
    """Whether something stays as it is for so long."""
    before, until = look(), time.monotonic() + seconds
    while time.monotonic() < until:
        if look() != before:
            return False
        time.sleep(0.02)
    return True


def switched(member: Member) -> None:
    """Switch; one that is refused because the backup has just been slow is repeated."""

    def done() -> bool:
        try:
            member.broker.switch()
        except NotInSync:
            return False
        return True

    eventually(done)
