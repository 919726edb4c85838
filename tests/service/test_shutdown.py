"""A service in cluster mode ends on a signal, even if all its threads wait for the cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

SERVICE = """
import sys, threading
import txnbuffer.cli.serve as serve
from broker_io.memory import MemoryBroker
from txnbuffer.cli.logs import log_lines
from txnbuffer.config import Config, ServiceConfig

class Away(MemoryBroker):
    def close(self):
        threading.Event().wait()

serve.LogAddress.open_for_writing = lambda address: Away()
serve.SHUTDOWN_SECONDS = 0.2
service = ServiceConfig(listen="127.0.0.1:0", http="", drain_seconds=0.1)
with log_lines(json_lines=True):
    sys.exit(serve.run("pulsar://127.0.0.1:1/public/default", Config(service=service)))
"""


@pytest.mark.timeout(150)
def test_a_cluster_that_is_away_keeps_no_service_from_ending() -> None:
    command = [sys.executable, "-c", SERVICE]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stderr is not None
        told = []
        try:
            for line in process.stderr:
                told.append(line)
                if '"serving"' in line:
                    process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 3
        finally:
            process.kill()
        assert "the next service completes the work" in told[-1]
