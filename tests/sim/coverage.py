"""What a run of the simulator reached: transitions of all state tables, classes of errors, kinds of faults.

The transitions are recorded by wrapping the functions that look them up, for as long as a world runs.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sim.bit_rot import ROT
from sim.cluster_faults import CLUSTER, WINDOWS
from sim.destruction import DESTRUCTIONS
from sim.faults import EMBEDDED
from sim.pair_faults import PAIR
from sim.retention import TRIM

from broker_io import errors as broker_errors
from broker_io.errors import Error
from txnbuffer import errors
from txnbuffer.coordinator import groups, messages
from txnbuffer.coordinator.transaction import TransactionState
from txnbuffer.streams import client, producer, server, states

OF_CLUSTERS = {*CLUSTER, *(name.replace("_", " ") for name in WINDOWS), "partitioned topic", *DESTRUCTIONS, TRIM}
FAULTS = {
    "embedded": {*EMBEDDED, *ROT, TRIM},
    "cluster": OF_CLUSTERS,
    "shards": OF_CLUSTERS,
    "pair": {*PAIR, TRIM},
}
"""The kinds of faults of each kind of scenario."""
LEAST_FAULTS = 1_000
"""How often each kind of fault has to happen in COMPLETE_SEEDS."""
COMPLETE_SEEDS = 10_000
"""So many seeds must reach all errors and transitions except those that NOT_REACHED excuses."""


def _each(reason: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, reason)


NO_CLUSTER = _each("there is no cluster", "AppendUnknown", "ClusterRefused", "Fenced", "StillHeld")
NO_DISK = _each(
    "a service of a cluster has no disk", "DiskFailed", "DiskFull", "DiskWatermark", "TooManyFiles", "Locked", "Damaged"
)
NO_DELETIONS = _each(
    "nobody deletes a topic of an embedded log",
    "StreamTopicDeleted",
    "stream at the server: asked, Rollback",
    "stream at the client: requested, Rollback",
    "stream at the client: rolling back, the data was rolled back",
)
NOT_REACHED: dict[str, dict[str, str]] = {
    "every kind": {
        **_each("a base class", "Error", "CallerError", "PeerError", "StorageError", "EnvironmentFault"),
        **_each("a base class", "ProtocolStopped"),
        **_each("an option is wrong", "InvalidTopicName", "InvalidAddress", "UnknownOption", "MissingDependency"),
        **_each("an argument is wrong", "InvalidConfiguration", "InvalidHandler", "UnreadableToken"),
        **_each("a message is refused before it is sent", "MessageTooLarge", "InvalidMessage", "EntryTooLarge"),
        **_each("the simulated network has no TLS and no tokens", "NotAuthorized", "UntrustedService"),
        **_each("all processes have one version", "VersionMismatch", "UnsupportedFormat", "UnsupportedProtocol"),
        **_each("nobody breaks the protocol", "MalformedMessage", "MalformedFrame", "StreamViolation"),
        **_each("nobody breaks the protocol", "StreamExists", "UnregisteredTopic", "UnknownTransaction"),
        **_each("there is one log", "ForeignDirectory", "ForeignTopic", "ForeignToken"),
        **_each("there is one log", "ForeignSink"),
        **_each("an operator gave the wrong topic", "TopicPartitioned"),
        **_each("nobody asks for what is not allowed", "ProtectedTopic", "NotSupported", "ReadOnly"),
        **_each("a limit that is larger than a scenario", "TooManyStreams", "TooManyTransactions"),
        **_each("a limit that is larger than a scenario", "TooManyCursors", "TooManyTopics"),
        **_each("nobody else writes to the topics", "UndecodableMarker", "UndecodableRecordSet", "UnreadableDecision"),
        **_each("nobody else writes to the topics", "RegistrationRefused", "UnsafePolicy"),
        **_each("simulated processes don't fork", "UsedAfterFork"),
        **_each("services create topics", "TopicNotCreated"),
        **_each("nobody removes a cursor", "UnknownCursor"),
        **_each("nobody asks for the deletion of a topic", "TopicInUse"),
        **_each("no reader has a deserializer", "UndecodableValue"),
        **_each("nobody deletes the decision log", "LogDeleted"),
        **_each("relays run without retention, and streams are told StreamTrimmed", "MutationsTrimmed"),
        **_each("no command runs", "BackupFailed", "CompactionFailed"),
        **_each("each sink has a file that does not fail", "SinkLocked", "SinkFailed", "SinkFull"),
        **_each("the disks of clients do not fail", "TokensFailed"),
        **_each("a defect of the product, which is a finding", "ClientBroken", "OutOfOrder", "SegmentMismatch"),
        **_each("a defect of the product, which is a finding", "SeqnoGap"),
        **_each("nothing durable is lost or changed", "DecisionsLost", "LogReplaced", "LogRestored"),
        **_each("nothing durable is lost or changed", "LogTruncated", "RelayBranched", "StreamBranched"),
        **_each(
            "a history branches only where a topic is created again, and its follower rolls back at once",
            "stream at the client: rolling back, the connection is lost",
            "stream at the client: rolling back, the client closes it",
            "stream at the client: rolling back, it fails",
        ),
    },
    "embedded": {**NO_CLUSTER, **NO_DELETIONS, **_each("one process at a time opens the directory", "Locked")},
    "cluster": NO_DISK,
    "shards": NO_DISK,
    "pair": _each("there is no cluster", "ClusterRefused"),
}
"""Errors and transitions that the simulator does not reach, by kind of scenario, each with the reason."""


def reasons(kind: str) -> dict[str, str]:
    """Why a kind of scenario does not reach some errors and transitions; their own tests do."""
    return {**NOT_REACHED["every kind"], **NOT_REACHED.get(kind, {})}


def error_classes() -> list[str]:
    """The names of all errors of the tree, without those of tests."""
    modules = {broker_errors.__name__, errors.__name__}
    found: list[str] = []
    waiting: list[type[Error]] = [Error]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__module__ in modules:
            found.append(kind.__name__)
    return sorted({*found})


def transitions() -> list[str]:
    """All rows of all state tables."""
    rows = [_named("transaction", step.before.value, step.after.value) for step in messages.TRANSITIONS]
    rows += [_named("group", step.before.value, step.after.value) for step in groups.TRANSITIONS]
    for who, table in (("server", states.PRODUCER_STEPS), ("client", states.CONSUMER_STEPS)):
        rows += [_named(f"stream at the {who}", before.value, event.value) for before, event in table]
    return rows


def _named(table: str, before: object, what: object) -> str:
    return f"{table}: {before}, {what}"


@contextlib.contextmanager
def recorded(reached: Counter[str]) -> Iterator[None]:
    """Count the transitions that are taken and the errors that are made for a block."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_errors(reached))
        stack.enter_context(_transactions(reached))
        stack.enter_context(_groups(reached))
        for module in (client, producer, server):
            stack.enter_context(_replaced(module, "next_state", _stepped(reached)))
        yield


@contextlib.contextmanager
def _replaced(place: Any, name: str, new: Any) -> Iterator[None]:
    before = vars(place).get(name)
    setattr(place, name, new)
    try:
        yield
    finally:
        if before is None:
            delattr(place, name)
        else:
            setattr(place, name, before)


def _errors(reached: Counter[str]) -> contextlib.AbstractContextManager[None]:
    def made(self: Error, *arguments: object) -> None:
        Exception.__init__(self, *arguments)
        reached[f"error {type(self).__name__}"] += 1

    return _replaced(Error, "__init__", made)


def _transactions(reached: Counter[str]) -> contextlib.AbstractContextManager[None]:
    advance = TransactionState.advance

    def advanced(self: TransactionState, state: messages.State) -> None:
        before = self.state
        advance(self, state)
        reached[_named("transaction", before.value, state.value)] += 1

    return _replaced(TransactionState, "advance", advanced)


def _stepped(reached: Counter[str]) -> Callable[..., Any]:
    def stepped(state: Any, event: states.Event) -> Any:
        after = states.next_state(state, event)
        who = "server" if isinstance(state, states.Producing) else "client"
        reached[_named(f"stream at the {who}", state.value, event.value)] += 1
        return after

    return stepped


@contextlib.contextmanager
def _groups(reached: Counter[str]) -> Iterator[None]:
    """The stage of a group follows from its members and generations: look after each change of either."""
    stages: dict[int, tuple[groups.Members, groups.Stage]] = {}

    def look(members: groups.Members) -> None:
        _, before = stages.get(id(members), (members, groups.Stage.EMPTY))
        if members.stage is not before:
            reached[_named("group", before.value, members.stage.value)] += 1
            stages[id(members)] = members, members.stage

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: groups.Members, *arguments: Any) -> Any:
            result = method(self, *arguments)
            look(self)
            return result

        return call

    def changed(self: groups.Members, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name == "pending_generations" and "_changed" in vars(self):
            look(self)

    with contextlib.ExitStack() as stack:
        for name in ("leave", "fence"):
            stack.enter_context(_replaced(groups.Members, name, watched(getattr(groups.Members, name))))
        stack.enter_context(_replaced(groups.Members, "__setattr__", changed))
        yield


def report(kind: str, faults: Mapping[str, int], reached: Mapping[str, int], seeds: int) -> dict[str, Any]:
    """The shares of transitions and errors that some seeds reached; in `missing` those that they should have reached.

    Fewer seeds than COMPLETE_SEEDS need proportionally fewer faults. `reasons_refuted`: what NOT_REACHED excuses, and
    the seeds reached.
    """
    rows, classes, known = transitions(), error_classes(), reasons(kind)
    raised = {name for name in classes if reached.get(f"error {name}")}
    taken = {row for row in rows if reached.get(row)}
    least = LEAST_FAULTS * min(seeds / COMPLETE_SEEDS, 1.0)
    rare = {name: faults.get(name, 0) for name in sorted(FAULTS[kind]) if faults.get(name, 0) < least}
    missing = [name for name in (*rows, *classes) if name not in known and name not in raised | taken]
    return {
        "missing": [*missing, *rare],
        "transitions": f"{len(taken)} of {len(rows)}, {len(known.keys() & {*rows})} not expected",
        "errors": f"{len(raised)} of {len(classes)}, {len(known.keys() & {*classes})} not expected",
        "reasons_refuted": sorted((raised | taken) & known.keys()),
        "rare_faults": rare,
    }
