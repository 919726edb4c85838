"""The faults of a scenario with a simulated Pulsar cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.faults import Faults

if TYPE_CHECKING:
    from sim.cluster import SimCluster

WINDOWS: dict[str, tuple[float, ...]] = {
    "slow_acknowledgements": (0.01, 0.2),
    "broken_appends": (0.05, 0.5),
    "lost_answers": (0.02, 0.3),
    "silent_readers": (0.3, 1.0),
    "slow_compaction": (1.0, 10.0),
}
"""What the cluster does for some seconds, with the values that it may have."""


class ClusterFaults(Faults):
    """Adds the faults of the cluster itself."""

    cluster: SimCluster

    def calm_down(self) -> None:
        super().calm_down()
        for name in WINDOWS:
            setattr(self.cluster, name, 0.0)

    def _unload_topic(self) -> None:
        if self.cluster.topics:
            name = self._choose.choice([*self.cluster.topics])
            self._count("unload topic", name)
            self.cluster.unload(name)

    def _cluster_restart(self) -> None:
        self._count("cluster restart")
        self.cluster.restart(self._choose.choice((0.5, 5.0, 20.0)))

    def _cluster_trouble(self) -> None:
        """Let the cluster be slow, forgetful or silent for some seconds."""
        name = self._choose.choice([*WINDOWS])
        self._count(name.replace("_", " "))
        setattr(self.cluster, name, self._choose.choice(WINDOWS[name]))

        def end() -> None:
            setattr(self.cluster, name, 0.0)

        self._later(self._choose.uniform(1.0, 8.0), end)


CLUSTER = {
    "kill service": 4,
    "stop service": 2,
    "pause service": 3,
    "kill client": 3,
    "pause client": 1,
    "power loss": 1,
    "clock jump": 1,
    "clock drift": 1,
    "lossy network": 2,
    "slow network": 1,
    "partition": 4,
    "unload topic": 4,
    "cluster restart": 2,
    "cluster trouble": 6,
}
"""The faults of a cluster and their weights."""
