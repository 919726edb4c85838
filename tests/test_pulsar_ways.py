"""Which Pulsar tests run on, and that those who share it end it once: without any broker."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pulsar_cluster
import pytest
from pulsar_cluster import Cluster, choose, shared
from pulsar_container import ROOT

from broker_io.testing.standalone import NoPulsar, Port, born, kill_process, process_is_alive

VARIABLES = ("URL", "ADMIN", "IMAGE", "REQUIRE")


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cluster, no engine, no Maven, nothing fetched."""
    for name in VARIABLES:
        monkeypatch.delenv(f"TXNBUFFER_PULSAR_{name}", raising=False)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    monkeypatch.setenv("TXNBUFFER_CACHE", str(tmp_path / "cache"))
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "flock", "mkdir", "java"):
        (tools / tool).symlink_to(shutil.which(tool) or "/bin/true")
    monkeypatch.setenv("PATH", str(tools))


def test_nothing_works_is_one_sentence_that_says_what_to_do() -> None:
    with pytest.raises(NoPulsar, match=r"install Maven and Java 17$") as failure:
        choose()
    for reason in ("TXNBUFFER_PULSAR_URL is not set", "no Docker engine answers", "standalone: pulsar: the server"):
        assert reason in str(failure.value)
    assert "\n" not in str(failure.value)


def test_the_url_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXNBUFFER_PULSAR_URL", "pulsar://somewhere:6650")
    assert choose() == "url"
    assert pulsar_cluster._url() == Cluster("url", "pulsar://somewhere:6650", "http://somewhere:8080")
    monkeypatch.setenv("TXNBUFFER_PULSAR_ADMIN", "https://elsewhere:8443/")
    assert pulsar_cluster._url().admin == "https://elsewhere:8443"


def test_an_engine_comes_before_a_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulsar_cluster, "_ask_engine", lambda image: "")
    assert choose() == "testcontainers"


def test_an_engine_without_the_image_falls_to_a_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulsar_cluster, "_ask_engine", lambda image: f"no image {image}")
    monkeypatch.setattr(pulsar_cluster, "distribution", lambda: Path("/"))
    assert choose() == "standalone"
    monkeypatch.setenv("TXNBUFFER_PULSAR_REQUIRE", "testcontainers")
    with pytest.raises(NoPulsar, match=r"no image apachepulsar/pulsar:4.0.8.*unset TXNBUFFER_PULSAR_REQUIRE"):
        choose()


def test_what_is_required_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXNBUFFER_PULSAR_URL", "pulsar://somewhere:6650")
    monkeypatch.setenv("TXNBUFFER_PULSAR_REQUIRE", "testcontainers")
    with pytest.raises(NoPulsar, match="no Docker engine answers"):
        choose()
    monkeypatch.setenv("TXNBUFFER_PULSAR_REQUIRE", "docker")
    with pytest.raises(NoPulsar, match="say one of url, testcontainers, standalone"):
        choose()


def test_a_url_where_nothing_answers_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    port = Port()
    monkeypatch.setenv("TXNBUFFER_PULSAR_URL", "pulsar://127.0.0.1:6650")
    monkeypatch.setenv("TXNBUFFER_PULSAR_ADMIN", f"http://127.0.0.1:{port.number}")
    with pytest.raises(NoPulsar, match=r"no healthy broker at .*: start it"), shared(tmp_path):
        pass
    port.free()


class Pretended:
    """A broker that only counts."""

    started: ClassVar[list[Path]] = []
    url, admin = "pulsar://127.0.0.1:1", "http://127.0.0.1:2"

    def __init__(self, directory: Path) -> None:
        self.handle = {"pid": None, "born": None, "data": str(directory / "data")}

    def __enter__(self) -> Pretended:
        path = Path(self.handle["data"] or "")
        path.mkdir()
        self.started.append(path)
        return self


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(Pretended, "started", [])
    monkeypatch.setattr(pulsar_cluster, "choose", lambda: "standalone")
    monkeypatch.setattr(pulsar_cluster, "make_standalone", lambda way, directory: Pretended(directory))
    return Pretended.started


def test_one_broker_for_all_and_the_last_ends_it(pretended: list[Path], tmp_path: Path) -> None:
    with contextlib.ExitStack() as last:
        with shared(tmp_path) as first:
            assert last.enter_context(shared(tmp_path)) == first
        (data,) = pretended
        assert data.exists()
    assert not data.exists()
    with shared(tmp_path):
        assert pretended == [data, data]


def test_a_user_that_crashes_counts_no_more(pretended: list[Path], tmp_path: Path) -> None:
    with shared(tmp_path):
        script = "import os, sys, fcntl\nusers = open(sys.argv[1], 'a')\nfcntl.flock(users, fcntl.LOCK_SH)\nos._exit(1)"
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "pulsar.users")], check=False)
    assert not pretended[0].exists()


def test_a_failure_is_told_to_all_and_not_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried = []

    def fail() -> str:
        tried.append(1)
        raise NoPulsar("nothing here")

    monkeypatch.setattr(pulsar_cluster, "choose", fail)
    for _ in range(2):
        with pytest.raises(NoPulsar, match="nothing here"), shared(tmp_path):
            pass
    assert tried == [1]


def test_a_kept_port_is_taken_by_those_it_is_for_only() -> None:
    port = Port()
    other = socket.socket()
    with pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port.number))
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    other.bind(("127.0.0.1", port.number))
    other.listen()
    other.close()
    port.free()


def test_a_process_is_known_by_number_and_birth(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    handle = {"pid": process.pid, "born": born(process.pid)}
    stranger = {"pid": process.pid, "born": (handle["born"] or 0) + 1}
    assert process_is_alive(handle)
    assert not process_is_alive(stranger)
    kill_process(stranger)
    assert process.poll() is None
    kill_process(handle)
    assert not process_is_alive(handle)
    assert process.wait(30) == -9
    process.stdin.close()


def test_one_version_of_pulsar_everywhere() -> None:
    named = ("docker/compose.yaml", "docker/distribution.sh", "docker/engine.sh", "tests/pulsar_cluster.py")
    found = [re.findall(r"(?<![\d.])\d+\.\d+\.\d+(?![\d.])", (ROOT / name).read_text()) for name in named]
    assert all(found)
    assert {version for versions in found for version in versions} == {pulsar_cluster.IMAGE.rpartition(":")[2]}
