"""The demo on its own broker, which is killed as well."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from pulsar_container import distribution

from broker_io.standalone import NoPulsar

SECONDS = 800
"""Timeout below that of the test, so that the demo can still end its processes."""


def run_demo(*arguments: str) -> tuple[int, str, str]:
    """Run the demo; exit code, stdout and stderr."""
    try:
        home = distribution()
    except NoPulsar as failure:
        pytest.fail(f"the demo starts a broker from the server distribution: {failure}", pytrace=False)
    command = [sys.executable, "-m", "txnbuffer", "demo", "--broker", "pulsar", "--seed", "1", *arguments]
    environment = {**os.environ, "TXNBUFFER_PULSAR_HOME": str(home)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as demo:
        try:
            out, err = demo.communicate(timeout=SECONDS)
        except BaseException:
            demo.terminate()
            raise
    return demo.returncode, out, err


def test_short_demo_with_kills_of_the_broker_finds_no_difference() -> None:
    code, out, err = run_demo(
        "--transactions", "600", "--kills", "4", "--broker-kills", "1", "--seed", "5", "--output", "json"
    )
    assert code == 0, out + err
    report = json.loads(out.splitlines()[-1])
    assert report["records_read"] == report["records_expected"] > 40_000
    assert (report["lost"], report["duplicated"], report["uncommitted_seen"]) == (0, 0, 0)
    assert report["kills"] >= 4
    assert (report["kills_in_recovery"], report["producer_kills"], report["broker_kills"]) == (1, 1, 1)
    assert report["recovery_seconds_max"] > 0
    assert report["transactions_per_second"] > 0
