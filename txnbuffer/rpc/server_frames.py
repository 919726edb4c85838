"""The format of frames from service to client: a control record without blocks

welcome          null, or session, shard, epoch, max_message_bytes, and the state of each transaction that the hello
                 named: most[], least[], states (one byte each: the number of a `State`, or 255 for an error),
                 errors[]
acknowledged     all sends up to this number are settled; 0: none since the last frame
failures         send, the id of the transaction or null for the whole send, error
outcome_*        request; outcomes: one byte each, 0 ABORT, 1 COMMIT
state_*          request; states: one byte each
done_request     requests that are done
leased_*         request, first, size
opened_*         request, opening (the producer epoch), committed: producer names
joined           request, generation, and the group's positions: topics[], ledgers[], entries[], batches[]
shares           partition assignments of members: request, generation, unsettled, and the partitions[], since[],
                 ledgers[], entries[], batches[]
error_request    requests that failed
errors           their errors, as in `txnbuffer.rpc.columns`
credits          null: unchanged, or how many bytes the client may have unacknowledged
draining         the service is shutting down
goodbye          null, or the error because of which the service ends the connection
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from broker_io.position import Position
from txnbuffer import avro
from txnbuffer.coordinator.messages import (
    Done,
    Joined,
    Leased,
    MemberAssignments,
    NameOpened,
    PartitionAssignment,
    Result,
    State,
)
from txnbuffer.errors import Error, MalformedFrame
from txnbuffer.model import Outcome
from txnbuffer.rpc.columns import (
    ERROR_SCHEMA,
    LONGS,
    STRINGS,
    Fields,
    decode_error,
    encode_error,
    join,
    optional,
    record,
    rows,
    same_length,
    split,
    txn_columns,
    txns_of,
)
from txnbuffer.rpc.frames import Failure, ServerFrame, Welcome

_ID = record("Id", [("most", "long"), ("least", "long")])
_WELCOME = record(
    "Welcome",
    [
        ("session", "string"),
        *((name, "long") for name in ("shard", "epoch", "max_message_bytes")),
        ("most", LONGS),
        ("least", LONGS),
        ("states", "bytes"),
        ("errors", rows(ERROR_SCHEMA)),
    ],
)
_FAILURE = record("Failure", [("send", "long"), ("txn", optional(_ID)), ("error", "txnbuffer.session.Error")])
_JOINED = record(
    "Joined",
    [
        ("request", "long"),
        ("generation", "long"),
        ("topics", STRINGS),
        *((name, LONGS) for name in ("ledgers", "entries", "batches")),
    ],
)
_SHARES = record(
    "Shares",
    [
        *(("request", "long"), ("generation", "long"), ("unsettled", "boolean"), ("partitions", STRINGS)),
        *((name, LONGS) for name in ("since", "ledgers", "entries", "batches")),
    ],
)

SERVER_SCHEMA = record(
    "ServerFrame",
    [
        ("welcome", optional(_WELCOME)),
        ("acknowledged", "long"),
        (
            "failures",
            rows(_FAILURE),
        ),
        ("outcome_request", LONGS),
        ("outcomes", "bytes"),
        ("state_request", LONGS),
        ("states", "bytes"),
        ("done_request", LONGS),
        *((name, LONGS) for name in ("leased_request", "leased_first", "leased_size")),
        *((name, LONGS) for name in ("opened_request", "opened_opening", "opened_committed")),
        ("joined", rows(_JOINED)),
        ("shares", rows(_SHARES)),
        ("error_request", LONGS),
        ("errors", rows("txnbuffer.session.Error")),
        ("credits", optional("long")),
        ("draining", "boolean"),
        ("goodbye", optional("txnbuffer.session.Error")),
    ],
)

_SCHEMA = avro.schema(SERVER_SCHEMA)
_OUTCOMES = (Outcome.ABORT, Outcome.COMMIT)
_ANSWERS = (Outcome, State, Done, Leased, NameOpened, Joined, MemberAssignments, Error)

_NO_STATE = 255

Code = TypeVar("Code")
Pair = TypeVar("Pair", Leased, NameOpened)


def encode_server_frame(frame: ServerFrame) -> bytes:
    """Return the bytes of a frame. Raises TypeError for a result that is not an answer, such as SessionOpened."""
    control: Fields = {
        "welcome": None if frame.welcome is None else _welcome(frame.welcome),
        "acknowledged": frame.acknowledged,
        "failures": [
            {"send": failure.send, "txn": failure.txn and failure.txn._asdict(), "error": encode_error(failure.error)}
            for failure in frame.failures
        ],
        **_answers(frame.answers),
        "credits": frame.credits,
        "draining": frame.draining,
        "goodbye": None if frame.goodbye is None else encode_error(frame.goodbye),
    }
    return join(_SCHEMA, control, ())


def _welcome(welcome: Welcome) -> Fields:
    most, least = txn_columns([txn for txn, _ in welcome.states])
    return {
        **welcome._asdict(),
        "most": most,
        "least": least,
        "states": bytes([_NO_STATE if isinstance(state, Error) else state for _, state in welcome.states]),
        "errors": [encode_error(state) for _, state in welcome.states if isinstance(state, Error)],
    }


def _answers(answers: tuple[tuple[int, Result], ...]) -> Fields:
    groups: dict[type, tuple[list[int], list[Any]]] = {kind: ([], []) for kind in _ANSWERS}
    for request, result in answers:
        kind = Error if isinstance(result, Error) else type(result)
        if kind not in groups:
            raise TypeError(f"{result!r} is not an answer to a session's request")
        requests, results = groups[kind]
        requests.append(request)
        results.append(result)
    return {
        "outcome_request": groups[Outcome][0],
        "outcomes": bytes(groups[Outcome][1]),
        "state_request": groups[State][0],
        "states": bytes(groups[State][1]),
        "done_request": groups[Done][0],
        "leased_request": groups[Leased][0],
        "leased_first": [leased.first for leased in groups[Leased][1]],
        "leased_size": [leased.size for leased in groups[Leased][1]],
        "opened_request": groups[NameOpened][0],
        "opened_opening": [opened.epoch for opened in groups[NameOpened][1]],
        "opened_committed": [opened.committed for opened in groups[NameOpened][1]],
        "joined": [_joined(request, joined) for request, joined in zip(*groups[Joined], strict=True)],
        "shares": [_shares(request, member) for request, member in zip(*groups[MemberAssignments], strict=True)],
        "error_request": groups[Error][0],
        "errors": [encode_error(error) for error in groups[Error][1]],
    }


def _joined(request: int, joined: Joined) -> Fields:
    columns = zip(*(position for _, position in joined.positions), strict=True) if joined.positions else ((), (), ())
    ledgers, entries, batches = columns
    return {
        "request": request,
        "generation": joined.generation,
        "topics": [topic for topic, _ in joined.positions],
        "ledgers": ledgers,
        "entries": entries,
        "batches": batches,
    }


def _shares(request: int, member: MemberAssignments) -> Fields:
    return {
        "request": request,
        "generation": member.generation,
        "unsettled": member.unsettled,
        "partitions": [assignment.partition for assignment in member.assignments],
        "since": [assignment.since for assignment in member.assignments],
        "ledgers": [assignment.end.ledger for assignment in member.assignments],
        "entries": [assignment.end.entry for assignment in member.assignments],
        "batches": [assignment.end.batch for assignment in member.assignments],
    }


# --- decoding ---


def decode_server_frame(frame: bytes) -> ServerFrame:
    """Return the frame of these bytes. Raises MalformedFrame."""
    try:
        control, end = split(_SCHEMA, frame)
        if end != len(frame):
            raise ValueError(f"{len(frame) - end} bytes follow its control record")
        return ServerFrame(
            welcome=_read_welcome(control["welcome"]),
            acknowledged=control["acknowledged"],
            failures=tuple(_read_failure(failure) for failure in control["failures"]),
            answers=tuple(_read_answers(control)),
            credits=control["credits"],
            draining=control["draining"],
            goodbye=control["goodbye"] and decode_error(control["goodbye"]),
        )
    except ValueError as error:
        raise MalformedFrame(f"cannot read a frame of the service: {error}; use a client of its release") from None


def _read_welcome(fields: Fields | None) -> Welcome | None:
    if fields is None:
        return None
    txns = txns_of(fields.pop("most"), fields.pop("least"), "the states of a welcome")
    codes, errors = fields.pop("states"), [decode_error(error) for error in fields.pop("errors")]
    same_length("the states of a welcome", txns, codes)
    if codes.count(_NO_STATE) != len(errors):
        raise ValueError(f"the welcome has {len(errors)} errors for {codes.count(_NO_STATE)} transactions")
    rest = iter(errors)
    states = [next(rest) if code == _NO_STATE else _state(code) for code in codes]
    return Welcome(**fields, states=tuple(zip(txns, states, strict=True)))


def _state(code: int) -> State:
    (state,) = _read_codes(bytes([code]), tuple(State), "state")
    return state


def _read_failure(fields: Fields) -> Failure:
    txn = fields["txn"]
    if txn is not None:
        (txn,) = txns_of([txn["most"]], [txn["least"]], "failures")
    return Failure(fields["send"], decode_error(fields["error"]), txn)


def _read_answers(control: Fields) -> Iterator[tuple[int, Result]]:
    columns: list[tuple[str, Sequence[Result]]] = [
        ("outcome", _read_codes(control["outcomes"], _OUTCOMES, "outcome")),
        ("state", _read_codes(control["states"], tuple(State), "state")),
        ("done", [Done()] * len(control["done_request"])),
        ("leased", _read_pairs(Leased, control["leased_first"], control["leased_size"])),
        ("opened", _read_pairs(NameOpened, control["opened_opening"], control["opened_committed"])),
        ("error", [decode_error(fields) for fields in control["errors"]]),
    ]
    for kind, results in columns:
        requests = control[f"{kind}_request"]
        same_length(f"answers of the kind {kind!r}", requests, results)
        yield from zip(requests, results, strict=True)
    for fields in control["joined"]:
        yield fields["request"], _read_joined(fields)
    for fields in control["shares"]:
        yield fields["request"], _read_member_assignments(fields)


def _read_pairs(
    kind: type[Leased] | type[NameOpened], first: list[int], second: list[int]
) -> list[Leased | NameOpened]:
    same_length("answers", first, second)
    return list(map(kind, first, second))


def _read_joined(fields: Fields) -> Joined:
    columns = fields["topics"], fields["ledgers"], fields["entries"], fields["batches"]
    same_length("positions of a group", *columns)
    positions = tuple((topic, Position(*numbers)) for topic, *numbers in zip(*columns, strict=True))
    return Joined(fields["generation"], positions)


def _read_member_assignments(fields: Fields) -> MemberAssignments:
    columns = [fields[name] for name in ("partitions", "since", "ledgers", "entries", "batches")]
    same_length("the assignment of a member", *columns)
    table = zip(*columns, strict=True)
    assignments = tuple(PartitionAssignment(name, since, Position(*at)) for name, since, *at in table)
    return MemberAssignments(fields["generation"], assignments, fields["unsettled"])


def _read_codes(codes: bytes, values: tuple[Code, ...], what: str) -> list[Code]:
    if codes and max(codes) >= len(values):
        raise ValueError(f"{max(codes)} is not a valid {what}")
    return [values[code] for code in codes]
