"""Records with many properties between many records without any."""

from __future__ import annotations

from broker_io.batch import Batch, Message
from broker_io.errors import Error
from txnbuffer.service.topics.appends import AppendPart, ServiceTopic


def part(*messages: Message) -> AppendPart:
    def acknowledged() -> None: ...

    def failed(_: Error) -> None: ...

    batch = Batch.of(messages)
    return AppendPart(batch, batch.weight, acknowledged, failed)


def test_many_properties_of_one_record_are_no_columns_for_many_others() -> None:
    topic = ServiceTopic("t")
    wide = part(Message(None, b"", {f"name-{number}": "x" for number in range(900)}))
    many = part(*[Message(None, b"")] * 4000)
    few = part(*[Message(None, b"")] * 3)
    topic.waiting.extend([few, wide, many, many, wide, few])
    flights = [topic.take().parts for _ in range(3)]
    assert flights == [[few, wide], [many, many], [wide, few]]
    assert not topic.waiting
