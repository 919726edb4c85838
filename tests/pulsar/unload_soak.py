"""Unload namespace, bundles and topics, restart the broker, and compare the log with the reported outcomes.

    python tests/pulsar/unload_soak.py --unloads 50 --restarts 5 --services 2 --seed 7

The rig of `cluster_soak`: a service, optional standbys, writers of transactions and a reader that follows. An asyncio
reader without retries, a change stream and a consumer group follow too. While topics have no owner the cluster refuses
requests temporarily: none of these processes may end, and no standby may take over from a service that is alive. At the
end all have to agree. Prints one JSON object; exit code 1 if they don't.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
import urllib.error
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cluster_soak import SECONDS, Report, Soak, play, read_decided, run_script, wait_until
from pulsar_cluster import Cluster
from soak_check import TOPICS
from soak_followers import COPIES, KINDS

from broker_io import open_broker
from broker_io.port import Broker
from broker_io.standalone import Standalone, ask

OURS = ("__txnbuffer_decisions", "__txnbuffer_snapshots")
DONE = 204
UNLOADS = ("unload_namespace", "unload_bundles", "unload_topics", "unload_ours")


@dataclass
class Unloaded(Report):
    """`slowest_commit`: seconds from an unload to the next commit; `takeovers`: by another service.

    A broker that was killed may refuse a writer that reconnects: then the same service takes over from itself.

    `failed_reads`: of the reader without retries; `answers`: of the cluster to unloads, by status.
    """

    unloads: int = 0
    takeovers: int = 0
    failed_reads: int = 0
    answers: dict[int, int] = field(default_factory=dict)
    slowest_commit: float = 0.0
    copies_differ: int = 0
    stream_differs: int = 0
    rollbacks: int = 0

    @property
    def good(self) -> bool:
        needless = self.takeovers or self.ended_by_themselves  # nothing kills a service here
        return super().good and not (needless or self.copies_differ or self.stream_differs)


class UnloadSoak(Soak):
    def __init__(self, broker: Standalone | Cluster, directory: Path, seed: int, writers: int, services: int) -> None:
        self.services = services
        super().__init__(broker, directory, seed, writers)
        self.report: Unloaded = Unloaded()
        arguments = {kind: (kind, self._address, str(directory / kind), json.dumps(self._options)) for kind in KINDS}
        self._followers = {kind: self._start("soak_followers.py", *given) for kind, given in arguments.items()}

    def run(self, events: Iterable[str]) -> Unloaded:
        for event in events:
            self._wait_for_progress()
            time.sleep(self._random.uniform(0.0, 0.5))
            print(time.strftime("%H:%M:%S"), event, file=sys.stderr)
            began = time.monotonic()
            getattr(self, f"_{event}")()
            self._wait_for_progress()
            self._supervise()
            self._count_takeovers()
            if event in UNLOADS:
                self.report.unloads += 1
                self.report.slowest_commit = max(self.report.slowest_commit, round(time.monotonic() - began, 1))
            self._see_followers()
        self._end()
        return self.report

    # Events

    def _unload_namespace(self) -> None:
        self._unload(f"namespaces/{self.namespace}")

    def _unload_bundles(self) -> None:
        bounds = ask(self._broker.admin, f"namespaces/{self.namespace}/bundles")["boundaries"]
        for low, high in itertools.pairwise(bounds):
            self._unload(f"namespaces/{self.namespace}/{low}_{high}")

    def _unload_topics(self) -> None:
        for topic in TOPICS:
            self._unload(f"persistent/{self.namespace}/{topic}")

    def _unload_ours(self) -> None:
        for topic in OURS:
            self._unload(f"persistent/{self.namespace}/{topic}")

    def _unload(self, what: str) -> None:
        """Unload; a refusal of the cluster is ignored, because the bundle may be moving."""
        answer = DONE
        try:
            ask(self._broker.admin, f"{what}/unload", "PUT")
        except urllib.error.HTTPError as error:
            answer = error.code
        self.report.answers[answer] = self.report.answers.get(answer, 0) + 1

    def _count_takeovers(self) -> None:
        """Count the services that have served, but the first one; another one shows the logs of all."""
        services = (*self._services, *self._old_services)
        served = sum(service.event("serving") is not None for service in services) - 1
        if served > self.report.takeovers:
            self.report.takeovers = served
            print(*("".join(service.lines[-20:]) for service in services), sep="\n", file=sys.stderr)

    def _see_followers(self) -> None:
        for kind, process in self._followers.items():
            assert process.poll() is None, f"the {kind} ended unexpectedly with {process.returncode}"

    # The end

    def _compare_live(self, final: dict[str, list[bytes]]) -> None:
        super()._compare_live(final)
        first = final[TOPICS[0]]
        wanted = {value.decode().partition("/")[0]: value.decode() for value in first}
        count = sum(len(found) for found in final.values())
        wait_until(lambda: len(self._lines("reader")) >= count, "the asyncio reader does not see everything")
        for topic in TOPICS:
            seen = [value.encode() for name, value in self._lines("reader") if name == topic]
            self.report.live_differs += seen != final[topic]
        deadline = time.monotonic() + SECONDS
        while self._table() != wanted and time.monotonic() < deadline:
            time.sleep(0.2)
        self.report.stream_differs += self._table() != wanted
        with open_broker(self._address, **self._options) as broker:
            copies = _copies(broker)
            deadline = time.monotonic() + SECONDS
            while copies.total() < len(first) and time.monotonic() < deadline:
                time.sleep(1.0)
                copies = _copies(broker)
        failed = self._directory / "reader.failed"
        self.report.failed_reads = failed.read_text().count("\n") if failed.exists() else 0
        missing, too_many = Counter(first) - copies, copies - Counter(first)
        self.report.copies_differ += missing.total() + too_many.total()
        self._see_followers()
        for kind, process in self._followers.items():
            process.terminate()
            if process.wait(SECONDS):
                self.report.surprises.append(f"the {kind} ended with {process.returncode}")

    def _table(self) -> dict[str, str]:
        """The table that the stream built of the first topic."""
        lines = self._lines("stream")
        begun = [index for index, line in enumerate(lines) if line == ["rollback"]]
        self.report.rollbacks = len(begun)
        return {line[0]: line[1] for line in lines[begun[-1] + 1 if begun else 0 :]}

    def _lines(self, kind: str) -> list[list[str]]:
        """The complete lines that a follower wrote."""
        file = self._directory / kind
        return [line.split() for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _copies(broker: Broker) -> Counter[bytes]:
    """The output of the group; its topic exists after its first commit."""
    return Counter(read_decided(broker, COPIES)) if COPIES in broker.topics() else Counter()


def plan(unloads: int, restarts: int, chance: random.Random) -> list[str]:
    """Events with these counts, the kinds of unloads in turn, in random order."""
    events = [UNLOADS[number % len(UNLOADS)] for number in range(unloads)] + ["kill_broker"] * restarts
    chance.shuffle(events)
    return events


def soak(
    broker: Standalone | Cluster, events: Sequence[str], seed: int, writers: int = 2, services: int = 1
) -> Unloaded:
    return play(lambda directory: UnloadSoak(broker, directory, seed, writers, services), broker, events)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--unloads", type=int, default=50)
    parser.add_argument("--restarts", type=int, default=5, help="kills and restarts of the broker")
    parser.add_argument("--services", type=int, default=1, help="an active one and standbys")
    return run_script(
        parser,
        lambda options, chance: plan(options.unloads, options.restarts, chance),
        lambda broker, events, options: soak(broker, events, options.seed, options.writers, options.services),
    )


if __name__ == "__main__":
    sys.exit(main())
