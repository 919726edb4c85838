"""Faults on demand: each hits once, and leaves a log that a broker could leave."""

from concurrent.futures import Future
from typing import Any

import pytest

from broker_io.batch import Batch, Message
from broker_io.errors import Closed, Damaged, DiskFailed, DiskWatermark, Error, Fenced
from broker_io.memory import MemoryBroker, MemoryWriter, open_memory
from broker_io.position import Positions
from broker_io.testing import SimulatedClock
from broker_io.testing.contract.together import append_together


@pytest.fixture
def broker() -> MemoryBroker:
    broker = MemoryBroker(clock=SimulatedClock(), ledger_entries=4, compacted_prefix="")
    broker.create_topic("t")
    broker.create_topic("other")
    return broker


def batch(text: str) -> Batch:
    return Batch.of([Message(None, letter.encode()) for letter in text])


def content(broker: MemoryBroker, topic: str = "t") -> str:
    text = ""
    with broker.connect().reader(topic) as reader:
        while (found := reader.read()) is not None:
            text += "".join((placed.message.value or b"").decode() for placed in found)
    return text


def failed(future: Future[Any]) -> type[BaseException]:
    return type(future.exception(0))


@pytest.mark.parametrize("written", [0, 1, 2, 3])
def test_an_append_fails_after_a_prefix(broker: MemoryBroker, written: int) -> None:
    writer = broker.writer("t")
    broker.faults.fail_append(written=written)
    assert failed(writer.append(batch("abc"))) is DiskFailed
    assert content(broker) == "abc"[:written]


def test_failed_writer_ends_and_a_new_one_works(broker: MemoryBroker) -> None:
    writer = broker.writer("t")
    broker.faults.fail_append()
    assert failed(writer.append(batch("a"))) is DiskFailed
    assert failed(writer.append(batch("b"))) is DiskFailed
    broker.writer("t").append(batch("c")).result(0)
    assert content(broker) == "c"


def test_writer_continues_after_a_retryable_failure(broker: MemoryBroker) -> None:
    writer = broker.writer("t")
    broker.faults.fail_append(DiskWatermark("no room"))
    assert failed(writer.append(batch("a"))) is DiskWatermark
    writer.append(batch("b")).result(0)
    assert content(broker) == "b"


def test_an_acknowledgement_is_lost(broker: MemoryBroker) -> None:
    writer = broker.writer("t")
    broker.faults.lose_acknowledgement(Closed("gone"))
    assert failed(writer.append(batch("abcdef"))) is Closed
    assert content(broker) == "abcdef"


def test_faults_hit_their_topic_in_order(broker: MemoryBroker) -> None:
    broker.faults.fail_append(DiskWatermark("first"), topic="t")
    broker.faults.fail_append(DiskWatermark("second"))
    other, writer = broker.writer("other"), broker.writer("t")
    assert str(other.append(batch("a")).exception(0)) == "second"
    other.append(batch("b")).result(0)
    assert str(writer.append(batch("c")).exception(0)) == "first"
    writer.append(batch("d")).result(0)
    assert (content(broker, "other"), content(broker)) == ("b", "d")


def test_a_fault_hits_its_own_handle_only(broker: MemoryBroker) -> None:
    broker.faults.fail_append()
    elsewhere = broker.connect()
    elsewhere.writer("t").append(batch("a")).result(0)
    assert content(broker) == "a"


def test_an_append_is_written_twice_and_the_second_copy_acknowledged(broker: MemoryBroker) -> None:
    broker.faults.duplicate_append()
    positions = broker.writer("t").append(batch("abc")).result(0)
    assert content(broker) == "abcabc"
    assert positions.last == broker.last_position("t")
    assert len(positions) == 3


def test_messages_are_repeated_after_newer_ones(broker: MemoryBroker) -> None:
    writer = broker.writer("t")
    first = writer.append(batch("abc")).result(0)
    writer.append(batch("de")).result(0)
    copies = broker.repeat("t", first[1], first[2])
    assert content(broker) == "abcdebc"
    assert copies.first > first.last
    assert copies.last == broker.last_position("t")


def test_a_whole_topic_is_repeated_over_ledgers(broker: MemoryBroker) -> None:
    positions = broker.writer("t").append(batch("abcdefghij")).result(0)
    broker.repeat("t", positions.first, positions.last)
    assert content(broker) == "abcdefghij" * 2


@pytest.mark.parametrize("written", [0, 2])
def test_a_writer_is_fenced_in_the_middle_of_an_append(broker: MemoryBroker, written: int) -> None:
    writer = broker.writer("t", exclusive=True)
    broker.faults.fence_append(written=written)
    assert failed(writer.append(batch("abc"))) is Fenced
    assert failed(writer.append(batch("d"))) is Fenced
    with broker.writer("t") as newer:
        newer.append(batch("e")).result(0)
    assert content(broker) == "abc"[:written] + "e"


def test_a_read_fails_once_and_loses_nothing(broker: MemoryBroker) -> None:
    broker.writer("t").append(batch("ab")).result(0)
    reader = broker.reader("t")
    broker.faults.fail_read(Damaged("segment", 5, "bad checksum"), topic="t")
    with pytest.raises(Damaged):
        reader.read()
    found = reader.read()
    assert found is not None
    assert len(found) == 2


def test_held_acknowledgements_arrive_when_released(broker: MemoryBroker) -> None:
    writer = broker.writer("t")
    broker.faults.hold()
    futures = [writer.append(batch(letter)) for letter in "abc"]
    assert content(broker) == "abc"
    assert not any(future.done() for future in futures)
    broker.faults.release()
    positions = [future.result(0).first for future in futures]
    assert positions == sorted(positions)
    writer.append(batch("d")).result(0)
    assert content(broker) == "abcd"


def test_held_messages_are_written_in_the_order_of_each_writer(broker: MemoryBroker) -> None:
    one, two = broker.writer("t"), broker.writer("other")
    broker.faults.hold(written=False)
    for letter in "ab":
        one.append(batch(letter))
    future = two.append(batch("c"))
    first, second, third = broker.faults.held
    assert (first.topic, third.topic) == ("t", "other")
    assert content(broker) == ""
    with pytest.raises(ValueError, match="write that first"):
        second.write()
    third.acknowledge()
    assert future.result(0).first == broker.last_position("other")
    first.write()
    second.write()
    second.write()
    assert content(broker) == "ab"
    first.fail(DiskFailed("lost"))
    assert failed(first.future) is DiskFailed
    assert not second.future.done()


def test_empty_append_is_held_and_written_like_others(broker: MemoryBroker) -> None:
    writer = broker.writer("t")
    broker.faults.hold()
    futures = [writer.append(batch("")), writer.append(batch("a"))]
    broker.faults.hold(written=False)
    futures.append(writer.append(batch("b")))
    broker.faults.release()
    assert [len(future.result(0)) for future in futures] == [0, 1, 1]


def test_fencing_fails_held_appends(broker: MemoryBroker) -> None:
    writer = broker.writer("t")
    broker.faults.hold(written=False)
    futures = [writer.append(batch(letter)) for letter in "ab"]
    held = [*broker.faults.held]
    held[0].write()
    newer = broker.connect().writer("t", exclusive=True)
    assert [failed(future) for future in futures] == [Fenced, Fenced]
    newer.append(batch("z")).result(0)
    for late in held:
        late.write()
        late.acknowledge()
    assert content(broker) == "az"
    assert broker.faults.held == []


def test_holding_one_topic_lets_the_others_pass(broker: MemoryBroker) -> None:
    broker.faults.hold(topic="t")
    assert broker.writer("other").append(batch("a")).done()
    assert not broker.writer("t").append(batch("b")).done()


def test_closing_a_writer_leaves_its_held_appends(broker: MemoryBroker) -> None:
    broker.faults.hold(written=False)
    with broker.writer("t") as writer:
        future = writer.append(batch("a"))
    assert not future.done()
    broker.faults.release()
    assert len(future.result(0)) == 1


def test_a_handle_closes_its_own_writers_only(broker: MemoryBroker) -> None:
    elsewhere = broker.connect()
    mine, theirs = broker.writer("t"), elsewhere.writer("t")
    broker.close()
    assert failed(mine.append(batch("a"))) is Closed
    theirs.append(batch("b")).result(0)
    with pytest.raises(Closed):
        broker.topics()
    assert elsewhere.topics() == ["other", "t"]


def test_closing_a_handle_closes_its_exclusive_writers(broker: MemoryBroker) -> None:
    elsewhere = broker.connect()
    broker.writer("t", exclusive=True)
    with pytest.raises(Fenced):
        elsewhere.writer("t")
    broker.close()
    elsewhere.writer("t").append(batch("a")).result(0)


def test_waiting_passes_simulated_time_only() -> None:
    clock = SimulatedClock()
    broker = MemoryBroker(clock=clock)
    broker.create_topic("t")
    assert broker.reader("t").read(timeout=3600) is None
    assert 3600 <= clock.monotonic() < 3601


def test_a_compacted_view_outlives_the_raw_ledgers(broker: MemoryBroker) -> None:
    writer = broker.writer("t")
    writer.append(Batch.of([Message(b"k%d" % (number % 2), b"%d" % number) for number in range(10)])).result(0)
    broker.compact("t")
    broker.trim("t", broker.ledgers("t")[-1].ledger)
    with broker.reader("t", compacted=True) as reader:
        found = reader.read()
    assert found is not None
    assert [placed.message.value for placed in found] == [b"8", b"9"]


def test_named_brokers_share_topics_and_unnamed_ones_do_not() -> None:
    one, two = open_memory("test-names"), open_memory("test-names")
    one.create_topic("t")
    assert two.topics() == ["t"]
    one.close()
    assert open_memory("test-names").topics() == ["t"]
    assert open_memory().topics() == open_memory("").topics() == []


def test_appends_during_a_release_follow_the_held_ones(broker: MemoryBroker) -> None:
    writer = broker.writer("t")
    broker.faults.hold(written=False)
    futures = [writer.append(batch("a")), writer.append(batch("b"))]
    futures[0].add_done_callback(lambda _: futures.append(writer.append(batch("c"))))
    broker.faults.release()
    assert content(broker) == "abc"
    assert all(future.done() for future in futures)


def together(broker: MemoryBroker, text: str, *writers: MemoryWriter) -> Future[list[Positions | Error]]:
    return append_together(broker, [(writer, batch(text)) for writer in writers])


@pytest.mark.parametrize("topic", ["t", "other"])
def test_a_fault_of_one_append_hits_all_of_its_operation(broker: MemoryBroker, topic: str) -> None:
    writers = [broker.writer("t"), broker.writer("other")]
    broker.faults.fail_append(written=1, topic=topic)
    assert failed(together(broker, "abc", *writers)) is DiskFailed
    assert content(broker) == content(broker, "other") == ""
    writers = [broker.writer("t"), broker.writer("other")]
    broker.faults.lose_acknowledgement(topic=topic)
    assert failed(together(broker, "abc", *writers)) is DiskFailed
    assert content(broker) == content(broker, "other") == "abc"


def test_an_operation_is_refused_whole_and_one_of_its_appends_is_doubled(broker: MemoryBroker) -> None:
    writers = [broker.writer("t"), broker.writer("other")]
    broker.faults.fail_append(DiskWatermark("no room"), topic="other")
    assert failed(together(broker, "ab", *writers)) is DiskWatermark
    assert content(broker) == content(broker, "other") == ""
    broker.faults.duplicate_append(topic="t")
    together(broker, "cd", *writers).result(0)
    assert (content(broker), content(broker, "other")) == ("cdcd", "cd")


@pytest.mark.parametrize("written", [True, False])
def test_appends_of_an_operation_are_held_together(broker: MemoryBroker, written: bool) -> None:
    one, two = broker.writer("t"), broker.writer("other")
    broker.faults.hold(topic="other", written=written)
    first, second, third = together(broker, "ab", one, two), two.append(batch("c")), one.append(batch("d"))
    assert (first.done(), second.done(), third.done()) == (False, False, True)
    assert content(broker, "other") == ("abc" if written else "")
    if not written:
        with pytest.raises(ValueError, match="write that first"):
            broker.faults.held[1].write()
    broker.faults.release()
    assert len(first.result(0)) == 2
    assert content(broker, "other") == "abc"
    assert sorted(content(broker)) == [*"abd"]


def test_fencing_one_writer_fails_what_it_holds_with_others(broker: MemoryBroker) -> None:
    writers = [broker.writer("t"), broker.writer("other")]
    broker.faults.hold(written=False)
    future = together(broker, "ab", *writers)
    broker.connect().writer("t", exclusive=True)
    assert failed(future) is Fenced
    assert broker.faults.held == []
    broker.faults.release()
    writers[1].append(batch("c")).result(0)
    assert (content(broker), content(broker, "other")) == ("", "c")
