"""What topics live through on a broker with the plug-in: deleted ledgers, deletion, damage, policies of operators."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

from commands import txnbuf
from plain_world import (
    KINDS,
    SETTINGS,
    Plain,
    World,
    committed,
    compare,
    read_to_end,
    state,
    until,
    values,
    write,
)

from broker_io.standalone import Standalone, ask
from txnbuffer.errors import Error

SMALL_LEDGERS = ["managedLedgerMaxEntriesPerLedger=10", "managedLedgerMinLedgerRolloverTimeMinutes=0"]
SMALL_SNAPSHOTS = ["snapshots.changes=5"]
TRIMMING = ["retention.bytes=3000", "retention.check_seconds=0.2"]


BROKER = [*SETTINGS, *SMALL_LEDGERS]
"""Settings of its broker, which has the plug-in."""


async def test_consumers_get_the_same_while_ledgers_end_and_are_deleted(broker: Standalone) -> None:
    world = World(broker, SMALL_SNAPSHOTS)
    try:
        async with world.client() as client:
            await write(client, "short", 5, 0)
            first = ledgers(world, "short")[0]
            plain = Plain(world, "short", "Exclusive")
            for seed in range(1, 4):
                await write(client, "short", 5, seed)
                await asyncio.to_thread(compare, plain, await committed(client, "short"))
                await asyncio.to_thread(world.unload, "short")
            world.service.kill()
            world.service = world.serve(settings=TRIMMING)
            await until(lambda: ledgers(world, "short")[0] > first)
            world.service.kill()  # so that no more are deleted
            world.service = world.serve()
            count = len(plain.got)
            await write(client, "short", 5, 5)
            wanted = await committed(client, "short")
            await asyncio.to_thread(compare, Plain(world, "short", "reader"), wanted)
            await asyncio.to_thread(world.unload, "short")
            await asyncio.to_thread(compare, Plain(world, "short", "reader"), wanted)
            new = [pair for pair in wanted if pair[1].startswith(b"5-")]
            assert (await asyncio.to_thread(plain.read, count + len(new)))[count:] == new
    finally:
        world.close()


def ledgers(world: World, topic: str) -> list[int]:
    found = ask(world.broker.admin, f"persistent/{world.namespace}/{topic}/internalStats")["ledgers"]
    return [ledger["ledgerId"] for ledger in found]


async def test_topic_that_is_created_again_begins_anew(world: World) -> None:
    path = f"persistent/{world.namespace}/again"
    async with world.client() as client:
        await write(client, "again", 5, 1)
        await asyncio.to_thread(ask, world.broker.admin, f"{path}?force=true", "DELETE")
    async with world.client() as client:
        for seed in itertools.count(2):  # none commits while the deleted topic still counts as registered
            with contextlib.suppress(Error):
                await write(client, "again", 5, seed)
                break
        wanted = await committed(client, "again")
        for kind in KINDS:
            await asyncio.to_thread(compare, Plain(world, "again", kind), wanted)
        await asyncio.to_thread(world.unload, "again")
        await asyncio.to_thread(compare, Plain(world, "again", "reader"), wanted)


async def test_operator_lets_a_stopped_topic_go_on(world: World) -> None:
    path = f"persistent/{world.namespace}/let"
    async with world.client() as client:
        async with client.transaction() as txn:
            await txn.send("let", b"committed")
        await until(lambda: read_to_end(world, "let") == 1)
        gone = await client.transaction().begin()
        await gone.send("let", b"aborted")
        await client.send("let", b"ordinary")
        await gone.abort()
        await until(lambda: read_to_end(world, "let") == 2)
    producer = world.pulsar.create_producer(world.topic("let"))
    producer.send(b"newer", properties={"tb.v": "9"})
    producer.close()
    await until(lambda: state(world, "let")["state"] == "stopped")
    ask(world.broker.admin, f"{path}/properties", "PUT", {"txnbuffer.plain": "everything"})
    await asyncio.to_thread(world.unload, "let")
    everything = Plain(world, "let", "reader")
    assert {b"committed", b"aborted", b"ordinary", b"newer"} < {*values(await asyncio.to_thread(everything.read, 6))}
    assert [one for one in everything.properties if "tb.marker" in one]
    assert state(world, "let")["state"] == "everything"
    compaction = f"{path}/compaction"  # its result would stay
    await asyncio.to_thread(ask, world.broker.admin, compaction, "PUT")
    await until(lambda: ask(world.broker.admin, compaction)["status"] != "RUNNING")
    assert "ignores transactions" in ask(world.broker.admin, compaction)["lastError"]
    producer = world.pulsar.create_producer(world.topic("let"))
    producer.send(b"later")
    producer.close()
    assert b"later" in values(await asyncio.to_thread(everything.read, len(everything.got) + 1))
    ask(world.broker.admin, f"{path}/properties?key=txnbuffer.plain", "DELETE")
    await asyncio.to_thread(world.unload, "let")
    await until(lambda: state(world, "let")["state"] == "stopped")
    assert values(await asyncio.to_thread(Plain(world, "let", "reader").read, 2)) == [b"committed", b"ordinary"]


async def test_added_partition_has_no_state_of_the_first_one(world: World) -> None:
    path = f"persistent/{world.namespace}/added"
    ask(world.broker.admin, f"{path}/partitions", "PUT", 1)
    async with world.client() as client:
        async with client.transaction() as txn:
            await txn.send("added", b"committed", key="k")
        txn = await client.transaction().begin()
        await txn.send("added", b"open", key="k")
        await until(lambda: state(world, "added-partition-0")["state"] == "open")
        ask(world.broker.admin, f"{path}/partitions", "POST", 2)
        await until(lambda: "state" in state(world, "added-partition-1"))
        await txn.abort()
    new = f"{path}-partition-1"
    assert ask(world.broker.admin, f"{new}/subscription/__txnbuffer/properties") == {}
    assert "transaction" not in state(world, "added-partition-1")


async def test_topic_with_a_damaged_snapshot_goes_on_once_it_is_recovered(world: World) -> None:
    async with world.client() as client:
        await write(client, "damaged", 5, 1)
        wanted = await committed(client, "damaged")
    world.service.terminate()
    world.service.finish()
    producer = world.pulsar.create_producer(f"persistent://{world.namespace}/__txnbuffer_snapshots")
    damage = {"tb.v": "1", "tb.kind": "end", "tb.epoch": "999999999"}
    producer.send(b"damage", partition_key="damaged-end", properties=damage)
    producer.close()
    await asyncio.to_thread(world.unload, "damaged")
    plain = Plain(world, "damaged", "Exclusive")
    await until(lambda: state(world, "damaged")["state"] == "stopped")
    assert "damaged-end" in state(world, "damaged")["reason"]
    assert not await asyncio.to_thread(plain.read, 0)
    options = ["--set", f"pulsar.admin_url={world.broker.admin}"]
    recovered = await asyncio.to_thread(txnbuf, "recover", world.address, "damaged", "--write", *options)
    assert recovered.returncode == 0, recovered.stderr
    await until(lambda: state(world, "damaged")["state"] == "ready")
    await asyncio.to_thread(compare, plain, wanted)
    world.service = world.serve()


async def test_topics_with_transactions_are_not_replicated(world: World) -> None:
    admin, path = world.broker.admin, f"persistent/{world.namespace}/copied"
    nowhere = {"serviceUrl": "http://127.0.0.1:9", "brokerServiceUrl": "pulsar://127.0.0.1:9"}
    ask(admin, "clusters/nowhere", "PUT", nowhere)
    ask(admin, "tenants/public", "POST", {"allowedClusters": ["standalone", "nowhere"], "adminRoles": []})
    producer = world.pulsar.create_producer(world.topic("copied"))
    producer.send(b"ordinary")
    producer.close()
    ask(admin, f"{path}/replication", "POST", ["standalone", "nowhere"])
    await until(lambda: "nowhere" in ask(admin, f"{path}/stats")["replication"])
    ask(admin, f"{path}/subscription/__txnbuffer", "PUT", {"ledgerId": -1, "entryId": -1})
    producer = world.pulsar.create_producer(world.topic("copied"))
    producer.send(b"ordinary, and the topic may have transactions")
    producer.close()
    await until(lambda: not ask(admin, f"{path}/stats")["replication"])
    await until(lambda: "pulsar.repl.nowhere" not in ask(admin, f"{path}/internalStats")["cursors"])
    await asyncio.to_thread(world.unload, "copied")
    assert await asyncio.to_thread(read_to_end, world, "copied") == 2
    assert not ask(admin, f"{path}/stats")["replication"]
