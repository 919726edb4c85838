"""Applications of a simulated world that copy topics: relays to another topic, and sinks that keep rows and a token."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sim.apps import PAUSE, App, Setting
from sim.history import Shown
from sim.readers import changes_of
from sim.world import Host, World

from broker_io import open_broker
from broker_io.environment import current
from broker_io.errors import Error, Fenced
from broker_io.port import Broker
from txnbuffer import connect
from txnbuffer.cli.admin_client import ServiceAddress
from txnbuffer.cli.admin_client import call_owner as ask_owner
from txnbuffer.client.client import Client
from txnbuffer.client.streams.streams import ChangeBatch, Rollback
from txnbuffer.errors import MutationsTrimmed, RelayBranched, RelayTargetTaken, SeqnoGap, TopicNotFound
from txnbuffer.rpc.discovery import owner_address_of
from txnbuffer.sinks import runner
from txnbuffer.sinks.relay import Relay, RelayCursor, Target
from txnbuffer.sinks.relay_targets import OwnedTarget, ServiceTarget
from txnbuffer.sinks.runner import SinkProgress, materialize, run_sink
from txnbuffer.sinks.sqlite import SQLiteFile
from txnbuffer.streams.failover import ResumeToken

RELAYED = "relayed"
BROKEN_RELAY = (RelayTargetTaken, RelayBranched, MutationsTrimmed, SeqnoGap)
"""Errors that a relay must not raise as long as no history branches and nothing is trimmed."""


class RelayApp(App):
    """Relays a topic, each time for a while: two of them fence each other."""

    def __init__(
        self,
        name: str,
        host: Host,
        setting: Setting,
        choose: random.Random,
        topic: str,
        *,
        visits: bool,
        cursor: bool,
        release: bool,
    ) -> None:
        """`visits`: it runs only now and then, and fences the relay that runs always. `release`: see OwnedTarget."""
        super().__init__(name, host, setting, choose)
        self._release = release
        self._topic = topic
        self._visits = visits
        self._cursor = cursor

    def start(self) -> None:
        self.process = self.host.spawn(self.name, self._run)

    def _run(self) -> None:
        clock = current().clock
        while True:
            if self._visits:
                clock.sleep(self.choose.uniform(1.0, 12.0))
            until = clock.monotonic() + self.choose.uniform(0.5, 5.0 if self._visits else 20.0)
            stop = lambda until=until: clock.monotonic() > until  # noqa: E731
            relay = Relay(self._source, self._topic, self._target(), max_unavailable=10.0, cursor=self._cursor_of())
            try:
                relay.run(stop=stop)
            except BROKEN_RELAY as error:
                self.host.world.fail(f"{self.name} raised {error!r}")
            except Fenced:
                self.host.world.count("fenced relay")
                clock.sleep(self.choose.uniform(0.0, 4.0))
            except Error as error:
                self.log(f"relays again after {error!r:.200}")
                clock.sleep(PAUSE)

    def _source(self) -> Broker:
        return open_broker(self.setting.address)

    def _target(self) -> Target:
        if self.setting.address.startswith("txnbuf:"):
            return ServiceTarget(connect(self.setting.address, **self.setting.options).open_sync, RELAYED)
        return OwnedTarget(self._source, RELAYED, release=self._release)

    def _cursor_of(self) -> RelayCursor | None:
        address, topic = self.setting.address, self._topic

        def call_owner(broker: Broker, method: str, request: dict[str, Any]) -> Any:
            remote = address.startswith("txnbuf:")
            owner = address if remote else owner_address_of(broker, address, topic)
            return ask_owner(ServiceAddress(owner), method, timeout=5.0, **request)

        return RelayCursor(call_owner, topic, "relay-cursor") if self._cursor else None


@dataclass(slots=True, eq=False)
class Rows:
    """The newest change of each key that a sink had stored when its data was equal to the topic at `seqno`."""

    sink: str
    topic: str
    seqno: int = 0
    complete: bool = True
    rows: dict[bytes | None, Shown] = field(default_factory=dict)


class LedgerSink:
    """A sink that keeps every change that it applied; changes and token are replaced together, as in a database."""

    def __init__(self, topic: str, world: World) -> None:
        self.name = f"the ledger of {topic}"
        self.topic = topic
        self.changes: list[Shown] = []
        self.token: ResumeToken | None = None
        self.complete_at = [0]
        self._world = world

    def begin(self) -> ResumeToken | None:
        return self.token

    def write(self, batches: Sequence[ChangeBatch]) -> None:
        current().clock.sleep(0.001)  # a process that is killed here has written nothing
        for batch in batches:
            for change in changes_of(batch):
                newest = self.changes[-1].seqno if self.changes else 0
                if change.seqno is None or newest is None or change.seqno <= newest:
                    self._world.fail(f"{self.name} was given {change} after seqno {newest}")
                self.changes.append(change)
        self.token = batches[-1].token
        if batches[-1].complete:
            self.complete_at.append(self.token.seqno)

    def roll_back(self, rollback: Rollback) -> int:
        seqno = max(at for at in self.complete_at if at <= rollback.seqno)
        self.changes = [change for change in self.changes if (change.seqno or 0) <= seqno]
        self.complete_at = [at for at in self.complete_at if at <= seqno]
        self.token = rollback.token.rolled_back(seqno)
        return seqno

    @property
    def rows(self) -> Rows:
        """What it has stored."""
        seqno, complete = (0, True) if self.token is None else (self.token.seqno, self.token.complete)
        return Rows(self.name, self.topic, seqno, complete, {change.key: change for change in self.changes})


class LedgerApp(App):
    """Writes a topic to a ledger; the ledger stays when the process is killed."""

    def __init__(self, name: str, host: Host, setting: Setting, choose: random.Random, topic: str) -> None:
        super().__init__(name, host, setting, choose)
        self.ledger = LedgerSink(topic, host.world)
        self._topic = topic

    async def work(self, client: Client) -> None:
        while True:
            stop = asyncio.Event()
            asyncio.get_running_loop().call_later(self.choose.uniform(1.0, 20.0), stop.set)
            cursor = self.choose.choice((None, "ledger"))
            with contextlib.suppress(TopicNotFound):
                await run_sink(client, self._topic, self.ledger, stop=stop, cursor=cursor)
            await asyncio.sleep(PAUSE)


class TableApp(App):
    """Keeps topics as tables of a SQLite file, with `materialize`, and looks at the tables meanwhile."""

    def __init__(
        self, name: str, host: Host, setting: Setting, choose: random.Random, topics: tuple[str, ...], file: Path
    ) -> None:
        super().__init__(name, host, setting, choose)
        self.seen: list[Rows] = []
        self._topics = topics
        self._file = file

    async def work(self, client: Client) -> None:
        while True:
            stop = asyncio.Event()
            asyncio.get_running_loop().call_later(self.choose.uniform(1.0, 20.0), stop.set)
            with contextlib.suppress(TopicNotFound):
                await materialize(client, self._topics, self._file, stop=stop, on_progress=self._looked)
            await asyncio.sleep(PAUSE)

    def _looked(self, progress: SinkProgress) -> None:
        if self.choose.random() < 0.3:
            self.seen += self.tables()

    def tables(self) -> list[Rows]:
        """The tables as another program reads them: all in one transaction of the file."""
        if not self._file.exists():
            return []
        with closing(sqlite3.connect(self._file)) as database:
            database.execute("BEGIN")
            found = database.execute("SELECT topic, name, seqno, complete FROM txnbuffer_topics").fetchall()
            return [self._table(database, *row) for row in found]

    def _table(self, database: sqlite3.Connection, topic: str, name: str, seqno: int, complete: int) -> Rows:
        rows = database.execute(f'SELECT key, value, seqno FROM "{name}"').fetchall()
        found = {key.encode(): Shown(number, key.encode(), value.encode()) for key, value, number in rows}
        return Rows(self.name, topic, seqno, bool(complete), found)


class _ProcessFile(SQLiteFile):
    """A SQLite file that is closed with its process, as the descriptors of a real one are."""

    world: World

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        thread = self.world.scheduler.current
        assert thread is not None
        thread.process.on_death.append(self.close)


@contextlib.contextmanager
def files_of_processes(world: World) -> Iterator[Path]:
    """A directory for SQLite files for a block, in memory if possible; processes that end close their files."""
    kind = type("ProcessFile", (_ProcessFile,), {"world": world})
    module: Any = runner
    memory = Path("/dev/shm")
    before, module.SQLiteFile = module.SQLiteFile, kind
    try:
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
            yield Path(directory)
    finally:
        module.SQLiteFile = before
