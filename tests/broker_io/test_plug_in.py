"""What the brokers of a cluster say about their plug-in, as the REST interface shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from broker_io.errors import CallerError, ServiceUnavailable
from broker_io.port import PLUG_IN_LOCK, PLUG_IN_SETTINGS
from broker_io.pulsar.plug_in import lock, plug_ins_of, topic_state

ANNOUNCED = "txnbuffer.plugin:version=0.3.0,protocol=1,end=3,part=1,later=x"
OTHER = {"brokers/version": "4.0.8", "brokers/configuration/runtime": {}, "brokers/configuration": ["other"]}
GOOD = OTHER | {
    "brokers/configuration/runtime": PLUG_IN_SETTINGS | {"other": "x"},
    "brokers/configuration": ["other", ANNOUNCED],
}


class Interface:
    """The admin interfaces of a cluster: `answers` by URL; those of other URLs do not answer."""

    def __init__(self, answers: dict[str, dict[str, Any]], url: str) -> None:
        self.answers, self.url = answers, url
        self.posted: list[Any] = []

    def at(self, url: str) -> Interface:
        return Interface(self.answers, url)

    def ask(self, method: str, path: str, body: Any = None, *, retry: bool = True) -> Any:
        if self.url not in self.answers:
            raise ServiceUnavailable("no answer")
        if method == "POST":
            self.posted.append(body)
        return self.answers[self.url].get(path)

    def query(self, path: str, read: Callable[[Any], Any], *, retry: bool = True) -> Any:
        return read(self.ask("GET", path))

    def close(self) -> None:
        pass


def cluster(brokers: dict[str, dict[str, Any]], own: str = "http://one:8080") -> Any:
    first = {"brokers": [url.partition("://")[2] for url in brokers]}
    return Interface({**brokers, own: brokers.get(own, {}) | first}, own)


def test_brokers_say_what_they_have_and_read() -> None:
    one, two, gone = plug_ins_of(cluster({"http://one:8080": GOOD, "http://two:8080": OTHER, "http://x:1": OTHER}))
    assert (one.plug_in, one.missing, one.reads) == ("0.3.0", (), {"protocol": 1, "end": 3, "part": 1})
    assert (two.version, two.plug_in, two.reads) == ("4.0.8", "", {})
    assert two.missing == tuple(f"{name}={value}" for name, value in PLUG_IN_SETTINGS.items())
    assert gone.broker == "x:1"


def test_a_broker_that_does_not_answer_lacks_an_answer() -> None:
    admin = cluster({"http://one:8080": GOOD})
    admin.answers["http://one:8080"]["brokers"].append("two:8080")
    _, two = plug_ins_of(admin)
    assert (two.version, two.missing) == ("", ("an answer (no answer)",))


def test_a_cluster_with_tls_is_asked_at_the_port_of_its_admin_interface() -> None:
    """It lists the port without TLS, where the brokers have one too."""
    admin = cluster({"https://one:8443": GOOD}, "https://one:8443")
    admin.answers["https://one:8443"]["brokers"] = ["one:8080"]
    (one,) = plug_ins_of(admin)
    assert (one.broker, one.plug_in) == ("one:8080", "0.3.0")


def test_the_state_of_a_topic_is_in_its_stats() -> None:
    properties = {"txnbuffer.state": "open", "txnbuffer.first": "5:1", "other": "x", "txnbuffer.later": "y"}
    stats = {"subscriptions": {"__txnbuffer": {"subscriptionProperties": properties}, "plain": {}}}
    assert topic_state(stats) == {"state": "open", "first": "5:1"}
    for without in ({}, {"subscriptions": {}}, {"subscriptions": {"__txnbuffer": {"subscriptionProperties": {}}}}):
        assert topic_state(without) == {}


def test_a_namespace_is_locked_with_the_other_values_of_its_policy() -> None:
    setting, _, value = PLUG_IN_LOCK.partition("=")
    defaults = {
        "managedLedgerDefaultEnsembleSize": "3", "managedLedgerDefaultWriteQuorum": "2",
        "managedLedgerDefaultAckQuorum": "2", "managedLedgerDefaultMarkDeleteRateLimit": "1.0",
    }  # fmt: skip
    ready = GOOD | {"brokers/configuration/runtime": {setting: value, **defaults}}
    admin = cluster({"http://one:8080": ready})
    lock(admin, "public/default", locked=True)
    assert admin.posted == [
        {"bookkeeperEnsemble": 3, "bookkeeperWriteQuorum": 2, "bookkeeperAckQuorum": 2,
         "managedLedgerMaxMarkDeleteRate": 1.0, "managedLedgerStorageClassName": "txnbuffer"},
    ]  # fmt: skip
    with pytest.raises(CallerError, match=r"one:8080 can't serve a locked namespace: set managedLedgerStorageClass"):
        lock(cluster({"http://one:8080": GOOD}), "public/default", locked=True)
