"""A pair: two machines with one embedded log, a lock, and a service on each; the applications know both addresses

All rules of an embedded log hold. In addition: one store is live in each epoch, no two records have one number, both
machines are in sync again once nothing is wrong, and then their logs and their files agree.

In some seeds operators force promotions, which may lose what was committed before: each transaction as a whole or not
at all. Streams then roll back, so that in the end they have shown what is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

from sim.faults import Faults
from sim.pair_faults import DIRECTORY, PairFaults
from sim.pair_lock import LockServer, SimPairLock
from sim.readers import Joiner
from sim.scenario import Scenario
from sim.service import Service, embedded
from sim.world import Finding, Host

from broker_io.block import HEADER_BYTES, parse_header
from broker_io.environment import current
from broker_io.filelog.log import FileBroker
from broker_io.filelog.log.following import FollowingBroker
from broker_io.filelog.log.records import Mark, Store
from broker_io.filelog.pair import broker as pair_broker
from broker_io.filelog.pair import transport
from broker_io.filelog.pair.broker import PairBroker, PairOptions
from broker_io.filelog.pair.copying import is_segment_name, name_of
from broker_io.filelog.pair.node import PairNode
from broker_io.filelog.replication.lock import LockRecord
from broker_io.position import Position
from txnbuffer.config import PairConfig

MACHINES = ("alpha", "omega")
PORT = 7722
LOCK = "etcd://lock:2379/sim"
MIB = 1 << 20
FORCED = 0.25
"""How many seeds have forced promotions."""
FORCING_SECONDS = 120.0
"""Seconds that a forced promotion, and what the operator does before and after it, take at most."""
ROTS = 0.3
"""In how many seeds a bit of a file is flipped on one machine."""
REPAIR_SECONDS = 200.0
"""Seconds within which it is repaired: each machine verifies its files every minute."""
QUIET_SECONDS = 5.0
"""Seconds after the last request of a client in which the backup applies everything, and snapshots end."""


FORCED_ROLES = (["reader"], ["follower"], ["reader", "follower"])
"""The roles of seeds with forced promotions: those whose rules hold for what is left."""


def is_padding(segment: bytes, at: int) -> bool:
    """Whether a byte of a segment is one of those between parts of blocks, of which there is no checksum."""
    start = 0
    while True:
        header = parse_header(segment[start : start + HEADER_BYTES])
        if start + header.length > at:
            values = HEADER_BYTES + -(-header.keys_size // 8) * 8
            keys_end, values_end = HEADER_BYTES + header.keys_size, values + header.values_size
            return keys_end <= at - start < values or values_end <= at - start
        start += header.length


class PairScenario(Scenario):
    """One seed of a pair."""

    may_rot = False

    def _choose_roles(self) -> list[str]:
        return self.world.random("forced roles").choice(FORCED_ROLES) if self.forces else super()._choose_roles()

    @property
    def forces(self) -> bool:
        """Whether promotions may be forced."""
        return self.world.random("forces").random() < FORCED

    def make_services(self) -> list[Service]:
        world, choose = self.world, self.choose
        self.lock = LockServer(world, clocked=choose.random() < 0.7)
        self.lock.on_swap = self._swapped
        self.lives: dict[int, Store] = {}
        self.committed: dict[int, Mark] = {}
        self.cuts: list[tuple[int, int]] = []
        """The epoch that each forced promotion began, and the lsn to which it has cut the log."""
        options = {
            "segment_bytes": choose.choice((4096, 1 << 16, 1 << 26)),
            "journal_bytes": choose.choice((4096, 1 << 16, 1 << 26)),
            "watermark_bytes": choose.choice((0, 1 << 16)),
        }
        pair = PairConfig(
            lock=LOCK,
            min_in_sync=choose.choice((1, 1, 1, 1 if self.forces else 2)),
            lease_seconds=choose.choice((1.0, 3.0, 10.0)),
            lanes=choose.choice((1, 2, 4)),
            window_bytes=choose.choice((2000, 64 * MIB)),
            keep_bytes=choose.choice((4000, 1024 * MIB)),
        )
        world.enter(mock.patch.object(pair_broker, "open_lock", self._open_lock))
        world.enter(mock.patch.object(transport, "is_loopback", return_value=True))
        self._watch_nodes()
        return [
            self._on_machine(world.host(name), world.host(peer), pair, options)
            for name, peer in (MACHINES, MACHINES[::-1])
        ]

    def _on_machine(self, host: Host, peer: Host, pair: PairConfig, options: dict[str, Any]) -> Service:
        service = embedded(host)
        addresses = {"listen": f"{host.name}:{PORT}", "peer": f"{peer.name}:{PORT}"}
        pair = replace(pair, found=host.name == MACHINES[0], **addresses)
        service.config = replace(self.configured(service.config), pair=pair)
        own = {name: getattr(pair, name) for name in PairConfig.__slots__}
        service.open_log = lambda: PairBroker.open_member(DIRECTORY, pair=PairOptions(**own), **options)
        return service

    def _open_lock(self, _: str) -> SimPairLock:
        return SimPairLock(self.lock, current().network.host_name())

    def make_faults(self) -> Faults:
        self.pair_faults = PairFaults(self)
        return self.pair_faults

    def _reach_floors(self) -> None:
        """Also let a promotion that is being forced end."""
        self._let_forcing_end()
        super()._reach_floors()
        self._let_forcing_end()

    def _let_forcing_end(self) -> None:
        self.world.run(FORCING_SECONDS, lambda: not self.pair_faults.forcing)

    @property
    def address(self) -> str:
        return f"txnbuf://{','.join(service.address for service in self.services)}"

    # What is checked when it happens

    def _watch_nodes(self) -> None:
        set_live, commit = PairNode._set_live, PairNode.commit

        def watched_live(node: PairNode, live: bool) -> None:
            set_live(node, live)
            if live:
                self._serves(node._member.leading.epoch, node._member.store)

        def watched_commit(node: PairNode, content: bytes, fits: Callable[[], bool]) -> Mark:
            mark = commit(node, content, fits)
            self._commits(mark)
            return mark

        self.world.enter(mock.patch.object(PairNode, "_set_live", watched_live))
        self.world.enter(mock.patch.object(PairNode, "commit", watched_commit))

    def _serves(self, epoch: int, store: Store) -> None:
        record = self.lock.record
        if self.lives.setdefault(epoch, store) != store or (record.epoch == epoch and record.live != store):
            self.world.fail(f"{store.hex()} serves in epoch {epoch}, which is that of {self.lives[epoch].hex()}")

    def _commits(self, mark: Mark) -> None:
        if any(mark.epoch < epoch and mark.lsn > lsn for epoch, lsn in self.cuts):
            return  # the call returns late: a forced promotion has dropped the record meanwhile
        if self.committed.setdefault(mark.lsn, mark) != mark:
            self.world.fail(f"{mark} and {self.committed[mark.lsn]} are both committed")

    def _swapped(self, old: LockRecord, new: LockRecord) -> None:
        if new.live != old.live:
            self.world.count("change of the primary")
        if len(new.in_sync) > len(old.in_sync):
            self.world.count("joined backup")
        if new.forced is not None and new.forced != old.forced:
            self.world.count("lost records")
            self.history.may_lose()
            for app in self.apps:
                if isinstance(app, Joiner):
                    app.stretches.clear()
            self.cuts.append((new.epoch, new.forced.lsn))
            self.committed = {lsn: mark for lsn, mark in self.committed.items() if lsn <= new.forced.lsn}

    # What is checked in the end

    def _behind(self) -> list[str]:
        """Also followers that have not rolled back yet what was lost."""
        counts = {topic: len(records) for topic, records in self.final.items()}
        ahead = [one for one in self.history.followings if one.seqno > counts.get(one.topic, 0)]
        return [*super()._behind(), *(f"{one.follower} was shown what {one.topic} has not" for one in ahead)]

    def open_log(self) -> FollowingBroker:
        return FileBroker.open(DIRECTORY, read_only=True)

    @property
    def verified_hosts(self) -> list[Host]:
        return [service.host for service in self.services]

    def _read_all(self) -> None:
        """Read once both machines are in sync: a promotion that was forced before has happened then, or never does."""
        self._wait_until_in_sync()
        super()._read_all()

    def _wait_until_in_sync(self) -> None:
        self.wait(lambda: len(self.lock.record.in_sync) == len(MACHINES), "the machines are not in sync again")

    def _verify(self) -> None:
        self._wait_until_in_sync()
        self.world.run(QUIET_SECONDS)
        super()._verify()
        if self.world.random("pair rots").random() < ROTS:
            self._rot()
        self.over = True
        for service in self.services:
            if service.running is not None:
                service.running.kill()
        self._compare_files()
        self._compare_logs()

    def _rot(self) -> None:
        """Flip a bit of a file of one machine that nobody reads: the scrub finds it, and the other one has the file."""
        choose = self.world.random("pair rot")
        service, other = choose.sample(self.services, 2)
        if service.running is None or other.running is None:
            return
        found, same = self._segments(service.host), self._segments(other.host)
        paths = [path for path, data in found.items() if data and same.get(path) == data]
        if not paths:
            return
        path = choose.choice(paths)
        bit = choose.randrange(8 * len(found[path]))
        while is_padding(found[path], bit // 8):
            bit = choose.randrange(8 * len(found[path]))
        service.host.disk.flip(path, bit)
        self.world.count("repaired bit")
        self.world.log("fault", f"bit {bit} of {path} of {service.host.name} is flipped")

        def is_whole() -> bool:
            """Whether the file is as it was; it may have grown, or be gone."""
            disk = service.host.disk
            return not disk.exists(path) or disk.content(path).startswith(found[path])

        if not self.world.run(REPAIR_SECONDS, is_whole):
            raise Finding(f"bit {bit} of {path} of {service.host.name} was not repaired from {other.host.name}")

    def _compare_files(self) -> None:
        """Segments are equal byte for byte, up to what both have written."""
        one, other = (self._segments(service.host) for service in self.services)
        for name in one.keys() & other.keys():
            size = min(len(one[name]), len(other[name]))
            if one[name][:size] != other[name][:size]:
                raise Finding(f"the segments {name} of both machines differ")

    @staticmethod
    def _segments(host: Host) -> dict[str, bytes]:
        """The segments of a machine, not what it sets aside or has fetched for a repair."""
        return {
            path: host.disk.content(path) for path in host.disk.files() if is_segment_name(name_of(DIRECTORY, path))
        }

    def _compare_logs(self) -> None:
        """All topics have the same messages on both machines, but for the changes that one has not applied yet."""
        found: dict[str, dict[str, TopicCopy]] = {}
        for service in self.services:

            def main(name: str = service.host.name) -> None:
                with self.open_log() as broker:
                    found[name] = {topic: TopicCopy.read(broker, topic) for topic in broker.topics()}

            service.host.spawn("compare", main)
        self.wait(lambda: len(found) == len(MACHINES), "the logs are not read")
        one, other = (found[name] for name in MACHINES)
        for topic in sorted(one.keys() | other.keys()):
            if (left := one.get(topic)) and (right := other.get(topic)) and left.differs(right):
                raise Finding(f"{topic} differs: {left} and {right}")
            for name, log in zip(MACHINES, (one, other), strict=True):
                entries = log[topic].entries if topic in log else []
                kept = entries[0][0] if entries else Position(0, 0)  # retention may have dropped what is before
                shown = {record.position for record in self.left.get(topic, ()) if (record.position or kept) >= kept}
                if missing := shown - {position for position, _, _ in entries}:
                    raise Finding(f"{topic} of {name} lacks {sorted(missing)}, which were shown")


class TopicCopy(NamedTuple):
    """What a machine has of a topic: its ledgers, with the number of compactions of each, and its messages."""

    generations: dict[int, int]
    entries: list[tuple[Position, Any, Any]]

    @classmethod
    def read(cls, broker: FollowingBroker, topic: str) -> TopicCopy:
        """Read all of a topic of a log that has no owner."""
        entries: list[tuple[Position, Any, Any]] = []
        with broker.reader(topic) as reader:
            while (placed := reader.read()) is not None:
                entries += [(position, message.key, message.value) for position, _, message in placed]
        return cls({one.ledger: one.generation for one in broker.named(topic).ledgers}, entries)

    def differs(self, other: TopicCopy) -> bool:
        """Whether the other machine has another history, not only more or less of what is applied last.

        That may be messages at the end, a trim of the first ledgers, and compactions, which remove messages.
        """
        first = max(min(self.generations), min(other.generations))
        rewritten = {
            ledger
            for ledger in self.generations.keys() & other.generations.keys()
            if self.generations[ledger] != other.generations[ledger]
        }
        left, right = (
            [each for each in log.entries if each[0].ledger >= first and each[0].ledger not in rewritten]
            for log in (self, other)
        )
        size = min(len(left), len(right))
        return left[:size] != right[:size] or not all(self._compacted(other, ledger) for ledger in rewritten)

    def _compacted(self, other: TopicCopy, ledger: int) -> bool:
        """Whether the copy with more compactions of a ledger has no message that the other one lacks."""
        newer, older = sorted((self, other), key=lambda log: -log.generations[ledger])
        return all(entry in older.entries for entry in newer.entries if entry[0].ledger == ledger)
