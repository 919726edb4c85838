"""An audit of a topic against its relayed copy on a real cluster, which compacts the copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from relayed_topic import CLEAN, Relayed, T

from broker_io.port import Broker
from txnbuffer.recovery.audit import CommittedLog, KeyAudit, audit
from txnbuffer.sinks.relay import Relay
from txnbuffer.sinks.relay_targets import OwnedTarget
from txnbuffer.sinks.relayed_copy import RelayedCopy


def test_a_copy_that_the_cluster_has_compacted_equals_its_source(
    opening: Callable[..., Broker], tmp_path: Path
) -> None:
    world = Relayed()

    def relay(**options: str) -> None:
        target = OwnedTarget(partial(opening, **options), CLEAN, release=True)
        Relay(world.cluster.connect, T, target).run(follow=False)

    def compared(*, compacted: bool) -> KeyAudit:
        with world.cluster.connect() as mine:
            copy = RelayedCopy(opening(), CLEAN, T, mine.incarnation(T), compacted=compacted)
            return audit(CommittedLog(mine, T), copy, str(tmp_path))

    for number in range(200):
        world.write(f"k{number % 7}", str(number))
    world.write("k3", None)
    relay()
    opening(compacted_prefix=CLEAN).compact(CLEAN)
    for compacted in (True, False):
        found = compared(compacted=compacted)
        assert (found.up_to, found.different, found.unproven, found.copy.keys) == (201, 0, 0, 6)
    world.write("k0", "newer")
    world.write("k3", "back")
    relay(compacted_prefix=CLEAN)  # else a topic that was compacted is refused
    world.write("k0", "not relayed yet")
    found = compared(compacted=True)
    assert (found.up_to, found.different, found.copy.keys) == (203, 0, 7)
    assert found.copy.records < 200
