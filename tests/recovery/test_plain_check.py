"""The comparison of what plain consumers get with the committed records, with a reader that gets something else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from recovery.audited_topic import AuditedTopic, T

from broker_io.batch import PlacedBatch
from broker_io.environment import use
from broker_io.errors import InvalidAddress
from broker_io.port import Broker, Resource
from broker_io.position import EARLIEST
from txnbuffer.follow import read_existing
from txnbuffer.recovery.audit import CommittedLog
from txnbuffer.recovery.plain import PlainCheck, verify_plain


class PlainBatches(Resource):
    """A plain reader of these batches."""

    def __init__(self, batches: list[PlacedBatch]) -> None:
        self._batches: Iterator[PlacedBatch] = iter(batches)

    def read(self, *, limit: int = 1000, timeout: float = 0.0) -> PlacedBatch | None:
        return next(self._batches, None)

    def has_more(self) -> bool:
        return False

    def close(self) -> None: ...


@pytest.fixture
def topic() -> AuditedTopic:
    """Six records that are visible, four that are not, and one behind an open transaction."""
    made = AuditedTopic()
    made.write("a", "1")
    made.begin()
    made.begin()
    made.write("b", "aborted", 1)
    made.write("c", "committed", 2)
    made.write_set(("d", "1"), ("e", None), ("f", "3"))
    made.end(0, commit=False)
    made.end(0, commit=True)
    made.write("g", "7")
    made.begin()
    made.write("h", "open", 3)
    made.write("i", "behind")
    return made


def check(topic: AuditedTopic, batches: list[PlacedBatch]) -> PlainCheck:
    broker: Any = topic.broker
    broker.plain_reader = lambda name: PlainBatches(batches)
    with use(topic.world.environment):
        return verify_plain(broker, T, timeout=-1.0)


def visible(broker: Broker) -> list[PlacedBatch]:
    return [found.records for found in CommittedLog(broker, T).records()]


def everything(broker: Broker) -> list[PlacedBatch]:
    return [*read_existing(broker, T, EARLIEST, broker.last_position(T))]


def test_committed_records_are_what_plain_consumers_must_get(topic: AuditedTopic) -> None:
    assert check(topic, visible(topic.broker)) == PlainCheck(6, 0, ())


def test_more_than_is_decided_is_not_compared(topic: AuditedTopic) -> None:
    rest = everything(topic.broker)[-1]
    assert check(topic, [*visible(topic.broker), rest.take(slice(len(rest) - 1, len(rest)))]).different == 0


def test_all_of_the_log_is_too_much(topic: AuditedTopic) -> None:
    found = check(topic, everything(topic.broker))
    assert found.records == 6
    assert [(one.what, one.committed, one.plain) for one in found.differences] == 3 * [("extra", 0, 1)]


def rows(*numbers: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    return np.array(numbers, np.intp)


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ([rows(1, 2, 3, 4, 5)], [("missing", 1, 0)]),
        ([rows(0, 1, 2, 3, 4)], [("missing", 1, 0)]),
        ([rows(0, 1, 2, 4, 5)], [("different", 3, 2)]),
        ([], [("missing", 1, 0), ("missing", 1, 0), ("missing", 3, 0), ("missing", 1, 0)]),
        ([rows(0, 1, 2, 3, 4, 5), rows(5)], [("different", 1, 2)]),
        ([rows(1, 0, 2, 3, 4, 5)], [("missing", 1, 0), ("extra", 0, 1)]),
        ([rows(0, 1, 3, 2, 4, 5)], [("different", 3, 3)]),
    ],
    ids=["first", "last", "row of a set", "all", "twice", "order", "order in a set"],
)
def test_each_difference_is_found(
    topic: AuditedTopic,
    parts: list[np.ndarray[Any, np.dtype[np.intp]]],
    wanted: list[tuple[str, int, int]],
) -> None:
    (placed,) = visible(topic.broker)
    found = check(topic, [placed.take(part) for part in parts])
    assert [(one.what, one.committed, one.plain) for one in found.differences] == wanted
    assert found.different == len(wanted)


def test_only_a_cluster_has_plain_consumers(topic: AuditedTopic) -> None:
    with pytest.raises(InvalidAddress, match="give pulsar://HOST:PORT"):
        verify_plain(topic.broker, T)
