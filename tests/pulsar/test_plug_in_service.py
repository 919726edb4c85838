"""What a service and the commands say and do on a cluster whose brokers have the plug-in, and on one without it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from commands import txnbuf
from mixed_releases import OLD, Life, unpacked
from plain_world import KINDS, LONG, SETTINGS, Plain, World, until, values
from pulsar_cluster import Cluster
from service_process import ServiceProcess

from broker_io import open_broker
from broker_io.standalone import Standalone, ask
from snapshots.format import RAW_END_VERSION, SNAPSHOT_TOPIC
from snapshots.scan import scan
from txnbuffer import ServiceUnavailable, TxnId, __version__, connect
from txnbuffer.plug_in import WRITTEN, PlugInState, plug_ins_of

BROKER = SETTINGS
"""Settings of its broker, which has the plug-in."""


def command(world: World, *words: str) -> Any:
    name, *rest = words
    given = (name, world.address, *rest, "--set", f"pulsar.admin_url={world.broker.admin}", "--output", "json")
    done = txnbuf(*given)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ready(service: ServiceProcess) -> dict[str, Any]:
    """The answer of /ready, also if it is 503."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{service.http}/ready", timeout=LONG) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return json.loads(error.read())


def asked(place: Standalone | Cluster) -> Any:
    with open_broker(place.url, admin_url=place.admin) as opened:
        return plug_ins_of(opened)


def test_brokers_say_which_plug_in_they_have_and_what_it_reads(broker: Standalone, cluster: Cluster) -> None:
    assert asked(broker).state is PlugInState.ALL, "also if it has loaded no topic yet"
    ask(broker.admin, f"persistent/{broker.namespace()}/any", "PUT", {})
    (one,) = asked(broker).brokers
    assert (one.plug_in, one.reads, one.missing) == (__version__, WRITTEN, ())
    assert asked(cluster).state is PlugInState.NONE


async def test_service_says_what_the_plug_in_does_with_a_topic(world: World) -> None:
    async with world.client() as client:
        open_one = await client.transaction(timeout=120).begin()
        await open_one.send("told", b"open")
        await client.send("told", b"after")
        await until(lambda: command(world, "describe", "told")["plain_consumers"].get("state") == "open")
        told = command(world, "describe", "told")["plain_consumers"]
        assert (told["plug_in"], told["transaction"]) == ("all", str(open_one.id))
        await open_one.commit()
        await until(lambda: command(world, "describe", "told")["plain_consumers"]["state"] == "ready")
    assert ready(world.service)["plug_in"] == "all"
    with urllib.request.urlopen(f"http://127.0.0.1:{world.service.http}/metrics", timeout=LONG) as answer:
        lines = answer.read().decode().splitlines()
    assert {"txnbuffer_plug_in_brokers 1.0", "txnbuffer_plug_in_missing 0.0"} <= {*lines}


async def test_transaction_that_holds_plain_consumers_back_is_aborted_without_a_service(world: World) -> None:
    async with world.client() as client:
        plains = [Plain(world, "orphans", kind) for kind in KINDS]
        async with client.transaction() as txn:
            await txn.send("orphans", b"committed")
        hanging = await client.transaction(timeout=600).begin()
        await hanging.send("orphans", b"open")
        await client.send("orphans", b"after")
        txn_id: TxnId = hanging.id
        await until(lambda: command(world, "find-hanging", "--older-than", "0") != [])
        refused = txnbuf("abort", f"txnbuf://127.0.0.1:{world.port + 0}", "0:99999999")
        assert refused.returncode == 2, "the service answers"
        await asyncio.to_thread(world.service.kill)
        (row,) = await asyncio.to_thread(command, world, "find-hanging", "--older-than", "0")
        assert (row["txn"], row["topics"], row["state"]) == (str(txn_id), ["orphans"], "open")
        assert row["open_seconds"] > 0
        for plain in plains:
            assert values(await asyncio.to_thread(plain.read, 1)) == [b"committed"], plain.kind
        assert (await asyncio.to_thread(command, world, "abort", str(txn_id)))["outcome"] == "ABORT"
        for plain in plains:
            assert values(await asyncio.to_thread(plain.read, 2)) == [b"committed", b"after"], plain.kind
        assert await asyncio.to_thread(command, world, "find-hanging", "--older-than", "0") == []
        world.service = await asyncio.to_thread(world.serve)
        async with client.transaction() as txn:  # the client finds the next service
            await txn.send("orphans", b"again")
        for plain in plains:
            assert len(await asyncio.to_thread(plain.read, 3)) == 3, plain.kind


async def test_reader_of_an_earlier_release_gets_one_error(world: World, tmp_path: Path) -> None:
    """Without it, it would wait for markers that plain subscriptions do not get."""
    async with world.client() as client:
        async with client.transaction() as txn:
            await txn.send("early", b"committed")
        await until(lambda: end_version(world, "early") == RAW_END_VERSION)
        errors = tmp_path / "stderr"
        old = Life(unpacked(tmp_path / "release")[OLD], errors, world.address, "read", "early", world.broker.admin)
        code = await asyncio.to_thread(old.process.wait, LONG)
        assert (code, old.lines[1:]) == (1, [])
        assert "snapshot entry early-end has format version 3, which this release can't read" in errors.read_text()


def end_version(world: World, topic: str) -> str | None:
    with open_broker(world.address, admin_url=world.broker.admin) as opened:
        end = scan(opened, SNAPSHOT_TOPIC, topic).topics[topic].end
    return None if end is None else end.version


async def test_service_that_requires_the_plug_in_serves_no_client_without_it(cluster: Cluster, namespace: str) -> None:
    address = f"{cluster.url}/{namespace}"
    setting = ("--set", "service.require_plug_in=true")
    with ServiceProcess(address, "--admin-url", cluster.admin, *setting) as service:
        problem = await asyncio.to_thread(service.wait_event, "problem")
        assert "lacks topicFactoryClassName=txnbuffer.broker.TxnTopicFactory" in problem["error"]
        assert (ready(service)["ready"], ready(service)["plug_in"]) == (False, "none")
        options = {"admin_url": cluster.admin}
        async with connect(address, broker_options=options, max_unavailable=2.0) as client:
            with pytest.raises(ServiceUnavailable, match="lacks topicFactoryClassName"):
                await client.send("orders", b"record")
                async with client.transaction() as txn:
                    await txn.send("orders", b"record")
    with contextlib.suppress(ProcessLookupError):
        service.kill()
