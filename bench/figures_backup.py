"""Backups of the embedded log: the copy against `cp`, and what a running one costs the service."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from bench.fresh import fresh
from bench.harness import Pair, figure
from bench.service_process import started
from broker_io.batch import Batch, Blobs
from broker_io.filelog.log.broker import FileBroker
from txnbuffer.cli.admin_client import ServiceAddress, call

MB = 1_000_000
APPENDS, RECORDS, VALUE_BYTES = 40, 64_000, 100
"""256 MB of values."""
SECONDS = 5.0


def fill(directory: str) -> None:
    """A log of one topic."""
    values = np.random.default_rng(1).bytes(RECORDS * VALUE_BYTES)
    batch = Batch(Blobs.none(RECORDS), Blobs(values, np.arange(RECORDS + 1, dtype=np.int32) * VALUE_BYTES, None))
    with FileBroker.open(directory, committer=False) as broker:
        broker.create_topic("cold")
        with broker.writer("cold") as writer:
            for _ in range(APPENDS):
                writer.append(batch).result()


def copied(directory: str) -> float:
    """MB/s of `cp`, with a sync of the copy."""
    size, began = size_of(directory), time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", directory, f"{directory}-copy"], check=True)
    for path in Path(f"{directory}-copy").rglob("*.log"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return size / MB / (time.perf_counter() - began)


def backed_up(directory: str) -> float:
    """MB/s of a backup, once the log is open."""
    with FileBroker.open(directory) as broker:
        began = time.perf_counter()
        report = broker.back_up(f"{directory}-backup", lambda *_: None)
        return report.bytes / MB / (time.perf_counter() - began)


def size_of(directory: str) -> int:
    return sum(path.stat().st_size for path in Path(directory).rglob("*.log"))


@figure("backup.mb_per_s", unit="MB/s", goal=">= 0.4 times the peer", peer="cp of the directory, synced")
def speed() -> Pair:
    with tempfile.TemporaryDirectory() as directory:
        fill(f"{directory}/log")
        return Pair(fresh("bench.figures_backup", "backed_up", f"{directory}/log"), copied(f"{directory}/log"))


def back_up_until(ending: threading.Event, address: str, directory: str) -> None:
    """Write one backup after the other; print how many MB/s."""
    service, began, size, number = ServiceAddress(address), time.perf_counter(), 0, 0
    while not ending.is_set():
        number += 1
        call(service, "BackUp", path=f"{directory}/backup-{number}")
        while (run := call(service, "Backups")[0])["state"] == "running":
            time.sleep(0.05)
        size += run["report"]["bytes"]
        os.remove(run["path"])
    print(f"  {number} backups, {size / MB / (time.perf_counter() - began):.0f} MB/s", file=sys.stderr)


@figure("backup.serving", unit="transactions/s", goal=">= 0.7 times the peer", peer="the service without a backup")
def serving() -> Pair:
    with tempfile.TemporaryDirectory() as directory:
        fill(f"{directory}/log")
        command = [sys.executable, "-m", "txnbuffer", "serve", f"file:{directory}/log"]
        with started([*command, "--listen", "127.0.0.1:0", "--http", ""]) as (_, facts):
            address, ending = str(facts["address"]), threading.Event()
            alone = fresh("bench.figures_embedded", "run_lanes", address, ["a"], 512, 1, SECONDS)
            backups = threading.Thread(target=back_up_until, args=(ending, address, directory))
            backups.start()
            meanwhile = fresh("bench.figures_embedded", "run_lanes", address, ["a"], 512, 1, SECONDS)
            ending.set()
            backups.join()
    return Pair(float(meanwhile["per_second"]), float(alone["per_second"]))
