"""Frames of the session protocol as messages of `session.proto`

The messages have the fields of the values in `txnbuffer.rpc.frames` and `txnbuffer.coordinator.messages`. Frames of a
peer are checked: decoding raises MalformedFrame for contradictions, UnsupportedFormat for blocks of a newer release.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Any

from broker_io.block import encode_block
from broker_io.position import Position
from broker_io.rpc import encoding
from broker_io.rpc.encoding import (
    BlockSlice,
    Detail,
    StreamMethod,
    decode_block,
    detail,
    fields,
    join_blocks,
    parse,
    reader,
    serialize,
    split_blocks,
)
from broker_io.rpc.log_pb2 import Error as ErrorMessage
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
    ProducerSequence,
    Result,
    State,
)
from txnbuffer.errors import Error, MalformedFrame
from txnbuffer.model import Outcome, TxnId
from txnbuffer.rpc import session_pb2
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

Fields = dict[str, Any]


def encode_client_frame(frame: ClientFrame) -> bytes:
    """Return the bytes of a frame. Each send must have at least one message."""
    message = session_pb2.ClientFrame(bye=frame.bye, hello=frame.hello and fields(frame.hello))
    for rows, requests in (
        (message.registers, frame.registers),
        (message.leases, frame.leases),
        (message.open_names, frame.open_names),
        (message.delete_names, frame.delete_names),
        (message.joins, frame.joins),
        (message.members, frame.members),
        (message.returned, frame.returned),
    ):
        for request in requests:
            rows.add(**fields(request))
    begin = message.begins.add
    for number, (most, least), timeout, parent, sequence in frame.begins:
        row = begin(request=number, most=most, least=least, timeout=timeout)
        if parent is not None or sequence is not None:
            details = session_pb2.BeginDetails(
                parent=parent and parent._asdict(), sequence=sequence and sequence._asdict()
            )
            row.details.CopyFrom(details)
    blocks = []
    for topic, batch in frame.sends:
        message.sends.add(topic=topic)
        blocks.append(encode_block(batch, first_entry=0, publish_time=0).chunks)
    _add_commits(message, frame.commits)
    for number, (most, least), topics in frame.aborts:
        message.aborts.add(request=number, most=most, least=least, topics=topics)
    for number, (most, least) in frame.queries:
        message.queries.add(request=number, most=most, least=least)
    return join_blocks(message, blocks)


def _add_commits(message: session_pb2.ClientFrame, commits: Iterable[Commit]) -> None:
    add = message.commits.add
    for number, (most, least), topics, records, wait, sequence, winners, losers, positions in commits:
        row = add(request=number, most=most, least=least, topics=topics, records=records, wait_visible=wait)
        if sequence is None and not (winners or losers or positions):
            continue
        details = row.details
        details.CopyFrom(session_pb2.CommitDetails(sequence=sequence and sequence._asdict()))
        for rows, values in ((details.winners, winners), (details.losers, losers), (details.positions, positions)):
            for value in values:
                rows.add(**fields(value))


def encode_error(error: Error) -> ErrorMessage:
    """Return the message of an error; its attribute `txn` is sent as text."""
    return encoding.encode_error(error, _detail)


def _detail(value: object) -> Detail:
    return str(value) if isinstance(value, TxnId) else detail(value)


def decode_error(message: ErrorMessage) -> Error:
    """Return the error of a message. Raises ValueError."""
    error = encoding.decode_error(message)
    txn = vars(error).get("txn")
    if txn is not None:
        error.txn = TxnId.parse(str(txn))  # type: ignore[attr-defined]  # some classes have it
    return error


PART_ROWS = 128
"""Rows of a frame that are decoded at once: a large frame delays nobody for as long as all of it would take."""


def decode_client_frame(data: bytes) -> ClientFrame:
    """Return the frame of these bytes. Raises MalformedFrame, and UnsupportedFormat."""
    (frame,) = client_frame_parts(data, sys.maxsize)
    return frame


def client_frame_parts(data: bytes, most: int = PART_ROWS) -> Iterator[ClientFrame]:
    """Yield frames of at most `most` rows, which together, in this order, are the frame of these bytes.

    Each part is decoded when it is asked for. Raises MalformedFrame, and UnsupportedFormat.
    """
    try:
        message, blocks = split_blocks(session_pb2.ClientFrame, data)
        if len(message.sends) != len(blocks):
            raise ValueError(f"it has {len(message.sends)} sends and {len(blocks)} blocks")
        part: Fields = {"hello": _hello(message.hello)} if message.HasField("hello") else {}
        left = most
        for name, decode in _CLIENT_ROWS.items():
            rows = getattr(message, name)
            if name == "sends" and blocks:
                rows = [*zip(range(len(blocks)), rows, blocks, strict=True)]
            for at in range(0, len(rows), most):
                some = rows[at : at + most]
                if len(some) > left:
                    yield ClientFrame(**part)
                    part, left = {}, most
                part[name] = tuple(map(decode, some))
                left -= len(some)
        yield ClientFrame(bye=message.bye, **part)
    except ValueError as error:
        raise MalformedFrame(f"cannot read a frame of the client: {error}; use a client of this release") from None


def _txn(row: Any) -> TxnId:
    """Return the transaction id in `most` and `least`, whose largest values are those of an int64."""
    most, least = row.most, row.least
    if most < 0 or least < 1:
        raise ValueError(f"the transaction id {most}:{least} is out of range")
    return TxnId(most, least)


def _count(number: int) -> int:
    if number < 0:
        raise ValueError(f"{number} is below 0")
    return number


_SPECIAL = {TxnId: _txn, Error: decode_error}
_hello, _named = reader(SessionHello, _SPECIAL), reader(NamedRequest)
_heartbeat, _place = reader(GroupHeartbeat), reader(Position)


def _member(row: session_pb2.GroupHeartbeat) -> GroupHeartbeat:
    topics, partitions, ends = len(row.topics), len(row.partitions), len(row.ends)
    if topics != partitions or ends not in (0, partitions):
        raise ValueError(f"a member has {topics} topics and {ends} ends for {partitions} partitions")
    return _heartbeat(row)


def _begin(row: session_pb2.Begin) -> Begin:
    timeout = row.timeout
    if not 0.0 <= timeout < inf:
        raise ValueError("a begin has a timeout that is negative or not a finite number")
    begin = Begin(row.request, _txn(row), timeout or None)
    if not row.HasField("details"):
        return begin
    details = row.details
    parent = _txn(details.parent) if details.HasField("parent") else None
    return begin._replace(parent=parent, sequence=_sequence(details))


_number, _consumed = reader(ProducerSequence), reader(ConsumerPosition)


def _sequence(details: session_pb2.BeginDetails | session_pb2.CommitDetails) -> ProducerSequence | None:
    return _number(details.sequence) if details.HasField("sequence") else None


def _send(row: tuple[int, session_pb2.Send, BlockSlice]) -> Send:
    number, send, block = row
    return Send(send.topic, decode_block(block, f"block {number}, for topic {send.topic!r}").messages)


def _counted(row: session_pb2.Commit | session_pb2.Branch) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the topics, and the numbers of records in them."""
    topics, records = tuple(row.topics), tuple(row.records)
    if len(records) != len(topics) or (records and min(records) < 0):
        raise ValueError(f"a commit has {len(topics)} topics with the numbers of records {records}")
    return topics, records


def _commit(row: session_pb2.Commit) -> Commit:
    commit = Commit(row.request, _txn(row), *_counted(row), row.wait_visible)
    if not row.HasField("details"):
        return commit
    details = row.details
    return commit._replace(
        sequence=_sequence(details),
        winners=tuple([Branch(_txn(branch.txn), *_counted(branch)) for branch in details.winners]),
        losers=tuple(map(_txn, details.losers)),
        positions=tuple(map(_consumed, details.positions)),
    )


_CLIENT_ROWS: dict[str, Callable[[Any], Any]] = {
    "registers": _named,
    "leases": reader(LeaseRequest),
    "open_names": _named,
    "delete_names": lambda row: Deletion(row.request, row.name, _count(row.over)),
    "joins": _named,
    "members": _member,
    "begins": _begin,
    "sends": _send,
    "commits": _commit,
    "aborts": lambda row: Abort(row.request, _txn(row), tuple(row.topics)),
    "queries": lambda row: Query(row.request, _txn(row)),
    "returned": lambda row: IdBlock(_count(row.first), _count(row.size)),
}
"""How to decode a row of each field of ClientFrame, in the order in which the service executes them."""


# --- from service to client ---


def encode_server_frame(frame: ServerFrame) -> bytes:
    """Return the bytes of a frame. Raises TypeError for a result that is not an answer, such as SessionOpened."""
    message = session_pb2.ServerFrame(
        acknowledged=frame.acknowledged,
        credits=frame.credits,
        draining=frame.draining,
        goodbye=None if frame.goodbye is None else encode_error(frame.goodbye),
        settled=frame.settled,
    )
    if frame.welcome is not None:
        known = {"states": [*map(_known, frame.welcome.states)]}
        message.welcome.MergeFrom(session_pb2.Welcome(**{**frame.welcome._asdict(), **known}))
    for send, error, txn in frame.failures:
        message.failures.add(send=send, error=encode_error(error), txn=txn and txn._asdict())
    for request, result in frame.answers:
        if type(result) is Outcome:
            (message.committed if result else message.aborted).append(request)
        else:
            message.answers.add(request=request, **_answer(result))
    return serialize(message)


def _known(known: tuple[TxnId, State | Error]) -> Fields:
    txn, state = known
    found = {"error": encode_error(state)} if isinstance(state, Error) else {"state": state.value}
    return {"txn": txn._asdict(), **found}


def _answer(result: Result) -> Fields:
    match result:
        case Error():
            return {"error": encode_error(result)}
        case Joined(generation, positions):
            topics, places = [name for name, _ in positions], [fields(position) for _, position in positions]
            return {"joined": {"generation": generation, "topics": topics, "positions": places}}
        case State() | Done() | Leased() | NameOpened() | MemberAssignments():
            return {_NAMES[type(result)]: fields(result)}
    raise TypeError(f"{result!r} is not an answer to a session's request")


_NAMES = {Done: "done", Leased: "leased", NameOpened: "opened", MemberAssignments: "assignments", State: "state"}


def decode_server_frame(data: bytes) -> ServerFrame:
    """Return the frame of these bytes. Raises MalformedFrame."""
    try:
        message = parse(session_pb2.ServerFrame, data)
        return ServerFrame(
            welcome=_welcome(message.welcome) if message.HasField("welcome") else None,
            acknowledged=message.acknowledged,
            failures=tuple([_failure(row) for row in message.failures]),
            answers=(
                *[(request, Outcome.COMMIT) for request in message.committed],
                *[(request, Outcome.ABORT) for request in message.aborted],
                *[(row.request, _result(row)) for row in message.answers],
            ),
            credits=message.credits if message.HasField("credits") else None,
            draining=message.draining,
            goodbye=decode_error(message.goodbye) if message.HasField("goodbye") else None,
            settled=message.settled,
        )
    except ValueError as error:
        raise MalformedFrame(f"cannot read a frame of the service: {error}; use a client of its release") from None


def _welcome(row: session_pb2.Welcome) -> Welcome:
    states = tuple([(_txn(known.txn), _state_or_error(known)) for known in row.states])
    return Welcome(row.session, row.shard, row.epoch, row.max_message_bytes, states)


def _state_or_error(known: session_pb2.KnownState) -> State | Error:
    return decode_error(known.error) if known.HasField("error") else State(known.state)


_failure = reader(Failure, _SPECIAL)


def _joined(row: session_pb2.GroupJoined) -> Joined:
    return Joined(row.generation, tuple(zip(row.topics, map(_place, row.positions), strict=True)))


_RESULTS: dict[str, Callable[[Any], Result]] = {
    "state": State,
    "done": reader(Done),
    "leased": reader(Leased),
    "opened": reader(NameOpened),
    "joined": _joined,
    "assignments": reader(MemberAssignments),
    "error": decode_error,
}


def _result(row: session_pb2.Answer) -> Result:
    kind = row.WhichOneof("result")
    if kind is None:
        raise ValueError(f"the answer to request {row.request} has no result")
    return _RESULTS[kind](getattr(row, kind))


SESSION_SERVICE = "txnbuffer.v1.Session"
SESSION_METHOD = "Talk"
SESSION = StreamMethod(f"/{SESSION_SERVICE}/{SESSION_METHOD}", encode_client_frame, decode_server_frame)
