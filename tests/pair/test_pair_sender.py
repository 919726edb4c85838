"""What a node sends over its link: messages and stored records, in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from broker_io.environment import current
from broker_io.filelog.log.records import LogRecord, Mark, make_record
from broker_io.filelog.pair.sender import PeerSender
from broker_io.filelog.replication.messages import Records, SendMessage, SendStored
from broker_io.testing.contract.base import eventually as until


class RecordedLink:
    """A link that keeps what is sent."""

    number = 7

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.closed = False

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def send_copy(self, begin: Any, copy: Any) -> None:
        self.sent.append(begin)
        copy.close()

    def close(self) -> None:
        self.closed = True


class SlowStore:
    """Reads records as soon as `going`."""

    def __init__(self) -> None:
        self.going = threading.Event()

    def read(self, first: int, last: int) -> Iterator[LogRecord]:
        assert self.going.wait(60)
        before = Mark(1, first, 0)
        for _ in range(first, last):
            record = make_record(before, 1, 0, b"x" * 600_000)
            yield record
            before = record.mark


def test_messages_are_sent_after_the_records_that_are_read_for_the_link_before_them() -> None:
    threads, mutex, link, store, durable = current().threads, current().threads.lock(), RecordedLink(), SlowStore(), [0]
    failures: list[Exception] = []
    problems: list[tuple[int, str]] = []
    sender = PeerSender(
        threads,
        mutex,
        store,  # type: ignore[arg-type]  # has what is used
        lambda: durable[0],
        failures.append,
        lambda number, why: problems.append((number, why)),
    )
    thread = threading.Thread(target=sender.run, daemon=True)
    thread.start()
    template = Records(1, b"a1", (), 3)
    with mutex:
        sender.up(link)
        for effect in (SendMessage(7, "one"), SendStored(7, template, 0, 5), SendMessage(7, "two"), SendMessage(6, "")):  # type: ignore[arg-type]  # has what is used
            sender.send(effect)
    store.going.set()
    time.sleep(0.1)
    assert link.sent == ["one"]  # records that are not durable yet can't be read
    durable[0] = 5
    sender.synced()
    until(lambda: len(link.sent) == 5)
    assert link.sent[0] == "one"
    assert link.sent[-1] == "two"
    assert [record.lsn for message in link.sent[1:-1] for record in message.records] == [1, 2, 3, 4, 5]
    sender.close()
    thread.join()
    assert link.closed
    assert not failures
    assert not problems
