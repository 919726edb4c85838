"""Frames for tests: strategies for complete frames, and comparable values of frames, with batches as rows."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from broker_io.batch import Batch, Message
from broker_io.errors import Fenced, MessageTooLarge
from broker_io.position import Position
from broker_io.varint import encode_varint
from txnbuffer.coordinator.messages import (
    Begin,
    Branch,
    Commit,
    ConsumerPosition,
    Done,
    GroupHeartbeat,
    Joined,
    Leased,
    MemberAssignments,
    NameOpened,
    PartitionAssignment,
    ProducerSequence,
    State,
)
from txnbuffer.errors import AlreadyCommitted, TransactionAborted
from txnbuffer.model import MAX_LEAST, Outcome, TxnId
from txnbuffer.protocol import transactional
from txnbuffer.rpc.frames import (
    Abort,
    ClientFrame,
    Deletion,
    Failure,
    IdBlock,
    LeaseRequest,
    NamedRequest,
    Query,
    Send,
    ServerFrame,
    SessionHello,
    Welcome,
)

longs = st.integers(0, 2**63 - 1)
requests = st.integers(1, 2**40)
words = st.text("abc-_é/", min_size=1, max_size=5)
txns = st.builds(TxnId, st.one_of(st.just(0), longs), st.integers(1, MAX_LEAST))
positions = st.builds(Position, longs, longs, st.integers(-1, 5))
namings = st.one_of(st.none(), st.builds(ProducerSequence, words, longs, longs))


def tuples(of: st.SearchStrategy, size: int = 3) -> st.SearchStrategy:
    return st.lists(of, max_size=size).map(tuple)


@st.composite
def topic_counts(draw: st.DrawFn) -> tuple[tuple[str, ...], tuple[int, ...]]:
    pairs = draw(st.lists(st.tuples(words, longs), max_size=3))
    return tuple(name for name, _ in pairs), tuple(count for _, count in pairs)


@st.composite
def commits(draw: st.DrawFn) -> Commit:
    request, txn, wait = draw(requests), draw(txns), draw(st.booleans())
    if draw(st.booleans()):
        return Commit(request, txn, *draw(topic_counts()), wait)
    winners = tuple(Branch(draw(txns), *draw(topic_counts())) for _ in range(draw(st.integers(0, 2))))
    consumed = tuples(st.builds(ConsumerPosition, words, words, longs, positions, positions))
    return Commit(request, txn, *draw(topic_counts()), wait, draw(namings), winners, draw(tuples(txns)), draw(consumed))


messages = st.builds(
    Message,
    st.one_of(st.none(), st.binary(max_size=4)),
    st.one_of(st.none(), st.binary(max_size=9)),
    st.dictionaries(words, words, max_size=2),
    st.integers(0, 2**40),
)


@st.composite
def sends(draw: st.DrawFn) -> Send:
    batch = Batch.of(draw(st.lists(messages, min_size=1, max_size=4)))
    return Send(draw(words), transactional(batch, draw(txns), draw(requests)) if draw(st.booleans()) else batch)


timeouts = st.one_of(st.none(), st.floats(0.001, 1e6))


@st.composite
def parts(draw: st.DrawFn) -> GroupHeartbeat:
    rows = draw(st.lists(st.tuples(words, words, positions), max_size=3))
    topics, partitions, ends = zip(*rows, strict=True) if rows else ((), (), ())
    head = draw(requests), draw(words), draw(words)
    return GroupHeartbeat(*head, topics, partitions, ends if draw(st.booleans()) else (), draw(st.booleans()))


client_frames = st.builds(
    ClientFrame,
    hello=st.one_of(st.none(), st.builds(SessionHello, words, tuples(txns))),
    registers=tuples(st.builds(NamedRequest, requests, words)),
    leases=tuples(st.builds(LeaseRequest, requests, longs)),
    open_names=tuples(st.builds(NamedRequest, requests, words)),
    delete_names=tuples(st.builds(Deletion, requests, words, st.integers(0, 2**63 - 1))),
    joins=tuples(st.builds(NamedRequest, requests, words)),
    members=tuples(parts()),
    begins=tuples(st.builds(Begin, requests, txns, timeouts, st.one_of(st.none(), txns), namings)),
    sends=tuples(sends()),
    commits=tuples(commits()),
    aborts=tuples(st.builds(Abort, requests, txns, tuples(words))),
    queries=tuples(st.builds(Query, requests, txns)),
    returned=tuples(st.builds(IdBlock, longs, longs)),
    bye=st.booleans(),
)

errors = st.one_of(
    st.builds(TransactionAborted, txns, words),
    st.builds(AlreadyCommitted, words, requests, requests),
    st.builds(MessageTooLarge, words),
    st.builds(Fenced, words),
)
results = st.one_of(
    st.sampled_from(Outcome),
    st.sampled_from(State),
    st.builds(Done),
    st.builds(Leased, longs, longs),
    st.builds(NameOpened, longs, longs),
    st.builds(Joined, longs, tuples(st.tuples(words, positions))),
    st.builds(MemberAssignments, longs, tuples(st.builds(PartitionAssignment, words, longs, positions)), st.booleans()),
    errors,
)
states = st.one_of(st.sampled_from(State), errors)
server_frames = st.builds(
    ServerFrame,
    welcome=st.one_of(
        st.none(),
        st.builds(
            Welcome, words, longs, longs, longs, tuples(st.tuples(txns, st.one_of(st.sampled_from(State), errors)))
        ),
    ),
    acknowledged=longs,
    failures=tuples(st.builds(Failure, longs, errors, st.one_of(st.none(), txns))),
    answers=tuples(st.tuples(requests, results), 6),
    credits=st.one_of(st.none(), longs),
    draining=st.booleans(),
    goodbye=st.one_of(st.none(), errors),
    settled=st.booleans(),
)


def plain_client(frame: ClientFrame) -> object:
    """A client frame as a comparable value."""
    rows = tuple((send.topic, tuple(send.batch)) for send in frame.sends)
    return replace(frame, sends=()), rows


def plain_server(frame: ServerFrame) -> object:
    """A server frame as a value that compares equal for any order of its answers."""
    answers = sorted(((request, _plain(result)) for request, result in frame.answers), key=repr)
    failures = tuple((failure.send, _plain(failure.error), failure.txn) for failure in frame.failures)
    states = [] if frame.welcome is None else [(txn, _plain(state)) for txn, state in frame.welcome.states]
    rest = replace(frame, welcome=frame.welcome and frame.welcome[:4], answers=(), failures=(), goodbye=None)  # type: ignore[arg-type]  # to compare only
    return rest, states, answers, failures, _plain(frame.goodbye)


def _plain(result: object) -> object:
    if isinstance(result, Exception):
        return type(result), str(result), vars(result)
    return type(result), result


def field(number: int, content: bytes) -> bytes:
    """A field of a message of a protocol file that has bytes, up to number 15."""
    return bytes([number << 3 | 2]) + encode_varint(len(content)) + content
