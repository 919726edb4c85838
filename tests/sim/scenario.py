"""A scenario: services and applications run with faults, then without; what they did and saw is compared at the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

from sim.apps import PAUSE, App, Setting, Writer
from sim.bit_rot import BitRot
from sim.branch_apps import BranchDriver
from sim.calls import Calls
from sim.checker import behind, violations
from sim.cluster import ADDRESS, NAMESPACE, SimCluster, in_place_of_pulsar
from sim.cluster_faults import ClusterFaults
from sim.compaction import Compaction, compacted
from sim.destruction import Destruction
from sim.faults import RESTARTS, Faults
from sim.group_apps import Rival
from sim.history import Attempt, Fate, History, Shown
from sim.partitions import Partitions
from sim.readers import shown
from sim.reduction import Part
from sim.retention import Retention, before, retained
from sim.roles import ROLES, Role, choose_roles
from sim.service import DIRECTORY, Service, embedded, on_cluster
from sim.sizes import small_sizes
from sim.sync_apps import SyncWriter
from sim.world import Finding, Host, World

from broker_io.errors import Error
from broker_io.filelog.log import FileBroker
from broker_io.port import MAX_MESSAGE_BYTES, Broker
from snapshots.shards import shard_of
from txnbuffer import connect
from txnbuffer.config import Config
from txnbuffer.coordinator.messages import SMALLEST_LIMIT
from txnbuffer.errors import OutcomeForgotten, TopicNotFound, UnknownTransaction
from txnbuffer.model import Outcome as TransactionOutcome
from txnbuffer.recovery.verify import Level, verify
from txnbuffer.service.door import connection

TOPICS = ("orders", "payments")
CLIENT_HOSTS = ("beta", "gamma")
CHECK_SECONDS = 0.5
CHECK_STEPS = 64
"""Steps of the scheduler after which a scenario looks again whether something is done."""
ROTS = 0.3
"""How many embedded logs are damaged in the end."""
PARTITIONED = 0.4
"""How many clusters have a partitioned topic."""
RARE_ROLES: dict[str, tuple[type[Role], float]] = {
    "retention": (Retention, 0.15),
    "destruction": (Destruction, 0.2),
    "compaction": (Compaction, 0.25),
}
"""Roles that only some seeds have, because other rules hold with them; how many."""
ALL_ROLES: dict[str, tuple[type[Role], float]] = {**ROLES, **RARE_ROLES}
CALM_SECONDS = 400.0
"""Virtual seconds after the last fault within which all applications have all answers."""


LEAST_OPERATIONS = 200
LEAST_FAULTS = 5
"""The least operations of clients, and the least faults, of a seed that runs as a whole with the size that it chooses.

A service of such a seed also starts again at least once.
"""
FLOOR_SECONDS = 1.0
"""Seconds after each fault that is added to reach LEAST_FAULTS."""


@dataclass(slots=True)
class Size:
    """How large a scenario is."""

    writers: int = 2
    transactions: int = 15
    """Transactions of a writer."""
    faults: int = 8
    seconds: float = 10.0
    """Virtual seconds in which faults happen."""

    @classmethod
    def of(cls, choose: random.Random) -> Self:
        """A size that a seed chooses; most are as the defaults."""
        writers = choose.choice((2, 2, 3))
        faults, seconds = choose.choice(((8, 10.0), (8, 10.0), (12, 10.0), (8, 6.0), (8, 14.0), (16, 20.0), (8, 50.0)))
        return cls(writers, 30 // writers, faults, seconds)


@dataclass(slots=True)
class Outcome:
    """What a seed did."""

    seed: int
    operations: int
    virtual_seconds: float
    digest: str
    counts: dict[str, int]
    fates: dict[str, int] = field(default_factory=dict)
    finding: str = ""
    roles: list[str] = field(default_factory=list)
    reached: dict[str, int] = field(default_factory=dict)
    """Transitions and errors, as `coverage` names them."""
    cpu_seconds: float = 0.0
    part: Part = field(default_factory=Part)
    """All faults, roles and writers that it had."""
    faults: int = 0
    restarts: int = 0
    """How often a service started again."""


A = TypeVar("A", bound=App)


class Scenario:
    """One seed of an embedded log: a service, writers, and a few roles."""

    on_cluster = False
    """Whether the log is on a cluster, which may store twice what is sent without a transaction."""
    may_rot = True
    """Whether its log may be damaged in the end."""
    topics = TOPICS
    """The topics that writers write to."""

    def __init__(self, world: World, kinds: dict[str, int], size: Size | None = None, part: Part | None = None) -> None:
        """`size`: how large it is; None: the seed chooses. `part`: what the seed is reduced to; None: all of it."""
        self.world = world
        self._kinds = kinds
        self._has_floors = size is None and part is None
        self.size = size = size or Size.of(world.random("size"))
        self.part = part = part or Part()
        names = self._choose_roles() if part.roles is None else part.roles
        trims = "retention" in names
        self.rots = self.may_rot and not trims and world.random("rots").random() < ROTS
        """Whether its log is damaged in the end."""
        partitions = {} if trims else self.choose_partitions()  # an archive reads topics that it has created
        self.history = History(lambda: world.now, world.fail, Partitions(partitions))
        self.history.numbered = not self.on_cluster
        self.logs = self.history.partitions.logs(*self.topics)
        """The logs of its topics: the partitions of those that are partitioned."""
        self.choose = world.random("services")
        self.calls = Calls(world, on_cluster=self.on_cluster)
        world.enter(self.calls.recorded())
        world.enter(small_sizes(world.random("sizes"), world.log))
        self.services = self.make_services()
        for service in self.services:
            service.on_take_over = self.history.took_over
        self.options = {"max_unavailable": world.random("options").choice((5.0, 30.0, 60.0))}
        least = LEAST_OPERATIONS if self._has_floors else 0
        pause = size.seconds * world.random("pauses").choice((0.0, 0.3, 0.3))
        self.setting = Setting(
            self.address, self.history, self.topics, world.log, self.options, self.on_cluster, least, pause
        )
        self.setting.deletes = "compaction" in names  # writers get copies of the setting before roles begin
        self.calm = 0.0
        """When the faults ended."""
        self.over = False
        """Whether nothing is started again."""
        self.final: dict[str, list[Shown]] = {}
        """All committed records of each topic, also those that retention has dropped or compaction removed."""
        self.left: dict[str, list[Shown]] = {}
        """Those that compaction has not removed."""
        self.archived: dict[str, list[Shown]] = {}
        """Records that retention may have dropped in the end."""
        self.committed_numbers: dict[str, int] = {}
        self.apps: list[App] = []
        writers = range(size.writers) if part.writers is None else part.writers
        transactions = size.transactions if part.transactions is None else part.transactions
        self._add_writers(writers, transactions)
        self.roles: list[Role] = [ALL_ROLES[name][0](self, world.random("role", name)) for name in names]
        faults = range(size.faults) if part.faults is None else part.faults
        self.faults = self.make_faults()
        seconds = size.seconds if part.seconds is None else part.seconds
        self.whole = Part(tuple(faults), tuple(names), tuple(writers), transactions, seconds)
        """All faults, roles and writers that it has."""

    # What differs between kinds of scenarios

    def choose_partitions(self) -> dict[str, int]:
        """The topics that are partitioned, with their numbers of partitions."""
        return {}

    def make_services(self) -> list[Service]:
        """The services, not started yet."""
        choose = self.choose
        service = embedded(
            self.world.host("alpha"),
            segment_bytes=choose.choice((4096, 1 << 16, 1 << 26)),
            journal_bytes=choose.choice((4096, 1 << 16, 1 << 26)),
            watermark_bytes=choose.choice((0, 1 << 16)),
        )
        service.config = self.configured(service.config)
        return [service]

    def configured(self, config: Config) -> Config:
        """The configuration of a service with what the seed chooses."""
        choose = self.choose
        timeout, remember = choose.choice((5.0, 60.0)), choose.choice((8.0, 3600.0))
        transactions = replace(config.transactions, timeout=timeout, remember=remember, session_timeout=6.0)
        snapshots = replace(config.snapshots, changes=choose.choice((5, 50, 1000)), interval_ms=1000)
        streams = replace(config.streams, memory_bytes=choose.choice((4000, 1 << 28)))
        log = replace(config.log, max_message_bytes=choose.choice((SMALLEST_LIMIT, MAX_MESSAGE_BYTES)))
        retention = replace(config.retention, check_seconds=choose.choice((1.0, 30.0)))
        service = replace(config.service, client_bytes=connection.SMALLEST_CREDIT)  # which a seed may make small
        parts = {"log": log, "transactions": transactions, "snapshots": snapshots, "streams": streams}
        return replace(config, **parts, retention=retention, service=service)

    def make_faults(self) -> Faults:
        """What can go wrong."""
        return Faults(self)

    @property
    def address(self) -> str:
        return f"txnbuf://{self.services[0].address}"

    def _choose_roles(self) -> list[str]:
        names = choose_roles(self.world.random("roles"))
        retains, destroys, compacts = (
            self.world.random("rare role", rare).random() < RARE_ROLES[rare][1] for rare in RARE_ROLES
        )
        if retains:
            return retained(names, self.world.random("holder"))
        if compacts and not self.on_cluster:
            return compacted(names, self.world.random("holder"))
        return [*names, "destruction"] if destroys and self.on_cluster else names

    # Running it

    def _add_writers(self, numbers: Iterable[int], transactions: int) -> None:
        setting = self.writer_setting(self.topics)
        for number in numbers:
            kind = SyncWriter if number and number == self.size.writers - 1 else Writer
            self.add(kind, f"writer{number}", transactions, setting=setting)

    def add(self, kind: type[A], name: str, *arguments: Any, setting: Setting | None = None, **named: Any) -> A:
        """Add an application, on one of the hosts of clients."""
        choose = self.world.random("app", name)
        host = self.world.host(choose.choice(CLIENT_HOSTS))
        app = kind(name, host, setting or self.setting, choose, *arguments, **named)
        self.apps.append(app)
        return app

    def writer_setting(self, topics: tuple[str, ...]) -> Setting:
        """The setting of an application that writes to these topics only."""
        return replace(self.setting, topics=topics)

    def run(self) -> None:
        """Run it to its end. Raises Finding."""
        assert self.whole.faults is not None
        for service in self.services:
            service.start()
        for role in self.roles:
            role.prepare()
        self.faults.plan(self.whole.faults, self.size.seconds, self._kinds)
        for app in self.apps:
            app.start()
        self.world.scheduler.after(CHECK_SECONDS, self._supervise)
        assert self.whole.seconds is not None
        self.world.run(self.whole.seconds)
        self._reach_floors()
        self.world.log("scenario", "calms down")
        self.faults.calm_down()
        self.calm = self.world.now
        writers = [app for app in self.apps if isinstance(app, Writer | SyncWriter | Rival | BranchDriver)]
        self.wait(lambda: all(app.done for app in writers), "the writers have not ended")
        self._check_floors()
        for role in self.roles:
            role.finish()
        self._read_all()
        self.wait(lambda: not self._behind(), lambda: f"not everything was shown: {self._behind()}")
        self._compare()
        self._verify()
        if self.rots:
            BitRot(self).run()

    @property
    def restarts(self) -> int:
        """How often a service started again."""
        return sum(len(service.processes) - 1 for service in self.services)

    def _reach_floors(self) -> None:
        """Let more faults happen until there were enough, and a service has started again."""
        choose = self.world.random("floors")
        while self._has_floors and (self.faults.happened < LEAST_FAULTS or not self.restarts):
            if all(service.running for service in self.services):
                self.faults.one(choose, self._kinds if self.restarts else RESTARTS)
            self.world.run(FLOOR_SECONDS)

    def _check_floors(self) -> None:
        topics = {topic for attempt in self.history.attempts for topic in attempt.writes}
        if self._has_floors and (self.history.operations < LEAST_OPERATIONS or len(topics) < 2):
            raise Finding(f"the seed has only {self.history.operations} operations on {len(topics)} topics")

    def wait(self, done: Any, problem: Any) -> None:
        if not self.world.run(CALM_SECONDS, done, every=CHECK_STEPS):
            text = problem if isinstance(problem, str) else problem()
            raise Finding("\n".join([f"{CALM_SECONDS:g} s after the last fault {text}", *self._late()]))

    def _late(self) -> list[str]:
        return [*self.calls.late(max(self.calm, self.history.newest_take_over))]

    def _supervise(self) -> None:
        """Start what has ended again, as an operator or a supervisor does."""
        if self.over:
            return
        for service in self.services:
            if service.running is None and not service.held and self._starts_now(service.host.name):
                service.start()
        for app in self.apps:
            if not app.done and (app.process is None or app.process.dead) and self._starts_now(app.name):
                app.start()
        self.world.scheduler.after(CHECK_SECONDS, self._supervise)

    def _starts_now(self, name: str) -> bool:
        return self.world.random("restart", name, self.world.now).random() < 0.4

    def _read_all(self) -> None:
        """Read all topics with a new client until nothing more comes: everything that was decided is there."""
        read: list[bool] = []

        async def main() -> None:
            committed = False
            while not read:
                try:
                    async with connect(self.address, **self.options) as client, AsyncExitStack() as readers:
                        if not committed:
                            await self._commit_one(client)
                            committed = True
                        await self._read_to_end(client, readers)
                        self.committed_numbers[Rival.NAME] = await client.committed_number(Rival.NAME)
                        read.append(True)
                except Error as error:
                    self.world.log("final", f"reads again after {error!r:.200}")
                    await asyncio.sleep(PAUSE)

        self.world.host("delta").start("final", main)
        self.wait(lambda: bool(read), lambda: f"not everything was read: {self._missing()}")

    async def _commit_one(self, client: Any) -> None:
        """Commit a transaction on all topics, now that nothing is wrong."""
        attempt = self.history.attempt("final")
        async with client.transaction() as transaction:
            attempt.txn = transaction.id
            for topic in self.topics:
                value = b"final.%d.%s" % (len(self.history.attempts), topic.encode())
                self.history.sent(attempt, topic, value, b"final")
                await transaction.send(topic, value, key=b"final")
            self.history.asked(attempt)
        self.history.ended(attempt, Fate.COMMITTED)

    async def _read_to_end(self, client: Any, stack: AsyncExitStack) -> None:
        """Read all topics until no role misses anything. Outcomes are asked for before the last look at the topics."""
        readers: dict[str, Any] = {}
        self.final.clear()
        self.left.clear()
        await self._ask_outcomes(client)
        await self._read_on(client, stack, readers)
        while self._missing():
            await asyncio.sleep(CHECK_SECONDS)
            await self._read_on(client, stack, readers)
            if not self._missing():
                await self._ask_outcomes(client)
                await self._read_on(client, stack, readers)

    async def _read_on(self, client: Any, stack: AsyncExitStack, readers: dict[str, Any]) -> None:
        """Read what the topics have more; `readers` has the reader of each topic that exists."""
        for topic in self.all_topics:
            if topic not in readers:
                try:
                    readers[topic] = await stack.enter_async_context(await client.reader(topic))
                except TopicNotFound:
                    continue
            reader, found = readers[topic], self.left.setdefault(topic, [])
            while (batch := await reader.read(timeout=0.2)) is not None or (await reader.lag())[topic].behind:
                records = shown(batch or ())
                if records and not found:
                    found += before(self.archived.get(topic, ()), records[0])
                found += records
            self.final[topic] = self._put_back(topic, found)

    def _put_back(self, topic: str, left: list[Shown]) -> list[Shown]:
        for role in self.roles:
            left = role.put_back(topic, left)
        return left

    async def _ask_outcomes(self, client: Any) -> None:
        """Learn the outcomes that the writers do not know, and compare the others with what they were told."""
        asked = [one for one in self.history.attempts if one.txn is not None]
        await asyncio.gather(*(self._ask_outcome(client, one) for one in asked))

    async def _ask_outcome(self, client: Any, attempt: Attempt) -> None:
        try:
            outcome = await client.outcome(attempt.txn)
        except OutcomeForgotten:
            return
        except UnknownTransaction:
            if not attempt.losable:
                return
            outcome = TransactionOutcome.ABORT
        if outcome is None:
            return
        committed = outcome is TransactionOutcome.COMMIT
        if attempt.fate is Fate.ASKED:
            self.history.learned(attempt, committed=committed)
            self.world.log("final", str(attempt))
        elif committed != attempt.fate.may_be_visible and attempt.producer is None:
            self.world.fail(f"{attempt} has the outcome {outcome.name} in the end")

    @property
    def all_topics(self) -> list[str]:
        return [*self.setting.logs, *(topic for role in self.roles for topic in role.targets)]

    def _missing(self) -> list[str]:
        return [text for role in self.roles for text in role.missing()]

    def _behind(self) -> list[str]:
        return [*behind(self.history, self.final)]

    def _verify(self) -> None:
        """Verify the stored state against the logs, as `txnbuf verify` does."""
        for host in self.verified_hosts:
            self._verify_on(host)

    @property
    def verified_hosts(self) -> list[Host]:
        """The hosts whose log is verified."""
        return [self.services[0].host]

    def _verify_on(self, host: Host) -> None:
        verified: list[list[str]] = []
        damaged = {topic for role in self.roles for topic in role.damaged}

        def main() -> None:
            with self.open_log() as broker:
                findings = verify(broker)
            verified.append([str(one) for one in findings if one.level is Level.ERROR and one.topic not in damaged])

        host.spawn("verify", main)
        self.wait(lambda: bool(verified), "the log is not verified")
        if verified[0]:
            raise Finding("verify found " + "\n".join(verified[0]))

    def open_log(self) -> Broker:
        """The log of the service, to read it only."""
        return FileBroker.open(DIRECTORY, read_only=True)

    def _compare(self) -> None:
        compared = {topic: self.final.get(topic, []) for topic in self.setting.logs}
        found = [*violations(self.history, compared), *(text for role in self.roles for text in role.wrong())]
        found += self._late()
        if found:
            raise Finding("\n".join(found[:20]))


class ClusterScenario(Scenario):
    """One seed of a Pulsar cluster: two services, one of them on standby, and the applications."""

    on_cluster = True
    may_rot = False

    def make_services(self) -> list[Service]:
        self.make_cluster()
        return [self.on_host(name) for name in ("alpha", "omega")]

    def choose_partitions(self) -> dict[str, int]:
        choose = self.world.random("partitions")
        return {self.topics[0]: choose.choice((2, 3))} if choose.random() < PARTITIONED else {}

    def make_cluster(self) -> None:
        """Make the cluster, in place of Pulsar, with the topics that an operator has partitioned."""
        self.cluster = SimCluster(self.world, ledger_entries=self.choose.choice((10, 100, 1000)))
        self.cluster.moved_new_topics = self.world.random("moves").choice((0.0, 0.0, 0.5))
        self.cluster.slow_callbacks = self.world.random("callbacks").choice((0.0, 0.0, 0.05, 0.3))
        self.world.enter(in_place_of_pulsar(self.cluster))
        for topic, count in self.history.partitions.counts.items():
            self.world.count("partitioned topic")
            self.world.log("scenario", f"{topic} has {count} partitions")
            self.cluster.answer("PUT", f"persistent/{NAMESPACE}/{topic}/partitions", count)

    def on_host(self, name: str, shard: int = -1, shards: int = 1) -> Service:
        """A service on a host."""
        service = on_cluster(self.world.host(name), shard, shards)
        service.config = self.configured(service.config)
        return service

    def make_faults(self) -> Faults:
        faults = ClusterFaults(self)
        faults.cluster = self.cluster
        return faults

    def open_log(self) -> Broker:
        return self.services[0].open_log()

    @property
    def address(self) -> str:
        return ADDRESS


class ShardsScenario(ClusterScenario):
    """One seed of a cluster with two shards: three services, one of them a standby, and transactions over both."""

    topics = (TOPICS[0], "returns")

    def make_services(self) -> list[Service]:
        self.make_cluster()
        assert [shard_of(topic, 2) for topic in self.topics] == [0, 1]
        standby = self.choose.randrange(2)
        return [self.on_host(*place, 2) for place in (("alpha", 0), ("omega", 1), ("sigma", standby))]
