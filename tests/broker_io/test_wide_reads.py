"""Messages with distinct property names: combined reads stay small and return all of them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_io import batch as batches
from broker_io import open_broker
from broker_io.batch import Batch, Message, PlacedBatch, Width
from broker_io.block import encode_block, open_block, parse_header, property_names
from broker_io.position import EARLIEST
from txnbuffer.service.log_readers import merged

COUNT, EACH = 600, 5
CELLS = 10_000


def messages(first: int, count: int) -> list[Message]:
    return [
        Message(None, b"%d" % at, {f"name-{at}": f"text-{at}", "all": str(at)}) for at in range(first, first + count)
    ]


def cells(placed: PlacedBatch) -> int:
    return len(placed) * len(placed.messages.properties)


def read(address: str) -> list[PlacedBatch]:
    with open_broker(address) as broker:
        reader = broker.reader("t", EARLIEST)
        found = []
        while (placed := reader.read()) is not None:
            found.append(placed)
        reader.close()
    return found


def test_width() -> None:
    width = Width()
    width.add(["a", "b"], 250_000)
    width.add(["b"], 250_000)
    assert (width.rows, width.full) == (500_000, False)
    width.add(["b"], 24_288)
    assert width.full


def test_log_and_followers_limit_the_property_names_of_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "CELLS", CELLS)
    address = f"file:{tmp_path}"
    with open_broker(address) as broker:
        broker.create_topic("t")
        with broker.writer("t") as writer:
            for at in range(0, COUNT, EACH):
                writer.append(Batch.of(messages(at, EACH))).result()
    found = read(address)
    assert all(cells(placed) < 2 * CELLS for placed in found)
    assert len(found) >= 6
    assert [message.message for placed in found for message in placed] == messages(0, COUNT)

    pieces = [placed.take(slice(at, at + 1)) for placed in found for at in range(len(placed))]
    runs = merged(pieces)
    assert 6 <= len(runs) < len(pieces)
    assert all(cells(placed) < 2 * CELLS for placed in runs)
    assert [message.message for placed in runs for message in placed] == messages(0, COUNT)
    assert list(itertools.chain.from_iterable(placed.positions for placed in runs)) == list(
        itertools.chain.from_iterable(placed.positions for placed in found)
    )


def test_wide_messages_are_read_in_small_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "CELLS", CELLS)
    address = f"file:{tmp_path}"
    with open_broker(address) as broker:
        broker.create_topic("t")
        with broker.writer("t") as writer:
            for at in range(COUNT):
                writer.append(Batch.of([Message(None, b"%d" % at, {"all": str(at)})])).result()
    assert len(read(address)) == 1


texts = st.dictionaries(st.text(max_size=4), st.sampled_from(["1", "-7", "12345678901", "text", "", "ä"]), max_size=4)


@given(st.lists(texts, min_size=1, max_size=20))
def test_property_names_of_a_block_are_those_of_its_columns(rows: list[dict[str, str]]) -> None:
    batch = Batch.of([Message(b"k", b"v", row) for row in rows])
    data = b"".join(encode_block(batch, first_entry=0, publish_time=0, place=1).chunks)
    block = open_block(data, 0, parse_header(data, 0, 1))
    assert property_names(block) == {name.encode() for row in rows for name in row}
