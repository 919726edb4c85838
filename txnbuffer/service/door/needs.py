"""What a client must be allowed to do for each of its requests, as tables

A need is an action, a kind of resource and its name. The tables are for the frames of sessions, the requests of the
admin service, and the requests to the log. Requests that are not in the first one need nothing but a known principal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, starmap
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from snapshots.format import SNAPSHOT_TOPIC, is_internal
from txnbuffer.access.policy import Action, ResourceKind
from txnbuffer.coordinator.messages import Begin, Commit, GroupHeartbeat
from txnbuffer.errors import Error, InvalidRequest, NotAuthorized
from txnbuffer.rpc.frames import Abort, ClientFrame
from txnbuffer.service.door.access import Permissions

Need: TypeAlias = tuple[Action, ResourceKind, str]
Rows = Sequence[Any]

_TOPICS = attrgetter("topics")
_READS = (Action.READ, ResourceKind.TOPIC)


def _of(action: Action, kind: ResourceKind, names: Iterable[str]) -> Iterator[Need]:
    return ((action, kind, name) for name in {*names})


def _names(action: Action, kind: ResourceKind) -> Callable[[Rows], Iterator[Need]]:
    return lambda rows: _of(action, kind, (row.name for row in rows))


def _of_begins(rows: Sequence[Begin | Commit]) -> Iterator[Need]:
    sequences = [row.sequence.name for row in rows if row.sequence is not None]
    return _of(Action.USE, ResourceKind.PRODUCER, sequences)


def _of_commits(rows: Sequence[Commit]) -> Iterator[Need]:
    topics: set[str] = set().union(*map(_TOPICS, rows))
    for row in rows:
        if row.winners:
            topics.update(*map(_TOPICS, row.winners))
        for position in row.positions:
            yield Action.JOIN, ResourceKind.GROUP, position.group
            yield Action.READ, ResourceKind.TOPIC, position.topic
    yield from _of(Action.WRITE, ResourceKind.TOPIC, topics)
    yield from _of_begins(rows)


def _of_members(rows: Sequence[GroupHeartbeat]) -> Iterator[Need]:
    yield from _of(Action.JOIN, ResourceKind.GROUP, (row.group for row in rows))
    yield from _of(Action.READ, ResourceKind.TOPIC, chain.from_iterable(map(_TOPICS, rows)))
    yield from _of(Action.READ, ResourceKind.TOPIC, chain.from_iterable(row.partitions for row in rows))


def _of_aborts(rows: Sequence[Abort]) -> Iterator[Need]:
    return _of(Action.WRITE, ResourceKind.TOPIC, chain.from_iterable(map(_TOPICS, rows)))


OF_FRAMES: Mapping[str, Callable[[Any], Iterator[Need]]] = {
    "registers": _names(Action.WRITE, ResourceKind.TOPIC),
    "open_names": _names(Action.USE, ResourceKind.PRODUCER),
    "delete_names": _names(Action.USE, ResourceKind.PRODUCER),
    "joins": _names(Action.JOIN, ResourceKind.GROUP),
    "members": _of_members,
    "begins": _of_begins,
    "commits": _of_commits,
    "aborts": _of_aborts,
}
"""The needs of all rows of a field of a frame; OF_LEASES has those of leases.

Each send needs to write to its topic, and fails without the others.
"""

OF_LEASES = ((Action.WRITE, ResourceKind.TOPIC), (Action.JOIN, ResourceKind.GROUP))
"""What a client that leases ids must be allowed to do, one of them with at least one resource."""


def allowed(permissions: Permissions, frame: ClientFrame) -> tuple[ClientFrame, list[tuple[int, Error]]]:
    """The part of a frame that its client is allowed, and the answers to the requests that it is not."""
    changes: dict[str, Any] = {}
    answers: list[tuple[int, Error]] = []
    if (frame.leases or frame.returned) and not any(starmap(permissions.allows_any, OF_LEASES)):
        refused = permissions.denied(
            NotAuthorized(
                f"{permissions.principal!r} may not begin transactions, since it may write to no topic and join no "
                "group: ask for a rule that allows it"
            )
        )
        answers += [(lease.request, refused) for lease in frame.leases]
        changes["leases"] = changes["returned"] = ()
    for name, needs in OF_FRAMES.items():
        rows = getattr(frame, name)
        if not rows or all(starmap(permissions.allows, needs(rows))):
            continue
        kept = []
        for row in rows:
            refusal = next(filter(None, starmap(permissions.refusal, needs((row,)))), None)
            if refusal is None:
                kept.append(row)
            else:
                answers.append((row.request, refusal))
        changes[name] = tuple(kept)
    return (replace(frame, **changes) if changes else frame), answers


class AdminRequest(NamedTuple):
    """A request of the admin service, which `method` of `ServiceAdmin` answers; empty: the pair answers it.

    It needs one of `ways`, each a list of needs with keys of the request. `keys`: all that it may have. `rows`: the
    answer is a list, of which the caller sees the rows that one of these needs allows, with keys of a row.
    """

    method: str
    ways: tuple[tuple[Need, ...], ...]
    keys: tuple[str, ...] = ()
    rows: tuple[Need, ...] = ()


SERVICE = ""
_OPERATE_ALL: tuple[tuple[Need, ...], ...] = (((Action.OPERATE, ResourceKind.SERVICE, SERVICE),),)
_OBSERVE = ((Action.OBSERVE, ResourceKind.SERVICE, SERVICE),)
_OPERATE_TOPIC = (Action.OPERATE, ResourceKind.TOPIC, "topic")
_READ_TOPIC = (Action.READ, ResourceKind.TOPIC, "topic")
_OPERATE_GROUP = (Action.OPERATE, ResourceKind.GROUP, "group")
_JOIN_GROUP = (Action.JOIN, ResourceKind.GROUP, "group")
_OF_CURSOR = ((_OPERATE_TOPIC,), (_READ_TOPIC, (Action.JOIN, ResourceKind.GROUP, "cursor")))

POLICY_KEYS = ("dirty_ratio", "least_lag", "most_lag", "grace")
"""The parts of a compaction policy, in the order of `CompactionPolicy`."""

ADMIN_REQUESTS: Mapping[str, AdminRequest] = {
    "Status": AdminRequest("status", (_OBSERVE,)),
    "List": AdminRequest("list_topics", (_OBSERVE,), rows=(_READ_TOPIC, _OPERATE_TOPIC)),
    "Describe": AdminRequest("describe", ((_READ_TOPIC,), (_OPERATE_TOPIC,)), ("topic",)),
    "FindHanging": AdminRequest("find_hanging", _OPERATE_ALL, ("seconds",)),
    "Abort": AdminRequest("abort", _OPERATE_ALL, ("txn",)),
    "Groups": AdminRequest("groups", (_OBSERVE,), ("group",), (_JOIN_GROUP, _OPERATE_GROUP)),
    "ForgetGroup": AdminRequest("forget_group", ((_OPERATE_GROUP,),), ("group", "topic")),
    "Sessions": AdminRequest("sessions", _OPERATE_ALL),
    "Streams": AdminRequest("streams", _OPERATE_ALL),
    "Cursors": AdminRequest("cursors", (_OBSERVE,), rows=(_READ_TOPIC, _OPERATE_TOPIC)),
    "AddCursor": AdminRequest("add_cursor", _OF_CURSOR, ("topic", "cursor", "at")),
    "AdvanceCursor": AdminRequest("advance_cursor", _OF_CURSOR, ("topic", "cursor", "at")),
    "RemoveCursor": AdminRequest("remove_cursor", _OF_CURSOR, ("topic", "cursor")),
    "DeleteTopic": AdminRequest("delete_topic", ((_OPERATE_TOPIC,),), ("topic",)),
    "Compact": AdminRequest("compact", ((_OPERATE_TOPIC,),), ("topic",)),
    "Compactions": AdminRequest("compactions", (_OBSERVE,), ("topic",), (_OPERATE_TOPIC,)),
    "SetCompaction": AdminRequest("set_compaction", ((_OPERATE_TOPIC,),), ("topic", *POLICY_KEYS)),
    "BackUp": AdminRequest("back_up", _OPERATE_ALL, ("path",)),
    "Backups": AdminRequest("backups", _OPERATE_ALL),
    "Replication": AdminRequest("", (_OBSERVE,)),
    "SwitchOver": AdminRequest("", _OPERATE_ALL),
    "Promote": AdminRequest("", _OPERATE_ALL),
}
"""The requests of operators to a service and to a pair. An operator of the service needs no other permission."""


def check_admin(permissions: Permissions, request: str, arguments: Mapping[str, Any]) -> None:
    """Raises NotAuthorized if the caller may not make a request of the admin service.

    Raises InvalidRequest if the request does not name what it is about.
    """
    ways = ADMIN_REQUESTS[request].ways
    if _OPERATE_ALL[0] not in ways:
        ways = (*ways, *_OPERATE_ALL)
    if not any(all(permissions.allows(*_filled(need, arguments)) for need in way) for way in ways):
        for need in ways[0]:
            permissions.check(*_filled(need, arguments))


def visible(permissions: Permissions, request: str, answer: Any) -> Any:
    """The answer to a request of the admin service, without the rows that the caller may not see."""
    needs = ADMIN_REQUESTS[request].rows
    if not needs or permissions.allows(*_OPERATE_ALL[0][0]):
        return answer
    return [row for row in answer if any(permissions.allows(*_filled(need, row)) for need in needs)]


def _filled(need: Need, values: Mapping[str, Any]) -> Need:
    action, kind, key = need
    if key and not isinstance(values.get(key), str):
        raise InvalidRequest(f"the request needs {key!r}, a name: add it")
    return action, kind, values[key] if key else ""


OF_LOG: Mapping[str, Action] = {
    "read": Action.READ,
    "write": Action.WRITE,
    "append": Action.WRITE,
    "create": Action.WRITE,
    "own": Action.OPERATE,
    "delete": Action.OPERATE,
    "roll": Action.OPERATE,
    "trim": Action.OPERATE,
    "compact": Action.OPERATE,
}
"""What each request to the log needs on its topic."""


def check_log(permissions: Permissions, topic: str, change: str) -> None:
    """Raises NotAuthorized if the caller may not read or change a topic of the log.

    Readers of any topic need the snapshots of all; other internal topics are for operators.
    """
    permissions.check_valid()
    if not is_internal(topic):
        permissions.check(OF_LOG[change], ResourceKind.TOPIC, topic)
    elif not (topic.startswith(SNAPSHOT_TOPIC) and change == "read" and permissions.allows_any(*_READS)):
        permissions.check(Action.OPERATE, ResourceKind.SERVICE)


def may_list(permissions: Permissions, topic: str) -> bool:
    """Whether a list of topics for the caller names a topic."""
    if permissions.allows(Action.OPERATE, ResourceKind.SERVICE):
        return True
    actions = (Action.READ, Action.WRITE, Action.OPERATE)
    return not is_internal(topic) and any(permissions.allows(action, ResourceKind.TOPIC, topic) for action in actions)
