"""Transactions that span the partitions of a topic: where records belong, and what the checker finds."""

from __future__ import annotations

import pytest
from sim.checker import violations
from sim.cluster import NAMESPACE
from sim.history import Fate, History, Shown
from sim.kinds import run_seed
from sim.partitions import Partitions, java_hash
from sim.scenario import PARTITIONED
from sim.world import World

from broker_io.partitions import choose
from txnbuffer.model import Position

TOPICS = Partitions({"orders": 3})
KEYS = [b"k%d" % number for number in range(8)]


def test_keys_are_in_the_partitions_of_java_clients() -> None:
    assert java_hash("hello") == 99162322
    found = [TOPICS.log("orders", key) for key in KEYS]
    assert found == [f"orders-partition-{number}" for number in choose(KEYS, 3)]
    assert len({*found}) == 3
    assert TOPICS.log("orders", b"k0", 2) == "orders-partition-2"
    assert TOPICS.log("payments", b"k0") == "payments"
    assert TOPICS.logs("orders", "payments") == (*(f"orders-partition-{number}" for number in range(3)), "payments")


def found(logs: dict[str, list[bytes]]) -> str:
    """What is wrong with a transaction of three records, with keys 0 to 2, if the logs have these values."""
    history = History(lambda: 1.0, lambda _: None, TOPICS)
    attempt = history.attempt("app")
    for number in range(3):
        history.sent(attempt, "orders", b"%d" % number, KEYS[number])
    history.ended(attempt, Fate.COMMITTED)
    shown = {
        log: [Shown(at + 1, b"k", value, Position(1, at)) for at, value in enumerate(values)]
        for log, values in logs.items()
    }
    return "\n".join(violations(history, shown))


RIGHT = {TOPICS.log("orders", KEYS[number]): [b"%d" % number] for number in range(3)}
FIRST, SECOND, _ = RIGHT


@pytest.mark.parametrize(
    ("logs", "text"),
    [
        (RIGHT, ""),
        (RIGHT | {FIRST: []}, "and the topics have"),
        (RIGHT | {FIRST: [], SECOND: [*RIGHT[FIRST], *RIGHT[SECOND]]}, "and the topics have"),
    ],
    ids=["right", "one partition lacks its record", "a record is in another partition"],
)
def test_a_transaction_is_on_all_partitions(logs: dict[str, list[bytes]], text: str) -> None:
    assert len(RIGHT) == 3
    assert bool(found(logs)) == bool(text)
    assert text in found(logs)


def test_seeds_of_a_cluster_have_partitioned_topics() -> None:
    seeds = range(7000, 7020)
    seed = next(seed for seed in seeds if World(seed).random("partitions").random() < PARTITIONED)
    lines: list[str] = []
    outcome = run_seed(seed, "cluster", echo=lines.append)
    assert outcome.finding == ""
    assert outcome.counts["partitioned topic"] == 1
    assert any("scenario orders has" in line for line in lines)
    assert any(f"{NAMESPACE}/orders-partition-1" in line for line in lines)
