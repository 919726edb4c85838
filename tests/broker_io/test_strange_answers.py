"""Answers of Pulsar's admin interface that have another form than Pulsar's: a documented error, or a plain result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker_io.environment import Environment, use
from broker_io.errors import ClusterRefused, InvalidAddress, NotSupported, ServiceUnavailable, UnsafePolicy
from broker_io.port import Ledger
from broker_io.position import Position
from broker_io.pulsar import credentials as credentials_module
from broker_io.pulsar.admin import AdminClient
from broker_io.pulsar.broker import PulsarBroker
from broker_io.pulsar.cluster import Cluster
from broker_io.pulsar.credentials import Bearer
from broker_io.system import SystemClock

TOPIC = "__txnbuffer_orders"
QUOTA = {"limitSize": -1, "limitTime": -1, "policy": "producer_request_hold"}
PLAIN: dict[str, Any] = {
    "internalStats": {
        "ledgers": [{"ledgerId": 3, "entries": 2, "size": 80}, {"ledgerId": 5, "entries": 0, "size": 0}],
        "currentLedgerEntries": 7,
        "currentLedgerSize": 300,
        "lastConfirmedEntry": "5:6",
        "cursors": {"__compaction": {"markDeletePosition": "5:6"}, "__txnbuffer": {"markDeletePosition": "3:-1"}},
    },
    "lastMessageId": {"ledgerId": 5, "entryId": 6, "partitionIndex": -1, "batchIndex": -1},
    "messageid": {"ledgerId": 9, "entryId": 0, "partitionIndex": -1},
    "properties": {"txnbuffer.note": "host:1", "txnbuffer.last": "5:6"},
    "internal-info": {"version": 1, "creationDate": "2024-01-01T00:00:00Z", "ledgers": []},
    "partitions": {"partitions": 0},
    "compaction": {"status": "SUCCESS", "lastError": ""},
    "partitioned": ["persistent://public/default/wide"],
    "default": ["persistent://public/default/a", "persistent://public/default/wide"],
    "runtime": {"maxMessageSize": "5242880"},
    "messageTTL": None,
    "backlogQuotaMap": {"destination_storage": QUOTA},
    "inactiveTopicPolicies": {"deleteWhileInactive": False},
    "compactionThreshold": 0,
    "subscriptionExpirationTime": None,
    "replication": ["standalone"],
}
"""What Pulsar answers, by the last word of the path."""
CALLS: dict[str, tuple[Callable[[PulsarBroker], Any], type | tuple[type, ...]]] = {
    "topics": (lambda broker: broker.topics(), list),
    "incarnation": (lambda broker: broker.incarnation(TOPIC), str),
    "annotation": (lambda broker: broker.annotation(TOPIC), (str, type(None))),
    "partitions": (lambda broker: broker.partitions(TOPIC), int),
    "ledgers": (lambda broker: broker.ledgers(TOPIC), list),
    "first position": (lambda broker: broker.first_position(TOPIC), type(None)),
    "last position": (lambda broker: broker.last_position(TOPIC), (Position, type(None))),
    "position at": (lambda broker: broker.position_at(TOPIC, 5), type(None)),
    "limit": (lambda broker: broker.max_message_bytes, int),
    "create": (lambda broker: broker.create_topic(TOPIC), type(None)),
    "check": (lambda broker: broker.check_topic(TOPIC), type(None)),
    "check other": (lambda broker: broker.check_topic("orders"), type(None)),
    "roll": (lambda broker: broker.roll(TOPIC), type(None)),
    "trim": (lambda broker: broker.trim(TOPIC, 5), type(None)),
    "compact": (lambda broker: broker.compact(TOPIC), type(None)),
}
DOCUMENTED = (ClusterRefused, InvalidAddress, NotSupported, ServiceUnavailable, UnsafePolicy)
NUMBERS = st.integers(-2, 9) | st.sampled_from([2**63, -(2**63) - 1, 0.5, float("inf"), float("nan")])
LEAVES = st.none() | st.booleans() | NUMBERS | st.sampled_from(["", "5:6", "3:-1", "x", "SUCCESS", f"{2**63}:1"])
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["ledgerId", "entryId", "batchIndex", "status", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def strange(draw: st.DrawFn) -> tuple[str, Any]:
    """One path whose answer is arbitrary, or a usual one in which something was replaced or is missing."""
    word = draw(st.sampled_from(sorted(PLAIN)))
    answer = json.loads(json.dumps(PLAIN[word]))
    place: Any = None
    key: Any = None
    inside = answer
    while isinstance(inside, dict | list) and inside and draw(st.booleans()):
        place, key = inside, draw(st.sampled_from(sorted(inside) if isinstance(inside, dict) else range(len(inside))))
        inside = place[key]
    if place is None:
        return word, draw(JSON)
    if draw(st.booleans()):
        del place[key]
    else:
        place[key] = draw(JSON)
    return word, answer


class SkippingClock(SystemClock):
    """Sleeping takes no time."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self._skipped

    def sleep(self, seconds: float) -> None:
        self._skipped += seconds


def no_reader(*arguments: Any, **options: Any) -> None:
    raise ServiceUnavailable("no reader is opened here")


@pytest.fixture(scope="module")
def answers() -> Iterator[dict[str, Any]]:
    """The answers to queries; changes are answered with nothing."""
    found = dict(PLAIN)

    def call(admin: AdminClient, method: str, place: str, data: bytes | None, *, once: bool) -> tuple[int, bytes, None]:
        words = place.partition("?")[0].split("/")
        word = "messageid" if words[-2] == "messageid" else words[-1]
        answer = found.get(word) if method == "GET" else None
        return 200, b"" if answer is None else json.dumps(answer).encode(), None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdminClient, "_call", call)
        patch.setattr(Cluster, "reach", lambda cluster: None)
        patch.setattr(PulsarBroker, "reader", no_reader)
        yield found


@pytest.fixture(scope="module")
def broker(answers: dict[str, Any]) -> PulsarBroker:
    with use(Environment(clock=SkippingClock())):
        return PulsarBroker("pulsar://localhost:1/public/default", max_unavailable=0.0)


def test_usual_answers_are_read(broker: PulsarBroker) -> None:
    assert broker.topics() == ["a"]
    assert broker.incarnation(TOPIC) == f"2024-01-01T00:00:00Z persistent://public/default/{TOPIC}"
    assert broker.annotation(TOPIC) == "host:1"
    assert broker.partitions(TOPIC) == 0
    assert broker.ledgers(TOPIC)[0] == Ledger(3, 2, 80, closed=True)
    assert broker.last_position(TOPIC) == Position(5, 6)
    assert broker.position_at(TOPIC, 5) is None
    assert broker.max_message_bytes == 5242880 - 65536
    broker.create_topic(TOPIC)
    broker.check_topic(TOPIC)
    broker.compact(TOPIC)


@given(strange())
@example(("lastMessageId", {}))
@example(("lastMessageId", {"ledgerId": 2**63, "entryId": 0, "batchIndex": -1}))
@example(("messageid", ["x"]))
@example(("internal-info", {}))
@example(("compaction", "no JSON"))
@example(("partitions", {"partitions": float("inf")}))
@example(("runtime", None))
@example(("default", 5))
@example(("properties", {"txnbuffer.last": "x"}))
@example(("internalStats", PLAIN["internalStats"] | {"ledgers": []}))
@example(("backlogQuotaMap", {"message_age": {"limitTime": None}}))
@example(("backlogQuotaMap", {"message_age": {"limitTime": "x"}}))
@example(("replication", 5))
def test_a_strange_answer_is_a_documented_error_or_a_result(
    broker: PulsarBroker, answers: dict[str, Any], one: tuple[str, Any]
) -> None:
    answers.clear()
    answers.update(PLAIN)
    answers[one[0]] = one[1]
    broker._limit_asked = False
    for name, (call, kind) in CALLS.items():
        try:
            result = call(broker)
        except DOCUMENTED:
            continue
        assert isinstance(result, kind), name


def test_a_token_without_a_usable_lifetime_is_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = iter(["first", "second"])
    monkeypatch.setattr(credentials_module, "_fetch_token", lambda oauth2: (next(fetched), float("nan")))
    with use(Environment(clock=SkippingClock())):
        given_by = credentials_module.Credentials(oauth2={"issuer_url": "https://issuer", "private_key": "data:,"})
        bearer = Bearer(given_by)
    assert bearer.headers() == {"Authorization": "Bearer first"}
    bearer._until -= 2.0
    assert bearer.headers() == {"Authorization": "Bearer second"}
