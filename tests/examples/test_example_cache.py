"""The cache equals its topic, also after the service was killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.example_process import Shop, shop_on_a_cluster
from pulsar_cluster import Cluster


def test_the_cache_shows_its_topic(market: Shop) -> None:
    market.fill({"prices": {"apples": "120", "pears": "80"}})
    cache = market.example("cache.py", "prices")
    market.wait(lambda: "{'apples': '120', 'pears': '80'}" in market.output, cache)
    market.interrupt(cache)
    market.fill({"prices": {"apples": "130"}})
    cache = market.example("cache.py")
    market.wait(lambda: market.output.endswith("{'apples': '130', 'pears': '80'}\n"), cache)
    market.interrupt(cache)


@pytest.mark.parametrize("market", ["service", "cluster"], indirect=True)
def test_the_cache_follows_its_topic(market: Shop) -> None:
    cache = market.example("cache.py")
    with market.client() as client:
        client.send("prices", "120", key="apples")
        client.send("prices", "80", key="pears")
        market.wait(lambda: "{'apples': '120', 'pears': '80'}" in market.output, cache)
        with client.transaction() as txn:
            txn.send("prices", "130", key="apples")
            txn.delete("prices", "pears")
        market.wait(lambda: market.output.endswith("{'apples': '130'}\n"), cache)
        with client.transaction() as txn:
            txn.send("prices", "1", key="apples")
            txn.abort()
        client.send("prices", "50", key="plums")
    market.wait(lambda: market.output.endswith("{'apples': '130', 'plums': '50'}\n"), cache)
    assert "'1'" not in market.output
    market.interrupt(cache)


def test_the_cache_survives_a_restart_of_the_service(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    with shop_on_a_cluster(cluster, namespace, tmp_path) as market:
        market.fill({"prices": {"apples": "120"}})
        cache = market.example("cache.py")
        market.wait(lambda: "{'apples': '120'}" in market.output, cache)
        market.started.remove(cache)
    try:
        with shop_on_a_cluster(cluster, namespace, tmp_path) as market:
            market.fill({"prices": {"apples": "140"}})
            market.wait(lambda: market.output.endswith("{'apples': '140'}\n"), cache)
    finally:
        cache.kill()
        cache.wait()
