"""A cluster of several brokers, which share ZooKeeper and a bookie; topics can be moved between them."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from pulsar_container import distribution

from broker_io.standalone import SHORT_LIVED, Port, StandaloneProcess, ask, is_up

LOAD_MANAGER = "org.apache.pulsar.broker.loadbalance.extensions.ExtensibleLoadManagerImpl"
SESSION_SECONDS = 5
"""Seconds after which the bundles of a killed broker belong to the others."""
READY = "Local BK[0] started"
CLUSTER = "standalone"
MOVE_SECONDS = 60.0
STARTING = 240.0


class Storage(StandaloneProcess):
    """ZooKeeper and a bookie."""

    def __init__(self, directory: Path) -> None:
        self.zookeeper = Port()
        super().__init__(distribution(), directory, [], {**SHORT_LIVED, "PULSAR_STANDALONE_USE_ZOOKEEPER": "1"})

    def arguments(self, data: Path) -> list[str]:
        return [*super().arguments(data), "--no-broker", "--zookeeper-port", str(self.zookeeper.number)]

    def start(self) -> None:
        self.launch()
        deadline = time.monotonic() + STARTING
        while READY not in self.log():
            assert self.alive, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.1)

    def remove(self) -> None:
        super().remove()
        self.zookeeper.free()


class MemberBroker(StandaloneProcess):
    """A broker of the cluster; the first one creates it."""

    program = "broker"

    def __init__(self, storage: Storage, directory: Path, settings: Sequence[str], jar: Path | None) -> None:
        environment = {**SHORT_LIVED, "PULSAR_BROKER_CONF": str(directory / "data" / "standalone.conf")}
        self._without_jar = environment
        self._with_jar = environment | ({"PULSAR_EXTRA_CLASSPATH": str(jar)} if jar else {})
        self._settings = settings
        self._shared = [
            f"metadataStoreUrl=zk:127.0.0.1:{storage.zookeeper.number}",
            f"metadataStoreSessionTimeoutMillis={1000 * SESSION_SECONDS}",
            "advertisedAddress=127.0.0.1",
            f"loadManagerClassName={LOAD_MANAGER}",
            "loadBalancerEnabled=true",
            "loadBalancerSheddingEnabled=false",
            "loadBalancerAutoBundleSplitEnabled=false",
        ]
        super().__init__(storage.home, directory, [*self._shared, *settings], self._with_jar)

    def with_plug_in(self, given: bool) -> None:
        """Start with the settings and the jar from now on, or without them."""
        self._environment = self._with_jar if given else self._without_jar
        self._extra_settings = [*self._shared, *(self._settings if given else [])]

    def arguments(self, data: Path) -> list[str]:
        return []

    def start(self) -> None:
        self.launch()
        deadline = time.monotonic() + STARTING
        while not self._joined():
            assert self.alive, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.1)

    def _joined(self) -> bool:
        try:
            if CLUSTER not in ask(self.admin, "clusters"):
                urls = {"serviceUrl": self.admin, "brokerServiceUrl": self.url}
                ask(self.admin, f"clusters/{CLUSTER}", "PUT", urls)
                ask(self.admin, "tenants/public", "PUT", {"allowedClusters": [CLUSTER]})
        except (OSError, ValueError):
            return False
        return is_up(self.admin)


class Brokers:
    """`url` and `admin` are those of the first broker, which is never killed."""

    def __init__(self, members: list[MemberBroker]) -> None:
        self.members = members
        self.url, self.admin, self.namespace = members[0].url, members[0].admin, members[0].namespace

    def owner(self, topic: str) -> MemberBroker:
        found = json.loads(self._look_up(f"persistent/{topic}"))
        return next(broker for broker in self.members if broker.url == found["brokerUrl"])

    def _look_up(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.admin}/lookup/v2/topic/{path}", timeout=30.0) as answer:
            return str(answer.read().decode())

    def move(self, topic: str, to: MemberBroker) -> None:
        """Move the bundle of a topic to another broker."""
        if (owner := self.owner(topic)) is to:
            return
        bundle = self._look_up(f"persistent/{topic}/bundle")
        place = f"namespaces/{topic.rpartition('/')[0]}/{bundle}/unload"
        ask(owner.admin, f"{place}?destinationBroker={to.admin.removeprefix('http://')}", "PUT")
        deadline = time.monotonic() + MOVE_SECONDS
        while self.owner(topic) is not to:
            assert time.monotonic() < deadline, f"{topic} stays where it is"
            time.sleep(0.1)


@contextlib.contextmanager
def several_brokers(
    directory: Path, count: int, settings: Sequence[str] = (), jar: Path | None = None
) -> Iterator[Brokers]:
    with contextlib.ExitStack() as stack:
        storage = stack.enter_context(Storage(_made(directory / "storage")))
        yield Brokers(
            [
                stack.enter_context(MemberBroker(storage, _made(directory / str(number)), settings, jar))
                for number in range(count)
            ]
        )


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
