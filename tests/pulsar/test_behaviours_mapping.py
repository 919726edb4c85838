"""The mapping of the port to a cluster, without a cluster: names, keys, gaps, ledgers, policies."""

from __future__ import annotations

from typing import Any

import _pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_io import check_address, open_broker
from broker_io.errors import InvalidAddress, UnsafePolicy
from broker_io.partitions import PREFIX, key_of_text, key_to_text
from broker_io.port import Ledger
from broker_io.position import Position
from broker_io.pulsar.cluster import from_local_name, parse_address, to_local_name, url_of
from broker_io.pulsar.ledgers import COMPACTION, LedgerState, read_state
from broker_io.pulsar.policies import Policies, check_policies
from broker_io.pulsar.reader import BATCH_SIZE, follows, is_gone, is_next_ledger
from broker_io.varint import encode_varint

SAFE = Policies(0, {"destination_storage": {"policy": "producer_request_hold"}}, None, 0, None)

names = st.text(st.sampled_from("a/=2F3DE.%ü "), min_size=1, max_size=8)


@given(names)
def test_names_are_mapped_to_distinct_names_of_the_namespace(name: str) -> None:
    """Pulsar reserves `/` in topic names."""
    local = to_local_name(name)
    assert "/" not in local
    assert local not in (".", "..")
    assert from_local_name(local) == name


@given(names)
def test_foreign_name_is_listed_unchanged_or_not_at_all(local: str) -> None:
    name = from_local_name(local)
    assert name is None or to_local_name(name) == local


def test_plain_name_is_unchanged() -> None:
    assert url_of("public/default", "orders=a ü%2F") == "persistent://public/default/orders=a ü%2F"


@given(st.binary(max_size=12) | st.just(PREFIX.encode()) | st.binary(max_size=5).map(PREFIX.encode().__add__))
def test_keys_round_trip_to_distinct_partition_keys(key: bytes) -> None:
    """Partition keys are text, and Pulsar does not distinguish an empty one from none."""
    text = key_to_text(key)
    assert text
    assert key_of_text(text) == key
    if key and not key.startswith(PREFIX.encode()) and key.decode(errors="ignore").encode() == key:
        assert text == key.decode()


@given(st.text(max_size=12) | st.text("AQIDBA==x", max_size=8).map(PREFIX.__add__))
def test_foreign_partition_keys_are_distinct_keys(text: str) -> None:
    """Two partition keys are two keys to compaction, so they are two here too."""
    key = key_of_text(text)
    assert (key is None) == (not text)
    if key is not None and key_to_text(key) != text:
        assert key == text.encode()


@pytest.mark.parametrize(
    ("address", "service", "admin", "namespace"),
    [
        ("pulsar://h:6650", "pulsar://h:6650", "http://h:8080", "public/default"),
        ("pulsar://h:6650/t/n", "pulsar://h:6650", "http://h:8080", "t/n"),
        ("pulsar+ssl://a:1,b:2/t/n/", "pulsar+ssl://a:1,b:2", "https://a:8443", "t/n"),
        ("pulsar://[::1]:6650/t/n", "pulsar://[::1]:6650", "http://[::1]:8080", "t/n"),
    ],
)
def test_address_is_parsed(address: str, service: str, admin: str, namespace: str) -> None:
    check_address(address)
    found = parse_address(address)
    assert (found.service, found.admin, found.namespace) == (service, admin, namespace)


@pytest.mark.parametrize(
    "address",
    [
        "pulsar://",
        "pulsar:h:1",
        "pulsar://h",
        "pulsar://h:0",
        "pulsar://h:70000",
        "pulsar://h:1/t",
        "pulsar://h:1/t/n/x",
    ],
)
def test_invalid_address_is_rejected(address: str) -> None:
    with pytest.raises(InvalidAddress, match="pulsar://HOST:PORT/TENANT/NAMESPACE"):
        open_broker(address)


def state(*ledgers: tuple[int, int], cursors: dict[str, Position] | None = None) -> LedgerState:
    rows = [Ledger(number, entries, entries, closed=True) for number, entries in ledgers]
    return LedgerState(rows, Position(rows[-1].ledger, rows[-1].entries - 1), cursors or {})


@pytest.mark.parametrize(
    ("last", "place", "expected"),
    [
        ((3, 4, -1), (3, 5, -1), True),
        ((3, 4, -1), (3, 5, 0), True),
        ((3, 4, 7), (3, 5, 0), True),
        ((3, 4, 0), (3, 4, 1), True),
        ((3, 4, 0), (3, 4, 3), False),
        ((3, 4, 7), (3, 5, 1), False),
        ((3, 4, -1), (3, 6, -1), False),
        ((3, 4, -1), (3, 4, -1), False),
        ((3, 4, -1), (4, 5, -1), False),
        ((3, 4, -1), (4, 0, -1), False),
    ],
)
def test_entries_of_a_ledger_are_consecutive(last: Any, place: Any, expected: bool) -> None:
    assert follows(Position(*last), Position(*place)) is expected


@pytest.mark.parametrize(("size", "index"), [(8, 7), (128, 127), (300, 299), (20_000, 19_999)])
def test_next_entry_follows_only_the_last_message_of_a_batch(size: int, index: int) -> None:
    def id_of(batch: int) -> Any:
        bare = _pulsar.MessageId(-1, 3, 4, batch).serialize()
        return _pulsar.MessageId.deserialize(bare + BATCH_SIZE + encode_varint(size))

    assert follows(Position(3, 4, index), Position(3, 5, 0), id_of(index))
    assert not follows(Position(3, 4, index - 1), Position(3, 5, 0), id_of(index - 1))


def test_next_ledger_follows_a_ledger_that_was_read_to_its_end() -> None:
    """A reader whose messages were trimmed skips them without an error."""
    ledgers = state((3, 5), (6, 0), (9, 4), (12, 2))
    assert is_next_ledger(Position(3, 4), Position(9, 0), ledgers)
    assert is_next_ledger(Position(3, 4, 7), Position(9, 0, 0), ledgers)
    assert not is_next_ledger(Position(3, 3), Position(9, 0), ledgers)
    assert not is_next_ledger(Position(3, 4), Position(9, 1), ledgers)
    assert not is_next_ledger(Position(3, 4), Position(9, 0, 1), ledgers)
    assert not is_next_ledger(Position(3, 4), Position(12, 0), ledgers)
    assert not is_next_ledger(Position(2, 4), Position(3, 0), ledgers)


def test_start_is_gone_with_its_ledger_unless_compaction_kept_its_messages() -> None:
    ledgers = state((5, 3), (9, 3))
    assert is_gone(Position(4, 0), ledgers, compacted=False, horizon=None)
    assert is_gone(Position(7, 0), ledgers, compacted=False, horizon=None)
    assert not is_gone(Position(5, 99), ledgers, compacted=False, horizon=None)
    assert not is_gone(Position(10, 0), ledgers, compacted=False, horizon=None)
    assert is_gone(Position(4, 0), ledgers, compacted=True, horizon=None)
    assert not is_gone(Position(4, 0), ledgers, compacted=True, horizon=Position(4, 2))
    assert is_gone(Position(4, 0), ledgers, compacted=False, horizon=Position(4, 2))
    assert is_gone(Position(4, 0), ledgers, compacted=True, horizon=Position(3, 2))


def test_size_of_the_open_ledger_is_that_of_the_current_one() -> None:
    """The row of the open ledger has no number of entries."""
    found = read_state(
        {
            "ledgers": [{"ledgerId": 3, "entries": 2, "size": 80}, {"ledgerId": 5, "entries": 0, "size": 0}],
            "currentLedgerEntries": 7,
            "currentLedgerSize": 300,
            "lastConfirmedEntry": "5:6",
            "cursors": {"a": {"markDeletePosition": "3:-1"}},
        }
    )
    assert found.ledgers == [Ledger(3, 2, 80, closed=True), Ledger(5, 7, 300, closed=False)]
    assert found.last == Position(5, 6)
    assert found.cursors == {"a": Position(3, -1)}


def test_empty_ledger_may_be_replaced() -> None:
    """A broker that loads a topic replaces its empty ledger."""
    rows = [{"ledgerId": 3, "entries": 2, "size": 80}, {"ledgerId": 5, "entries": 0, "size": 0}]
    found = read_state(
        {
            "ledgers": rows,
            "currentLedgerEntries": 0,
            "currentLedgerSize": 0,
            "lastConfirmedEntry": "3:1",
            "cursors": {},
        }
    )
    assert [ledger.lasting for ledger in found.ledgers] == [True, False]


@pytest.mark.parametrize(
    ("policies", "cursors", "words"),
    [
        (SAFE._replace(ttl=60), {}, ["TTL", "remove-message-ttl"]),
        (
            SAFE._replace(quotas={"message_age": {"policy": "consumer_backlog_eviction"}}),
            {},
            ["consumer_backlog_eviction drops", "remove-backlog-quota t/n -t message_age"],
        ),
        (SAFE._replace(expiration=5), {}, ["expire", "remove-subscription-expiration-time"]),
        (
            SAFE._replace(
                inactive={
                    "deleteWhileInactive": True,
                    "inactiveTopicDeleteMode": "delete_when_subscriptions_caught_up",
                }
            ),
            {},
            ["delete_when_subscriptions_caught_up", "remove-inactive-topic-policies"],
        ),
        (SAFE._replace(clusters=["b", "a"]), {}, ["replicated to a, b", "namespaces set-clusters"]),
        (SAFE._replace(clusters=["b", "a"], own_clusters=["b", "a"]), {}, ["topics set-replication-clusters"]),
        (SAFE._replace(threshold=1000), {}, ["compaction", "set-compaction-threshold --threshold 0"]),
        (SAFE, {COMPACTION: Position(1, 1)}, ["compact"]),
    ],
)
def test_policy_that_overrides_subscriptions_is_rejected_by_name(
    policies: Policies, cursors: dict[str, Position], words: list[str]
) -> None:
    with pytest.raises(UnsafePolicy, match="'orders'") as caught:
        check_policies("orders", "t/n", policies, state((1, 1), cursors=cursors), compacted=False)
    assert all(word in str(caught.value) for word in words)


def test_harmless_policy_is_accepted() -> None:
    inactive = {"deleteWhileInactive": True, "inactiveTopicDeleteMode": "delete_when_no_subscriptions"}
    check_policies("orders", "t/n", SAFE._replace(inactive=inactive), state((1, 1)), compacted=False)
    caught_up = {"deleteWhileInactive": False, "inactiveTopicDeleteMode": "delete_when_subscriptions_caught_up"}
    check_policies("orders", "t/n", SAFE._replace(inactive=caught_up), state((1, 1)), compacted=False)
    compacting = SAFE._replace(threshold=1000)
    check_policies("own", "t/n", compacting, state((1, 1), cursors={COMPACTION: Position(1, 0)}), compacted=True)
