"""Transactions of this package and Pulsar's own, on the same real broker."""

from __future__ import annotations

from typing import Any

from bench.figures_embedded import SECONDS, WARM_UP
from bench.fresh import fresh
from bench.harness import Pair, figure
from bench.pulsar_broker import broker, native, service

PEER = "Pulsar's own transactions, Java client"


def both(in_flight: int, topics: int = 1) -> Pair:
    """Transactions per second with one record to each topic: those of this package, then the peer's."""
    names = [f"topic-{number}" for number in range(topics)]
    space = broker().namespace()
    address = f"{broker().url}/{space}"
    with service(address):
        options = {"admin_url": broker().admin}
        result: dict[str, Any] = fresh(
            "bench.figures_embedded", "run_lanes", address, names, in_flight, 1, SECONDS, options
        )
    peers = [f"persistent://{space}/native-{number}" for number in range(topics)]
    return Pair(float(result["per_second"]), native("rate", in_flight, int(WARM_UP) + 2, int(SECONDS), *peers))


@figure("pulsar.txn_per_s.1", unit="transactions/s", goal=">= 2 times the peer", peer=PEER)
def one_in_flight() -> Pair:
    return both(1)


@figure("pulsar.txn_per_s.64", unit="transactions/s", goal=">= 2 times the peer", peer=PEER)
def some_in_flight() -> Pair:
    return both(64)


@figure("pulsar.txn_per_s.512", unit="transactions/s", goal=">= 2 times the peer", peer=PEER)
def many_in_flight() -> Pair:
    return both(512)


@figure("pulsar.txn_per_s.two_topics", unit="transactions/s", goal=">= 2 times the peer", peer=PEER)
def two_topics() -> Pair:
    return both(512, topics=2)
