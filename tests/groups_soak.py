"""Members of a group as processes, added, killed, paused and ended at random while records are written.

Each committed record of the source must be in the target once, in the order of its partition.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from group_member import DONE, GROUP
from service_process import ServiceProcess, kept_port

from broker_io.position import Position
from broker_io.standalone import ask as ask_cluster
from snapshots.shards import shard_of
from txnbuffer import SyncClient, connect
from txnbuffer.cli.admin_client import ServiceAddress, call

MEMBER = Path(__file__).with_name("group_member.py")
MOST, FEWEST = 5, 1
"""Maximum number of running members."""
LONG = 300.0
"""Seconds to finish after the last kill."""
RESTARTS = 0.05
"""Probability that an event kills the service, in the long form."""
SHORT_TIMES = ("--set", "transactions.timeout=6", "--set", "transactions.session_timeout=2")
"""Seconds after which the transactions of killed or paused members are aborted, so that readers continue soon."""
TOPICS = tuple(f"flights-{number}" for number in range(5))
WIDE = "flights"

Flight = tuple[bytes | None, bytes]


class Place(NamedTuple):
    """The `topics` of the members, in the log or cluster at `address`; `grow` adds partitions.

    `restart` kills the service and starts another one, with the given probability at each event.
    """

    address: str
    options: dict[str, str]
    service: str
    topics: Sequence[str]
    grow: Callable[[], None] = lambda: None
    restart: Callable[[], None] = lambda: None
    restarts: float = 0.0


@dataclass
class Report:
    """`happened`: counts of events by kind; `wrong`: differences between source and target."""

    happened: Counter[str] = field(default_factory=Counter)
    records: int = 0
    generation: int = 0
    wrong: list[str] = field(default_factory=list)


class Members:
    def __init__(self, place: Place, chance: random.Random) -> None:
        self._command = [sys.executable, str(MEMBER), place.address, json.dumps(place.options), *place.topics]
        self._chance = chance
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the members
        self.running: list[subprocess.Popen[bytes]] = []
        self.stopped: list[subprocess.Popen[bytes]] = []

    def event(self, joined: set[int]) -> str:
        """Add, kill, pause, continue or end a member, preferably one of `joined` (pids); the kind of the event."""
        ways = ["add"] * 2 if len(self.running) + len(self.stopped) < MOST else []
        ways += ["continue"] * 2 if self.stopped else []
        ways += ["kill", "stop", "end"] if len(self.running) > FEWEST else []
        way = self._chance.choice(ways)
        if way == "add":
            self.add()
        elif way == "continue":
            self._take(self.stopped).send_signal(signal.SIGCONT)
        else:
            self.running.sort(key=lambda member: member.pid in joined)
            member = self.running.pop() if self._chance.random() < 0.8 else self._take(self.running)
            if way == "end" and member.pid not in joined:
                way = "kill"  # it may have no handler yet, and a background process of a shell ignores SIGINT
            signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "end": signal.SIGINT}
            member.send_signal(signals[way])
            if way == "stop":
                self.stopped.append(member)
            else:
                member.wait(60)
        return way

    def add(self) -> None:
        self.running.append(subprocess.Popen(self._command, stderr=self._said))

    def continue_all(self) -> None:
        """Continue all paused members, and start one if none runs."""
        while self.stopped:
            self._take(self.stopped).send_signal(signal.SIGCONT)
        if not self.running:
            self.add()

    def ended(self) -> list[str]:
        """The output of members that ended unexpectedly."""
        if all(member.poll() is None for member in self.running):
            return []
        self._said.seek(0)
        return [f"a member ended unexpectedly: {self._said.read().decode()[-4000:]}"]

    def end(self) -> None:
        for member in self.running + self.stopped:
            member.kill()
            member.wait(60)
        self._said.close()

    def _take(self, members: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        member = members.pop(self._chance.randrange(len(members)))
        if members is self.stopped:
            self.running.append(member)
        return member


def soak(place: Place, events: int, seed: int, flights: Iterator[Flight], each: int = 40) -> Report:
    """Run `events` random events, each after writing some flights."""
    chance, report, sent = random.Random(seed), Report(), Counter[bytes]()
    members = Members(place, chance)
    with connect(place.address, broker_options=place.options or None) as client:
        try:
            for number in range(events):
                if number == events // 2:
                    place.grow()
                write(client, place.topics, [next(flights) for _ in range(each)], number, sent)
                if chance.random() < place.restarts:
                    place.restart()
                    report.happened["restart"] += 1
                else:
                    report.happened[members.event(joined(place))] += 1
                time.sleep(chance.choice([0.0, 0.2, 1.0, 2.0]))
            members.continue_all()
            judge(client, sent, report)
            report.wrong += members.ended()
        finally:
            members.end()
        rows = call(ServiceAddress(place.service), "Groups", group=GROUP)
        report.generation = max((row["generation"] for row in rows), default=0)
    return report


def joined(place: Place) -> set[int]:
    """The pids of the present members."""
    rows = call(ServiceAddress(place.service), "Groups", group=GROUP)
    return {int(row["member"].split("-")[-2]) for row in rows if row["member"]}


def write(client: SyncClient, topics: Sequence[str], flights: list[Flight], number: int, sent: Counter[bytes]) -> None:
    """Write a transaction to all topics; each fifth one aborts."""
    with client.transaction(timeout=LONG) as txn:
        for at, (key, value) in enumerate(flights):
            txn.send(topics[at % len(topics)], value, key=key)
        if number % 5 == 4:
            txn.abort()
            return
    sent.update(value for _, value in flights)


def judge(client: SyncClient, sent: Counter[bytes], report: Report) -> None:
    """Read the target until it has all records, and a little longer; report differences."""
    found: Counter[bytes] = Counter()
    last: dict[str, Position] = {}
    deadline = time.monotonic() + LONG
    with client.reader(DONE) as reader:
        while time.monotonic() < deadline:
            batch = reader.read(timeout=1.0)
            if batch is None and found.total() >= sent.total():
                break
            for record in batch or ():
                if "from" not in record.properties:
                    continue
                found[(record.value or b"").swapcase()] += 1
                source, at = record.properties["from"], Position.parse(record.properties["at"])
                if source in last and at <= last[source]:
                    report.wrong.append(f"{at} of {source} follows {last[source]}")
                last[source] = at
    report.records = found.total()
    report.wrong += [f"lost: {value!r}" for value in (sent - found)]
    report.wrong += [f"doubled or never committed: {value!r}" for value in (found - sent)]


def made_up() -> Iterator[Flight]:
    """Invented flights, without end."""
    number = 0
    while True:
        number += 1
        yield f"N{number % 17}".encode(), f"flight {number}".encode()


def of_the_year() -> Iterator[Flight]:
    """The flights of the demo."""
    from txnbuffer.demo.flights import DEPARTURES, load_hours

    for hour in load_hours():
        yield from ((record.key, record.value or b"") for record in hour.records[DEPARTURES])


class Restarted:
    """A service that can be killed and restarted at the same port."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self.port = kept_port()
        self._service = ServiceProcess(*arguments, *SHORT_TIMES, port=self.port).wait_serving()

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def restart(self) -> None:
        self._service.kill()
        self._service = ServiceProcess(*self._arguments, *SHORT_TIMES, port=self.port).wait_serving()

    def kill(self) -> None:
        self._service.kill()


def embedded(directory: Path, events: int, seed: int, flights: Iterator[Flight], restarts: float = 0.0) -> Report:
    """Run the soak on the embedded log of a service."""
    service = Restarted(str(directory / "log"))
    try:
        place = Place(f"txnbuf://{service.target}", {}, service.target, TOPICS)
        with connect(place.address) as client:
            client.send(DONE, b"begin")
        return soak(place._replace(restart=service.restart, restarts=restarts), events, seed, flights)
    finally:
        service.kill()


def beside_pulsar(
    cluster: tuple[str, str, str],
    events: int,
    seed: int,
    flights: Iterator[Flight],
    restarts: float = 0.0,
    shards: int = 1,
) -> Report:
    """Run the soak on a partitioned topic that gets more partitions meanwhile. `cluster`: URL, admin URL, namespace.

    With several shards each has a service; one of them is restarted at a time.
    """
    url, admin, namespace = cluster
    path = f"persistent/{namespace}/{WIDE}/partitions"
    ask_cluster(admin, path, "PUT", 3)
    ask_cluster(admin, f"persistent/{namespace}/{DONE}", "PUT")
    address = f"{url}/{namespace}"
    services: list[Restarted] = []
    chance = random.Random(seed)
    try:
        for shard in range(shards):
            flags = ("--shards", str(shards), "--shard", str(shard))
            services.append(Restarted(address, "--admin-url", admin, *flags))
        grow = partial(ask_cluster, admin, path, "POST", 5)
        asked = services[shard_of(GROUP, shards)].target
        place = Place(address, {"admin_url": admin}, asked, (WIDE,), grow, lambda: chance.choice(services).restart())
        return soak(place._replace(restarts=restarts), events, seed, flights)
    finally:
        for service in services:
            service.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--pulsar-events", type=int, default=40)
    parser.add_argument("--shards", type=int, default=1, help="shards of the namespace, each with a service")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    reports = {}
    with tempfile.TemporaryDirectory() as directory:
        if asked.events:
            reports["embedded"] = embedded(Path(directory), asked.events, asked.seed, of_the_year(), RESTARTS)
            print(reports["embedded"], flush=True)
        if asked.pulsar_events:
            from pulsar_cluster import shared

            with shared(Path(directory)) as cluster:
                namespace = cluster.namespace()
                place = cluster.url, cluster.admin, namespace
                wanted = asked.pulsar_events, asked.seed, of_the_year(), RESTARTS, asked.shards
                reports["pulsar"] = beside_pulsar(place, *wanted)
                cluster.drop(namespace)
            print(reports["pulsar"], flush=True)
    if any(report.wrong for report in reports.values()):
        sys.exit(f"seed {asked.seed}: there are differences")


if __name__ == "__main__":
    main()
