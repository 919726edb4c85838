"""A relay on a real cluster, with kills of relay and service; a plain client reads the target."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pulsar
from pulsar_cluster import Cluster
from relay_kills import RelayProcess
from service_process import ServiceProcess

from txnbuffer import connect

Row = tuple[str, bytes | None, str | None]


def read_plainly(client: pulsar.Client, url: str, count: int) -> list[Row]:
    """The first `count` messages, and one more if there is any."""
    reader = client.create_reader(url, pulsar.MessageId.earliest)
    found: list[Row] = []
    with contextlib.suppress(pulsar.Timeout):
        while len(found) <= count:
            message = reader.read_next(30_000 if len(found) < count else 1000)
            value = None if message._message.has_null_value() else message.data()
            found.append((message.partition_key(), value, message.properties().get("relay.seqno")))
    reader.close()
    return found


async def test_a_plain_client_reads_each_committed_record_once(
    cluster: Cluster, namespace: str, client: pulsar.Client, tmp_path: Path
) -> None:
    address = f"{cluster.url}/{namespace}"
    flags = ("--set", f"pulsar.admin_url={cluster.admin}")
    truth: list[Row] = []
    with contextlib.ExitStack() as stack:

        async def serve() -> ServiceProcess:
            process = ServiceProcess(address, "--admin-url", cluster.admin)
            stack.callback(process.__exit__)
            return await asyncio.to_thread(process.wait_serving)

        def relay(*more: str) -> RelayProcess:
            started = RelayProcess(tmp_path / "relay.log", address, "orders", "clean", *flags, *more)
            stack.callback(lambda: started.process.poll() is None and started.kill())
            return started

        service = await serve()
        async with connect(address, broker_options={"admin_url": cluster.admin}) as writer:
            relaying = None
            for round_ in range(4):
                for number in range(10):
                    async with writer.transaction() as txn:
                        await txn.send("orders", f"{round_}-{number}", key=f"k{number % 3}")
                        if number == 7:
                            await txn.delete("orders", "k1")
                        if number == 4:
                            await txn.abort()
                            continue
                    truth.append((f"k{number % 3}", f"{round_}-{number}".encode(), str(len(truth) + 1)))
                    if number == 7:
                        truth.append(("k1", None, str(len(truth) + 1)))
                if relaying is not None:
                    await asyncio.to_thread(relaying.kill)
                relaying = relay()
                if round_ == 1:
                    await asyncio.to_thread(service.kill)
                    service = await serve()
            assert relaying is not None
            await asyncio.to_thread(relaying.kill)
        code, _ = await asyncio.to_thread(relay("--no-follow").finish)
        assert code == 0, (tmp_path / "relay.log").read_text()
    url = f"persistent://{namespace}/clean"
    assert await asyncio.to_thread(read_plainly, client, url, len(truth)) == truth


def latest(client: pulsar.Client, url: str) -> tuple[dict[str, bytes | None], int]:
    """The newest value of each key for a reader of the compacted topic, and how many messages it read."""
    reader = client.create_reader(url, pulsar.MessageId.earliest, is_read_compacted=True)
    found: dict[str, bytes | None] = {}
    count = 0
    while reader.has_message_available():
        message = reader.read_next(30_000)
        count += 1
        found[message.partition_key()] = None if message._message.has_null_value() else message.data()
    reader.close()
    return found, count


def test_a_relay_of_latest_values_keeps_a_compacted_topic(
    cluster: Cluster, namespace: str, client: pulsar.Client, tmp_path: Path
) -> None:
    address, url = f"{cluster.url}/{namespace}", f"persistent://{namespace}/latest"
    flags = ("--set", f"pulsar.admin_url={cluster.admin}", "--no-follow", "--latest")

    def relay() -> None:
        started = RelayProcess(
            tmp_path / "relay.log", f"file:{tmp_path / 'log'}", "orders", "latest", "--to", address, *flags
        )
        code, _ = started.finish()
        assert code == 0, (tmp_path / "relay.log").read_text()

    def write(last: str) -> None:
        with connect(f"file:{tmp_path / 'log'}") as writer:
            for number in range(20):
                with writer.transaction() as txn:
                    txn.send("orders", f"{last}{number}", key=f"k{number % 4}")
                    txn.send("orders", "keyless")
                    if number % 5 == 4:
                        txn.abort()
            with writer.transaction() as txn:
                txn.delete("orders", "k3")

    write("a")
    relay()
    assert latest(client, url) == ({"k0": b"a16", "k1": b"a17", "k2": b"a18"}, 3)
    write("b")
    relay()
    assert latest(client, url) == ({"k0": b"b16", "k1": b"b17", "k2": b"b18"}, 3)
    relay()
    assert latest(client, url) == ({"k0": b"b16", "k1": b"b17", "k2": b"b18"}, 3), "nothing new"
