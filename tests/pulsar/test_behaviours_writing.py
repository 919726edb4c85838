"""Behaviours of Pulsar's writers, and of stored messages."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pulsar
import pytest
from pulsar_cluster import Cluster
from source_tree import ROOT

from broker_io.batch import Batch, Message
from broker_io.errors import (
    AppendUnknown,
    Closed,
    Fenced,
    MessageTooLarge,
    NotSupported,
    StillHeld,
    TopicNotFound,
    UnsafePolicy,
)
from broker_io.port import Broker
from broker_io.pulsar.ledgers import SUBSCRIPTION
from broker_io.standalone import ask
from broker_io.testing.contract.base import (
    WAIT_SECONDS,
    eventually,
    fill,
    numbered,
    positions_of,
    put,
    read_all,
    values,
)

Opening = Callable[..., Broker]


@pytest.fixture
def broker(opening: Opening) -> Broker:
    made = opening()
    made.create_topic("orders")
    return made


def append(writer: Any, number: int = 0) -> BaseException | None:
    error: BaseException | None = writer.append(Batch.of(numbered(1, number))).exception(WAIT_SECONDS)
    return error


def test_an_owner_in_another_process_fences(opening: Opening, broker: Broker) -> None:
    """An exclusive writer with fencing always wins; a fenced writer stays fenced after the winner has ended."""
    older = broker.writer("orders", exclusive=True)
    assert append(older, 0) is None
    with opening().writer("orders", exclusive=True) as owner:
        put(owner, numbered(1, 1))
        errors = [append(older, 7), append(older, 8)]
    errors.append(append(older, 9))
    assert all(isinstance(error, Fenced) for error in errors)
    assert errors[1] is errors[0] is errors[2]
    assert values(read_all(broker, "orders")) == [b"value-0", b"value-1"]


def test_waiting_writer_opens_after_the_end_of_the_other_process(opening: Opening, broker: Broker) -> None:
    """The library's own wait ends with its timeout, and at once if another writer fences meanwhile."""
    owning = opening()
    owner = owning.writer("orders", exclusive=True)
    with pytest.raises(StillHeld):
        broker.writer("orders", exclusive=True, wait=0.2)
    put(owner, numbered(1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(broker.writer, "orders", exclusive=True, wait=WAIT_SECONDS)
        owning.close()
        with waiting.result(WAIT_SECONDS) as writer:
            put(writer, numbered(1, 1))
    assert values(read_all(broker, "orders")) == [b"value-0", b"value-1"]


def test_owner_continues_after_an_unload(broker: Broker) -> None:
    """Exclusive access is lost at a disconnect if another writer claims it; here none does."""
    with broker.writer("orders", exclusive=True) as writer:
        for number in range(4):
            put(writer, numbered(1, number))
            broker.roll("orders")
    assert values(read_all(broker, "orders")) == [b"value-%d" % number for number in range(4)]


def test_writer_does_not_continue_in_a_re_created_topic(opening: Opening, broker: Broker) -> None:
    """The client library continues silently with the new topic: nothing written there is acknowledged."""
    writer = broker.writer("orders")
    put(writer, numbered(1))
    other = opening()
    other.delete_topic("orders")
    other.create_topic("orders")
    error = append(writer, 1)
    assert isinstance(error, TopicNotFound)
    assert append(writer, 2) is error


def test_first_failure_ends_a_writer(broker: Broker) -> None:
    """The library sends later messages after a failed one, which would be a gap."""
    writer = broker.writer("orders")
    writer._limit = 2**40  # type: ignore[attr-defined]  # so that the cluster rejects it, as with a lower limit
    futures = [writer.append(Batch.of([Message(b"k", b"x" * size)])) for size in (5, 6 * 1024 * 1024, 7)]
    errors = [future.exception(WAIT_SECONDS) for future in futures]
    assert isinstance(errors[1], MessageTooLarge)
    assert "max_message_bytes" in str(errors[1])
    assert isinstance(errors[2], AppendUnknown)
    assert append(writer) is errors[2]
    assert errors[0] in (None, errors[2])
    assert {*values(read_all(broker, "orders"))} <= {b"x" * 5, b"x" * 7}


def test_dropped_append_is_an_error(broker: Broker) -> None:
    """Deduplication acknowledges a dropped message with an invalid id."""
    with broker.writer("orders") as writer:
        outcome = writer.outcome([pulsar.MessageId(-1, -1, -1, -1)])  # type: ignore[attr-defined]  # see above
        assert isinstance(outcome, AppendUnknown)
        assert append(writer) is outcome


def test_append_over_the_pending_limit_waits_without_a_gap(broker: Broker) -> None:
    """By default the library rejects messages while its queue is full, and accepts later ones."""
    with broker.writer("orders") as writer:
        futures = [writer.append(Batch.of(numbered(1000, start))) for start in range(0, 12_000, 1000)]
    assert [position for future in futures for position in future.result()] == positions_of(read_all(broker, "orders"))


def test_callbacks_of_appends_may_call_anything(broker: Broker) -> None:
    """A call into the client library from its own thread would block it for ever."""
    done = threading.Event()
    with broker.writer("orders") as writer:

        def go_on(_: object) -> None:
            writer.append(Batch.of(numbered(1, 1)))
            assert broker.last_position("orders") is not None
            broker.writer("orders").close()
            done.set()

        writer.append(Batch.of(numbered(1))).add_done_callback(go_on)
        assert done.wait(WAIT_SECONDS)
    assert values(read_all(broker, "orders")) == [b"value-0", b"value-1"]


def test_a_writer_that_is_opened_while_its_broker_is_closed_fails_its_appends(
    opening: Opening, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of this package resolves them, which has ended by then."""
    closed: Any = opening()
    opened, writers = closed._cluster.opened, []

    def closed_meanwhile(*arguments: Any, **options: Any) -> Any:
        writers.append(opened(*arguments, **options))
        closed.close()
        return writers[-1]

    monkeypatch.setattr(closed._cluster, "opened", closed_meanwhile)
    with pytest.raises(Closed):
        closed.writer("orders")
    assert isinstance(append(writers[0]), Closed)
    assert read_all(broker, "orders") == []


def test_subscription_keeps_messages_without_retention(
    opening: Opening, broker: Broker, client: pulsar.Client, namespace: str, cluster: Cluster
) -> None:
    """Without retention Pulsar drops each ledger that no durable subscription keeps, even while it is read."""
    producer = client.create_producer(f"persistent://{namespace}/foreign")
    producer.send(b"foreign")  # before the subscription was created
    positions = []
    with broker.writer("foreign") as writer:
        for number in range(3):
            positions += put(writer, numbered(1, number))
            broker.roll("foreign")
    ask(cluster.admin, f"persistent/{namespace}/foreign/trim", "POST")
    assert values(read_all(broker, "foreign")) == [b"foreign", b"value-0", b"value-1", b"value-2"]
    broker.trim("foreign", positions[1].ledger)
    assert values(read_all(opening(), "foreign")) == [b"value-1", b"value-2"]


@pytest.mark.parametrize(
    ("policy", "body", "word"),
    [
        ("subscriptionExpirationTime", 5, "expire"),
        ("compactionThreshold", 1000, "compaction"),
    ],
)
def test_policy_that_drops_kept_messages_is_rejected(
    broker: Broker, namespace: str, cluster: Cluster, policy: str, body: Any, word: str
) -> None:
    """An expiry ignores subscriptions; compaction ignores transactions."""
    fill(broker, "orders", numbered(1))
    method = "PUT" if policy == "compactionThreshold" else "POST"
    ask(cluster.admin, f"namespaces/{namespace}/{policy}", method, body)

    said: list[str] = []

    def refused() -> bool:
        try:
            broker.writer("orders").close()
        except UnsafePolicy as error:
            said.append(str(error))
        return bool(said)

    eventually(refused)  # policies take a moment to reach topics
    assert word in said[0]
    assert namespace in said[0]
    assert values(read_all(broker, "orders")) == [b"value-0"]


def test_compacted_data_topic_is_not_written_to(broker: Broker, asking: Callable[..., Any]) -> None:
    """Compaction ignores transactions: an aborted record may have replaced a committed one."""
    fill(broker, "orders", numbered(3))
    with pytest.raises(NotSupported, match="__txnbuffer"):
        broker.compact("orders")
    asking("PUT", "compaction")
    eventually(lambda: "__compaction" in asking("GET", "internalStats")["cursors"])
    with pytest.raises(UnsafePolicy, match="compact"):
        broker.writer("orders")


def test_concurrent_compactions_all_succeed(opening: Opening) -> None:
    """The cluster rejects a compaction while another one runs."""
    broker = opening(compacted_prefix="orders")
    broker.create_topic("orders")
    fill(broker, "orders", numbered(500))
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lambda _: broker.compact("orders"), range(4))] == [None] * 4
    assert len(read_all(broker, "orders", compacted=True)) == 7


def test_a_compacted_topic_keeps_a_steady_size(opening: Opening) -> None:
    """Compacted ledgers are dropped, except that of the last message and one more."""
    broker = opening(compacted_prefix="orders")
    broker.create_topic("orders")
    last = None
    for turn in range(6):
        fill(broker, "orders", numbered(20, turn))
        broker.roll("orders")
        last = broker.last_position("orders")
        broker.compact("orders")
        assert len([ledger for ledger in broker.ledgers("orders") if ledger.entries]) <= 2
        assert broker.last_position("orders") == last
    assert len(read_all(broker, "orders", compacted=True)) == 7


def test_subscription_exists_before_the_first_message(broker: Broker, asking: Callable[..., Any]) -> None:
    cursor = asking("GET", "internalStats")["cursors"][SUBSCRIPTION]
    assert cursor["markDeletePosition"].endswith(":-1")
    fill(broker, "orders", numbered(2))
    assert asking("GET", "internalStats")["cursors"][SUBSCRIPTION]["markDeletePosition"] == cursor["markDeletePosition"]


LEAVING = """
import sys
from broker_io import open_broker
from broker_io.batch import Batch, Message
broker = open_broker(sys.argv[1], admin_url=sys.argv[2])
broker.create_topic("orders")
writer, reader = broker.writer("orders"), broker.reader("orders")
for _ in range(50):
    writer.append(Batch.of([Message(b"k", b"v" * 100)] * 100))
"""


def test_process_exits_cleanly_without_closing(cluster: Cluster, namespace: str) -> None:
    """With pending sends and nothing closed the client library would abort the process."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", LEAVING, f"{cluster.url}/{namespace}", cluster.admin],
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=WAIT_SECONDS * 6,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout == done.stderr == ""
