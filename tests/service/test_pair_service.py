"""Services of a pair: whichever machine is live serves, in the same process, and clients notice a pause only."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections import Counter
from unittest import mock

import pytest
from pair_of_brokers import Member, Pair
from pair_services import PAIR, RunningPair, on_a_pair
from service_setup import eventually, visible

from broker_io import open_broker
from broker_io.batch import Batch, Message
from broker_io.errors import AppendUnknown, DiskFailed, InvalidAddress, NotInSync, NotLive, NotPromotable
from broker_io.port import ReplicatedBroker
from txnbuffer import Outcome, Record, SendUnknown, ServiceUnavailable, SyncTransaction, connect
from txnbuffer.cli.admin_client import ServiceAddress, call
from txnbuffer.config import Config, PairConfig, ServiceConfig
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.errors import InvalidConfiguration, InvalidRequest
from txnbuffer.service.engine import engine as engine_module
from txnbuffer.service.process import _Service
from txnbuffer.service.standby import replication
from txnbuffer.service.standby.replication import check_pair


def test_the_fake_members_are_what_the_service_expects() -> None:
    pair = Pair()
    assert all(isinstance(member, ReplicatedBroker) for member in pair.members)
    pair.close()


@on_a_pair
async def test_transactions_and_streams_move_with_the_live_role_and_back(both: RunningPair) -> None:
    async with connect(both.address) as client:
        seen: list[bytes | None] = []

        async def follow() -> None:
            async for batch in client.stream("a"):
                seen.extend(mutation.value for mutation in batch)

        await client.send("a", b"0")
        following = asyncio.ensure_future(follow())
        async with client.transaction(name="loader", number=1) as txn:
            for number, to in enumerate((1, 0, 1)):
                await txn.send("a", b"%d" % (number + 1))
                await both.move_to(to)
        assert await client.outcome(txn.id) is Outcome.COMMIT
        await eventually(lambda: len(seen) == 4)
        assert seen == [b"0", b"1", b"2", b"3"]
        following.cancel()
    assert visible(both.pair.log, "a") == {b"%d" % number: 1 for number in range(4)}
    assert both.services[1].count("serving") == 2


@on_a_pair
async def test_readers_groups_and_sync_clients_continue(both: RunningPair) -> None:
    """They run in threads, and are moved several times while they write, read and process."""

    def write(address: str, stop: threading.Event, written: list[bytes]) -> None:
        with connect(address) as client:
            number = 0
            while not stop.is_set():
                number += 1
                with client.transaction(name="writer", number=number) as txn:
                    txn.send_many("a", [b"%d" % number] * 3)
                written.append(b"%d" % number)

    def read(address: str, ended: threading.Event, written: list[bytes], seen: list[bytes | None]) -> None:
        with connect(address) as client, client.reader("a") as reader:
            while not ended.is_set() or len(seen) < 1 + 3 * len(written):
                seen += [record.value for record in reader.read(timeout=0.5) or ()]

    def copy(txn: SyncTransaction, record: Record) -> None:
        txn.send("b", record.value, key=record.key)

    def process(address: str, ended: threading.Event) -> None:
        with connect(address) as client:
            while not ended.is_set():
                client.process("a", "copies", copy, batch=5, idle_timeout=1.0)
            client.process("a", "copies", copy, batch=5, idle_timeout=3.0)

    stop, ended, written, seen = threading.Event(), threading.Event(), list[bytes](), list[bytes | None]()
    async with connect(both.address) as client:
        await client.send("a", b"0")
    writing = asyncio.ensure_future(asyncio.to_thread(write, both.address, stop, written))
    await eventually(lambda: written or writing.done())
    reading = asyncio.ensure_future(asyncio.to_thread(read, both.address, ended, written, seen))
    processing = asyncio.ensure_future(asyncio.to_thread(process, both.address, ended))
    for to in (1, 0, 1, 0):
        count = len(written)
        await eventually(lambda count=count: len(written) > count + 3 or writing.done())
        await both.move_to(to)
    stop.set()
    await writing
    ended.set()
    await asyncio.gather(reading, processing)
    expected = Counter({b"0": 1} | dict.fromkeys(written, 3))
    assert len(written) > 12
    assert visible(both.pair.log, "a") == expected
    assert visible(both.pair.log, "b") == expected
    assert seen == [b"0", *(value for value in written for _ in range(3))]


@on_a_pair
async def test_a_commit_in_doubt_gets_the_truth_from_the_other_machine(both: RunningPair) -> None:
    """The decision is in the log, or it is not, and its owner loses its role before it knows."""
    async with connect(both.address) as client:
        for number, written in enumerate((True, False)):
            async with client.transaction() as txn:
                await txn.send("a", b"%d" % number)
                live = both.pair.members[number]
                live.faults.hold(topic=DECISIONS, written=written)
                committing = asyncio.ensure_future(txn.commit())
                await eventually(lambda live=live: live.faults.held)
                live.faults.holds.clear()  # its next takeover would be held too
                both.pair.move(1 - number)
                await committing
    assert visible(both.pair.log, "a") == {b"0": 1, b"1": 1}


@on_a_pair
async def test_a_machine_that_is_live_no_more_answers_nothing_and_stands_by(both: RunningPair) -> None:
    first = both.services[0]
    async with connect(f"txnbuf://127.0.0.1:{first.port}", max_unavailable=0.3) as client:
        both.pair.move(None)
        await eventually(lambda: first.count("standing by") == 2)
        with pytest.raises(ServiceUnavailable, match="standing by"):
            await client.send("a", b"1")
    status, text = await first.get("/ready")
    assert status == 503
    assert "standing by" in text
    status, text = await first.get("/health")
    assert status == 200
    assert json.loads(text)["replication"]["role"] == "backup"


@on_a_pair
async def test_a_machine_that_is_live_again_before_its_service_notices_begins_again(both: RunningPair) -> None:
    """The engine of the former term does not know what the other machine did in between."""
    first = both.services[0]
    async with connect(both.address) as client:
        await client.send("a", b"1")
        engine = first.service._listeners.engine
        assert engine is not None
        both.pair.move(1)
        both.pair.move(0)
        with pytest.raises(NotLive, match="in a former term"):
            engine.check_answer()
        await both.serving(0, 2)
        async with client.transaction() as txn:
            await txn.send("a", b"2")
    assert visible(both.pair.log, "a") == {b"1": 1, b"2": 1}


@on_a_pair
async def test_a_request_under_way_ends_with_the_engine_that_would_answer_it(both: RunningPair) -> None:
    service, asked = both.services[0], asyncio.Event()

    async def hang(_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    service.service._listeners.grpc.admin._methods["List"] = hang
    answer = asyncio.ensure_future(service.ask("List"))
    await asked.wait()
    await both.move_to(1)
    with pytest.raises(ServiceUnavailable, match="serves no more"):
        await asyncio.wait_for(answer, 20.0)


@on_a_pair
async def test_a_standby_names_the_service_that_serves(both: RunningPair) -> None:
    address = f"127.0.0.1:{both.services[0].port}"
    standby = both.services[1].service._listeners.grpc
    await eventually(lambda: address in standby.admin.waits_for)
    with pytest.raises(ServiceUnavailable, match=f"standing by: the service at {address} serves"):
        await connect(f"txnbuf://127.0.0.1:{both.services[1].port}", max_unavailable=0.0).open()


@on_a_pair
async def test_a_standby_says_so_if_nobody_serves(both: RunningPair) -> None:
    first = f"127.0.0.1:{both.services[0].port}"
    standbys = [service.service._listeners.grpc.admin for service in both.services]
    await eventually(lambda: f"the service at {first} serves" in standbys[1].waits_for)
    both.pair.move(None)
    await eventually(lambda: all("nobody is live" in standby.waits_for for standby in standbys))
    assert standbys[0].waits_for == "standing by: nobody is live yet"
    status, text = await both.services[1].get("/ready")
    waits = f"standing by: nobody is live yet; the last service was at {first}"
    assert (status, json.loads(text)["waits_for"]) == (503, [waits])
    with pytest.raises(ServiceUnavailable, match=waits):
        await connect(f"txnbuf://127.0.0.1:{both.services[1].port}", max_unavailable=0.0).open()


async def test_a_request_of_an_operator_waits_a_little_for_a_log_that_is_being_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, opened = Pair(), threading.Event()

    def open_member() -> Member:
        opened.wait()
        return pair.members[0]

    config = Config(service=ServiceConfig(listen="127.0.0.1:0", http=""), pair=PAIR)
    service = _Service(config, "test", lambda *_, **__: None, None, cluster_mode=False)
    task = asyncio.ensure_future(service.run(open_member))
    await eventually(lambda: service._listeners.grpc.port)
    address = ServiceAddress(f"127.0.0.1:{service._listeners.grpc.port}")
    waiting = asyncio.ensure_future(asyncio.to_thread(call, address, "Replication"))
    with monkeypatch.context() as patch:
        await asyncio.sleep(0.3)
        patch.setattr(replication, "OPENING_SECONDS", 0.1)
        for method in ("Replication", "SwitchOver", "Promote"):
            with pytest.raises(ServiceUnavailable, match="still being opened"):
                await asyncio.to_thread(call, address, method)
    assert not waiting.done()
    opened.set()
    assert (await waiting)["role"] == "backup"
    service._signals.first.set()
    assert await task is None
    pair.close()


@on_a_pair
async def test_a_machine_that_stops_makes_the_other_one_live_first(both: RunningPair) -> None:
    """Open transactions move, instead of being waited for."""
    async with connect(both.address) as client, client.transaction() as txn:
        await txn.send("a", b"1")
        assert await both.services[0].stop() is None
        assert both.pair.live == 1
        assert [facts["seconds"] for event, facts in both.services[0].events if event == "draining"] == [0.1]
        await txn.send("a", b"2")
    assert visible(both.pair.log, "a") == {b"1": 1, b"2": 1}
    assert both.pair.members[0].switches == 1


@on_a_pair
async def test_a_machine_that_stops_alone_waits_for_open_transactions(both: RunningPair) -> None:
    both.pair.in_sync = False
    async with connect(both.address) as client:
        async with client.transaction(timeout=60.0) as txn:
            await txn.send("a", b"1")
            engine = both.services[0].service._listeners.engine
            await eventually(lambda: any(engine.coordinator.transactions()))
            stopping = asyncio.ensure_future(both.services[0].stop())
            await asyncio.sleep(0.5)
            assert not stopping.done()
        await stopping
    assert both.pair.members[0].switches == 0


@on_a_pair
async def test_a_machine_that_stops_waits_for_a_backup_that_is_missing_for_a_moment(both: RunningPair) -> None:
    """It serves meanwhile; and a switch that fails because the backup is lost again is repeated."""
    first = both.services[0]
    await eventually(lambda: first.service._replication._in_sync_at > 0)
    both.pair.in_sync = False
    stopping = asyncio.ensure_future(first.stop())
    async with connect(both.address) as client:
        await client.send("a", b"1")
        assert first.count("draining") == 0
        first.member.refusals = [NotInSync("the backup was lost meanwhile")]
        both.pair.in_sync = True
        assert await stopping is None
        assert (both.pair.live, first.member.switches) == (1, 2)
        await client.send("a", b"2")
    assert visible(both.pair.log, "a") == {b"1": 1, b"2": 1}


@on_a_pair
async def test_a_machine_that_stops_waits_for_the_repair_of_its_backup(both: RunningPair) -> None:
    """It serves meanwhile. After a while it ends, and the other machine is not made live: it is not preferred."""
    first = both.services[0]
    await eventually(lambda: first.service._replication._in_sync_at > 0)
    both.pair.damage = "files of topic 'a' are damaged there"
    stopping = asyncio.ensure_future(first.stop())
    async with connect(both.address) as client:
        await client.send("b", b"1")
        assert first.count("draining") == 0
        both.pair.damage = ""
        assert await stopping is None
        assert (both.pair.live, first.member.switches) == (1, 1)
        await client.send("b", b"2")
    second = await both.serving(1)
    both.pair.damage = "files of topic 'a' are damaged there"
    second.service._replication._in_sync_at = -math.inf
    assert await second.stop() is None
    assert (both.pair.live, second.member.switches) == (1, 0)


@on_a_pair
async def test_a_machine_that_stops_before_it_serves_makes_the_other_one_live(both: RunningPair) -> None:
    first = both.services[0]
    await both.move_to(1)
    await eventually(lambda: first.count("standing by") == 2)
    with mock.patch.object(_Service, "_take_over", side_effect=ServiceUnavailable("not now")):
        both.pair.move(0)
        await eventually(lambda: any(facts.get("what") == "taking over" for _, facts in first.events))
        assert await first.stop() is None
    assert both.pair.live == 1


async def read(address: str, topic: str, count: int) -> list[bytes | None]:
    """The first values of a topic, read by a client that opens no session."""

    def work() -> list[bytes | None]:
        found: list[bytes | None] = []
        with open_broker(address) as broker, broker.reader(topic) as reader:
            while len(found) < count and (batch := reader.read(timeout=60.0)) is not None:
                found += [message.value for message in batch.messages]
        return found

    return await asyncio.to_thread(work)


@on_a_pair
async def test_writes_end_with_a_clear_error_while_the_backup_is_missing_and_reads_go_on(both: RunningPair) -> None:
    first = both.services[0]
    async with connect(both.address, max_unavailable=1.0) as client, connect(both.address) as patient:
        await client.send("a", b"1")
        await patient.send("a", b"2")
        txn = await patient.transaction(timeout=300.0).begin()
        both.pair.strict, both.pair.in_sync = True, False
        first.member.faults.hold(written=False)
        sending = asyncio.ensure_future(client.send("a", b"3"))
        writing = asyncio.ensure_future(txn.send("a", b"4"))
        with pytest.raises(SendUnknown, match="may or may not be"):
            await asyncio.wait_for(sending, 30.0)
        with pytest.raises(ServiceUnavailable, match=r"backup of this pair is not in sync, .*min_in_sync is 2"):
            await asyncio.wait_for(client.send("a", b"5"), 30.0)
        assert await read(both.address, "a", 2) == [b"1", b"2"]
        status, text = await first.get("/ready")
        assert (status, "pair.min_in_sync is 2" in text) == (503, True)
        assert first.count("serving") == 1
        both.pair.in_sync = True
        first.member.faults.release()
        await writing
        await txn.commit()
        await eventually(lambda: client.session.core.welcomed)
        await client.send("a", b"6")
    assert (await first.get("/ready"))[0] == 200
    found = visible(both.pair.log, "a")
    assert {value: found[value] for value in (b"3", b"4", b"5", b"6")} == {b"3": 1, b"4": 1, b"5": 0, b"6": 1}


@on_a_pair
async def test_a_new_live_without_its_backup_says_why_it_serves_nothing_and_stops_at_once(both: RunningPair) -> None:
    second = both.services[1]
    both.pair.strict, both.pair.in_sync = True, False
    both.pair.move(1)
    await eventually(lambda: "min_in_sync is 2" in second.service._listeners.grpc.admin.waits_for)
    status, text = await second.get("/ready")
    assert (status, "can't answer readers either" in text) == (503, True)
    with pytest.raises(ServiceUnavailable, match="min_in_sync is 2"):
        await connect(both.address, max_unavailable=0.5).open()
    assert second.count("recovering") == 0
    both.pair.in_sync = True
    await both.serving(1)
    both.pair.in_sync = False
    await eventually(lambda: second.service._replication.refusal)
    assert await asyncio.wait_for(second.stop(), 30.0) is None


@pytest.mark.parametrize("at", ["append", "take-over"])
@on_a_pair
async def test_a_machine_that_stops_gives_up_what_waits_for_its_backup(both: RunningPair, at: str) -> None:
    both.pair.strict = True
    async with connect(both.address, max_unavailable=60.0) as client:
        await client.send("a", b"1")
        service = both.services[at == "take-over"]
        service.member.faults.hold(written=False)
        if at == "append":
            sending = asyncio.ensure_future(client.send("a", b"2"))
        else:
            both.pair.move(1)
        await eventually(lambda: service.member.faults.held)
        both.pair.in_sync = False
        assert await asyncio.wait_for(service.stop(), 60.0) is None
        assert [facts for event, facts in service.events if facts.get("what") == "stopping"]
        if at == "append":
            with pytest.raises(SendUnknown):
                await sending


@on_a_pair
async def test_operators_switch_to_the_backup_and_back(both: RunningPair) -> None:
    for former in (0, 1, 0):
        service = both.services[former]
        await both.serving(former, 1 + service.member.switches)
        assert (await service.ask("SwitchOver"))["role"] == "backup"
        assert (await service.ask("Replication"))["live"] == f"store{1 - former}"
        await eventually(lambda service=service: service.count("standing by") == 1 + service.member.switches)
    assert [member.switches for member in both.pair.members] == [2, 1]


@on_a_pair
async def test_ordinary_sends_get_their_answers_when_the_role_moves(both: RunningPair) -> None:
    """What the service has taken is answered, and what it has not taken is sent to the other machine."""
    stop, sent = asyncio.Event(), list[bytes]()

    async def send(name: int) -> None:
        async with connect(both.address) as client:
            while not stop.is_set():
                value = b"%d-%d" % (name, len(sent))
                await client.send("a", value)
                sent.append(value)

    senders = [asyncio.ensure_future(send(name)) for name in range(4)]
    for former in (0, 1, 0, 1):
        count = len(sent)
        await both.serving(former, 1 + both.services[former].member.switches)
        await eventually(lambda count=count: len(sent) > count + 50 or any(one.done() for one in senders))
        await both.services[former].ask("SwitchOver")
    await both.serving(0, 3)
    stop.set()
    await asyncio.gather(*senders)
    assert visible(both.pair.log, "a") == dict.fromkeys(sent, 1)


@on_a_pair
async def test_a_send_that_is_answered_late_is_in_doubt_when_the_role_moves(both: RunningPair) -> None:
    first = both.services[0]
    async with connect(both.address) as client:
        await client.send("a", b"1")
        first.member.faults.hold(topic="a", written=True)
        sending = asyncio.ensure_future(client.send("a", b"2"))
        await eventually(lambda: first.member.faults.held)
        with mock.patch.object(engine_module, "SETTLE", 0.1):
            switching = asyncio.ensure_future(first.ask("SwitchOver"))
            with pytest.raises(SendUnknown):
                await sending
        first.member.faults.release()
        await switching
    assert visible(both.pair.log, "a") == {b"1": 1, b"2": 1}


@on_a_pair
async def test_a_switch_is_refused_before_anything_ends(both: RunningPair) -> None:
    with pytest.raises(NotLive, match="ask the other one"):
        await both.services[1].ask("SwitchOver")
    both.pair.in_sync = False
    with pytest.raises(NotInSync, match="wait until it is"):
        await both.services[0].ask("SwitchOver")
    both.pair.in_sync, both.pair.damage = True, "files of topic 'a' are damaged there"
    with pytest.raises(NotInSync, match="topic 'a'"):
        await both.services[0].ask("SwitchOver")
    assert both.services[0].count("draining") == 0


@on_a_pair
async def test_a_switch_that_fails_is_reported_and_the_machine_serves_on(both: RunningPair) -> None:
    first = both.services[0]

    first.member.refusals = [NotInSync("the backup was lost meanwhile")]
    with pytest.raises(NotInSync, match="lost meanwhile"):
        await first.ask("SwitchOver")
    await both.serving(0, 2)
    async with connect(both.address) as client:
        await client.send("a", b"1")


@on_a_pair
async def test_operators_force_a_backup_to_become_live(both: RunningPair) -> None:
    both.pair.move(None)
    with pytest.raises(NotPromotable):
        both.pair.in_sync = False
        await both.services[1].ask("Promote")
    both.pair.in_sync = True
    await both.services[1].ask("Promote")
    await both.serving(1)
    with pytest.raises(InvalidRequest, match="live already"):
        await both.services[1].ask("Promote")


@on_a_pair
async def test_a_machine_whose_disk_failed_ends_with_the_error(both: RunningPair) -> None:
    for number in (1, 0):
        both.pair.members[number].fail(DiskFailed("the sync failed"))
        error = await both.services[number].task if number == 0 else None
        if number == 1:
            with pytest.raises(DiskFailed):
                await both.services[1].task
        else:
            assert isinstance(error, DiskFailed)


@on_a_pair
async def test_an_unexpected_error_of_an_append_does_not_end_a_live_machine_for_good(both: RunningPair) -> None:
    first = both.services[0]
    async with connect(both.address) as client:
        await client.send("a", b"1")
        first.member.faults.fail_append(AppendUnknown("no answer"), topic="a")
        async with client.transaction() as txn:
            await txn.send("a", b"2")
        assert await client.outcome(txn.id) is Outcome.COMMIT
    assert first.count("serving") == 2
    assert visible(both.pair.log, "a")[b"2"] == 1


@on_a_pair
async def test_a_copy_that_replaced_the_log_makes_a_standby_begin_again(both: RunningPair) -> None:
    standby = both.services[1]
    async with connect(both.address) as client, client.transaction() as txn:
        await txn.send("a", b"1")
    http = standby.service._listeners.http
    await eventually(lambda: http.lag().warm)
    first = http.lag
    standby.member.store = "another"
    await eventually(lambda: http.lag is not first and http.lag().warm)
    both.pair.move(1)
    await both.serving(1)
    assert visible(both.pair.log, "a") == {b"1": 1}


async def test_a_service_without_a_pair_says_so() -> None:
    from broker_io.memory import MemoryBroker

    broker = MemoryBroker()
    with broker.connect() as log:
        log.create_topic("a")
        log.writer("a").append(Batch.of([Message(b"k", b"v")])).result()
    config = Config(service=ServiceConfig(listen="127.0.0.1:0", http=""))
    service = _Service(config, "test", lambda *_, **__: None, None, cluster_mode=False)
    task = asyncio.ensure_future(service.run(lambda: broker))
    await eventually(lambda: service._listeners.engine)
    address = ServiceAddress(f"127.0.0.1:{service._listeners.grpc.port}")
    for method in ("Replication", "SwitchOver", "Promote"):
        with pytest.raises(InvalidRequest, match="has no pair"):
            await asyncio.to_thread(call, address, method)
    service._signals.first.set()
    assert await task is None


@pytest.mark.parametrize(
    ("pair", "embedded", "text"),
    [
        (PairConfig(listen="127.0.0.1:1"), True, "pair.listen is given without pair.lock"),
        (PairConfig(found=True), True, "pair.found is given without pair.lock"),
        (PAIR, False, "use --standby there"),
        (PairConfig(lock="zookeeper://a", listen="127.0.0.1:1", peer="b:1"), True, "is not the address of a lock"),
        (PairConfig(lock="file:l", listen="127.0.0.1:1"), True, "needs --pair-listen and --backup-of on both"),
        (PairConfig(lock="file:l", listen="127.0.0.1:1", peer="b"), True, "is not the address of the other member"),
        (PairConfig(lock="file:l", listen="b", peer="b:1", tls_cert="c"), True, "needs a certificate, its key"),
        (PairConfig(lock="file:l", listen="0.0.0.0:1", peer="127.0.0.1:1"), True, "0.0.0.0:1: without TLS"),
        (PairConfig(lock="file:l", listen="127.0.0.1:1", peer="b:1"), True, "b:1: without TLS"),
        (
            PairConfig(lock="file:l", listen="localhost:1", peer="localhost:2", lease_seconds=0.5),
            True,
            "must be at least 1",
        ),
    ],
)
def test_a_pair_that_cannot_work_is_refused(pair: PairConfig, embedded: bool, text: str) -> None:
    with pytest.raises((InvalidConfiguration, InvalidAddress), match=text):
        check_pair(pair, embedded=embedded)


def test_a_valid_pair_is_accepted() -> None:
    check_pair(PAIR, embedded=True)
    check_pair(PairConfig(), embedded=False)
    tls = {"tls_cert": "c", "tls_key": "k", "tls_ca": "a"}
    check_pair(PairConfig(lock="etcd://h:1/p", listen="0.0.0.0:1", peer="b:1", **tls), embedded=True)
