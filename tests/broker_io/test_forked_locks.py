"""A child forked while a log is open does not share the lock: it is released when the parent closes or is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from broker_io import open_broker

FORKS = """
import os, signal, sys
from broker_io import open_broker

broker = open_broker(sys.argv[1])
broker.create_topic("t")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
if os.fork() == 0:
    signal.alarm(120)
    print(os.getpid(), flush=True)
    signal.sigwait([signal.SIGUSR1])
    broker.close()
    os._exit(0)
sys.stdin.readline()
broker.close()
print("closed", flush=True)
os.wait()
"""


@pytest.mark.parametrize("end", ["closes", "is killed"])
def test_lock_is_released_when_its_owner_ends_despite_children(tmp_path: Path, end: str) -> None:
    address = f"file:{tmp_path}"
    owner = subprocess.Popen([sys.executable, "-c", FORKS, address], stdin=PIPE, stdout=PIPE, text=True)
    assert owner.stdin is not None
    assert owner.stdout is not None
    with owner.stdin, owner.stdout:
        child = int(owner.stdout.readline())
        if end == "closes":
            owner.stdin.write("\n")
            owner.stdin.flush()
            assert owner.stdout.readline() == "closed\n"
        else:
            owner.kill()
            owner.wait(60)
        with open_broker(address) as broker:
            broker.create_topic("u")
            os.kill(child, signal.SIGUSR1)  # its close has no effect on the log
            assert owner.stdout.read() == ""
            assert broker.topics() == ["t", "u"]
    owner.wait(60)


def test_child_can_open_a_log_that_its_parent_closed(tmp_path: Path) -> None:
    script = """
import os, sys
from broker_io import open_broker
with open_broker(sys.argv[1]) as broker:
    broker.create_topic("t")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        with open_broker(sys.argv[1]) as own:
            own.create_topic("u")
        os._exit(0)
os.close(write)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", script, f"file:{tmp_path}"], check=True, timeout=200)
