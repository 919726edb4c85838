"""The simulated cluster is checked against the real one: the same scripts observe the same on both."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from pulsar_cluster import Cluster
from sim.cluster import ADDRESS, SimCluster, in_place_of_pulsar
from sim.cluster_scripts import SCRIPTS, Rig
from sim.stage import SimulatedTime, Stage
from sim.world import World

from broker_io import open_broker
from broker_io.port import Broker
from broker_io.testing.contract import base

Script = Callable[[Rig], Any]


def on_simulated(script: Script) -> Any:
    with World(1) as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "time", SimulatedTime)
        cluster = SimCluster(world)
        world.enter(in_place_of_pulsar(cluster))

        def ask(method: str, resource: str, body: Any = None) -> tuple[int, Any]:
            joint = "" if not resource or resource[0] == "?" else "/"
            return cluster.answer(method, f"persistent/public/default/orders{joint}{resource}", body)

        return Stage(world).call(lambda: script(Rig(lambda **options: open_broker(ADDRESS, **options), ask)))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_both_clusters_behave_alike(
    script: Script, cluster: Cluster, namespace: str, opening: Callable[..., Broker]
) -> None:
    def ask(method: str, resource: str, body: Any = None) -> tuple[int, Any]:
        joint = "" if not resource or resource[0] == "?" else "/"
        url = f"{cluster.admin}/admin/v2/persistent/{namespace}/orders{joint}{resource}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30.0) as answer:
                content = answer.read()
                return answer.status, json.loads(content) if content else None
        except urllib.error.HTTPError as error:
            return error.code, None

    assert on_simulated(script) == script(Rig(opening, ask))
