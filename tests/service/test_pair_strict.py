"""Two service processes with `min_in_sync` 2, whose link uses TLS with certificates of both sides."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from certificates import Authority
from http_answers import get
from pair_processes import LEASE, PairOfProcesses
from reading import read_values
from service_process import STARTING

from broker_io import open_broker
from txnbuffer import Outcome, OutcomeUnknown, SendUnknown, ServiceUnavailable, connect

STOPPING = 3 * LEASE + 20.0
"""Seconds within which a service without its backup ends, on a machine that is busy with other tests."""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[PairOfProcesses]:
    authority = Authority(tmp_path, "authority")
    options = []
    for name in ("a", "b"):
        certificate, key = authority.sign(f"link-{name}")
        files = ["--pair-cert", str(certificate), "--pair-key", str(key), "--pair-ca", str(authority.trust)]
        options.append([*files, "--set", "pair.min_in_sync=2"])
    running = PairOfProcesses(tmp_path, f"file:{tmp_path}/lock", options)
    try:
        yield running
    finally:
        running.kill()


def wait_for_ready(pair: PairOfProcesses, number: int, text: str) -> None:
    """Wait until a service says why it is not ready."""
    deadline = time.monotonic() + STARTING
    while text not in (answer := get(pair.http(number), "/ready"))[1]:
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)
    assert answer[0] == 503


def stop(pair: PairOfProcesses, number: int) -> None:
    pair.services[number].terminate()
    began = time.monotonic()
    assert pair.services[number].finish(STARTING) == 0, pair.services[number].lines[-10:]
    assert time.monotonic() - began < STOPPING


@pytest.mark.timeout(600)
def test_a_live_without_its_backup_writes_nothing_says_why_and_can_be_stopped(pair: PairOfProcesses) -> None:
    live = pair.live()
    backup = 1 - live
    with connect(pair.address, max_unavailable=2.0) as client:
        with client.transaction() as txn:  # from then on the topic takes transactions
            txn.send("a", b"0")
        txn = client.transaction(timeout=600.0).begin()
        txn.send("a", b"2")
        client.send("a", b"1")
        pair.services[backup].kill()
        with pytest.raises(OutcomeUnknown, match="min_in_sync is 2"):
            txn.commit()
        with pytest.raises(ServiceUnavailable, match="backup of this pair is not in sync"):
            client.send("a", b"3")
        wait_for_ready(pair, live, "pair.min_in_sync is 2")
        with open_broker(pair.address) as broker, broker.reader("a") as reader:
            assert (batch := reader.read(timeout=120.0)) is not None
            assert b"0" in {message.value for message in batch.messages}
        pair.again(backup)
        assert pair.live() == live
        deadline = time.monotonic() + STARTING
        sent = False
        while not sent:
            assert time.monotonic() < deadline
            with suppress(ServiceUnavailable):
                client.send("a", b"4")
                sent = True
        assert client.outcome(txn.id) is Outcome.COMMIT
    pair.services[live].kill()
    pair.wait_for_role(backup)
    wait_for_ready(pair, backup, "can't answer readers either")
    stop(pair, backup)
    pair.again(backup)
    pair.again(live)
    live = pair.live()
    with connect(pair.address, max_unavailable=1.0) as client:
        assert Counter(read_values(client, "a", 4)) == {b"0": 1, b"1": 1, b"2": 1, b"4": 1}
        pair.services[1 - live].kill()
        with pytest.raises(SendUnknown):
            client.send("a", b"5")
        stop(pair, live)
