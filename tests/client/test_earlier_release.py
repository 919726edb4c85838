"""Clients and services of 0.2.0 and of this release work with each other, and read each other's logs."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from mixed_releases import NEW, OLD, Found, Writers, check, environment, read, unpacked
from pair_processes import PairOfProcesses
from service_process import ServiceProcess, kept_port


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return unpacked(tmp_path_factory.mktemp("release"))


def end(service: ServiceProcess, how: str) -> None:
    if how == "terminate":
        service.terminate()
        service.finish()
        return
    if how == "stop":  # what clients send from here on reaches the socket, and no service reads it
        service.process.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
    service.kill()


@pytest.mark.parametrize(
    ("releases", "ends"),
    [((OLD, NEW, OLD, OLD), ("kill", "stop", "kill")), ((NEW, OLD, NEW, NEW), ("stop", "terminate", "stop"))],
    ids=["there and back", "back and there"],
)
def test_services_of_both_releases_take_turns(
    releases: tuple[str, ...], ends: tuple[str, ...], trees: dict[str, Path], tmp_path: Path
) -> None:
    log, port = tmp_path / "log", kept_port()
    with Writers(trees, tmp_path, f"txnbuf://127.0.0.1:{port}") as writers:
        for release, how in zip(releases, (*ends, None), strict=True):
            variables = environment(trees[release])
            with ServiceProcess(log, port=port, python=("-P", "-m", "txnbuffer"), environment=variables) as service:
                writers.progress()
                if how is not None:
                    end(service, how)
                    continue
                written = writers.stop()
                end(service, "terminate")
    orders = (NEW, OLD, NEW) if releases[-1] is NEW else (OLD, NEW, OLD)
    found, *again = [read(trees[release], tmp_path / "reader.stderr", f"file:{log}") for release in orders]
    assert again == [found, found]
    check(found, written)


def test_the_machines_of_a_pair_run_both_releases(trees: dict[str, Path], tmp_path: Path) -> None:
    """Either is the primary and the backup of the other one, after switches and kills of the primary."""
    pair = PairOfProcesses(tmp_path, f"file:{tmp_path}/lock", trees=[trees[OLD], trees[NEW]])

    def found(release: str) -> Found:
        return read(trees[release], tmp_path / "reader.stderr", pair.address)

    try:
        live = [pair.live()]
        with Writers(trees, tmp_path, pair.address) as writers:
            writers.progress()
            for how in ("kill", "switch", "switch", "kill"):
                pair.disturb(how)
                live.append(pair.live())
                writers.progress()
            written = writers.stop()
        first = found(OLD)
        pair.disturb("switch")
        live.append(pair.live())
        assert [found(NEW), found(OLD)] == [first, first]
    finally:
        pair.kill()
    assert live == [0, 1, 0, 1, 0, 1]
    check(first, written)
