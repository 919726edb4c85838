"""What a run of the simulator reached: transitions of all state tables, classes of errors, kinds of faults.

The transitions are recorded by wrapping the functions that look them up, for as long as a world runs.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sim.cluster_faults import CLUSTER, WINDOWS
from sim.faults import EMBEDDED

from broker_io import errors as broker_errors
from broker_io.errors import Error
from txnbuffer import errors
from txnbuffer.coordinator import groups, messages
from txnbuffer.coordinator.transaction import TransactionState
from txnbuffer.streams import client, producer, server, states

FAULTS = {
    "embedded": {*EMBEDDED},
    "cluster": {*CLUSTER, *(name.replace("_", " ") for name in WINDOWS)} - {"cluster trouble"},
}
"""The kinds of faults of each kind of scenario."""
LEAST_FAULTS = 1_000
"""How often each kind of fault has to happen in 10,000 seeds."""

NOT_RAISED = {
    **dict.fromkeys(
        ("Error", "CallerError", "PeerError", "StorageError", "EnvironmentFault", "ProtocolStopped"), "a base class"
    ),
    **dict.fromkeys(("InvalidTopicName", "InvalidAddress", "UnknownOption", "MissingDependency"), "an option is wrong"),
    **dict.fromkeys(("InvalidConfiguration", "InvalidHandler", "UnreadableToken"), "an argument is wrong"),
    **dict.fromkeys(("MessageTooLarge", "InvalidMessage", "EntryTooLarge"), "a message is refused before it is sent"),
    **dict.fromkeys(("NotAuthorized", "UntrustedService"), "the simulated network has no TLS and no tokens"),
    **dict.fromkeys(("VersionMismatch", "UnsupportedFormat", "UnsupportedProtocol"), "all processes have one version"),
    **dict.fromkeys(("MalformedMessage", "MalformedFrame", "StreamViolation"), "nobody breaks the protocol"),
    **dict.fromkeys(
        ("ForeignDirectory", "ForeignTransaction", "ForeignTopic", "ForeignToken", "ForeignSink"), "there is one log"
    ),
    "TopicPartitioned": "an operator gave the wrong topic",
    **dict.fromkeys(("ProtectedTopic", "NotSupported"), "nobody asks for what is not allowed"),
    **dict.fromkeys(
        ("TooManyStreams", "TooManyTransactions", "TooManyCursors", "StreamMemoryExhausted"),
        "a limit that is larger than a scenario",
    ),
    **dict.fromkeys(("UndecodableMarker", "UndecodableRecordSet"), "nobody else writes to the topics"),
    "UsedAfterFork": "simulated processes don't fork",
}
"""Classes of errors that the simulator does not raise, each with the reason; their own tests raise them."""


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


def report(kind: str, faults: Mapping[str, int], reached: Mapping[str, int]) -> dict[str, Any]:
    """How much was reached, and what was not."""
    rows, classes = transitions(), error_classes()
    raised = {name for name in classes if reached.get(f"error {name}")}
    rare = {name: faults.get(name, 0) for name in sorted(FAULTS.get(kind, ())) if faults.get(name, 0) < LEAST_FAULTS}
    missing = [name for name in classes if name not in raised and name not in NOT_RAISED]
    rows_missing = [row for row in rows if row not in reached]
    return {
        "missing": [*rows_missing, *missing, *rare],
        "transitions": f"{sum(row in reached for row in rows)} of {len(rows)}",
        "transitions_missing": rows_missing,
        "errors": f"{len(raised)} of {len(classes)}, {len(NOT_RAISED)} with a reason",
        "errors_missing": missing,
        "reasons_refuted": sorted(raised & NOT_RAISED.keys()),
        f"faults_below_{LEAST_FAULTS}": rare,
    }
