"""A directory that an earlier release wrote is read correctly by readers and owners."""

import shutil

import pytest
from golden_files import GOLDEN
from make_directory import TOPICS, make
from snapshot_driver import manager_on

from broker_io.file import FileBroker
from txnbuffer.follow import visible_records
from txnbuffer.model import TxnId
from txnbuffer.recovery.restore import load
from txnbuffer.recovery.verify import Level, verify


@pytest.fixture(params=["directory-v1", "made now"])
def directory(request, tmp_path):
    target = tmp_path / "log"
    if request.param == "made now":
        make(str(target))
    else:
        shutil.copytree(GOLDEN / request.param, target)
    return str(target)


def check(topic, broker, buffer, next_seqno):
    assert [txn.least for txn in buffer.aborted.ids()] == [txn for txn in range(1, 21) if txn % 3]
    assert buffer.outcome(TxnId(0, 100)) is not None
    assert buffer.counters.late == 1
    rows = []
    with broker.reader(topic) as reader:
        while (placed := reader.read()) is not None:
            rows += visible_records(placed, buffer).messages
    expected = [(b"k", b"first"), (None, b"open"), (None, b"still open")]
    expected += [(f"key {txn}".encode(), f"value {txn}".encode()) for txn in range(3, 21, 3)]
    assert [(row.key, row.value) for row in rows] == [*expected, (b"k", None)]
    assert next_seqno in (None, len(rows) + 1)


def test_golden_directory_is_read_by_a_reader(directory):
    with FileBroker.open(directory, read_only=True) as broker:
        for topic in TOPICS:
            loaded = load(broker, topic)
            assert len(loaded.buffer.ongoing) == 1
            with broker.reader(topic, loaded.resume, inclusive=False) as reader:
                while (placed := reader.read()) is not None:
                    loaded.buffer.apply_batch(placed)
            check(topic, broker, loaded.buffer, None)


def test_golden_directory_is_taken_over_by_an_owner(directory):
    with FileBroker.open(directory) as broker:
        assert {finding.level for finding in verify(broker)} == {Level.OK}
        for _ in range(2):
            with manager_on(broker) as owner:
                assert owner.problems == {}
                assert owner.notes == []
                for topic in TOPICS:
                    check(topic, broker, owner.buffer(topic), owner.followed(topic).numbered.next_seqno)


CONTENT = {
    "later": [b"l000"],
    "orders": [b"o%03d" % number + b"x" * 50 for number in range(5)] + [b"o005"],
    "payments": [b"p000", b"p001", *[b"v%d" % number for number in range(200)]],
    "rolled": [b"r%03d" % number for number in range(6)],
}


def values_of(broker):
    found = {}
    for topic in broker.topics():
        with broker.reader(topic) as reader:
            found[topic] = [placed.message.value for batch in iter(reader.read, None) for placed in batch]
    return found


def test_golden_directory_of_a_killed_owner_is_read_and_taken_over(tmp_path):
    """Most of it is in its journal of version 1, behind which is a torn tail."""
    directory = tmp_path / "log"
    shutil.copytree(GOLDEN / "directory-v1-killed", directory)
    with FileBroker.open(str(directory), read_only=True) as broker:
        assert values_of(broker) == CONTENT
    assert (directory / "manifest").read_bytes().startswith(b"txnbuffer-log 1 ")
    for _ in range(2):
        with FileBroker.open(str(directory)) as broker:
            assert values_of(broker) == CONTENT
            assert (directory / "manifest").read_bytes().startswith(b"txnbuffer-log 2 ")
    with FileBroker.open(str(directory), read_only=True) as broker:
        assert values_of(broker) == CONTENT
