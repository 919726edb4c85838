"""Keys and properties, which the client library does not count when it fills an entry."""

from __future__ import annotations

import pulsar
from hypothesis import given, settings
from hypothesis import strategies as st
from pulsar_cluster import Cluster

from broker_io import open_broker
from broker_io.batch import Batch, Message
from broker_io.errors import EntryTooLarge, MessageTooLarge
from broker_io.port import check_batch
from broker_io.position import Position
from broker_io.pulsar.writer import BATCH_BYTES, BATCH_MESSAGES, Batching, RecentMaximum, measure
from broker_io.testing.contract.base import read_all, values

SECONDS = 120.0
LIMIT = 1_000_000
LARGE = 6 * 1024 * 1024


def with_property(count: int, size: int) -> Batch:
    return Batch.of([Message(None, b"v", {"trace": "z" * size})] * count)


def measured(batch: Batch) -> tuple[int, int]:
    return measure(batch, check_batch(batch, LIMIT))


def test_shared_text_counts_for_each_message() -> None:
    size, unseen = measured(with_property(1000, 6000))
    assert size == 1000 * (len("vtrace") + 6000)
    assert 6005 <= unseen <= 6005 + 100


def test_payloads_are_not_uncounted_bytes() -> None:
    for count in (1, 2):
        size, unseen = measured(
            Batch.of([Message(b"k" * 20, b"v" * 50_000, {"n": str(number)}) for number in range(count)])
        )
        assert count * 50_020 <= size <= count * 50_100
        assert 20 <= unseen <= 200


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 3)), max_size=40))
def test_peak_is_that_of_the_pending_appends(steps: list[tuple[int, int]]) -> None:
    recent, numbers, done = RecentMaximum(), [], 0
    for number, more in steps:
        done = min(done + more, len(numbers))
        peak = recent.peak(number, len(numbers), done)
        numbers.append(number)
        assert max(numbers[done:]) <= peak <= max(numbers)
    for begun in range(len(numbers), len(numbers) + 2):
        recent.peak(1, begun, begun)
    assert recent.peak(1, len(numbers) + 2, len(numbers) + 2) == 1


def entries_of(appends: list[tuple[int, int, int]], acknowledged: list[bool]) -> list[list[int]]:
    """Bytes of the messages of each entry into which the library combines appends if its timer never fires."""
    batching = Batching(pulsar.ProducerAccessMode.Shared, LIMIT, enabled=True)
    made = batching.configuration
    entries: list[list[int]] = [[]]
    payloads = done = 0

    def send() -> None:
        nonlocal payloads
        payloads = 0
        entries.append([])

    for begun, ((count, payload, unseen), quiet) in enumerate(zip(appends, acknowledged, strict=True)):
        if quiet:
            done = begun
            send()
        batching.as_they_come(unseen, begun, done)
        most, size = made.batching_max_messages(), made.batching_max_allowed_size_in_bytes()
        for _ in range(count):
            if len(entries[-1]) >= most or payloads + payload > size:
                send()
            entries[-1].append(payload + unseen)
            payloads += payload
            if len(entries[-1]) >= most or payloads >= size:
                send()
    return [entry for entry in entries if entry]


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 2, 7, 60, 300]),
            st.sampled_from([1, 100, 20_000, BATCH_BYTES]),
            st.sampled_from([64, 900, 9000, 90_000, LIMIT // 2 - 1, LIMIT - BATCH_BYTES]),
            st.booleans(),
        ),
        max_size=10,
    )
)
def test_no_mixture_of_appends_exceeds_the_entry_limit(appends: list[tuple[int, int, int, bool]]) -> None:
    entries = entries_of([append[:3] for append in appends], [append[3] for append in appends])
    assert all(sum(entry) <= LIMIT for entry in entries)


def test_small_properties_do_not_reduce_the_batch() -> None:
    assert [len(entry) for entry in entries_of([(BATCH_MESSAGES, 1, 100)] * 2, [False, False])] == [BATCH_MESSAGES] * 2


def test_large_and_many_concurrent_appends_succeed(cluster: Cluster, namespace: str) -> None:
    """7 MB in each form: as one entry the cluster would reject it."""
    with open_broker(f"{cluster.url}/{namespace}", admin_url=cluster.admin) as broker:
        broker.create_topic("t")
        with broker.writer("t") as writer:
            told = list(writer.append(with_property(600, 12_000)).result(SECONDS))
            alone = [with_property(1, 12_000 + number % 100) for number in range(600)]
            for future in [writer.append(batch) for batch in alone]:
                told += future.result(SECONDS)
        with broker.reader("t") as reader:
            found: list[Position] = []
            while (placed := reader.read()) is not None:
                found += placed.positions
    assert found == told


def test_only_unwritten_messages_are_rejected_as_too_large(cluster: Cluster, namespace: str) -> None:
    """A cluster with a lower limit than the writer's: other pending appends, or parts of them, may be in the log."""
    with open_broker(f"{cluster.url}/{namespace}", admin_url=cluster.admin, max_message_bytes=2 * LARGE) as broker:
        broker._limit_asked = broker._limit_answered = True  # type: ignore[attr-defined]  # as without the permission to administer the cluster
        broker.create_topic("t")
        for batch, kind in ((with_property(1, LARGE), MessageTooLarge), (with_property(2, LARGE), EntryTooLarge)):
            with broker.writer("t") as writer:
                writer._limit = 2**40  # type: ignore[attr-defined]  # so that the cluster rejects it
                assert type(writer.append(batch).exception(SECONDS)) is kind
                acknowledged = writer.outcome([pulsar.MessageId(-1, 7, 1, 0)])  # type: ignore[attr-defined]  # see above
                later = writer.append(with_property(1, 1)).exception(SECONDS)
            assert type(acknowledged) is type(later) is EntryTooLarge
            assert "max_message_bytes" in str(later)
        assert values(read_all(broker, "t")) == []
        assert LARGE <= broker.max_message_bytes < LARGE + 1000  # the size of the rejected single message
