"""The choice of the Pulsar for tests, and the end of a shared one by its last user: without a broker."""

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

from broker_io.standalone import NoPulsar, Port, born, kill_process, process_is_alive

VARIABLES = ("URL", "ADMIN", "IMAGE", "REQUIRE")


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without cluster, engine, Maven and downloads."""
    for name in VARIABLES:
        monkeypatch.delenv(f"TXNBUFFER_PULSAR_{name}", raising=False)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    monkeypatch.setenv("TXNBUFFER_CACHE", str(tmp_path / "cache"))
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "flock", "mkdir", "java"):
        (tools / tool).symlink_to(shutil.which(tool) or "/bin/true")
    monkeypatch.setenv("PATH", str(tools))


def test_error_of_a_machine_without_pulsar_says_what_to_do() -> None:
    with pytest.raises(NoPulsar, match=r"install Maven and Java 17$") as failure:
        choose()
    for reason in (
        "TXNBUFFER_PULSAR_URL is not set",
        "no Docker engine answers",
        "standalone: pulsar: Maven downloads the server",
    ):
        assert reason in str(failure.value)
    assert "\n" not in str(failure.value)


def test_url_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXNBUFFER_PULSAR_URL", "pulsar://somewhere:6650")
    assert choose() == "url"
    assert pulsar_cluster._url() == Cluster("url", "pulsar://somewhere:6650", "http://somewhere:8080")
    monkeypatch.setenv("TXNBUFFER_PULSAR_ADMIN", "https://elsewhere:8443/")
    assert pulsar_cluster._url().admin == "https://elsewhere:8443"


def test_engine_comes_before_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulsar_cluster, "_ask_engine", lambda image: "")
    assert choose() == "testcontainers"


def test_engine_without_the_image_falls_back_to_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulsar_cluster, "_ask_engine", lambda image: f"no image {image}")
    monkeypatch.setattr(pulsar_cluster, "distribution", lambda: Path("/"))
    assert choose() == "standalone"
    monkeypatch.setenv("TXNBUFFER_PULSAR_REQUIRE", "testcontainers")
    with pytest.raises(NoPulsar, match=r"no image apachepulsar/pulsar:4.0.8.*unset TXNBUFFER_PULSAR_REQUIRE"):
        choose()


def test_required_way_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXNBUFFER_PULSAR_URL", "pulsar://somewhere:6650")
    monkeypatch.setenv("TXNBUFFER_PULSAR_REQUIRE", "testcontainers")
    with pytest.raises(NoPulsar, match="no Docker engine answers"):
        choose()
    monkeypatch.setenv("TXNBUFFER_PULSAR_REQUIRE", "docker")
    with pytest.raises(NoPulsar, match="use one of url, testcontainers, standalone"):
        choose()


def test_url_without_an_answer_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    port = Port()
    monkeypatch.setenv("TXNBUFFER_PULSAR_URL", "pulsar://127.0.0.1:6650")
    monkeypatch.setenv("TXNBUFFER_PULSAR_ADMIN", f"http://127.0.0.1:{port.number}")
    with pytest.raises(NoPulsar, match=r"no healthy broker at .*: start it"), shared(tmp_path):
        pass
    port.free()


class Pretended:
    """A broker that only counts its starts and ends."""

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


def test_last_user_ends_the_shared_broker(pretended: list[Path], tmp_path: Path) -> None:
    with contextlib.ExitStack() as last:
        with shared(tmp_path) as first:
            assert last.enter_context(shared(tmp_path)) == first
        (data,) = pretended
        assert data.exists()
    assert not data.exists()
    with shared(tmp_path):
        assert pretended == [data, data]


def test_crashed_user_does_not_count(pretended: list[Path], tmp_path: Path) -> None:
    with shared(tmp_path):
        script = "import os, sys, fcntl\nusers = open(sys.argv[1], 'a')\nfcntl.flock(users, fcntl.LOCK_SH)\nos._exit(1)"
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "pulsar.users")], check=False)
    assert not pretended[0].exists()


def test_failure_is_reported_to_all_and_not_retried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried = []

    def fail() -> str:
        tried.append(1)
        raise NoPulsar("nothing here")

    monkeypatch.setattr(pulsar_cluster, "choose", fail)
    for _ in range(2):
        with pytest.raises(NoPulsar, match="nothing here"), shared(tmp_path):
            pass
    assert tried == [1]


def test_reserved_port_is_bound_only_with_reuse_address() -> None:
    port = Port()
    other = socket.socket()
    with pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port.number))
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    other.bind(("127.0.0.1", port.number))
    other.listen()
    other.close()
    port.free()


def test_process_is_identified_by_pid_and_start_time(tmp_path: Path) -> None:
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


def test_all_files_name_one_version_of_pulsar() -> None:
    named = (
        *("broker_plugin/build.py", "docker/compose.yaml", "docker/distribution.sh", "docker/engine.sh"),
        "tests/pulsar_cluster.py",
    )
    found = [re.findall(r"(?<![\d.])\d+\.\d+\.\d+(?![\d.])", (ROOT / name).read_text()) for name in named]
    assert all(found)
    assert {version for versions in found for version in versions} == {pulsar_cluster.IMAGE.rpartition(":")[2]}
