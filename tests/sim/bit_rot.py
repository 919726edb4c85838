"""Bit rot: the stored files of an embedded log change while nothing runs.

`docs/embedded-log.md` promises that a wrong byte is noticed: what is read afterwards is right, or a `StorageError`
says what is damaged and the service does not start, or does not serve this topic; `verify` names the damage. Nothing
wrong is shown, nothing is left out in the middle, and nothing is invented.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from sim.checker import progress
from sim.history import Shown
from sim.readers import shown
from sim.service import DIRECTORY
from sim.world import Finding

from broker_io.errors import Error, ServiceUnavailable, StorageError
from broker_io.filelog.log import FileBroker
from broker_io.testing.disk import SECTOR
from txnbuffer import connect
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.recovery.verify import Level, verify

if TYPE_CHECKING:
    from sim.scenario import Scenario

READ_SECONDS = 60.0
"""Virtual seconds within which a reader has everything, or an error."""
STARTED_SECONDS = 2.0
"""Virtual seconds after which a service that finds the log damaged has ended."""
ROT = ("flipped bit", "zeroed sector")
"""Kinds of damage."""
PLACES = (1, 1, 2, 4)
"""Places that are damaged, in different files."""


@dataclass(slots=True)
class Result:
    """What a reader showed of a topic, and the error that ended it."""

    who: str
    topic: str
    records: list[Shown] = field(default_factory=list)
    error: Error | None = None
    ended: bool = False


def misread(result: Result, records: list[Shown], may_miss: Callable[[Shown], bool]) -> str:
    """What is wrong with the result of a reader of a damaged log; empty if nothing is."""
    wanted = [record._replace(seqno=None) for record in records]
    found = [record._replace(seqno=None) for record in result.records]
    name = f"after damage, {result.who} of {result.topic}"
    passed, wrong = progress(found, wanted, may_miss)
    if wrong is not None:
        return f"{name} showed {wrong} as record {passed + 1}, and {wanted[passed : passed + 1]} is there"
    if result.error is None and not result.ended:
        return f"{name} has shown {passed} of {len(wanted)} records within {READ_SECONDS:g} s, without an error"
    if result.error is None and passed < len(wanted):
        return f"{name} showed {passed} of {len(wanted)} records without an error"
    if result.error is not None and not isinstance(result.error, StorageError):
        return f"{name} raised {result.error!r}"
    return ""


class BitRot:
    """Damages the log of a scenario that is over, and judges what is then read."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._world = scenario.world
        self._choose = scenario.world.random("bit rot")
        self._service = scenario.services[0]
        self._topics = [topic for topic, records in scenario.final.items() if records]
        self.damaged: list[str] = []
        """What was damaged."""
        self.results: list[Result] = []

    def run(self) -> None:
        """Damage some places, and read. Raises Finding."""
        self._stop_everything()
        for _ in range(self._choose.choice(PLACES)):
            self._damage()
        named = self._verify()
        self._read_offline()
        self._read_from_service()
        found = [text for result in self.results if (text := self._misread(result))]
        errors = [f"{result.who} of {result.topic}: {result.error!r}" for result in self.results if result.error]
        if self._service.error is not None:
            errors.append(f"the service: {self._service.error!r}")
            if not isinstance(self._service.error, StorageError):
                found.append(f"the service ended with {self._service.error!r}")
        if errors and not named:
            found.append(f"verify found nothing, but {errors}")
        if found:
            raise Finding("\n".join([*found, f"damaged were {self.damaged}"]))

    def _misread(self, result: Result) -> str:
        may_miss = partial(self._scenario.history.may_miss, result.topic)
        return misread(result, self._scenario.final[result.topic], may_miss)

    def _stop_everything(self) -> None:
        self._scenario.over = True
        stops = self._choose.random() < 0.5
        if stops and (running := self._service.running) is not None:
            running.signal(15)
            self._world.run(READ_SECONDS, lambda: running.dead)
        for host in self._world.hosts.values():
            for process in host.processes:
                process.kill()

    def _damage(self) -> None:
        """Flip a bit, or lose a sector, of one file."""
        disk, choose = self._service.host.disk, self._choose
        files = [path for path, size in disk.files().items() if size and path.startswith(f"{DIRECTORY}/")]
        path = choose.choice([path for path in files if posixpath.basename(path) != "lock"])
        before = disk.content(path)
        at = choose.randrange(len(before))
        if choose.random() < 0.5:
            kind = ROT[0]
            disk.flip(path, at * 8 + choose.randrange(8))
        else:
            kind, first = ROT[1], at - at % SECTOR
            disk.put(path, before[:first] + bytes(len(before[first : first + SECTOR])) + before[first + SECTOR :])
        if disk.content(path) != before:
            self.damaged.append(f"{path} at {at} ({kind})")
            self._world.count(kind)
            self._world.log("fault", f"{kind} in {path} at {at}")

    def _verify(self) -> bool:
        """Whether `verify` names damage."""
        named: list[bool] = []

        def main() -> None:
            try:
                with FileBroker.open(DIRECTORY, read_only=True) as broker:
                    named.append(any(finding.level is Level.ERROR for finding in verify(broker)))
            except StorageError as error:
                self._world.log("verify", repr(error))
                named.append(True)

        self._service.host.spawn("verify", main)
        self._wait(lambda: bool(named), "verify has not ended")
        return named[0]

    def _read_offline(self) -> None:
        done: list[None] = []

        def main() -> None:
            for topic in self._topics:
                result = Result("an offline reader", topic)
                self.results.append(result)
                until = self._world.now + READ_SECONDS
                try:
                    with FileBroker.open(DIRECTORY, read_only=True) as log, CommittedReader(log, topic) as reader:
                        while not result.ended and self._world.now < until:
                            batch = reader.read(timeout=0.1)
                            result.records += shown(batch or ())
                            result.ended = batch is None and not reader.lag()[topic].behind
                except Error as error:
                    result.error = error
            done.append(None)

        self._service.host.spawn("offline", main)
        self._wait(lambda: bool(done), "the offline readers have not ended")

    def _read_from_service(self) -> None:
        process, done = self._service.start(), list[None]()
        if self._world.run(STARTED_SECONDS, lambda: process.dead):
            return  # its error says why

        async def main() -> None:
            for topic in self._topics:
                result = Result("a client", topic)
                until = self._world.now + READ_SECONDS
                try:
                    async with (
                        connect(self._scenario.address, max_unavailable=30.0) as client,
                        await client.reader(topic) as reader,
                    ):
                        while not result.ended and self._world.now < until:
                            batch = await reader.read(timeout=0.1)
                            result.records += shown(batch or ())
                            result.ended = batch is None and not (await reader.lag())[topic].behind
                except Error as error:
                    result.error = error
                if not (process.dead and isinstance(result.error, ServiceUnavailable)):  # it has ended meanwhile
                    self.results.append(result)
            done.append(None)

        self._world.host("delta").start("after damage", main)
        self._wait(lambda: bool(done), "the clients have not ended")

    def _wait(self, done: Callable[[], bool], problem: str) -> None:
        if not self._world.run(READ_SECONDS * 10, done):
            raise Finding(f"after damage, {problem}; damaged were {self.damaged}")
