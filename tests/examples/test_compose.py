"""The quickstart of the README: the services of the compose file, and the commands, on a real Pulsar."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from examples.example_process import Shop
from pulsar_cluster import Cluster
from service_process import kept_port
from source_tree import ROOT

from broker_io.port import PLUG_IN_SETTINGS
from broker_plugin.build import JARS, distribution, minor_version

COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
PLAIN = yaml.safe_load((ROOT / "docker" / "compose.plain.yaml").read_text())["services"]["pulsar"]
README = (ROOT / "README.md").read_text()
ADDRESS = "pulsar://127.0.0.1:6650/public/default"
INSIDE = "pulsar://pulsar:6650/public/default"


def start(market: Shop, name: str) -> subprocess.Popen[bytes]:
    """Start a service of the compose file, as a process with ports of its own."""
    service = COMPOSE["services"][name]
    port = kept_port()
    command = [market.address if part == INSIDE else part for part in service["command"]]
    command = [re.sub(r":7711$", f":{port}", re.sub(r":7712$", ":0", part)) for part in command]
    (advertised,) = service["environment"].items()
    assert advertised == ("TXNBUFFER_SERVICE_ADVERTISE", service["ports"][0].rpartition(":")[0])
    return market.start("-m", "txnbuffer", *command, **{advertised[0]: f"127.0.0.1:{port}"})


def run(market: Shop, command: str) -> str:
    """Run a command of the README on this cluster; what it prints."""
    here = command.replace(ADDRESS, market.address).replace("txnbuf ", f"{shlex.quote(sys.executable)} -m txnbuffer ")
    done = subprocess.run(
        ["/bin/sh", "-c", here],
        cwd=market.directory,
        env=market.environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr + market.output
    return done.stdout


def test_the_quickstart_works_also_after_the_active_service_is_killed(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    section = README.partition("## On Pulsar, with Docker\n")[2].partition("\n## ")[0]
    _, produce, tail, kill = re.findall(r"^ {4}(\S.*)$", section, re.MULTILINE)[:4]
    assert kill.startswith("docker compose -f docker/compose.yaml kill active")
    market = Shop(f"{cluster.url}/{namespace}", cluster.admin, tmp_path)
    try:
        active = start(market, "active")
        market.wait(lambda: '"serving"' in market.output, active)
        standby = start(market, "standby")
        market.wait(lambda: '"standing by"' in market.output, active, standby)
        run(market, produce)
        assert [line.split("\t")[-2:] for line in run(market, tail).splitlines()] == [["apples", "3"], ["pears", "5"]]
        active.send_signal(signal.SIGKILL)
        active.wait()
        run(market, produce)
        assert len(run(market, tail).splitlines()) == 4
        assert standby.poll() is None
    finally:
        for process in market.started:
            process.kill()
            process.wait()


@pytest.mark.parametrize("plain", [True, False])
def test_broker_of_the_compose_file_has_the_plug_in_if_it_is_asked_for(tmp_path: Path, *, plain: bool) -> None:
    shell, option, script = COMPOSE["services"]["pulsar"]["command"]
    configuration = tmp_path / "standalone.conf"
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "standalone.conf").write_text("topicFactoryClassName=\n#last line without its end")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pulsar").write_text('#!/bin/sh\necho "$PULSAR_EXTRA_CLASSPATH"\n')
    (tmp_path / "bin" / "pulsar").chmod(0o755)
    script = script.replace("/tmp/standalone.conf", str(configuration)).replace("$$", "$")
    environment = {"PATH": os.environ["PATH"], **(PLAIN["environment"] if plain else {})}
    started = subprocess.check_output([shell, option, script], cwd=tmp_path, env=environment, text=True).strip()
    settings = dict(line.split("=", 1) for line in configuration.read_text().splitlines() if "=" in line)
    assert "bindAddresses" in settings
    assert [settings.get(name) == value for name, value in PLUG_IN_SETTINGS.items()] == [plain] * len(PLUG_IN_SETTINGS)
    if plain:
        (mounted,) = PLAIN["volumes"]
        assert (ROOT / "docker" / mounted["source"]).resolve() == JARS
        image = COMPOSE["services"]["pulsar"]["image"]
        version = minor_version(distribution(re.findall(r"\d+\.\d+\.\d+", image)[0]))
        assert started == f"{mounted['target']}/txnbuffer-broker-{version}.jar"


@pytest.mark.parametrize("market", ["cluster"], indirect=True)
def test_the_example_of_the_readme_runs_on_a_cluster(market: Shop) -> None:
    program, shown = re.findall(r"^```(?:python|text)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[:2]
    connecting = f'connect("{market.address}", broker_options={{"admin_url": "{market.admin}"}})'
    assert 'connect("file:data")' in program
    program = program.replace('connect("file:data")', connecting).replace("timeout=1.0", "timeout=10.0")
    market.start("-c", program).wait(200)
    assert sorted(market.output.splitlines()) == sorted(shown.splitlines())
