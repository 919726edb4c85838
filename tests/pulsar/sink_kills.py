"""Kills of a relay, a materializer, their service and their broker, with short retention.

    python tests/pulsar/sink_kills.py --rounds 12 --seed 7

As `tests/cursor_kills.py`, on a private broker: source and target of the relay are topics of one namespace. Nothing is
written while the broker is down; the sinks have to keep running and to apply the records written just before.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from cursor_kills import MAX_WAIT, Rig, report, through_kills  # noqa: E402
from pulsar_cluster import Cluster, choose  # noqa: E402
from relay_kills import CLEAN  # noqa: E402
from service_process import ServiceProcess  # noqa: E402

from broker_io import open_broker  # noqa: E402
from broker_io.port import Broker  # noqa: E402
from broker_io.standalone import Standalone, ask  # noqa: E402
from txnbuffer import connect  # noqa: E402

RETENTION = ("--set", "retention.bytes=1", "--set", "retention.check_seconds=0.5")
SMALL_LEDGERS = ("managedLedgerMaxEntriesPerLedger=100", "managedLedgerMinLedgerRolloverTimeMinutes=0")
WAITING = 600.0
"""Seconds for which a sink waits for a restarting broker."""


class ClusterRig(Rig):
    """A rig whose `broker` is killed too."""

    kinds = ("relay", "table", "service", "broker", "broker")

    def __init__(self, directory: Path, chance: random.Random, broker: Standalone) -> None:
        self.broker = broker
        self.namespace = broker.namespace()
        self.flags = ("--set", f"pulsar.admin_url={broker.admin}", "--max-unavailable", str(WAITING))
        self._options = {"admin_url": broker.admin, "max_unavailable": WAITING}
        with open_broker(self.address, **self._options) as opened:
            opened.create_topic(CLEAN)
        # A subscription keeps the relayed messages.
        place = f"persistent/{self.namespace}/{CLEAN}/subscription/reader"
        ask(broker.admin, place, "PUT", {"ledgerId": -1, "entryId": -1, "partitionIndex": -1})
        super().__init__(directory, chance)

    @property
    def address(self) -> str:
        return f"{self.broker.url}/{self.namespace}"

    @property
    def clean(self) -> str:
        return self.address

    def serve(self) -> ServiceProcess:
        flags = ("--admin-url", self.broker.admin, "--set", f"pulsar.max_unavailable={WAITING:.0f}")
        return ServiceProcess(self.address, *RETENTION, *flags).wait_serving()

    def connect(self) -> Any:
        return connect(self.address, max_unavailable=MAX_WAIT, broker_options=self._options)

    def open_clean(self) -> Broker:
        return open_broker(self.address, **self._options)

    def open_source(self) -> Broker:
        return self.open_clean()

    def kill(self, what: str) -> None:
        if what != "broker":
            super().kill(what)
            return
        self.broker.kill()
        time.sleep(self.chance.uniform(0.0, 1.0))
        self.broker.start()
        if self.service.process.poll() is not None:  # as a supervisor does
            self.service.finish()
            self.service = self.serve()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that child processes are ended
    with (
        tempfile.TemporaryDirectory() as directory,
        Cluster(choose(), "", "").private_standalone(SMALL_LEDGERS) as broker,
    ):
        rig = ClusterRig(Path(directory), random.Random(chosen.seed), broker)
        return report(rig, chosen.seed, *through_kills(rig, chosen.rounds))


if __name__ == "__main__":
    sys.exit(main())
