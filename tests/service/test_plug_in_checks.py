"""What a service does about brokers that lack the plug-in, or have one that can't read what it writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cluster_app import app_on
from raw_session import InProcess, RawSession
from service_setup import engine_on, eventually

from broker_io.errors import NotAuthorized, ServiceUnavailable
from broker_io.memory import MemoryBroker
from broker_io.port import PLUG_IN_SETTINGS, BrokerPlugIn
from snapshots.format import END_VERSION, RAW_END_VERSION, SNAPSHOT_TOPIC
from snapshots.scan import scan
from txnbuffer.config import load_config
from txnbuffer.errors import InvalidConfiguration, PlugInMissing
from txnbuffer.plug_in import WRITTEN, PlugInState
from txnbuffer.service.door.connection import Limits
from txnbuffer.service.process import check
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.servers.http_server import exposition, metrics
from txnbuffer.service.topics import upkeep

GOOD = BrokerPlugIn("one:8080", "4.0.8", "0.3.0", (), WRITTEN)
RAW = BrokerPlugIn("two:8080", "4.0.8", "", tuple(f"{name}={value}" for name, value in PLUG_IN_SETTINGS.items()), {})
OLD = GOOD._replace(broker="two:8080", reads=WRITTEN | {"end": WRITTEN["end"] - 1})
AWAY = GOOD._replace(version="", plug_in="", missing=("an answer (it restarts)",), reads={})
REQUIRED = Limits(require_plug_in=True)


class Brokers(MemoryBroker):
    """A cluster whose brokers give the answers `answers`, or raise the error."""

    answers: list[BrokerPlugIn] | Exception
    asked = 0
    states = True
    """Whether topics have the state of a plug-in."""

    def plug_ins(self) -> list[BrokerPlugIn]:
        self.asked += 1
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers

    def plug_in_state(self, topic: str) -> dict[str, str]:
        return {"state": "ready", "readable": "1:2"} if self.states else {}

    def lock_plug_in(self, *, locked: bool) -> None:
        raise AssertionError("no service does that")

    async def asked_again(self) -> None:
        """Wait until an answer from now on has arrived."""
        before = self.asked
        await eventually(lambda: self.asked >= before + 2)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Brokers]:
    monkeypatch.setattr(upkeep, "PLUG_IN_CHECK", 0.01)
    monkeypatch.setattr(upkeep, "WITHOUT_PLUG_IN", 0.01)
    with Brokers() as opened:
        yield opened


async def shown(engine: Any, request: str, **arguments: Any) -> Any:
    return await ServiceAdmin(engine).methods()[request](arguments)


@pytest.mark.parametrize(
    ("answers", "state", "problem"),
    [
        ([GOOD, GOOD], PlugInState.ALL, "None"),
        ([GOOD, RAW], PlugInState.SOME, "two:8080 lacks topicFactoryClassName"),
        ([RAW, RAW], PlugInState.NONE, "None"),
    ],
)
async def test_service_says_which_brokers_have_the_plug_in(
    cluster: Brokers, answers: list[BrokerPlugIn], state: PlugInState, problem: str
) -> None:
    cluster.answers = answers
    async with engine_on(cluster, cluster_mode=True) as engine:
        await app_on(engine, cluster, "a")
        await eventually(lambda: engine.plug_ins.found.state is state)
        await eventually(lambda: problem in str(engine.plug_ins.problem))
        told = (await shown(engine, "Describe", topic="a"))["plain_consumers"]
        assert told == {"plug_in": state.value, "state": "ready", "readable": "1:2"}
        assert problem in str((await shown(engine, "Status"))["plug_in_problem"])
        lines = exposition(metrics(engine)).decode().splitlines()
        missing = answers.count(RAW)
        assert {f"txnbuffer_plug_in_brokers {2 - missing}.0", f"txnbuffer_plug_in_missing {missing}.0"} <= {*lines}
        assert engine.requests.refusal is None


@pytest.mark.parametrize("error", [NotAuthorized("use other credentials"), ServiceUnavailable("away")])
async def test_a_service_that_can_not_ask_serves(cluster: Brokers, error: Exception) -> None:
    cluster.answers = error
    async with engine_on(cluster, cluster_mode=True) as engine:
        await app_on(engine, cluster, "a")
        await cluster.asked_again()
        assert (await shown(engine, "Status"))["plug_in"] == "unknown"
        assert (engine.plug_ins.problem, engine.requests.refusal) == (None, None)


async def test_a_service_that_requires_the_plug_in_serves_no_client_while_a_broker_lacks_it(cluster: Brokers) -> None:
    cluster.answers = [GOOD, RAW]
    async with engine_on(cluster, cluster_mode=True, limits=REQUIRED) as engine:
        assert isinstance(engine.requests.refusal, PlugInMissing), "before it has asked"
        await eventually(lambda: "two:8080 lacks" in str(engine.requests.refusal))
        with pytest.raises(EOFError, match="two:8080 lacks"):
            await RawSession(InProcess(engine)).hello()
        cluster.answers = [GOOD, GOOD]
        await eventually(lambda: engine.requests.refusal is None)
        app = await app_on(engine, cluster, "a")
        for away in (ServiceUnavailable("the cluster restarts"), [AWAY]):
            cluster.answers = away
            await cluster.asked_again()
            assert engine.requests.refusal is None, "the last answers remain"
        for answers in (
            [GOOD, RAW],
            [GOOD, AWAY._replace(broker="new:8080")],
            NotAuthorized("the role lost the right to ask"),
        ):
            cluster.answers = answers
            await eventually(lambda: engine.requests.refusal is not None)
            cluster.answers = [GOOD]
            await eventually(lambda: engine.requests.refusal is None)
        with pytest.raises(EOFError):
            await app.session.lease(1)


async def test_a_service_writes_nothing_that_a_plug_in_can_not_read(cluster: Brokers) -> None:
    cluster.answers = [GOOD, OLD]
    with pytest.raises(PlugInMissing, match=rf"two:8080 lacks version {WRITTEN['end']} of end: install the jar"):
        async with engine_on(cluster, cluster_mode=True):
            pass
    assert cluster.topics() == []
    cluster.answers = [GOOD]
    async with engine_on(cluster, cluster_mode=True) as engine:
        await app_on(engine, cluster, "a")
        cluster.answers = [OLD]
        await eventually(lambda: isinstance(engine.requests.refusal, PlugInMissing))
        cluster.answers = [GOOD]
        await eventually(lambda: engine.requests.refusal is None)


async def test_older_releases_refuse_topics_while_a_broker_has_the_plug_in(cluster: Brokers) -> None:
    """Their readers would wait for markers that plain subscriptions do not get."""

    def version(topic: str) -> str:
        end = scan(cluster, SNAPSHOT_TOPIC, topic).topics[topic].end
        assert end is not None
        return end.version

    cluster.answers = [RAW]
    async with engine_on(cluster, cluster_mode=True) as engine:
        await app_on(engine, cluster, "a")
        assert version("a") == END_VERSION
        cluster.answers = [GOOD, RAW]
        await eventually(lambda: version("a") == RAW_END_VERSION)
        await app_on(engine, cluster, "b")
        assert version("b") == RAW_END_VERSION, "its first snapshot"
    cluster.answers = ServiceUnavailable("away")
    async with engine_on(cluster, cluster_mode=True) as engine:
        await (await app_on(engine, cluster, "a", "b")).write("a", [1])
        await engine.snapshots.snapshot(["a", "b"])
        assert (version("a"), version("b")) == (RAW_END_VERSION, RAW_END_VERSION), "a new owner keeps it"
        cluster.answers = [RAW]
        await eventually(lambda: version("a") == version("b") == END_VERSION)
        cluster.answers = NotAuthorized("use other credentials")  # then the stats of topics show it
        await eventually(lambda: version("a") == version("b") == RAW_END_VERSION)
        cluster.states = False
        await eventually(lambda: version("a") == version("b") == END_VERSION)


def test_the_setting_needs_a_cluster() -> None:
    with pytest.raises(InvalidConfiguration, match="requires a cluster"):
        check(load_config(None, {}, ["service.require_plug_in=true"]))
