"""Two nodes of a pair in the simulated world: random faults, clients and readers, and what must hold

The rules are those of `pair_world`, which drives the core alone; here the node drives it, with all its threads. Faults
are kills, pauses, cut links, a lock that does not answer or whose answers are lost, full and failing disks, replaced
disks, checkpoints, switches and forced promotions.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from pair_parts import Engine, LockServer, LoopTransport, MemoryDisk, MemoryLock, MemoryStore, Net, node_of
from sim.world import Process, World

from broker_io.environment import current
from broker_io.errors import AppendUnknown, DiskFailed, DiskWatermark, Error, LockUnavailable, NotLive
from broker_io.filelog.pair.node import PairNode
from broker_io.filelog.replication.lease import Terms
from broker_io.filelog.replication.lock import LockRecord
from broker_io.filelog.replication.member import Settings
from broker_io.filelog.replication.messages import DiskSpace

TTL = 1.0
NS = 1_000_000_000
SETTINGS = Settings(
    Terms(round(TTL * NS), 0.02),
    member_timeout=NS // 2,
    answer_timeout=NS // 4,
    window_bytes=400,
    stall=NS // 2,
    keep_bytes=4000,
)
SYNC_SECONDS = 0.002
SETTLE_SECONDS = 60.0


class PairViolation(AssertionError):
    """A rule that does not hold."""


class SimMember:
    """A machine of the pair; `commands` are what its main thread does next, None ends it."""

    def __init__(self, stage: PairStage, name: str) -> None:
        self.stage = stage
        self.name = name
        self.disk = MemoryDisk(name.encode() + b"1", sync_seconds=SYNC_SECONDS)
        self.process: Process | None = None
        self.node: PairNode | None = None
        self.store: MemoryStore | None = None
        self.lock: MemoryLock | None = None
        self.lock_down = False
        self.commands: Any = None
        self.appended = 0

    @property
    def running(self) -> bool:
        return self.process is not None and not self.process.dead

    def start(self) -> None:
        self.disk.used = self.disk.fails = False
        host = self.stage.world.host(self.name)
        self.node = self.store = self.commands = None
        self.process = host.spawn(self.name, self._main)
        self.process.on_death.append(self._died)

    def _died(self) -> None:
        """The other side sees the end of its connections."""
        net = self.stage.net
        for end in [end for end in net.ends if end.name == self.name]:
            end.break_link("the peer is gone")
            net.ends.remove(end)

    def _main(self) -> None:
        stage, environment = self.stage, current()
        self.commands = environment.threads.queue()
        store = MemoryStore(self.disk)
        lock = MemoryLock(stage.server, self._lock_fault)
        settings = stage.settings._replace(founder=self.name == "a")
        node = node_of(settings, store, lock, LoopTransport(stage.net, self.name), lambda _: None)
        engine = Engine(node, store)
        self.store, self.lock = store, lock
        node.start()
        self.node = node
        threads = [
            environment.threads.thread(lambda: self._append(engine), name="client"),
            environment.threads.thread(lambda: self._read(engine), name="reader"),
        ]
        for thread in threads:
            thread.start()
        while (command := self.commands.get()) is not None:
            command()
        node.close()
        for thread in threads:
            thread.join()
        store.close()

    def _lock_fault(self, request: str, after: bool) -> None:
        faults = self.stage.random
        current().clock.sleep(faults.uniform(0.0, 0.003))
        if self.lock_down or (after and self.stage.loses and faults.random() < 0.2):
            current().clock.sleep(0.1)
            raise LockUnavailable(f"no answer to {request}")

    def _append(self, engine: Engine) -> None:
        stage, clock = self.stage, current().clock
        while True:
            clock.sleep(stage.random.uniform(0.0, 0.05))
            self.appended += 1
            content = f"{self.name}{self.process.name if self.process else ''} {self.appended}".encode()
            try:
                lsn = engine.append(content)
            except DiskFailed:
                return
            except (NotLive, AppendUnknown, DiskWatermark) as error:
                stage.counts[type(error).__name__] += 1
                if engine.node._closed:
                    return
                continue
            stage.acknowledge(lsn, content)

    def _read(self, engine: Engine) -> None:
        stage, clock = self.stage, current().clock
        while True:
            clock.sleep(stage.random.uniform(0.0, 0.05))
            before = dict(stage.acked)
            losses = stage.losses
            if engine.node.failure is not None or engine.node._closed:
                return
            seen = engine.read()
            if seen is not None and losses == stage.losses:
                stage.show(self.name, seen, before)


class PairStage:
    """The world of one seed."""

    def __init__(self, seed: int, *, clocked: bool | None = None, force: bool = False) -> None:
        self.world = World(seed, preemption=0.1)
        self.random = random.Random(f"{seed}/pair")
        self.clocked = self.random.random() < 0.7 if clocked is None else clocked
        strict = 2 if self.random.random() < 0.2 else 1
        self.settings = SETTINGS._replace(min_in_sync=strict)
        self.forces = force
        self.net = Net()
        self.acked: dict[int, bytes] = {}
        self.shown: dict[int, bytes] = {}
        self.losses = 0
        self.loses = False
        self.counts: Counter[str] = Counter()
        self.forked: set[bytes] = set()
        self.server: LockServer

    def __enter__(self) -> PairStage:
        self.world.__enter__()
        lock = self.world.host("lock").spawn("lock", self._serve)
        self.world.run(1.0, lambda: hasattr(self, "server"))
        assert not lock.dead
        self.members = [SimMember(self, name) for name in "ab"]
        return self

    def __exit__(self, *error: Any) -> None:
        self.world.__exit__(*error)

    def _serve(self) -> None:
        self.server = LockServer(TTL, clocked=self.clocked)
        self.server.on_swap = self._swapped
        current().clock.sleep(1e9)

    def _swapped(self, old: LockRecord, new: LockRecord) -> None:
        self.counts["swap"] += 1
        self.world.log("lock", f"{new}")
        if new.forced is not None and new.forced != old.forced:
            self.losses += 1
            self.forked |= {member.disk.store for member in self.members} - {new.live}
            for history in (self.acked, self.shown):
                for lsn in [each for each in history if each > new.forced.lsn]:
                    del history[lsn]

    # --- what happens ---

    def acknowledge(self, lsn: int, content: bytes) -> None:
        self.counts["acknowledged"] += 1
        if self.acked.setdefault(lsn, content) != content:
            raise PairViolation(f"R1: two records {lsn} are acknowledged: {self.acked[lsn]!r}, {content!r}")

    def show(self, name: str, seen: list[bytes], before: dict[int, bytes]) -> None:
        self.counts["read"] += 1
        for lsn, content in before.items():
            if lsn > len(seen) or seen[lsn - 1] != content:
                raise PairViolation(f"R3: a read at {name} does not show record {lsn}, which was acknowledged")
        for lsn, content in enumerate(seen, 1):
            if self.shown.setdefault(lsn, content) != content:
                raise PairViolation(f"R2: readers were shown two records {lsn}")

    def command(self, member: SimMember, name: str, call: Callable[[], object]) -> None:
        """Let the main thread of a member do something; errors of the tree count, others are findings."""

        def work() -> None:
            try:
                call()
            except Error as error:
                self.counts[f"{name}: {type(error).__name__}"] += 1

        if member.running and member.commands is not None and member.node is not None:
            member.commands.put(work)

    def fault(self) -> None:
        """One random fault; some end by themselves."""
        choose, member = self.random, self.random.choice(self.members)
        kinds = ["kill", "pause", "cut", "lock", "lose", "switch", "checkpoint", "checkpoint", "disk", "wipe", "full"]
        kind = choose.choice([*kinds, "force"] if self.forces else kinds)
        self.counts[kind] += 1
        self.world.log(member.name, f"fault {kind}")
        process, node, after = member.process, member.node, self.world.scheduler.after
        if kind == "kill" and process is not None:
            process.kill()
            after(choose.uniform(0.05, 2.0), lambda: self._restart(member))
        elif kind == "pause" and process is not None and not process.dead:
            process.pause()
            after(choose.uniform(0.05, 3.0), process.resume)
        elif kind == "cut":
            self.net.cut = choose.random() < 0.5
            self.net.break_links()
            after(choose.uniform(0.05, 2.0), self._heal)
        elif kind == "lock":
            member.lock_down = True
            after(choose.uniform(0.05, 2.0), lambda: setattr(member, "lock_down", False))
        elif kind == "lose":
            self.loses = True
            after(1.0, lambda: setattr(self, "loses", False))
        elif kind == "switch" and node is not None:
            self.command(member, "switch", node.switch)
        elif kind == "checkpoint" and member.store is not None:
            self.command(member, "checkpoint", member.store.checkpoint)
        elif kind == "full" and node is not None:
            self.command(member, "full", lambda: node.post(DiskSpace(True)))
            after(0.5, lambda: self.command(member, "free", lambda: node.post(DiskSpace(False))))
        elif kind == "disk":
            member.disk.fails = True
            after(choose.uniform(0.5, 2.0), lambda: self._kill_and_restart(member))
        elif kind == "wipe":
            self._wipe(member)
        elif kind == "force" and node is not None:
            self.command(member, "force", node.force)

    def _heal(self) -> None:
        self.net.cut = False

    def _kill_and_restart(self, member: SimMember) -> None:
        if member.process is not None:
            member.process.kill()
        self._restart(member)

    def _restart(self, member: SimMember) -> None:
        if not member.running:
            member.start()

    def _wipe(self, member: SimMember) -> None:
        """The disk is replaced, if the other store may be promoted; that takes longer than a session lives."""
        disk = member.disk
        if not any(other.disk.store in self.server.record.in_sync for other in self.members if other is not member):
            return
        if member.process is not None:
            member.process.kill()
        for session in [each for each, (store, _) in self.server.sessions.items() if store == disk.store]:
            self.server.end(session)
        member.disk = MemoryDisk(
            member.name.encode() + b"%d" % (disk.stores + 1), stores=disk.stores + 1, sync_seconds=SYNC_SECONDS
        )
        self._restart(member)

    # --- the run ---

    def run(self, seconds: float) -> None:
        """Faults for some time, then R5, then the end of both. Raises PairViolation and Finding."""
        for member in self.members:
            member.start()
        until = self.world.now + seconds
        while self.world.now < until:
            self.world.run(self.random.expovariate(3.0))
            self.fault()
        self._settle()
        for member in self.members:
            assert member.commands is not None
            member.commands.put(None)
        if not self.world.run(10.0, lambda: not any(member.running for member in self.members)):
            stacks = "\n".join(member.process.stacks() for member in self.members if member.process)
            raise PairViolation(f"a node does not end:\n{stacks}")
        self._check_end()

    def _settle(self) -> None:
        self.world.run(4.0)
        for member in self.members:
            member.lock_down = False
            if member.process is not None:
                member.process.resume()
            if member.disk.fails or not member.running:
                self._kill_and_restart(member)
        self.loses = self.net.cut = False
        count = self.counts["acknowledged"]
        if not self.world.run(SETTLE_SECONDS, lambda: self._in_sync(count), every=500):
            status = [member.node and member.node.status() for member in self.members]
            stacks = "\n".join(member.process.stacks() for member in self.members if member.process)
            raise PairViolation(f"R5: not in sync again: {self.server.record}, {status}\n{stacks}")

    def _in_sync(self, count: int) -> bool:
        stores = {member.disk.store for member in self.members}
        return {*self.server.record.in_sync} == stores and self.counts["acknowledged"] > count + 5

    def _check_end(self) -> None:
        """R1, R2 and R4 for what is left: both logs agree, and have everything that was acknowledged or shown."""
        logs = []
        for member in self.members:
            disk = member.disk
            contents = dict(enumerate([content for _, content in disk.state], 1))
            contents |= {record.lsn: record.content for record in disk.journal}
            logs.append(contents)
        in_sync = {*self.server.record.in_sync}
        for member, contents in zip(self.members, logs, strict=True):
            if member.disk.store not in in_sync:
                continue
            for rule, history in (("R1", self.acked), ("R2", self.shown)):
                for lsn, content in history.items():
                    if contents.get(lsn) != content:
                        found = contents.get(lsn)
                        raise PairViolation(f"{rule}: {member.name} has {found!r} in place of {content!r} at {lsn}")
        common = range(1, min(max(log) for log in logs) + 1)
        known = min(member.node.status()["commit"] for member in self.members if member.node is not None)
        if [logs[0][lsn] for lsn in common if lsn <= known] != [logs[1][lsn] for lsn in common if lsn <= known]:
            raise PairViolation("R4: the logs differ below what is committed")


def explore(seed: int, seconds: float = 20.0, *, force: bool = False) -> Counter[str]:
    """Run one seed; what happened how often."""
    with PairStage(seed, force=force) as stage:
        stage.run(seconds)
        return stage.counts


def main() -> None:
    import sys

    first, count = int(sys.argv[1]), int(sys.argv[2])
    total: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            total += explore(seed, force=seed % 4 == 3)
        except BaseException as error:
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
            if len(sys.argv) > 3:
                raise
    print(total)


if __name__ == "__main__":
    main()
