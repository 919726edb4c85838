"""The client without asyncio: the same calls, each of which waits; the work is done in a thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from txnbuffer.checks import check_done, check_plain
from txnbuffer.client import forking
from txnbuffer.client.changes import ChangeBatch, ChangeStatistics, ChangeStream, Rollback
from txnbuffer.client.client import ATTEMPTS, FIRST_PAUSE
from txnbuffer.client.cursors import At
from txnbuffer.client.plain_transaction import RETURNED, PlainTransaction
from txnbuffer.client.portal import Portal
from txnbuffer.client.read_topics import Start
from txnbuffer.client.reader import CommittedReader
from txnbuffer.client.rows import Key
from txnbuffer.client.tokens import TokenStore
from txnbuffer.errors import InvalidRequest, TransactionAborted
from txnbuffer.model import Outcome, TxnId
from txnbuffer.streams.token import ResumeToken

if TYPE_CHECKING:
    from txnbuffer.client.handling import Processed
    from txnbuffer.client.records import Record, RecordBatch
    from txnbuffer.client.transaction import Transaction

Result = TypeVar("Result")


class PlainClient(Portal):
    """Made by `with connect(…)`. Threads may share it; a transaction belongs to one of them."""

    def transaction(
        self, *, name: str | None = None, number: int | None = None, timeout: float | None = None
    ) -> PlainTransaction:
        """As Client.transaction, to be used with `with`."""
        return PlainTransaction(self, self._client.transaction(name=name, number=number, timeout=timeout), name)

    def run(
        self,
        work: Callable[[PlainTransaction], Result],
        *,
        name: str | None = None,
        number: int | None = None,
        timeout: float | None = None,
        attempts: int = ATTEMPTS,
    ) -> Result:
        """As Client.run: repeats on TransactionAborted only."""
        check_plain(work)
        pause = FIRST_PAUSE
        for attempt in range(1, attempts + 1):
            try:
                with self.transaction(name=name, number=number, timeout=timeout) as txn:
                    result = check_done(work(txn))
            except TransactionAborted:
                if attempt == attempts:
                    raise
                time.sleep(pause)
                pause *= 2
            else:
                return result
        raise InvalidRequest(f"{attempts} attempts are none: allow at least 1")

    def outcome(self, txn: TxnId | str) -> Outcome | None:
        """How a transaction ended; None while it has not."""
        return self.call(self._client.outcome, txn)

    def committed_number(self, name: str) -> int:
        """As Client.committed_number."""
        return self.call(self._client.committed_number, name)

    def delete_name(self, name: str, *, over: int = 0) -> None:
        """As Client.delete_name."""
        self.call(self._client.delete_name, name, over=over)

    def forget_group(self, group: str, topic: str | None = None) -> None:
        """As Client.forget_group."""
        self.call(self._client.forget_group, group, topic)

    def send(self, topic: str, value: Any, **options: Any) -> None:
        """As Client.send: one record outside of any transaction."""
        self.call(self._client.send, topic, value, **options)

    def send_many(self, topic: str, values: Sequence[Any], **options: Any) -> None:
        """As Client.send_many."""
        self.call(self._client.send_many, topic, values, **options)

    def delete(self, topic: str, key: Key) -> None:
        """Delete a key, outside of any transaction."""
        self.call(self._client.delete, topic, key)

    def reader(
        self,
        topics: str | Sequence[str],
        *,
        start: Start | Mapping[str, Start] = "beginning",
        isolation: str = "read_committed",
    ) -> CommittedReader:
        """A reader of what committed."""
        forking.check(self._forked_from)
        return CommittedReader(self._client.open_broker(), topics, start=start, isolation=isolation)

    def stream(
        self,
        topic: str,
        *,
        from_: str | ResumeToken = "beginning",
        to: int | str | None = None,
        store: TokenStore | None = None,
        cursor: str | None = None,
    ) -> PlainStream:
        """As Client.stream, to be iterated with `for`."""

        async def made() -> ChangeStream:
            return self._client.stream(topic, from_=from_, to=to, store=store, cursor=cursor)

        return PlainStream(self, self.call(made))

    @property
    def cursors(self) -> PlainCursors:
        """As Client.cursors."""
        return PlainCursors(self)

    def process(
        self,
        source: str | Sequence[str],
        group: str,
        handler: Callable[[PlainTransaction, Record], None],
        **options: Any,
    ) -> Processed:
        """As Client.process; the handler is called in the calling thread."""
        return self._process(self._client.process, source, group, handler, options)

    def process_batches(
        self,
        source: str | Sequence[str],
        group: str,
        handler: Callable[[PlainTransaction, RecordBatch], None],
        **options: Any,
    ) -> Processed:
        """As Client.process_batches; the handler is called in the calling thread."""
        return self._process(self._client.process_batches, source, group, handler, options)

    def _process(
        self,
        process: Callable[..., Coroutine[Any, Any, Processed]],
        source: str | Sequence[str],
        group: str,
        handler: Callable[..., object],
        options: dict[str, Any],
    ) -> Processed:
        self.check()
        check_plain(handler)

        def work(in_caller: Any) -> Coroutine[Any, Any, Processed]:
            async def handle(txn: Transaction, records: Record | RecordBatch) -> None:
                plain = PlainTransaction(self, txn, None)
                await in_caller(lambda: check_done(handler(plain, records)))
                await plain.hand_over(RETURNED)

            return process(source, group, handle, **options)

        return self._loop.call_with_callbacks(work)


class PlainStream:
    """As ChangeStream."""

    def __init__(self, plain: Portal, stream: ChangeStream) -> None:
        self._plain = plain
        self._stream = stream

    @property
    def caught_up(self) -> bool:
        """Whether there was nothing newer than the last batch."""
        return self._stream.caught_up

    def statistics(self) -> ChangeStatistics:
        """As ChangeStream.statistics."""
        return self._stream.statistics()

    def next(self, timeout: float | None = None) -> ChangeBatch | Rollback | None:
        """As ChangeStream.next."""
        return self._plain.call(self._stream.next, timeout)

    def rolled_back(self, seqno: int) -> None:
        """As ChangeStream.rolled_back."""
        self._plain.call(self._stream.rolled_back, seqno)

    def done(self) -> None:
        """As ChangeStream.done."""
        self._plain.call(self._stream.done)

    def close(self) -> None:
        """As ChangeStream.close."""
        self._plain.call(self._stream.close)

    def __iter__(self) -> Iterator[ChangeBatch | Rollback]:
        while (item := self.next()) is not None:
            yield item

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not self._plain.inherited:
            self.close()


class PlainCursors:
    """As DurableCursors."""

    def __init__(self, plain: Portal) -> None:
        self._plain = plain
        self._cursors = plain.client.cursors

    def add(self, topic: str, cursor: str, at: At = "beginning") -> int:
        """As DurableCursors.add."""
        return self._plain.call(self._cursors.add, topic, cursor, at)

    def advance(self, topic: str, cursor: str, at: At) -> int:
        """As DurableCursors.advance."""
        return self._plain.call(self._cursors.advance, topic, cursor, at)

    def remove(self, topic: str, cursor: str) -> None:
        """As DurableCursors.remove."""
        self._plain.call(self._cursors.remove, topic, cursor)
