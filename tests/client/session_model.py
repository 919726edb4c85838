"""A minimal model of a service for tests of a client's core: it handles whole frames and keeps all state.

Its logs hold `(transaction or None, seq, value)`. It injects faults: `poison` values are refused, `closed` topics can't
be registered, and tests may expire transactions.
"""

from __future__ import annotations

from collections.abc import Iterator

from broker_io.batch import Batch
from broker_io.errors import InvalidTopicName, MessageTooLarge
from txnbuffer.coordinator.messages import Commit, Done, Joined, Leased, NameOpened, Result, State
from txnbuffer.errors import Error, TransactionAborted, UnknownTransaction
from txnbuffer.model import Outcome, TxnId
from txnbuffer.protocol import SEQ, TXN
from txnbuffer.rpc.frames import ClientFrame, Failure, Send, ServerFrame, SessionHello, Welcome

Entry = tuple[str | None, int, bytes | None]

POISON = b"poison"
CLOSED = "closed"


class SessionModel:
    def __init__(self) -> None:
        self.logs: dict[str, list[Entry]] = {}
        self.registered: set[str] = set()
        self.leased: dict[int, str] = {}
        self.ended: dict[TxnId, Outcome] = {}
        self.failed: dict[TxnId, Error] = {}
        self.names: dict[str, int] = {}
        self._sessions = 0

    def connect(self) -> ModelConnection:
        return ModelConnection(self)

    def open_session(self, hello: SessionHello) -> Welcome:
        if hello.session:
            session = hello.session
        else:
            self._sessions += 1
            session = f"s{self._sessions}"
        for least, owner in self.leased.items():
            txn = TxnId(0, least)
            if owner == session and txn not in hello.open and txn not in self.ended:
                self.ended[txn] = Outcome.ABORT
        return Welcome(session, 0, 1, 1000, tuple((txn, self.state(txn)) for txn in hello.open))

    def state(self, txn: TxnId) -> State:
        return {None: State.OPEN, Outcome.COMMIT: State.COMMITTED, Outcome.ABORT: State.ABORTED}[self.ended.get(txn)]

    def lease(self, session: str, size: int) -> Leased:
        first = len(self.leased) + 1
        self.leased |= dict.fromkeys(range(first, first + size), session)
        return Leased(first, size)

    def append(self, number: int, send: Send) -> Iterator[Failure]:
        log = self.logs.setdefault(send.topic, [])
        refused: set[str | None] = set()
        rows = list(_rows(send.batch))
        for text, _, value in rows:
            txn = None if text is None else TxnId.parse(text)
            error: Error | None = MessageTooLarge("poison is too large") if value == POISON else None
            if txn is not None and txn in self.ended:
                error = TransactionAborted(txn, "it had ended")
            if txn is not None:
                error = self.failed.get(txn, error)
            if error is not None and text not in refused:
                refused.add(text)
                if txn is not None:
                    self.failed[txn] = error
                yield Failure(number, error, txn)
        for text, seq, value in rows:
            if text in refused:
                continue
            if text is not None:
                assert send.topic in self.registered, "a transactional send to a topic that is not registered"
                last = sum(1 for entry in log if entry[0] == text)
                assert seq <= last + 1, f"a gap before record {seq} of {text}"
                if seq <= last:
                    continue
            log.append((text, seq, value))

    def commit(self, commit: Commit) -> Result:
        txn = commit.txn
        if txn not in self.ended:
            if txn.least not in self.leased:
                return UnknownTransaction(f"{txn} was never leased")
            accepted = tuple(self.accepted(topic, txn) for topic in commit.topics)
            self.ended[txn] = Outcome.COMMIT if accepted == commit.records else Outcome.ABORT
            assert accepted == commit.records or txn in self.failed, "a commit before its records"
        if self.ended[txn] is Outcome.ABORT:
            return TransactionAborted(txn, "it had ended")
        return Outcome.COMMIT

    def accepted(self, topic: str, txn: TxnId) -> int:
        return sum(1 for entry in self.logs.get(topic, ()) if entry[0] == str(txn))

    def abort(self, txn: TxnId) -> Outcome:
        return self.ended.setdefault(txn, Outcome.ABORT)

    def expire(self, txn: TxnId) -> None:
        """Abort a transaction by timeout."""
        self.ended.setdefault(txn, Outcome.ABORT)

    def committed(self, topic: str) -> list[Entry]:
        """The entries of committed transactions."""
        return [
            entry
            for entry in self.logs.get(topic, ())
            if entry[0] is None or self.ended.get(TxnId.parse(entry[0])) is Outcome.COMMIT
        ]


class ModelConnection:
    """Handles frames in order and returns one frame for each."""

    def __init__(self, model: SessionModel) -> None:
        self._model = model
        self._session = ""
        self._sends = 0

    def take(self, frame: ClientFrame) -> ServerFrame:
        model = self._model
        answers: list[tuple[int, Result]] = []
        failures: list[Failure] = []
        welcome: Welcome | None = None
        if frame.hello is not None:
            welcome = model.open_session(frame.hello)
            self._session = welcome.session
        assert self._session, "a frame before hello"
        for request, topic in frame.registers:
            if topic == CLOSED:
                answers.append((request, InvalidTopicName("this topic can't be")))
            else:
                model.registered.add(topic)
                answers.append((request, Done()))
        answers += [(request, model.lease(self._session, size)) for request, size in frame.leases]
        answers += [(request, NameOpened(1, model.names.setdefault(name, 0))) for request, name in frame.open_names]
        answers += [(request, Joined(1, ())) for request, _ in frame.joins]
        for begin in frame.begins:
            if model.ended.get(begin.txn) is Outcome.ABORT:
                answers.append((begin.request, TransactionAborted(begin.txn, "it had ended")))
        for send in frame.sends:
            self._sends += 1
            failures += model.append(self._sends, send)
        answers += [(commit.request, model.commit(commit)) for commit in frame.commits]
        answers += [(abort.request, model.abort(abort.txn)) for abort in frame.aborts]
        for request, txn in frame.queries:
            ended = model.ended.get(txn)
            answers.append((request, State.OPEN if ended is None else ended))
        return ServerFrame(welcome, self._sends, tuple(failures), tuple(answers))


def _rows(batch: Batch) -> Iterator[Entry]:
    for _, value, properties, _ in batch:
        text = properties.get(TXN)
        yield text, int(properties.get(SEQ, "0")), value
