import pytest
from snapshot_driver import Interfering, entries, manager_on, put
from writing import TopicWriter

from broker_io.batch import Batch
from broker_io.errors import DiskFailed
from broker_io.memory import MemoryBroker
from snapshots import writer as snapshot_writer
from snapshots.errors import OwnershipLost
from snapshots.format import SNAPSHOT_TOPIC, owner_message
from snapshots.scan import scan
from snapshots.writer import acquire


def test_each_owner_has_a_higher_epoch():
    broker = MemoryBroker()
    epochs = [acquire(broker)[0].epoch for _ in range(3)]
    assert epochs == [1, 2, 3]
    broker.compact(SNAPSHOT_TOPIC)
    assert acquire(broker)[0].epoch == 4


def test_a_fenced_owner_writes_nothing_more():
    broker = MemoryBroker()
    first, _ = acquire(broker)
    acquire(broker)
    last = broker.last_position(SNAPSHOT_TOPIC)
    for _ in range(2):
        with pytest.raises(OwnershipLost, match="another owner"):
            first.append([owner_message(9)])
    assert first.lost
    assert broker.last_position(SNAPSHOT_TOPIC) == last


def test_released_ownership_writes_nothing_even_without_fencing():
    broker = MemoryBroker()
    ownership, _ = acquire(broker)
    ownership.lost = True
    last = broker.last_position(SNAPSHOT_TOPIC)
    with pytest.raises(OwnershipLost):
        ownership.append([owner_message(1)])
    assert broker.last_position(SNAPSHOT_TOPIC) == last


@pytest.mark.parametrize("gone", [False, True])
def test_a_fenced_owner_never_fences_back(gone):
    broker = MemoryBroker()
    first, _ = acquire(broker)
    second, _ = acquire(broker)
    if gone:  # nobody holds the topic any more, but a later owner did
        second.close()
    with pytest.raises(OwnershipLost):
        first.renew()
    if not gone:
        second.append([owner_message(2)])
        assert not second.lost


def test_a_successor_that_has_written_nothing_yet_is_not_fenced_either(monkeypatch):
    monkeypatch.setattr(snapshot_writer, "RENEW_SECONDS", 0.05)
    broker = MemoryBroker()
    first, _ = acquire(broker)
    with broker.connect().writer(SNAPSHOT_TOPIC, exclusive=True) as successor:
        with pytest.raises(OwnershipLost):
            first.renew()
        assert first.lost
        successor.append(Batch.of([owner_message(2)])).result()


def test_an_owner_whose_wait_for_the_writer_outlasts_another_owner_does_not_renew_itself(monkeypatch):
    """As on a member of a pair, which waits until it is live again while the other one is live and then is not."""
    broker = MemoryBroker()
    first, _ = acquire(broker)
    writer = broker.writer

    def writer_after_another_owner(topic, **options):
        monkeypatch.undo()
        acquire(broker)[0].close()
        return writer(topic, **options)

    monkeypatch.setattr(broker, "writer", writer_after_another_owner)
    with pytest.raises(OwnershipLost):
        first.renew()
    assert first.lost
    assert [epoch for _, epoch in scan(broker, SNAPSHOT_TOPIC).owners] == [1, 2]


def test_an_owner_that_lost_an_acknowledgement_renews_itself():
    broker = MemoryBroker()
    ownership, _ = acquire(broker)
    broker.faults.lose_acknowledgement(topic=SNAPSHOT_TOPIC)
    with pytest.raises(Exception):  # noqa: B017 - whatever the broker says
        ownership.append([owner_message(1)])
    table = ownership.renew()
    assert ownership.epoch == 2
    assert table.epoch == 2
    ownership.append([owner_message(2)])


def test_an_epoch_that_was_never_acknowledged_is_not_owned():
    """Renewing fails and another owner uses the epoch that was tried: the first one has lost ownership."""
    broker = MemoryBroker()
    first, _ = acquire(broker)
    broker.faults.fail_append(DiskFailed("gone"), topic=SNAPSHOT_TOPIC)
    with pytest.raises(DiskFailed):
        first.renew()
    second, _ = acquire(broker)
    assert second.epoch == 2
    second.close()
    with pytest.raises(OwnershipLost):
        first.renew()


@pytest.mark.parametrize(("landed", "epoch"), [([], 6), ([6], 7), ([5], 6), ([8], 9), ([7, 6], 8)])
def test_h12_two_owners_with_one_epoch_number(landed, epoch):
    """The fenced owner's entry becomes durable after the new owner has read the topic, before its first write."""
    broker = MemoryBroker()
    broker.create_topic(SNAPSHOT_TOPIC)
    put(broker, owner_message(5))
    between = Interfering(broker)
    if landed:
        between.foreign = [[owner_message(number) for number in landed]]
    ownership, table = acquire(between)
    assert ownership.epoch == epoch
    assert table.epoch == epoch
    owners = [number for _, number in scan(broker).owners]
    assert owners.count(epoch) == 1
    assert owners[-1] == max(owners) == epoch


def test_p6_a_zombie_write_is_refused_or_ignored():
    broker = MemoryBroker()
    zombie = manager_on(broker)
    zombie.register("t")
    writer = TopicWriter(broker, "t")
    for txn in range(1, 8):
        writer.records(txn, "x")
        writer.abort(txn)
    zombie.pump()
    plan = zombie._followed["t"].capture(zombie.epoch).plan
    owner = manager_on(broker)
    owner.snapshot("t")
    with pytest.raises(OwnershipLost):
        zombie.snapshot("t")
    before = entries(broker, "t")
    put(broker, *plan.first, plan.end)  # a broker that does not fence would have let these in
    table = scan(broker)
    assert table.zombies == len(plan.first) + 1
    assert table.topics["t"] == before
    assert manager_on(broker).buffer("t").aborted.ids() == owner.buffer("t").aborted.ids()
