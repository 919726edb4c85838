"""The head start of a writer that lost its topic: for as long as it may come back, and no longer."""

from __future__ import annotations

import pytest

from broker_io.pulsar.head_start import GONE_SECONDS, LEAST, LONGEST, OF_THE_OUTAGE, UNKNOWN, HeadStart, Presence

THERE, LEFT = Presence(True, 5, used=True), Presence(False, 5, used=True)
RELOADED = Presence(False, 6, used=False)


def over_after(head_start: HeadStart, seen: Presence, now: float) -> float:
    """Seconds until the head start is over, if the topic is seen so from now on."""
    begin, step = now, 0.1
    while not head_start.is_over(seen, now):
        now += step
    return now - begin


@pytest.fixture
def seen() -> HeadStart:
    """The writer was seen at 100."""
    head_start = HeadStart()
    assert not head_start.is_over(THERE, 100.0)
    return head_start


def test_writer_that_leaves_a_loaded_topic_is_gone_soon(seen: HeadStart) -> None:
    assert over_after(seen, LEFT, 160.0) == pytest.approx(GONE_SECONDS, abs=0.11)


@pytest.mark.parametrize(
    ("outage", "seconds"), [(0.1, LEAST), (20.0, OF_THE_OUTAGE * 20), (50.0, OF_THE_OUTAGE * 50), (600.0, LONGEST)]
)
def test_writer_of_a_topic_that_was_loaded_again_may_come_back(seen: HeadStart, outage: float, seconds: float) -> None:
    """Its client library tries again at 0.1, 0.3, 0.7, … 25.5, 51.1 s, and then each minute."""
    assert over_after(seen, RELOADED, 100.0 + outage) == pytest.approx(seconds, abs=0.11)


def test_writer_that_came_back_and_leaves_again_is_gone_soon(seen: HeadStart) -> None:
    assert not seen.is_over(RELOADED, 103.0)
    assert not seen.is_over(RELOADED._replace(writer=True), 104.0)
    assert over_after(seen, RELOADED, 120.0) == pytest.approx(GONE_SECONDS, abs=0.11)


def test_each_load_begins_the_head_start_anew(seen: HeadStart) -> None:
    assert not seen.is_over(RELOADED, 101.0)
    assert over_after(seen, RELOADED._replace(ledger=7), 105.5) == pytest.approx(5.5 * OF_THE_OUTAGE, abs=0.11)


@pytest.mark.parametrize("since", [0.0, 10.0])
def test_topic_that_is_being_closed_is_no_sign(seen: HeadStart, since: float) -> None:
    """A topic that is unloaded first disconnects its writers, and shows the old ledger meanwhile."""
    assert not seen.is_over(LEFT, 160.0)
    assert not seen.is_over(None, 160.0 + since)
    assert not seen.is_over(LEFT, 161.0 + since)


def test_without_memory_a_topic_that_was_loaded_again_counts_as_an_outage() -> None:
    assert over_after(HeadStart(), RELOADED, 100.0) == pytest.approx(UNKNOWN, abs=0.11)


def test_without_memory_a_topic_that_was_written_to_or_is_new_is_free() -> None:
    """The writer was there since the topic was loaded, or there never was one."""
    assert over_after(HeadStart(), LEFT, 100.0) == pytest.approx(GONE_SECONDS, abs=0.11)


def test_own_writer_that_was_fenced_by_nobody_is_gone(seen: HeadStart) -> None:
    """A broker that was killed may refuse the writer that reconnects, although no other one has opened the topic."""
    seen.opened()
    assert over_after(seen, RELOADED, 160.0) == pytest.approx(GONE_SECONDS, abs=0.11)
    seen.opened()
    assert not seen.is_over(RELOADED._replace(writer=True), 170.0)  # another one fenced it
    assert over_after(seen, RELOADED._replace(ledger=7), 190.0) == pytest.approx(OF_THE_OUTAGE * 20, abs=0.11)
