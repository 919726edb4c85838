import dataclasses

import pytest
from snapshot_driver import (
    SMALL,
    abort_some,
    assert_true,
    end_of,
    entries,
    flipped,
    keeper,
    put,
    stored,
)

from snapshots.errors import (
    SnapshotDamaged,
    SnapshotMissing,
    UnsupportedSnapshot,
)
from snapshots.format import PART, SPILL, message
from snapshots.keys import part_key, spill_key
from snapshots.scan import TopicEntries
from txnbuffer.recovery.codec import decode_segment, encode_segment
from txnbuffer.recovery.restore import read_snapshot

T = "t"


def test_row_p12_h13_every_flipped_bit_is_damage_or_changes_nothing():
    broker, _, _ = stored(max_entry_bytes=SMALL)
    found = entries(broker, T)
    good = read_snapshot(T, found)
    for name in ("parts", "spills"):
        for number, entry in getattr(found, name).items():
            for at in range(len(entry.value)):
                wrong = dict(getattr(found, name))
                wrong[number] = entry._replace(value=flipped(entry.value, at))
                with pytest.raises(SnapshotDamaged) as caught:
                    read_snapshot(T, dataclasses.replace(found, **{name: wrong}))
                letter = "s" if name == "spills" else ""
                assert caught.value.entry == f"{T}-{letter}{number}"
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
    part = found.parts[2]
    for cut in range(len(part.value)):
        with pytest.raises(SnapshotDamaged):
            read_snapshot(T, dataclasses.replace(found, parts=found.parts | {2: part._replace(value=part.value[:cut])}))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_row_p12_a_missing_part_is_named(number):
    broker, _, _ = stored()
    found = entries(broker, T)
    del found.parts[number]
    with pytest.raises(
        SnapshotDamaged, match=f"entry t-{number}: it is missing.*1 to 3.*txnbuf verify.*txnbuf recover ADDRESS t"
    ):
        read_snapshot(T, found)


def test_row_p12_a_missing_spill_is_named():
    broker, _, _ = stored(max_entry_bytes=SMALL)
    found = entries(broker, T)
    number = max(found.spills)
    del found.spills[number]
    with pytest.raises(SnapshotDamaged, match=f"entry t-s{number}: it is missing"):
        read_snapshot(T, found)


def test_row_p12_a_part_of_another_chain_is_damage():
    """The same part of another topic's chain, with a sound digest of its own."""
    broker, _, _ = stored()
    other, _, _ = stored(txns=range(2, 13))
    found = entries(broker, T)
    with pytest.raises(SnapshotDamaged, match="t-2: it does not follow the part before it"):
        read_snapshot(T, dataclasses.replace(found, parts=found.parts | {2: entries(other, T).parts[2]}))


def test_row_p12_a_last_part_of_another_snapshot_is_damage():
    broker, _, _ = stored()
    found = entries(broker, T)
    part = decode_segment(T, 3, found.parts[3])
    items = dataclasses.replace(part.segment.items, least=part.segment.items.least + 50)
    value = encode_segment(dataclasses.replace(part, segment=dataclasses.replace(part.segment, items=items)))
    with pytest.raises(SnapshotDamaged, match="t-end: its chain does not end with the last part"):
        read_snapshot(T, dataclasses.replace(found, parts=found.parts | {3: found.parts[3]._replace(value=value)}))


def test_h13_a_chain_outlives_its_owners():
    broker, owner, writer = stored()
    for start in (20, 30, 40):
        owner = keeper(broker)
        abort_some(writer, *range(start, start + 4))
        owner.pump()
        owner.snapshot(T)
    epochs = [entry.epoch for _, entry in sorted(entries(broker, T).parts.items())]
    assert epochs == sorted(epochs)
    assert len(set(epochs)) == 4
    assert_true(keeper(broker), broker, T)


@pytest.mark.parametrize(
    ("epochs", "fine"), [((1, 1, 2), True), ((1, 2, 1), False), ((1, 1, 3), False), ((2, 2, 2), True)]
)
def test_h13_epochs_never_fall_along_the_chain_nor_pass_the_end(epochs, fine):
    broker, _, _ = stored()
    found = entries(broker, T)
    before = end_of(broker).chain_first
    for number, epoch in enumerate(epochs, 1):
        part = decode_segment(T, number, found.parts[number])
        value = encode_segment(dataclasses.replace(part, epoch=epoch, chain_before=before))
        before = value[-16:]
        found.parts[number] = found.parts[number]._replace(value=value, epoch=epoch)
    end = dataclasses.replace(end_of(broker), epoch=2, chain_next=before)
    found.end = found.end._replace(value=end.encode(), epoch=2)
    if fine:
        read_snapshot(T, found)
    else:
        with pytest.raises(SnapshotDamaged, match="epoch"):
            read_snapshot(T, found)


def test_h13_entries_outside_the_range_are_ignored():
    broker, _owner, _ = stored()
    put(broker, message(part_key(T, 4), PART, 1, b"junk"), message(spill_key(T, 9), SPILL, 1, b"junk"))
    successor = keeper(broker)
    assert_true(successor, broker, T)
    successor.snapshot(T)
    assert sorted(entries(broker, T).spills) == []


def test_parts_without_an_end_are_damage():
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
        ({"version": "2"}, UnsupportedSnapshot),
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
    for changes, match in (
        ({"topic": "u"}, "of topic u"),
        ({"incarnation": "x"}, "chain does not start"),
        ({"first_part": 2}, "name different parts"),
        ({"next_part": 3}, "name different parts"),
    ):
        end = dataclasses.replace(end_of(broker), **changes)
        wrong = dataclasses.replace(found, end=found.end._replace(value=end.encode()))
        with pytest.raises(SnapshotDamaged, match=match):
            read_snapshot(T, wrong)
