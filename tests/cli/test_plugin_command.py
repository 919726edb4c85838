"""`txnbuf plugin install`: the jar for the version of a broker, and what an installation without jars says."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from commands import txnbuf
from source_tree import ROOT

from broker_io.errors import Error
from broker_io.port import PLUG_IN_SETTINGS
from txnbuffer.cli import plugin
from txnbuffer.cli.app import app

BROKER = "org.apache.pulsar-pulsar-broker-{}.jar"


@pytest.fixture
def jars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation with jars for two versions of Pulsar."""
    jars = tmp_path / "jars"
    jars.mkdir()
    for version in ("4.0", "4.1"):
        (jars / f"txnbuffer-broker-{version}.jar").write_text(f"for {version}")
    monkeypatch.setattr(plugin, "JARS", jars)
    return jars


@pytest.fixture
def lib(tmp_path: Path) -> Path:
    lib = tmp_path / "lib"
    lib.mkdir()
    (lib / "org.apache.pulsar-pulsar-broker-common-4.9.9.jar").touch()
    return lib


def install(lib: Path) -> str:
    """What the command prints on stdout."""
    done = CliRunner().invoke(app, ["plugin", "install", str(lib)])
    if done.exception is not None:
        raise done.exception
    return done.stdout


@pytest.mark.parametrize("version", ["4.0.8", "4.1.0-rc-1"])
def test_install_writes_the_jar_for_the_version_of_the_broker(jars: Path, lib: Path, version: str) -> None:
    (lib / BROKER.format(version)).touch()
    (lib / "txnbuffer-broker.jar").write_text("former")
    with (lib / "txnbuffer-broker.jar").open() as used:  # by a running broker
        assert install(lib).splitlines() == [f"{name}={value}" for name, value in PLUG_IN_SETTINGS.items()]
        assert used.read() == "former"
    installed = lib / "txnbuffer-broker.jar"
    assert (installed.read_text(), installed.stat().st_mode & 0o777) == (f"for {version[:3]}", 0o644)
    assert len([*lib.iterdir()]) == 3


def test_page_has_the_settings_that_install_prints() -> None:
    page = (ROOT / "docs" / "plain-consumers.md").read_text()
    lines = [f"   {name}={value}" for name, value in PLUG_IN_SETTINGS.items()]
    assert "\n".join(["   ```properties", *lines, "   ```"]) in page


def test_install_into_another_directory_takes_the_only_jar(jars: Path, tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"jars for Pulsar 4\.0, 4\.1: give the lib/ of a broker as DIR"):
        install(tmp_path)
    (jars / "txnbuffer-broker-4.1.jar").unlink()
    install(tmp_path)
    assert (tmp_path / "txnbuffer-broker.jar").read_text() == "for 4.0"


def test_install_refuses_a_version_without_a_jar(jars: Path, lib: Path) -> None:
    (lib / BROKER.format("3.3.9")).touch()
    with pytest.raises(Error, match=r"belongs to Pulsar 3\.3, and there are jars for 4\.0, 4\.1 only"):
        install(lib)
    assert not (lib / "txnbuffer-broker.jar").exists()


def test_installation_without_jars_says_how_to_build_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "JARS", tmp_path / "jars")
    with pytest.raises(plugin.NoPlugIn, match="run make plugin in the source tree") as raised:
        install(tmp_path)
    assert raised.value.exit_code == 5


def test_install_names_a_directory_that_it_cannot_use(jars: Path, lib: Path) -> None:
    found = txnbuf("plugin", "install", str(lib / "nothing"))
    assert (found.returncode, found.stderr) == (
        2, f"txnbuf: {lib / 'nothing'} is not a directory: give the lib/ of a broker\n",
    )  # fmt: skip
    (lib / BROKER.format("4.0.8")).touch()
    (lib / "txnbuffer-broker.jar").mkdir()
    with pytest.raises(Error, match=r"cannot write .*/txnbuffer-broker\.jar: Is a directory"):
        install(lib)
    assert len([*lib.iterdir()]) == 3


@pytest.mark.parametrize("command", ["check", "lock"])
def test_commands_about_brokers_ask_for_a_cluster_at_once(command: str) -> None:
    """They would wait for a service that is not there, or could not use."""
    for address in ("txnbuf://127.0.0.1:1", "memory:", "file:none"):
        found = txnbuf("plugin", command, address)
        assert (found.returncode, found.stdout) == (2, "")
        assert f"{address} is not the address of a Pulsar cluster" in found.stderr
        assert "write pulsar://HOST:PORT, as ADDRESS or in TXNBUFFER_ADDRESS" in found.stderr
    found = txnbuf("plugin", command, environ={"TXNBUFFER_ADDRESS": "127.0.0.1:1"})
    assert (found.returncode, "txnbuf://127.0.0.1:1 is not" in found.stderr) == (2, True)
    found = txnbuf("plugin", command)
    assert found.returncode == 2
    assert "Missing argument 'ADDRESS': write pulsar://HOST:PORT, or set TXNBUFFER_ADDRESS" in found.stderr
    text = " ".join(txnbuf("plugin", command, "--help").stdout.split())
    assert "Without ADDRESS: that of the environment variable TXNBUFFER_ADDRESS, else of the profile. Also" in text
