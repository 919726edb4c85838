"""The format of frames from client to service

A frame is a control record, followed by a block of messages for each send. The control record has columns with one item
for each request. It refers to a topic by its index in `topics`. A transaction id is in two columns, `…_most` and
`…_least`; a single `most` applies to all rows. A column may be empty if all rows have the default. `naming` is a
producer sequence, and its `opening` is the producer epoch.

    hello            null, or version, session, and the open transactions most[], least[]
    topics           the topic names of the frame
    register_*       request, name: topics to register
    lease_*          request, size
    open_*           request, name: producer names to open
    delete_*         request, name: producer names to delete; over: numbers up to it still count as committed
    join_*           request, name: consumer groups that start a new generation without members
    members          heartbeats of consumer groups: request, group, member, leaves; the partitions topics[] (index of
                     `topics`), partitions[]; ends: empty, or ledger, entry and batch of each
    begin_*          request, most, least, timeout in seconds (0: the default)
    begin_extras     of some begins: row (of begin_*), parent, naming
    send_topics      the topic of each block after the control record
    commit_*         request, most, least; wait: one byte each, 1 to wait until the transaction is visible; topics: the
                     number of its topics; then for each topic, in the order of the transactions, topic_rows (the
                     topic) and records (the number of its records)
    commit_extras    of some commits: row (of commit_*), naming, winners, losers, positions
    abort_*          request, most, least; topics: the number of topics that it may have written to; then topic_rows
                     (these topics)
    query_*          request, most, least
    returned_*       first, size: unused ids that the session returns
    bye              the client closes its session

In all versions of the protocol a frame starts with `hello`, which is null or a record that starts with the version. If
the service has another version, it reads nothing else and ends the call with the status FAILED_PRECONDITION; the
details say which side to upgrade. So neither side reads a frame of another version.
"""

from __future__ import annotations

from typing import Any

from broker_io.block import BadBlock, decode_foreign_block, encode_block
from broker_io.position import Position
from txnbuffer import avro
from txnbuffer.coordinator.messages import Begin, Branch, Commit, ConsumerPosition, GroupHeartbeat, ProducerSequence
from txnbuffer.errors import MalformedFrame
from txnbuffer.model import TxnId
from txnbuffer.rpc.columns import (
    LONGS,
    STRINGS,
    Fields,
    control_of,
    join,
    names_at,
    not_negative,
    optional,
    record,
    rows,
    same_length,
    slices,
    split,
    txn_columns,
    txns_of,
)
from txnbuffer.rpc.frames import (
    Abort,
    ClientFrame,
    Deletion,
    IdBlock,
    LeaseRequest,
    NamedRequest,
    Query,
    Send,
    SessionHello,
    check_version,
)

_ONLY_HELLO = record("Beginning", [("hello", optional(record("Versioned", [("version", "long")])))])

_ONLY_HELLO_SCHEMA = avro.schema(_ONLY_HELLO)


def check_hello(frame: bytes) -> None:
    """Raises VersionMismatch if the hello of a frame has another version, ValueError if the bytes are not a frame."""
    hello = avro.decode_first(_ONLY_HELLO_SCHEMA, control_of(frame))["hello"]
    if hello is not None:
        check_version(hello["version"])


_ID = record("Id", [("most", "long"), ("least", "long")])
_SEQUENCE = record("Naming", [("name", "string"), ("number", "long"), ("opening", "long")])
_BRANCH = record("Branch", [("most", "long"), ("least", "long"), ("topics", LONGS), ("records", LONGS)])
_POSITION = record(
    "Position",
    [("group", "string"), ("topic", "long"), ("generation", "long"), ("start", LONGS), ("end", LONGS)],
)
_HELLO = record("Hello", [("version", "long"), ("session", "string"), ("most", LONGS), ("least", LONGS)])
_BEGIN_EXTRA = record("BeginExtra", [("row", "long"), ("parent", optional(_ID)), ("naming", optional(_SEQUENCE))])
_MEMBER = record(
    "Member",
    [
        *(("request", "long"), ("group", "string"), ("member", "string"), ("leaves", "boolean")),
        *(("topics", LONGS), ("partitions", STRINGS), ("ends", LONGS)),
    ],
)
_COMMIT_EXTRA = record(
    "CommitExtra",
    [
        ("row", "long"),
        ("naming", optional("txnbuffer.session.Naming")),
        ("winners", rows(_BRANCH)),
        ("loser_most", LONGS),
        ("loser_least", LONGS),
        ("positions", rows(_POSITION)),
    ],
)
_DOUBLES = {"type": "array", "items": "double"}

CLIENT_SCHEMA = record(
    "ClientFrame",
    [
        ("hello", optional(_HELLO)),
        ("topics", STRINGS),
        *((name, LONGS) for name in ("register_request", "lease_request", "lease_size", "open_request")),
        *((name, LONGS) for name in ("delete_request", "delete_over", "join_request")),
        *((name, STRINGS) for name in ("register_name", "open_name", "delete_name", "join_name")),
        *((name, LONGS) for name in ("begin_request", "begin_most", "begin_least")),
        ("members", rows(_MEMBER)),
        ("begin_timeout", _DOUBLES),
        ("begin_extras", rows(_BEGIN_EXTRA)),
        ("send_topics", LONGS),
        *((name, LONGS) for name in ("commit_request", "commit_most", "commit_least")),
        ("commit_wait", "bytes"),
        *((name, LONGS) for name in ("commit_topics", "commit_topic_rows", "commit_records")),
        ("commit_extras", rows(_COMMIT_EXTRA)),
        *((name, LONGS) for name in ("abort_request", "abort_most", "abort_least", "abort_topics", "abort_topic_rows")),
        *((name, LONGS) for name in ("query_request", "query_most", "query_least")),
        *((name, LONGS) for name in ("returned_first", "returned_size")),
        ("bye", "boolean"),
    ],
)  # fmt: skip

_SCHEMA = avro.schema(CLIENT_SCHEMA)


class _TopicIndexes(dict[str, int]):
    """Indexes in the table of topics, assigned as names are looked up."""

    def __missing__(self, name: str) -> int:
        self[name] = row = len(self)
        return row


def encode_client_frame(frame: ClientFrame) -> bytes:
    """Return the bytes of a frame. Each send must have at least one message."""
    topics = _TopicIndexes()
    hello = frame.hello
    control: Fields = {
        "hello": None,
        "send_topics": [topics[send.topic] for send in frame.sends],
        **_pairs("register", "name", frame.registers),
        **_pairs("lease", "size", frame.leases),
        **_pairs("open", "name", frame.open_names),
        "delete_request": [row.request for row in frame.delete_names],
        "delete_name": [row.name for row in frame.delete_names],
        "delete_over": [row.over for row in frame.delete_names] if any(row.over for row in frame.delete_names) else [],
        **_pairs("join", "name", frame.joins),
        "members": [_member(member, topics) for member in frame.members],
        **_begins(frame.begins),
        **_commits(frame.commits, topics),
        **_txn_requests("abort", frame.aborts),
        "abort_topics": [len(row.topics) for row in frame.aborts],
        "abort_topic_rows": [topics[name] for row in frame.aborts for name in row.topics],
        **_txn_requests("query", frame.queries),
        "returned_first": [row.first for row in frame.returned],
        "returned_size": [row.size for row in frame.returned],
        "bye": frame.bye,
    }
    if hello is not None:
        most, least = txn_columns(hello.open)
        control["hello"] = {"version": hello.version, "session": hello.session, "most": most, "least": least}
    control["topics"] = list(topics)
    chunks: list[bytes] = []
    for send in frame.sends:
        chunks += encode_block(send.batch, first_entry=0, publish_time=0).chunks
    return join(_SCHEMA, control, chunks)


def _pairs(kind: str, second: str, pairs: tuple[NamedRequest, ...] | tuple[LeaseRequest, ...]) -> Fields:
    return {f"{kind}_request": [pair[0] for pair in pairs], f"{kind}_{second}": [pair[1] for pair in pairs]}


def _txn_requests(kind: str, asked: tuple[Abort, ...] | tuple[Query, ...]) -> Fields:
    most, least = txn_columns([row.txn for row in asked])
    return {f"{kind}_request": [row.request for row in asked], f"{kind}_most": most, f"{kind}_least": least}


def _member(member: GroupHeartbeat, topics: _TopicIndexes) -> Fields:
    ends = [number for end in member.ends for number in end]
    return {**member._asdict(), "topics": [topics[name] for name in member.topics], "ends": ends}


def _begins(begins: tuple[Begin, ...]) -> Fields:
    most, least = txn_columns([begin.txn for begin in begins])
    timeouts = [begin.timeout or 0.0 for begin in begins]
    return {
        "begin_request": [begin.request for begin in begins],
        "begin_most": most,
        "begin_least": least,
        "begin_timeout": timeouts if any(timeouts) else [],
        "begin_extras": [
            {"row": row, "parent": begin.parent and begin.parent._asdict(), "naming": _sequence(begin.sequence)}
            for row, begin in enumerate(begins)
            if begin.parent is not None or begin.sequence is not None
        ],
    }


def _sequence(sequence: ProducerSequence | None) -> Fields | None:
    if sequence is None:
        return None
    return {"name": sequence.name, "number": sequence.number, "opening": sequence.epoch}


def _commits(commits: tuple[Commit, ...], topics: _TopicIndexes) -> Fields:
    most, least = txn_columns([commit.txn for commit in commits])
    waits = bytes([commit.wait_visible for commit in commits])
    return {
        "commit_request": [commit.request for commit in commits],
        "commit_most": most,
        "commit_least": least,
        "commit_wait": waits if any(waits) else b"",
        "commit_topics": [len(commit.topics) for commit in commits],
        "commit_topic_rows": [topics[name] for commit in commits for name in commit.topics],
        "commit_records": [count for commit in commits for count in commit.records],
        "commit_extras": [
            _commit_extra(row, commit, topics)
            for row, commit in enumerate(commits)
            if commit.sequence is not None or commit.winners or commit.losers or commit.positions
        ],
    }


def _commit_extra(row: int, commit: Commit, topics: _TopicIndexes) -> Fields:
    most, least = txn_columns(commit.losers)
    return {
        "row": row,
        "naming": _sequence(commit.sequence),
        "winners": [
            {**winner.txn._asdict(), "topics": [topics[name] for name in winner.topics], "records": winner.records}
            for winner in commit.winners
        ],
        "loser_most": most,
        "loser_least": least,
        "positions": [{**position._asdict(), "topic": topics[position.topic]} for position in commit.positions],
    }


# --- decoding ---


def decode_client_frame(frame: bytes) -> ClientFrame:
    """Return the frame of these bytes. Raises VersionMismatch, MalformedFrame, and UnsupportedFormat for blocks of a
    newer release.
    """
    try:
        check_hello(frame)
        control, at = split(_SCHEMA, frame)
        topics = control["topics"]
        return ClientFrame(
            hello=_read_hello(control["hello"]),
            registers=tuple(map(NamedRequest, *_read_pairs(control, "register", "name"))),
            leases=tuple(map(LeaseRequest, *_read_pairs(control, "lease", "size"))),
            open_names=tuple(map(NamedRequest, *_read_pairs(control, "open", "name"))),
            delete_names=_read_deletions(control),
            joins=tuple(map(NamedRequest, *_read_pairs(control, "join", "name"))),
            members=tuple(_read_member(fields, topics) for fields in control["members"]),
            begins=_read_begins(control),
            sends=_read_sends(frame, at, names_at(topics, control["send_topics"], "sends")),
            commits=_read_commits(control, topics),
            aborts=_read_aborts(control, topics),
            queries=tuple(map(Query, *_read_txn_requests(control, "query"))),
            returned=_read_returned(control),
            bye=control["bye"],
        )
    except (ValueError, BadBlock) as error:
        raise MalformedFrame(f"cannot read a frame of the client: {error}; use a client of this release") from None


def _read_hello(fields: Fields | None) -> SessionHello | None:
    if fields is None:
        return None
    txns = txns_of(fields["most"], fields["least"], "the open transactions of hello")
    return SessionHello(fields["version"], fields["session"], tuple(txns))


def _read_pairs(control: Fields, kind: str, second: str) -> tuple[list[int], list[Any]]:
    requests, others = control[f"{kind}_request"], control[f"{kind}_{second}"]
    same_length(f"{kind} requests", requests, others)
    return requests, others


def _read_deletions(control: Fields) -> tuple[Deletion, ...]:
    requests, names = _read_pairs(control, "delete", "name")
    over = control["delete_over"] or [0] * len(requests)
    same_length("delete requests", requests, over)
    not_negative("delete requests", over)
    return tuple(map(Deletion, requests, names, over))


def _read_aborts(control: Fields, topics: list[str]) -> tuple[Abort, ...]:
    requests, txns = _read_txn_requests(control, "abort")
    names = names_at(topics, control["abort_topic_rows"], "aborts")
    same_length("aborts", requests, control["abort_topics"])
    return tuple(map(Abort, requests, txns, slices(control["abort_topics"], names, "aborts")))


def _read_txn_requests(control: Fields, kind: str) -> tuple[list[int], list[TxnId]]:
    requests = control[f"{kind}_request"]
    txns = txns_of(control[f"{kind}_most"], control[f"{kind}_least"], f"{kind} requests")
    same_length(f"{kind} requests", requests, txns)
    return requests, txns


def _read_returned(control: Fields) -> tuple[IdBlock, ...]:
    firsts, counts = control["returned_first"], control["returned_size"]
    same_length("returned ids", firsts, counts)
    not_negative("returned ids", firsts, counts)
    return tuple(map(IdBlock, firsts, counts))


def _read_member(fields: Fields, topics: list[str]) -> GroupHeartbeat:
    names, numbers, partitions = names_at(topics, fields["topics"], "members"), fields["ends"], fields["partitions"]
    same_length("partitions of a member", names, partitions)
    if numbers and len(numbers) != 3 * len(partitions):
        raise ValueError(f"a member has {len(numbers)} numbers for the ends of {len(partitions)} partitions")
    ends = tuple(map(Position, numbers[::3], numbers[1::3], numbers[2::3]))
    head = fields["request"], fields["group"], fields["member"]
    return GroupHeartbeat(*head, tuple(names), tuple(partitions), ends, fields["leaves"])


def _read_begins(control: Fields) -> tuple[Begin, ...]:
    requests = control["begin_request"]
    txns = txns_of(control["begin_most"], control["begin_least"], "begins")
    timeouts = control["begin_timeout"] or [0.0] * len(requests)
    same_length("begins", requests, txns, timeouts)
    if not all(0.0 <= timeout < float("inf") for timeout in timeouts):
        raise ValueError("a begin has a timeout that is negative or not a finite number")
    begins = list(map(Begin, requests, txns, [timeout or None for timeout in timeouts]))
    for extra in control["begin_extras"]:
        row, parent = _row(extra, len(begins), "begin"), extra["parent"]
        begins[row] = begins[row]._replace(
            parent=parent and txns_of([parent["most"]], [parent["least"]], "begins")[0],
            sequence=_read_sequence(extra["naming"]),
        )
    return tuple(begins)


def _read_commits(control: Fields, topics: list[str]) -> tuple[Commit, ...]:
    requests, counts, records = control["commit_request"], control["commit_topics"], control["commit_records"]
    txns = txns_of(control["commit_most"], control["commit_least"], "commits")
    waits = control["commit_wait"] or bytes(len(requests))
    names = names_at(topics, control["commit_topic_rows"], "commits")
    same_length("commits", requests, txns, counts, waits)
    same_length("topics of commits", names, records)
    not_negative("commits", records)
    if counts.count(1) == len(counts) == len(names):
        topic_sets: list[tuple[str, ...]] = list(zip(names, strict=True))
        record_sets: list[tuple[int, ...]] = list(zip(records, strict=True))
    else:
        topic_sets, record_sets = slices(counts, names, "commits"), slices(counts, records, "commits")
    commits = list(map(Commit, requests, txns, topic_sets, record_sets, map(bool, waits)))
    for extra in control["commit_extras"]:
        row = _row(extra, len(commits), "commit")
        commits[row] = commits[row]._replace(**_read_commit_extra(extra, topics))
    return tuple(commits)


def _read_commit_extra(extra: Fields, topics: list[str]) -> Fields:
    return {
        "sequence": _read_sequence(extra["naming"]),
        "winners": tuple(_read_branch(winner, topics) for winner in extra["winners"]),
        "losers": tuple(txns_of(extra["loser_most"], extra["loser_least"], "losing branches")),
        "positions": tuple(_read_position(position, topics) for position in extra["positions"]),
    }


def _read_branch(fields: Fields, topics: list[str]) -> Branch:
    names = names_at(topics, fields["topics"], "branches")
    same_length("branches", names, fields["records"])
    not_negative("branches", fields["records"])
    (txn,) = txns_of([fields["most"]], [fields["least"]], "branches")
    return Branch(TxnId(*txn), tuple(names), tuple(fields["records"]))


def _read_position(fields: Fields, topics: list[str]) -> ConsumerPosition:
    (topic,) = names_at(topics, [fields["topic"]], "positions")
    if len(fields["start"]) != 3 or len(fields["end"]) != 3:
        raise ValueError("a position of a commit does not have three numbers")
    start, end = Position(*fields["start"]), Position(*fields["end"])
    return ConsumerPosition(fields["group"], topic, fields["generation"], start, end)


def _read_sequence(fields: Fields | None) -> ProducerSequence | None:
    return None if fields is None else ProducerSequence(fields["name"], fields["number"], fields["opening"])


def _row(extra: Fields, count: int, what: str) -> int:
    row: int = extra["row"]
    if not 0 <= row < count:
        raise ValueError(f"it adds to {what} {row} of {count}")
    return row


def _read_sends(frame: bytes, at: int, topics: list[str]) -> tuple[Send, ...]:
    sends = []
    for number, topic in enumerate(topics):
        try:
            decoded, at = decode_foreign_block(frame, at)
        except BadBlock as error:
            raise ValueError(f"block {number}, for topic {topic!r}: {error}") from None
        sends.append(Send(topic, decoded.messages))
    if at != len(frame):
        raise ValueError(f"{len(frame) - at} bytes follow its blocks")
    return tuple(sends)
