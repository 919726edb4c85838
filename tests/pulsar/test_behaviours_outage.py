"""A broker that is killed and restarted with open readers and writers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from broker_io import open_broker
from broker_io.batch import Batch
from broker_io.errors import Fenced, ServiceUnavailable
from broker_io.port import Broker
from broker_io.pulsar import reader as reader_module
from broker_io.standalone import Standalone
from broker_io.testing.contract.base import numbered, positions_of, put, read_all, read_count, values

RESTART = 300.0
"""Seconds within which a broker is up again, on a machine that is busy with other tests."""


def test_everything_continues_after_a_restart_of_the_broker(
    mortal: Standalone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing fails because of the outage: sends are repeated, readers continue, requests wait."""
    address = f"{mortal.url}/{mortal.namespace()}"
    with open_broker(address, admin_url=mortal.admin, max_unavailable=RESTART) as broker:
        live(mortal, address, broker, monkeypatch)


def live(server: Standalone, address: str, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    for topic in ("data", "__txnbuffer_own"):
        broker.create_topic(topic)
    incarnation = broker.incarnation("data")
    fenced = broker.writer("__txnbuffer_own", exclusive=True)
    with (
        broker.writer("data") as writer,
        broker.writer("__txnbuffer_own", exclusive=True) as owner,
        broker.reader("data") as reader,
        broker.reader("__txnbuffer_own", compacted=True) as own_reader,
        ThreadPoolExecutor(4) as pool,
    ):
        positions = put(writer, numbered(100))
        put(owner, numbered(20))
        assert len(read_count(reader, 100)) == 100
        assert len(read_count(own_reader, 20)) == 20
        server.kill()
        futures = [writer.append(Batch.of(numbered(10, start))) for start in range(100, 400, 10)]
        owned = owner.append(Batch.of(numbered(5, 20)))
        asked = [pool.submit(broker.last_position, "data"), pool.submit(broker.incarnation, "data")]
        with monkeypatch.context() as impatient:
            impatient.setattr(reader_module, "RECONNECT_SECONDS", 0.5)
            assert reader.read(timeout=0.5) is None
        opened = pool.submit(broker.writer, "data")
        with pytest.raises(ServiceUnavailable, match="admin interface"):
            open_broker(address, admin_url=server.admin, max_unavailable=1.0)
        server.start()
        positions += [position for future in futures for position in future.result(RESTART)]
        owned.result(RESTART)
        opened.result(RESTART).close()
        assert asked[0].result(RESTART) is not None
        assert asked[1].result(RESTART) == incarnation
        found = []
        while len(found) < 300:
            batch = reader.read(timeout=RESTART)
            assert batch is not None
            found += batch
        own = []
        while len(own) < 5:
            batch = own_reader.read(timeout=RESTART)
            assert batch is not None
            own += batch
        assert isinstance(fenced.append(Batch.of(numbered(1))).exception(RESTART), Fenced)
        put(owner, numbered(1, 25))
    # Nothing acknowledged is missing; pending appends may be in the log twice.
    everything = read_all(broker, "data")
    assert {*positions} <= {*positions_of(everything)}
    assert [*dict.fromkeys(values(everything))] == [b"value-%d" % number for number in range(400)]
    assert [*dict.fromkeys(values(read_all(broker, "__txnbuffer_own")))] == [b"value-%d" % n for n in range(26)]
