"""Plain consumers of a broker with the plug-in and our committed reader, under unloads and kills.

    python tests/pulsar/plain_soak.py --seconds 600 --seed 7

The rig of `cluster_soak`: an active service and a standby, writers of transactions, of which some abort and some stay
open for seconds, and our readers. There are also processes with Pulsar's Python and Java clients, and the Go client if
`go` is on the path, each with a consumer of every type and a reader. Topics are unloaded; broker, services, writers and
consumers are killed. With `--brokers 2` topic and snapshots move between brokers, whose owner is killed or paused.
At the end each consumer must have what our reader returns, in the same order (of each key for Key_Shared); a message
may come twice only if there was an unload, a move or a kill in between. Prints one JSON object; exit code 1 if
something differs. `--without-plug-in` must fail.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import sys
import tempfile
import time
import urllib.error
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cluster_soak import Report, Soak, play, private_broker, run_script, wait_until
from foreign_consumers import ForeignConsumers, Repeat, go_command, java_command, python_command
from several_brokers import SESSION_SECONDS, Brokers, MemberBroker, several_brokers
from soak_check import TOPICS

from broker_io.standalone import Standalone, ask
from broker_plugin.build import build

PLUG_IN = ["topicFactoryClassName=txnbuffer.broker.TxnTopicFactory", "allowOverrideEntryFilters=true"]
EVENTS = (
    *("unload", "kill_broker", "kill_active", "stop_writer", "kill_consumers", "unload", "kill_both", "kill_writer"),
    "make_zombie",
)
MOVES = (*EVENTS, "move", "move", "move_snapshots", "pause_broker")
"""With several brokers."""
CATCH_UP = 120.0
"""Seconds in which a consumer must have everything, on a busy machine."""
QUIET = 3.0
"""Seconds for which more may come after that."""
LATE = 10.0
"""Seconds after which this process may see what a consumer printed."""
SHOWN = 5


@dataclass
class PlainReport(Report):
    """`delivered` and `repeated`: messages of all consumers; `differences`: sentences."""

    unloads: int = 0
    moves: int = 0
    consumer_kills: int = 0
    delivered: int = 0
    repeated: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return super().good and not self.differences


class Schedule:
    """Events in random order for some seconds; `times` are the begin and the end of each."""

    def __init__(self, seconds: float, chance: random.Random, events: Sequence[str] = EVENTS) -> None:
        self.times: list[tuple[float, float]] = []
        self._seconds, self._chance, self._events = seconds, chance, events

    def __iter__(self) -> Iterator[str]:
        end = time.monotonic() + self._seconds
        while True:
            for event in self._chance.sample(self._events, len(self._events)):
                if (began := time.monotonic()) > end:
                    return
                yield event
                self.times.append((began, time.monotonic()))

    def explains(self, repeat: Repeat) -> bool:
        return any(began < repeat.again and repeat.first < end + LATE for began, end in self.times)


class PlainSoak(Soak):
    def __init__(
        self, broker: Standalone | Brokers, directory: Path, seed: int, writers: int, commands: dict[str, list[str]]
    ) -> None:
        super().__init__(broker, directory, seed, writers)
        self.report: PlainReport = PlainReport()
        self.topic = f"{self.namespace}/{TOPICS[0]}"
        self.consumers = {
            language: ForeignConsumers(command, broker.url, f"persistent://{self.topic}")
            for language, command in commands.items()
        }

    def close(self) -> None:
        for each in self.consumers.values():
            each.close()
        super().close()

    def _unload(self) -> None:
        self.report.unloads += 1
        owner = self._broker.owner(self.topic) if isinstance(self._broker, Brokers) else self._broker
        with contextlib.suppress(urllib.error.HTTPError):  # the bundle may be moving
            ask(owner.admin, f"persistent/{self.topic}/unload", "PUT")

    def _move(self, topic: str = "") -> None:
        """Move a topic to another broker."""
        assert isinstance(self._broker, Brokers)
        self.report.moves += 1
        topic = topic or self.topic
        owner = self._broker.owner(topic)
        self._broker.move(topic, self._random.choice([one for one in self._broker.members if one is not owner]))

    def _move_snapshots(self) -> None:
        self._move(f"{self.namespace}/__txnbuffer_snapshots")

    def _kill_broker(self) -> None:
        if isinstance(self._broker, Brokers):
            owner = self._mortal_owner()
            self.report.broker_kills += 1
            owner.kill()
            time.sleep(self._random.uniform(0.0, 2.0 * SESSION_SECONDS))
            owner.start()
        else:
            super()._kill_broker()

    def _pause_broker(self) -> None:
        """Pause the owner of the topic until another broker owns it, then let it continue."""
        assert isinstance(self._broker, Brokers)
        owner = self._mortal_owner()
        self.report.zombies += 1
        owner.pause()
        wait_until(lambda: self._broker.owner(self.topic) is not owner, "the topic stays on a paused broker")
        time.sleep(self._random.uniform(0.0, 5.0))
        owner.resume()

    def _mortal_owner(self) -> MemberBroker:
        """The owner of the topic, which moves if it is the first broker: that one has the admin interface."""
        assert isinstance(self._broker, Brokers)
        if self._broker.owner(self.topic) is self._broker.members[0]:
            self._move()
        return self._broker.owner(self.topic)

    def _kill_consumers(self) -> None:
        self.report.consumer_kills += 1
        chosen = self._random.choice([*self.consumers.values()])
        chosen.close()
        chosen.start()

    def _compare_live(self, final: dict[str, list[bytes]]) -> None:
        super()._compare_live(final)
        wanted = final[TOPICS[0]]
        deadline = time.monotonic() + CATCH_UP
        while not all(each.have(len(wanted)) for each in self.consumers.values()) and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(QUIET)
        for language, each in self.consumers.items():
            self.report.repeated += len(each.repeats)
            for kind, pairs in each.got.items():
                got = [value for _, value in pairs]
                self.report.delivered += len(got)
                if found := difference(kind, got, wanted):
                    self.report.differences.append(f"{language} {kind}: {found}")

    def repeated_without_a_reason(self, schedule: Schedule) -> list[str]:
        return [
            f"{language} {each.kind}: delivered again after {each.again - each.first:.1f} s without unload or kill"
            for language, consumers in self.consumers.items()
            for each in consumers.repeats
            if not schedule.explains(each)
        ]


def difference(kind: str, got: Sequence[bytes], wanted: Sequence[bytes]) -> str:
    """What a consumer got that our reader has not, or the reverse, or where the order differs; empty if nothing."""
    missing, more = _without(wanted, got), _without(got, wanted)
    if missing or more:
        return f"missing {len(missing)} {missing[:SHOWN]}, too many {len(more)} {more[:SHOWN]}"
    if kind == "Key_Shared":
        keys, others = _by_key(got), _by_key(wanted)
        return next((f"other order of {key!r}: {keys[key]}" for key in others if keys[key] != others[key]), "")
    first = next((at for at, (one, other) in enumerate(zip(got, wanted, strict=True)) if one != other), None)
    if first is None:
        return ""
    return f"other order from {first} on: {got[first : first + SHOWN]}, not {wanted[first : first + SHOWN]}"


def _without(values: Iterable[bytes], others: Iterable[bytes]) -> list[bytes]:
    return sorted((Counter(values) - Counter(others)).elements())


def _by_key(values: Iterable[bytes]) -> dict[bytes, list[bytes]]:
    """The values of each transaction, whose token is the key and the first part of the value."""
    found: dict[bytes, list[bytes]] = defaultdict(list)
    for value in values:
        found[value.partition(b"/")[0]].append(value)
    return found


def soak(
    broker: Standalone | Brokers, schedule: Schedule, seed: int, writers: int, commands: dict[str, list[str]]
) -> PlainReport:
    made: list[PlainSoak] = []

    def make(directory: Path) -> PlainSoak:
        made.append(PlainSoak(broker, directory, seed, writers, commands))
        return made[-1]

    report: PlainReport = play(make, broker, schedule)
    report.differences += made[0].repeated_without_a_reason(schedule)
    return report


def broker_of(options: argparse.Namespace, directory: Path) -> AbstractContextManager[Standalone | Brokers]:
    plug_in: dict[str, Any] = {} if options.without_plug_in else {"settings": PLUG_IN, "jar": build()}
    if options.brokers == 1:
        return private_broker(**plug_in)
    return several_brokers(directory, options.brokers, **plug_in)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--brokers", type=int, default=1, help="brokers of the cluster")
    parser.add_argument("--without-plug-in", action="store_true", help="show that the soak finds what it would")
    with tempfile.TemporaryDirectory(prefix="txnbuffer-plain-") as directory:
        commands = {"python": python_command(), "java": java_command()}
        if shutil.which("go"):
            commands["go"] = go_command(Path(directory))
        return run_script(
            parser,
            lambda options, chance: Schedule(options.seconds, chance, EVENTS if options.brokers == 1 else MOVES),
            lambda broker, schedule, options: soak(broker, schedule, options.seed, options.writers, commands),
            partial(broker_of, directory=Path(directory)),
        )


if __name__ == "__main__":
    sys.exit(main())
