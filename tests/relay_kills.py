"""Relay processes, killed at random together with the services that they read from and write to."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from service_process import ServiceProcess, kept_port

from broker_io import open_broker
from broker_io.port import Broker
from txnbuffer import SyncClient, connect
from txnbuffer.client.reading.reader import CommittedReader

T, CLEAN = "orders", "clean"


class RelayProcess:
    """A `txnbuf relay` process with its output in a file."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        with log.open("a") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "txnbuffer", "relay", *arguments], stdout=subprocess.PIPE, stderr=errors
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)

    def finish(self, seconds: float = 120.0) -> tuple[int, bytes]:
        """Wait for its end; exit code and output."""
        printed, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, printed


def write(client: SyncClient, first: int, count: int) -> None:
    """Write transactions, each fifth one aborted, with repeated keys, deletions, and records without a key."""
    for number in range(first, first + count):
        with client.transaction() as txn:
            for at in range(number % 4 + 1):
                key = None if number % 7 == 0 else f"k{(number + at) % 5}"
                if key is not None and number % 6 == 5:
                    txn.delete(T, key)
                else:
                    txn.send(T, f"{number}-{at}", key=key, properties={"n": str(number)})
            if number % 5 == 4:
                txn.abort()


Row = tuple[bytes | None, bytes | None, str | None]


def committed(broker: Broker, topic: str) -> list[Row]:
    rows: list[Row] = []
    with CommittedReader(broker, topic) as reader:
        while (batch := reader.read()) is not None:
            rows += [(one.key, one.value, one.properties.get("n")) for one in batch]
    return rows


def through_kills(directory: Path, kills: int, seed: int, *, same_service: bool) -> tuple[list[Row], list[Row]]:
    """The content of source and target after `kills` kills of the relay or a service, at random."""
    chance = random.Random(seed)
    port = kept_port()
    service = ServiceProcess(directory / "log", port=port).wait_serving()
    address, clean = f"txnbuf://127.0.0.1:{port}", f"file:{directory / 'clean'}"
    arguments = [address, T, CLEAN] + ([] if same_service else ["--to", clean])
    relay: RelayProcess | None = None
    try:
        with connect(address, max_unavailable=60.0) as client:
            write(client, 0, 20)
            relay = RelayProcess(directory / "relay.log", *arguments)
            for round_ in range(kills):
                write(client, 20 * (round_ + 1), 20)
                time.sleep(chance.uniform(0.0, 1.2))  # the kill falls at a random moment of the relay
                if chance.random() < 0.6:
                    relay.kill()
                    relay = RelayProcess(directory / "relay.log", *arguments)
                else:
                    service.kill()
                    service = ServiceProcess(directory / "log", port=port).wait_serving()
        relay.kill()
        relay = RelayProcess(directory / "relay.log", *arguments, "--no-follow")
        code, _ = relay.finish()
        assert code == 0, (directory / "relay.log").read_text()
        with open_broker(address) as broker:
            source = committed(broker, T)
            if same_service:
                return source, committed(broker, CLEAN)
        with open_broker(clean, read_only=True) as broker:
            return source, committed(broker, CLEAN)
    finally:
        if relay is not None and relay.process.poll() is None:
            relay.kill()
        service.kill()


def main() -> None:
    """Run the kills of `make soak`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    chosen = parser.parse_args()
    for same_service in (False, True):
        with tempfile.TemporaryDirectory() as directory:
            source, target = through_kills(Path(directory), chosen.kills, chosen.seed, same_service=same_service)
        print(f"relay: seed {chosen.seed}, {chosen.kills} kills, {len(source)} records, right: {source == target}")
        if source != target:
            sys.exit(1)


if __name__ == "__main__":
    main()
