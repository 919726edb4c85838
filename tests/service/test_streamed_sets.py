"""Change streams of topics with record sets, however many of them are unpacked together."""

from __future__ import annotations

import pytest
from histories import place
from service_setup import engine_on
from streamed import Follower, client_of

from broker_io.batch import Batch, Message
from broker_io.memory import MemoryBroker
from txnbuffer import ResumeToken, recordset
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.visibility import visible_counts
from txnbuffer.model import Position
from txnbuffer.mutations.batch import MutationBatch
from txnbuffer.recordset import pack
from txnbuffer.service.streams import streams
from txnbuffer.service.streams.stream_topic import mutations_in, mutations_of


@pytest.fixture(params=[1, recordset.TOGETHER_BYTES])
def together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One set at a time, and all at once."""
    monkeypatch.setattr(recordset, "TOGETHER_BYTES", request.param)


def a_set(first: int, size: int = 5) -> Message:
    return pack(Batch.of([Message(b"%d" % number, b"v") for number in range(first, first + size)]))


@pytest.mark.usefixtures("together")
async def test_a_read_may_begin_in_the_middle_of_a_record_set(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = MemoryBroker()
    broker.create_topic("t")
    with broker.writer("t") as writer:
        writer.append(Batch.of([a_set(0), a_set(5), a_set(10)])).result()
    monkeypatch.setattr(streams, "ANSWER_BYTES", 6)
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        whole = Follower(client.stream("t", to="now"))
        await whole.to_end()
        assert whole.seqnos == list(range(1, 16))
        assert list(whole.table) == [b"%d" % number for number in range(15)]
        token = whole.stream.token
        seventh = ResumeToken("t", token.cluster, token.incarnation, token.versions, 7, 7, 7)
        rest = Follower(client.stream("t", from_=seventh))
        await rest.until(15)
        assert list(rest.table) == [b"%d" % number for number in range(7, 15)]


@pytest.mark.usefixtures("together")
def test_records_sequenced_together_come_in_order_with_their_seqnos() -> None:
    rows = [a_set(0, 3), Message(b"single", b"v"), a_set(3, 1), a_set(4, 2)]
    placed = place(rows, [Position(1, entry) for entry in range(len(rows))])
    buffer = TransactionBuffer()
    buffer.apply_batch(placed)
    counts = visible_counts(placed, buffer)
    assert counts.tolist() == [3, 1, 1, 2]
    found = MutationBatch.concat([*mutations_in(placed, counts, 40, buffer)])
    assert [*found] == [*mutations_of(placed, counts, 40, buffer)]
    assert found.seqnos.tolist() == list(range(40, 47))
