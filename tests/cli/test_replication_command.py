"""`txnbuf replication`, and other commands with the addresses of both services of a pair."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

from commands import txnbuf
from http_answers import get
from pair_services import RunningPair, on_a_pair
from service_setup import eventually

from broker_io.filelog.log.broker import FileBroker
from broker_io.filelog.pair.broker import PairBroker, PairOptions
from txnbuffer import connect


async def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(txnbuf, *arguments)


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@on_a_pair
async def test_the_status_shows_both_machines(both: RunningPair) -> None:
    done = await command("replication", "status", both.address)
    assert done.returncode == 0
    assert "store0 store1" in done.stdout
    columns = done.stdout.splitlines()[1].split()
    assert {"store", "partial", "waits_for_backup"} <= {*columns}
    assert "live" in done.stdout
    assert "backup" in done.stdout
    done = await command("replication", "status", "--output", "json", both.address)
    assert [row["role"] for row in rows(done)] == ["live", "backup"]
    assert rows(done)[0]["window"] == 64


@on_a_pair
async def test_the_exit_code_of_the_status_says_whether_a_failover_would_lose_nothing(both: RunningPair) -> None:
    both.pair.in_sync = False
    assert (await command("replication", "status", both.address)).returncode == 1
    both.pair.in_sync = True
    first = f"txnbuf://127.0.0.1:{both.services[0].port}"
    assert (await command("replication", "status", first)).returncode == 0
    both.pair.move(None)
    assert (await command("replication", "status", both.address)).returncode == 1
    both.pair.in_sync = False
    await both.services[1].stop()
    done = await command("replication", "status", both.address)
    assert done.returncode == 3
    assert "1 of 2 services did not respond" in done.stderr
    assert "backup" in done.stdout


@on_a_pair
async def test_a_switch_asks_both_machines(both: RunningPair) -> None:
    await both.move_to(1)
    done = await command("replication", "switch", "--output", "json", both.address)
    assert done.returncode == 0, done.stderr
    assert [(row["service"], row["role"]) for row in rows(done)] == [
        (f"127.0.0.1:{both.services[0].port}", "live"),
        (f"127.0.0.1:{both.services[1].port}", "backup"),
    ]
    assert both.pair.live == 0
    both.pair.in_sync = False
    done = await command("replication", "switch", both.address)
    assert done.returncode == 3
    assert "the backup is not in sync: wait until it is, then switch" in done.stderr
    both.pair.move(None)
    done = await command("replication", "switch", both.address)
    assert done.returncode == 3
    assert "this machine is not live: ask the other one to switch" in done.stderr


@on_a_pair
async def test_a_switch_waits_until_the_other_machine_is_live(both: RunningPair) -> None:
    both.pair.slow = 1.0
    first = f"txnbuf://127.0.0.1:{both.services[0].port}"
    done = await command("replication", "switch", "--output", "json", first)
    assert done.returncode == 0, done.stderr
    assert [(row["role"], row["live"]) for row in rows(done)] == [("backup", "store1")]
    await both.serving(1)
    both.pair.slow = 3600.0
    done = await command("replication", "switch", "--timeout", "0.5", both.address)
    assert done.returncode == 3
    assert "no other machine became live within 0.5 s" in done.stderr


@on_a_pair
async def test_a_promotion_waits_until_the_machine_is_live(both: RunningPair) -> None:
    second = f"txnbuf://127.0.0.1:{both.services[1].port}"
    both.pair.move(None)
    both.pair.slow = 3600.0
    done = await command("replication", "promote", "--force", "--timeout", "0.5", second)
    assert done.returncode == 3
    assert f"{second} has not become live within 0.5 s: its role is backup" in done.stderr
    both.pair.slow = 1.0
    done = await command("replication", "promote", "--force", "--output", "json", second)
    assert done.returncode == 0, done.stderr
    assert rows(done)[0]["role"] == "live"


@on_a_pair
async def test_a_promotion_has_to_be_forced_and_names_one_machine(both: RunningPair) -> None:
    second = f"txnbuf://127.0.0.1:{both.services[1].port}"
    both.pair.move(None)
    done = await command("replication", "promote", second)
    assert (done.returncode, both.pair.live) == (2, None)
    assert "may lose acknowledged records: give --force" in done.stderr
    done = await command("replication", "promote", "--force", both.address)
    assert done.returncode == 2
    assert "name the one machine to promote" in done.stderr
    done = await command("replication", "promote", "--force", second)
    assert (done.returncode, both.pair.live) == (0, 1)
    assert second.removeprefix("txnbuf://") in done.stdout


@on_a_pair
async def test_a_backup_in_sync_is_not_forced_but_switched_to(both: RunningPair) -> None:
    second = f"txnbuf://127.0.0.1:{both.services[1].port}"
    done = await command("replication", "promote", "--force", second)
    assert (done.returncode, both.pair.live) == (2, 0)
    assert "use `txnbuf replication switch`" in done.stderr


@on_a_pair
async def test_other_commands_ask_the_live_machine(both: RunningPair) -> None:
    async with connect(both.address) as client:
        await client.send("orders", b"1")
        for live in (0, 1):
            await both.move_to(live)
            await eventually(lambda: client.session.core.welcomed)
            await client.send("orders", b"2")
            for arguments in (
                ("list", both.address),
                ("find-hanging", both.address),
                ("describe", both.address, "orders"),
                ("streams", both.address),
                ("cursors", "list", both.address),
            ):
                done = await command(*arguments)
                assert done.returncode == 0, done.stderr
            assert "orders" in (await command("list", both.address)).stdout
        done = await command("tail", both.address, "orders", "--isolation", "read_committed")
        assert done.stdout.count("\n") >= 3


@on_a_pair
async def test_metrics_show_the_pair_in_both_roles(both: RunningPair) -> None:
    for number, live in enumerate(("1.0", "0.0")):
        http = both.services[number].service._listeners.http.port
        status, text = await asyncio.to_thread(get, http, "/metrics")
        assert status == 200
        assert f"txnbuffer_pair_live {live}" in text
        assert "txnbuffer_pair_in_sync 2.0" in text
        assert "txnbuffer_pair_lag_seconds 0.25" in text


def test_a_pair_is_dissolved_on_a_directory(tmp_path: Path) -> None:
    log, lock = f"file:{tmp_path / 'log'}", f"file:{tmp_path / 'lock'}"
    pair = PairOptions(lock, "127.0.0.1:0", "127.0.0.1:1", found=True, lease_seconds=1.0)
    with PairBroker.open_member(str(tmp_path / "log"), pair=pair) as member:
        assert member.wait_live(30.0)
        member.create_topic("orders")
    command = ("replication", "dissolve")
    for arguments, text in (
        ((log,), "the lock of the pair is missing"),
        (("txnbuf://127.0.0.1:1", "--pair-lock", lock), "give the directory of a stopped machine"),
    ):
        done = txnbuf(*command, *arguments)
        assert (done.returncode, text in done.stderr) == (2, True), done.stderr
    done = txnbuf(*command, log, "--pair-lock", lock, "--set", "pair.lease_seconds=1")
    assert (done.returncode, "is dissolved" in done.stderr) == (0, True), done.stderr
    with FileBroker.open(str(tmp_path / "log")) as broker:
        assert broker.topics() == ["orders"]
    done = txnbuf(*command, log, "--pair-lock", lock)
    assert (done.returncode, "belongs to no pair" in done.stderr) == (2, True), done.stderr
