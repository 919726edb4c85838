"""The conductor of the demo when services or a broker end without a kill."""

from __future__ import annotations

import random
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from txnbuffer.demo.conductor import Conductor
from txnbuffer.demo.sites import ClusterSite, DemoFailed, DemoService, Site
from txnbuffer.recovery.plain import PlainCheck


class Logged(DemoService):
    """A service that has logged some events, and runs or has ended."""

    def __init__(self, place: Path, *lines: str, runs: bool = False) -> None:
        log = place / f"{len(list(place.iterdir()))}.log"
        log.write_text("".join(f"{line}\n" for line in lines))
        super().__init__("pulsar://host:1/public/demo", str(log))
        self._alive = runs

    @property
    def runs(self) -> bool:
        return self._alive


class Broker:
    def __init__(self, *, alive: bool = True) -> None:
        self.alive = alive

    def log(self) -> str:
        return "no space left"


class Beside:
    """A broker with an active and a standby service."""

    since = "the end of the other"
    killed_in_recovery = True

    def __init__(self, serving: DemoService, standby: DemoService, *, alive: bool = True) -> None:
        self.serving = serving
        self.broker = Broker(alive=alive)
        self.reinforced = 0
        self._standby = standby

    def succeed(self) -> None:
        self.serving = self._standby

    def reinforce(self) -> str:
        self.reinforced += 1
        return ""

    def check_plain(self, topics: Sequence[str]) -> list[PlainCheck]:
        return [PlainCheck(10, 0, ()) for _ in topics]


STANDBY = '{"event": "standing by", "port": 8}'
SERVING = '{"event": "serving", "port": 7}'
FENCED = '{"event": "failed", "kind": "CoordinatorStopped"}'
APPEND_FENCED = '{"event": "failed", "kind": "Fenced"}'
WRITER_FENCED = '{"event": "failed", "kind": "OwnershipLost"}'


def conductor(site: Beside) -> Any:
    told: list[str] = []
    return Conductor(cast(Site, site), 4, 1, random.Random(0), told.append)


def test_running_service_is_kept(tmp_path: Path) -> None:
    site = Beside(Logged(tmp_path, SERVING, runs=True), Logged(tmp_path))
    conductor(site)._check_services()
    assert site.reinforced == 0


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("last", [FENCED, WRITER_FENCED, APPEND_FENCED])
def test_standby_serves_after_the_active_service_was_fenced(tmp_path: Path, last: str, runs: bool) -> None:
    standby = Logged(tmp_path, "no JSON", "3", SERVING, runs=True)
    site = Beside(Logged(tmp_path, SERVING, last, runs=runs), standby)
    demo = conductor(site)
    demo._check_services()
    assert (site.serving, site.reinforced, standby.port) == (standby, 1, 7)
    demo._check_services()
    assert demo.report.takeovers == 1


def cluster_site(directory: Path, serving: DemoService, standby: DemoService) -> ClusterSite:
    site = ClusterSite("home", str(directory))
    site.serving, site._standby = serving, standby
    site._services += [serving, standby]
    return site


def test_fenced_service_that_runs_is_the_standby(tmp_path: Path) -> None:
    fenced, standby = Logged(tmp_path, SERVING, FENCED, runs=True), Logged(tmp_path, SERVING, runs=True)
    site = cluster_site(tmp_path, fenced, standby)
    site.succeed()
    assert (site.serving, site._standby) == (standby, fenced)
    assert not fenced.said("failed", kind="CoordinatorStopped")
    assert not fenced.said("serving")


def test_fenced_service_that_takes_over_from_itself_stays_the_active_one(tmp_path: Path) -> None:
    fenced, standby = Logged(tmp_path, SERVING, FENCED, SERVING, runs=True), Logged(tmp_path, STANDBY, runs=True)
    site = cluster_site(tmp_path, fenced, standby)
    site.succeed()
    assert (site.serving, site._standby) == (fenced, standby)
    assert fenced.serves


@pytest.mark.parametrize("last", [SERVING, '{"event": "failed", "kind": "DiskFailed"}'])
def test_a_service_that_ends_for_another_reason_fails_the_demo(tmp_path: Path, last: str) -> None:
    site = Beside(Logged(tmp_path, SERVING, last), Logged(tmp_path, SERVING, runs=True))
    with pytest.raises(DemoFailed, match=r'ended on its own:\s{"event": "serving"'):
        conductor(site)._check_services()


def test_a_standby_that_never_serves_fails_the_demo(tmp_path: Path) -> None:
    site = Beside(Logged(tmp_path, FENCED), Logged(tmp_path, "why it ended"))
    with pytest.raises(DemoFailed, match="did not log 'serving':\nwhy it ended"):
        conductor(site)._check_services()


def test_a_broker_that_ends_on_its_own_fails_the_demo(tmp_path: Path) -> None:
    site = Beside(Logged(tmp_path, runs=True), Logged(tmp_path), alive=False)
    with pytest.raises(DemoFailed, match="the broker ended on its own:\nno space left"):
        conductor(site)._check_services()


class CountedReader:
    """A reader that got this many records."""

    def __init__(self, records: int) -> None:
        self.counts = {"records_expected": records, "records_read": records}

    def send(self, message: object) -> None: ...

    def receive(self, timeout: float) -> tuple[str, dict[str, int]]:
        return "counts", self.counts


@pytest.mark.parametrize(("records", "good"), [(20, True), (21, False)])
def test_plain_reader_must_get_all_records_of_the_demo(tmp_path: Path, records: int, *, good: bool) -> None:
    compared = conductor(Beside(Logged(tmp_path), Logged(tmp_path)))
    compared.reader = CountedReader(records)
    compared._compare()
    assert (compared.report.plain_records, compared.report.good) == (20, good)
    compared.report.plain_different = 1
    assert not compared.report.good


def test_broker_that_does_not_start_leaves_no_files(tmp_path: Path) -> None:
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    for directory in (home / "bin", home / "conf", scratch):
        directory.mkdir(parents=True)
    (home / "conf" / "standalone.conf").write_text("")
    starter = home / "bin" / "pulsar"
    starter.write_text("#!/bin/sh\necho no Java here\nexit 1\n")
    starter.chmod(stat.S_IRWXU)
    site = ClusterSite(str(home), str(scratch))
    said: list[str] = []
    with pytest.raises(Exception, match="no Java here"):
        Conductor(site, 4, 1, random.Random(0), said.append, 500).run()
    assert not (scratch / "data").exists()
