import dataclasses

import pytest
from snapshot_driver import (
    SMALL,
    abort_some,
    assert_true,
    end_of,
    entries,
    flipped,
    manager_on,
    put,
    stored,
    with_entries,
)

from snapshots.errors import (
    SnapshotDamaged,
    SnapshotMissing,
    UnsupportedSnapshot,
)
from snapshots.format import OVERFLOW, SEGMENT, EntryKey, message
from snapshots.scan import TopicEntries
from txnbuffer.recovery.codec import decode_segment, encode_segment
from txnbuffer.recovery.restore import read_snapshot

T = "t"


def test_row_p12_h13_every_flipped_bit_is_damage_or_changes_nothing():
    broker, _, _ = stored(max_entry_bytes=SMALL)
    found = entries(broker, T)
    good = read_snapshot(T, found)
    for kind in (SEGMENT, OVERFLOW):
        for number, entry in found.numbered[kind].items():
            for at in range(len(entry.value)):
                wrong = found.numbered[kind] | {number: entry._replace(value=flipped(entry.value, at))}
                with pytest.raises(SnapshotDamaged) as caught:
                    read_snapshot(T, with_entries(found, kind, wrong))
                assert caught.value.entry == str(EntryKey(T, kind, number))
    for at in range(len(found.end.value)):
        end = found.end._replace(value=flipped(found.end.value, at))
        with pytest.raises(SnapshotDamaged, match="t-end"):
            read_snapshot(T, dataclasses.replace(found, end=end))
    assert good.buffer.aborted.ids() == read_snapshot(T, found).buffer.aborted.ids()


def test_row_p12_a_torn_entry_is_damage():
    broker, _, _ = stored(max_entry_bytes=SMALL)
    found = entries(broker, T)
    for cut in range(len(found.end.value)):
        with pytest.raises(SnapshotDamaged):
            read_snapshot(T, dataclasses.replace(found, end=found.end._replace(value=found.end.value[:cut])))
    segment = found.numbered[SEGMENT][2]
    for cut in range(len(segment.value)):
        torn = {2: segment._replace(value=segment.value[:cut])}
        with pytest.raises(SnapshotDamaged):
            read_snapshot(T, with_entries(found, SEGMENT, found.numbered[SEGMENT] | torn))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_row_p12_a_missing_segment_is_named(number):
    broker, _, _ = stored()
    found = entries(broker, T)
    del found.numbered[SEGMENT][number]
    with pytest.raises(
        SnapshotDamaged, match=f"entry t-{number}: it is missing.*1 to 3.*txnbuf verify.*txnbuf recover ADDRESS t"
    ):
        read_snapshot(T, found)


def test_row_p12_missing_overflow_is_named():
    broker, _, _ = stored(max_entry_bytes=SMALL)
    found = entries(broker, T)
    number = max(found.numbered[OVERFLOW])
    del found.numbered[OVERFLOW][number]
    with pytest.raises(SnapshotDamaged, match=f"entry t-s{number}: it is missing"):
        read_snapshot(T, found)


def test_row_p12_a_segment_of_another_chain_is_damage():
    """The same segment of another topic's chain, with a valid digest of its own."""
    broker, _, _ = stored()
    other, _, _ = stored(txns=range(2, 13))
    found = entries(broker, T)
    with pytest.raises(SnapshotDamaged, match="t-2: it does not follow the segment before it"):
        read_snapshot(
            T,
            with_entries(found, SEGMENT, found.numbered[SEGMENT] | {2: entries(other, T).numbered[SEGMENT][2]}),
        )


def test_row_p12_a_last_segment_of_another_snapshot_is_damage():
    broker, _, _ = stored()
    found = entries(broker, T)
    part = decode_segment(T, 3, found.numbered[SEGMENT][3])
    items = dataclasses.replace(part.segment.items, least=part.segment.items.least + 50)
    value = encode_segment(dataclasses.replace(part, segment=dataclasses.replace(part.segment, items=items)))
    with pytest.raises(SnapshotDamaged, match="t-end: its chain does not end with the last segment"):
        read_snapshot(
            T,
            with_entries(
                found, SEGMENT, found.numbered[SEGMENT] | {3: found.numbered[SEGMENT][3]._replace(value=value)}
            ),
        )


def test_h13_a_chain_outlives_its_owners():
    broker, owner, writer = stored()
    for start in (20, 30, 40):
        owner = manager_on(broker)
        abort_some(writer, *range(start, start + 4))
        owner.pump()
        owner.snapshot(T)
    epochs = [entry.epoch for _, entry in sorted(entries(broker, T).numbered[SEGMENT].items())]
    assert epochs == sorted(epochs)
    assert len(set(epochs)) == 4
    assert_true(manager_on(broker), broker, T)


@pytest.mark.parametrize(
    ("epochs", "fine"), [((1, 1, 2), True), ((1, 2, 1), False), ((1, 1, 3), False), ((2, 2, 2), True)]
)
def test_h13_epochs_never_fall_along_the_chain_nor_pass_the_end(epochs, fine):
    broker, _, _ = stored()
    found = entries(broker, T)
    chains = end_of(broker).chains
    before = chains[SEGMENT].before
    for number, epoch in enumerate(epochs, 1):
        part = decode_segment(T, number, found.numbered[SEGMENT][number])
        value = encode_segment(dataclasses.replace(part, epoch=epoch, chain_before=before))
        before = value[-16:]
        found.numbered[SEGMENT][number] = found.numbered[SEGMENT][number]._replace(value=value, epoch=epoch)
    end = dataclasses.replace(
        end_of(broker), epoch=2, chains={**chains, SEGMENT: chains[SEGMENT]._replace(after=before)}
    )
    found.end = found.end._replace(value=end.encode(), epoch=2)
    if fine:
        read_snapshot(T, found)
    else:
        with pytest.raises(SnapshotDamaged, match="epoch"):
            read_snapshot(T, found)


def test_h13_entries_outside_the_range_are_ignored():
    broker, _owner, _ = stored()
    put(broker, message(EntryKey(T, SEGMENT, 4), 1, b"junk"), message(EntryKey(T, OVERFLOW, 9), 1, b"junk"))
    successor = manager_on(broker)
    assert_true(successor, broker, T)
    successor.snapshot(T)
    assert sorted(entries(broker, T).numbered[OVERFLOW]) == []


def test_segments_without_an_end_are_damage():
    broker, _, _ = stored()
    found = entries(broker, T)
    found.end = None
    with pytest.raises(SnapshotDamaged, match="t-end: it is missing, though"):
        read_snapshot(T, found)


def test_nothing_at_all_is_missing():
    with pytest.raises(SnapshotMissing, match="txnbuf verify"):
        read_snapshot(T, TopicEntries())


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"version": "4"}, UnsupportedSnapshot),
        ({"version": ""}, SnapshotDamaged),
        ({"kind": "part"}, SnapshotDamaged),
        ({"epoch": 7}, SnapshotDamaged),
    ],
)
def test_an_end_with_wrong_properties_is_refused(changes, error):
    broker, _, _ = stored()
    found = entries(broker, T)
    found.end = found.end._replace(**changes)
    with pytest.raises(error, match="t-end"):
        read_snapshot(T, found)


def test_an_end_of_another_topic_or_chain_is_refused():
    broker, _, _ = stored()
    found = entries(broker, T)
    chains = end_of(broker).chains
    for changes, match in (
        ({"topic": "u"}, "of topic u"),
        ({"incarnation": "x"}, "chain does not start"),
        ({"chains": {**chains, SEGMENT: chains[SEGMENT]._replace(first=2)}}, "name different segments"),
        ({"chains": {**chains, SEGMENT: chains[SEGMENT]._replace(next=3)}}, "name different segments"),
    ):
        end = dataclasses.replace(end_of(broker), **changes)
        wrong = dataclasses.replace(found, end=found.end._replace(value=end.encode()))
        with pytest.raises(SnapshotDamaged, match=match):
            read_snapshot(T, wrong)
