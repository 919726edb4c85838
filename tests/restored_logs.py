"""Helpers of the tests of logs that are replaced by an older state: writing to them, backups, a relay."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from streamed import write

from broker_io import open_broker, restore_backup
from broker_io.memory import MemoryBroker
from broker_io.port import BackupBroker
from txnbuffer import connect
from txnbuffer.sinks.relay import Relay
from txnbuffer.sinks.relay_targets import OwnedTarget


def back_up(log: Path, file: Path) -> None:
    """Write the backup of a log that nobody has open."""
    with open_broker(f"file:{log}") as broker:
        assert isinstance(broker, BackupBroker)
        broker.back_up(str(file), lambda done, total: None)


def put_back(file: Path, log: Path) -> None:
    """Replace a log by a backup."""
    shutil.rmtree(log)
    restore_backup(str(file), f"file:{log}", lambda done, total: None)


async def grow(log: Path, numbers: range, name: str) -> None:
    async with connect(f"file:{log}") as client:
        for number in numbers:
            await write(client, "t", {f"k{number % 3}": f"{name}-{number}"})


def relay(log: Path, far: MemoryBroker) -> Relay:
    source = partial(open_broker, f"file:{log}", read_only=True)
    return Relay(source, "t", OwnedTarget(far.connect, "clean"), max_unavailable=20.0)
