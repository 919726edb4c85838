"""A directory of this format is read correctly by readers and owners, and one of version 1 is refused."""

import shutil

import pytest
from golden_files import GOLDEN
from recovery.make_directory import TOPICS, make
from snapshot_driver import manager_on

from broker_io.errors import UnsupportedFormat
from broker_io.filelog.log import FileBroker
from txnbuffer.follow import visible_records
from txnbuffer.model import TxnId
from txnbuffer.recovery.restore import load
from txnbuffer.recovery.verify import Level, verify


@pytest.fixture(params=["directory-v2", "made now"])
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


@pytest.mark.parametrize("name", ["directory-v1", "directory-v1-killed"])
@pytest.mark.parametrize("read_only", [False, True])
def test_a_log_of_version_1_is_refused_and_left_alone(tmp_path, name, read_only):
    directory = tmp_path / "log"
    shutil.copytree(GOLDEN / name, directory)
    with pytest.raises(UnsupportedFormat, match=r"version 1;.*the release 0\.2\.0, which converts"):
        FileBroker.open(str(directory), read_only=read_only)
    assert files_of(directory) == files_of(GOLDEN / name)


def files_of(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
