"""What readers of a damaged log may show: the right records, or some of the first ones and an error of the storage."""

from __future__ import annotations

import pytest
from sim.bit_rot import BitRot, Result, misread
from sim.history import Shown
from sim.scenario import Scenario, Size
from sim.world import World

from broker_io.errors import Damaged, Error, ServiceUnavailable
from txnbuffer.model import Position

LOG = [Shown(number, b"k", b"%d" % number, Position(1, number)) for number in range(1, 5)]
DAMAGED = Damaged("/log/1-0.log", 7, "the checksum is wrong")
GONE = ServiceUnavailable("no service answers")


@pytest.mark.parametrize(
    ("records", "error", "ended", "found"),
    [
        (LOG, None, True, ""),
        ([record._replace(seqno=None) for record in LOG], None, True, ""),
        (LOG[:2], DAMAGED, False, ""),
        ([], DAMAGED, False, ""),
        (LOG[:3], None, True, "showed 3 of 4 records without an error"),
        (LOG[:3], None, False, "has shown 3 of 4 records within"),
        (LOG, GONE, False, "raised ServiceUnavailable"),
        (LOG[1:], DAMAGED, False, "showed Shown(seqno=None, key=b'k', value=b'2', "),
        ([LOG[0], LOG[2]], DAMAGED, False, "as record 2, and "),
        ([LOG[0]._replace(value=b"other")], DAMAGED, False, "as record 1, and "),
        ([*LOG, LOG[3]], None, True, "as record 5, and [] is there"),
    ],
    ids=["all", "numbers", "some", "none", "short", "waits", "error", "late", "gap", "value", "twice"],
)
def test_what_a_reader_of_a_damaged_log_shows_is_judged(
    records: list[Shown], error: Error | None, ended: bool, found: str
) -> None:
    wrong = misread(Result("a reader", "a", records, error, ended), LOG, lambda record: False)
    assert found in wrong
    assert bool(found) == bool(wrong)


def damaged(monkeypatch: pytest.MonkeyPatch, seed: int, path: str) -> BitRot:
    """A small scenario, in whose end a bit of a file is flipped that has this text in its path."""
    with World(seed) as world:
        scenario = Scenario(world, {}, Size(2, 4, 0, 2.0))
        scenario.rots = False
        scenario.run()
        rot = BitRot(scenario)

        def flip() -> None:
            if rot.damaged:
                return  # a second flip would mend the first
            disk = scenario.services[0].host.disk
            name = max((name for name in disk.files() if path in name), key=lambda name: disk.files()[name])
            disk.flip(name, disk.files()[name] * 4)
            rot.damaged.append(name)

        monkeypatch.setattr(rot, "_damage", flip)
        rot.run()
        return rot


def test_a_log_with_a_wrong_byte_is_read_up_to_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """In most seeds the journal still has the block, so the damage is mended."""
    rots = (damaged(monkeypatch, seed, "/log/topics/") for seed in range(1, 20))
    assert any(isinstance(result.error, Damaged) for rot in rots for result in rot.results)


def test_a_service_with_a_damaged_manifest_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    rot = damaged(monkeypatch, 4, "/log/manifest")
    assert all(isinstance(result.error, Damaged) for result in rot.results)
    assert {result.who for result in rot.results} == {"an offline reader"}
