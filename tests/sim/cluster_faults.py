"""The faults of a scenario with a simulated Pulsar cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.cluster import NAMESPACE
from sim.faults import Faults

if TYPE_CHECKING:
    from sim.cluster import SimCluster

WINDOWS: dict[str, tuple[float, ...]] = {
    "slow acknowledgements": (0.01, 0.2),
    "broken appends": (0.05, 0.5),
    "lost answers": (0.02, 0.3),
    "odd answers": (0.02, 0.2, 0.6),
    "silent readers": (0.3, 1.0),
    "slow readers": (0.3, 1.0),
    "slow compaction": (1.0, 10.0),
}
"""What the cluster does for some seconds, with the values that it may have; see the attributes of `SimCluster`."""
UNOWNED = (0.0, 0.2, 3.0)
"""Seconds for which no broker owns a topic that was unloaded."""


class ClusterFaults(Faults):
    """Adds the faults of the cluster itself."""

    cluster: SimCluster

    def calm_down(self) -> None:
        super().calm_down()
        self.cluster.away = False
        self.cluster.moved_new_topics = self.cluster.slow_callbacks = 0.0
        for kind in WINDOWS:
            self._set(kind, 0.0)
        for name in [*self.cluster.topics]:
            self._read_again(name)

    def _happen(self, kind: str) -> None:
        if kind not in WINDOWS:
            super()._happen(kind)
        elif not self.calm:
            self._count(kind)
            self._set(kind, self._choose.choice(WINDOWS[kind]))
            self._later(self._choose.uniform(1.0, 8.0), lambda: self._set(kind, 0.0))

    def _set(self, kind: str, value: float) -> None:
        setattr(self.cluster, kind.replace(" ", "_"), value)

    def _topic(self) -> str | None:
        return self._choose.choice([*self.cluster.topics]) if self.cluster.topics else None

    def _unload_topic(self) -> None:
        if (name := self._topic()) is not None:
            self._count("unload topic", name)
            self.cluster.unload(name, self._choose.choice(UNOWNED))

    def _unload_namespace(self) -> None:
        self._count("unload namespace")
        self.cluster.unload_namespace(NAMESPACE, self._choose.choice(UNOWNED))

    def _roll_ledger(self) -> None:
        """A bookie of the newest ledger fails: the ledger is closed, and the topic continues in another one."""
        if (name := self._topic()) is not None:
            self._count("roll ledger", name)
            self.cluster.topics[name].roll()

    def _unreadable_ledger(self) -> None:
        """All bookies of a ledger are away for some seconds."""
        if (name := self._topic()) is not None:
            ledger = self._choose.choice(self.cluster.topics[name].ledgers)
            self._count("unreadable ledger", f"{ledger.number} of {name}")
            ledger.unreadable = True
            self._later(self._choose.choice((0.5, 5.0, 20.0, 40.0)), lambda: self._read_again(name))

    def _read_again(self, name: str) -> None:
        topic = self.cluster.topics.get(name)
        if topic is not None and not topic.readable:
            for ledger in topic.ledgers:
                ledger.unreadable = False
            for reader in [*topic.readers]:
                reader.pump()

    def _cluster_under_load(self) -> None:
        """The cluster comes back under load: readers that attach get nothing at first, and services start just then."""
        self._count("cluster under load")
        self.cluster.unload_namespace(NAMESPACE, self._choose.choice(UNOWNED))
        self._set("slow readers", 1.0)
        self._later(self._choose.uniform(1.0, 8.0), lambda: self._set("slow readers", 0.0))
        for service in self._scenario.services:
            if service.running is not None and self._choose.random() < 0.5:
                service.running.kill()

    def _cluster_restart(self) -> None:
        self._count("cluster restart")
        self.cluster.restart(self._choose.choice((0.5, 5.0, 20.0)))


CLUSTER = {
    "kill service": 4,
    "kill in recovery": 1,
    "stop service": 2,
    "pause service": 3,
    "kill client": 3,
    "pause client": 1,
    "power loss": 1,
    "client power loss": 1,
    "clock jump": 1,
    "clock drift": 1,
    "lossy network": 2,
    "slow network": 1,
    "partition": 4,
    "one-way partition": 4,
    "unload topic": 4,
    "unload namespace": 2,
    "roll ledger": 2,
    "unreadable ledger": 2,
    "cluster restart": 2,
    "cluster under load": 2,
    "slow acknowledgements": 2,
    "broken appends": 2,
    "lost answers": 2,
    "odd answers": 3,
    "silent readers": 2,
    "slow readers": 2,
    "slow compaction": 1,
}
"""The faults of a cluster and their weights."""
