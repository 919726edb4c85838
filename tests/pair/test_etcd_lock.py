"""A lock in a real etcd: also one that is killed, paused, or behind a bad connection."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from etcd_server import FAST, EtcdServer
from fault_proxy import DOWN, UP, FaultProxy
from golden_files import committed
from pair_lock_contract import MARKS, A, B, LockContract, OpenLocks, begin, claim

from broker_io.errors import EnvironmentFault, InvalidAddress, LockUnavailable, StorageError
from broker_io.filelog.pair import etcd_lock, open_lock, pair_name
from broker_io.filelog.pair.etcd_lock import EtcdAddress, EtcdLock
from broker_io.filelog.pair.lock_state import decode_record, encode_record
from broker_io.filelog.replication.lock import NO_RECORD, LockRecord, LockView
from broker_io.rpc import etcd_pb2

NAMES = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as found:
        yield found


@pytest.fixture
def mortal_server(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path) as found:
        yield found


def open_etcd(*addresses: str, name: str = "", timeout: float = 2.0) -> EtcdLock:
    name = name or f"pair/{next(NAMES)}"
    return EtcdLock(EtcdAddress.parse(f"etcd://{','.join(addresses)}/{name}"), timeout=timeout)


class TestEtcdLock(LockContract):
    examples = 40

    @pytest.fixture
    def open_lock(self, server: EtcdServer) -> Iterator[OpenLocks]:
        number = next(NAMES)
        locks = OpenLocks(lambda name: open_etcd(server.address, name=f"{number}-{name}"))
        yield locks
        locks.close()


def test_golden_record_in_etcd() -> None:
    record = LockRecord(7, 3, A, (A, B), MARKS[1], None)
    data = committed("pair/lock-record.json", encode_record(record, 2**62 + 1))
    assert decode_record(data, "here") == (record, 2**62 + 1)


def test_golden_record_with_the_id_of_its_pair() -> None:
    record = LockRecord(7, 3, A, (A, B), MARKS[1], None, b"\x02pair\xfe")
    data = committed("pair/lock-record-pair.json", encode_record(record, 5))
    assert decode_record(data, "here") == (record, 5)


def test_lease_ends_after_its_time_and_no_sooner(server: EtcdServer) -> None:
    with open_etcd(server.address) as lock:
        session = lock.renew(A, None, 1.0)
        assert session is not None
        assert lock.swap(claim(lock.read(), A, session))[0]
        for _ in range(4):
            time.sleep(0.4)
            before = time.monotonic()
            assert lock.renew(A, session, 1.0) == session
        while lock.read().lease is not None:
            time.sleep(0.02)
        assert 0.95 <= time.monotonic() - before < 60
        assert lock.renew(A, session, 1.0) is None
        assert not lock.swap(claim(lock.read(), A, session))[0]
        assert lock.read().record.live == A


def test_fractions_of_seconds_are_rounded_up(server: EtcdServer) -> None:
    with open_etcd(server.address) as lock:
        session = lock.renew(A, None, 1.2)
        began = time.monotonic()
        assert session is not None
        lock.swap(claim(lock.read(), A, session))
        while lock.read().lease is not None:
            time.sleep(0.02)
        assert time.monotonic() - began >= 1.9


def test_former_lease_is_revoked(server: EtcdServer) -> None:
    with open_etcd(server.address) as lock:
        session = begin(lock, A)
        begin(lock, A)
        assert lock._members.keep_alive(session).TTL == 0


def test_restarted_etcd_has_the_record(mortal_server: EtcdServer) -> None:
    with open_etcd(mortal_server.address) as lock:
        session = begin(lock, A)
        swap = claim(lock.read(), A, session)
        assert lock.swap(swap)[0]
        mortal_server.kill()
        for call in (lock.read, lambda: lock.renew(A, session, 60.0), lambda: lock.swap(swap)):
            began = time.monotonic()
            with pytest.raises(LockUnavailable, match=mortal_server.address):
                call()
            assert time.monotonic() - began < 30
        mortal_server.start()
        view = retried(lock.read)
        assert view.record == swap.record
        assert view.lease is not None
        assert retried(lambda: lock.renew(A, session, 60.0)) == session


def retried(call: Any) -> Any:
    """The answer of a lock whose etcd is starting."""
    until = time.monotonic() + 120
    while True:
        try:
            return call()
        except LockUnavailable:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_paused_etcd_is_unavailable_in_time(mortal_server: EtcdServer) -> None:
    with open_etcd(mortal_server.address, timeout=0.5) as lock:
        session = begin(lock, A)
        with mortal_server.paused():
            began = time.monotonic()
            with pytest.raises(LockUnavailable, match="DEADLINE_EXCEEDED"):
                lock.renew(A, session, 60.0)
            assert 0.4 < time.monotonic() - began < 30
        assert retried(lambda: lock.renew(A, session, 60.0)) == session


def test_swap_whose_answer_is_lost_has_an_unknown_outcome(server: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises, though it was done; nothing repeats it."""
    with FaultProxy(server.port) as proxy, open_etcd(proxy.address, name="lost", timeout=0.5) as lock:
        session = begin(lock, A)
        swap = claim(lock.read(), A, session)
        members = lock._members
        ask = members.ask

        def lose(method: str, *arguments: Any, **options: Any) -> Any:
            if method.endswith("Txn"):
                proxy.dropped.add(DOWN)
            return ask(method, *arguments, **options)

        monkeypatch.setattr(members, "ask", lose)  # the connection fails between the read and the change
        with pytest.raises(LockUnavailable):
            lock.swap(swap)
        monkeypatch.undo()
        proxy.heal()
        view = retried(lock.read)
        assert view.record == swap.record
        assert lock.swap(swap) == (False, view)


def test_swap_that_never_arrived_has_an_unknown_outcome(server: EtcdServer) -> None:
    with FaultProxy(server.port) as proxy, open_etcd(proxy.address, name="never", timeout=0.5) as lock:
        session = begin(lock, A)
        swap = claim(lock.read(), A, session)
        proxy.dropped.add(UP)
        with pytest.raises(LockUnavailable):
            lock.swap(swap)
        proxy.heal()
        assert retried(lock.read).record == NO_RECORD


@pytest.mark.parametrize("held", [{UP}, {DOWN}, {UP, DOWN}])
def test_half_open_connection_is_replaced(server: EtcdServer, held: set[str]) -> None:
    with FaultProxy(server.port) as proxy, open_etcd(proxy.address, timeout=0.5) as lock:
        session = begin(lock, A)
        proxy.held |= held
        with pytest.raises(LockUnavailable):
            lock.renew(A, session, 60.0)
        proxy.cut(refuse=False)
        proxy.heal()
        assert retried(lambda: lock.renew(A, session, 60.0)) == session


def test_session_that_a_lost_answer_began_does_not_stay(server: EtcdServer) -> None:
    """The process that lost the answer begins another one, which ends it."""
    with FaultProxy(server.port) as proxy, open_etcd(proxy.address, name="begun", timeout=0.5) as lock:
        lock.read()
        proxy.dropped.add(DOWN)
        with pytest.raises(LockUnavailable):
            lock.renew(A, None, 60.0)
        proxy.heal()
        session = retried(lambda: lock.renew(A, None, 60.0))
        assert lock.swap(claim(lock.read(), A, session))[0]


def test_next_member_is_asked_if_one_does_not_answer(server: EtcdServer) -> None:
    with FaultProxy(server.port) as proxy, open_etcd(proxy.address, server.address) as lock:
        session = begin(lock, A)
        proxy.cut()
        assert lock.read() == LockView(NO_RECORD, None)
        assert lock.renew(A, session, 60.0) == session


def test_renewal_by_a_former_leader_does_not_count(server: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read after it shows a later term: another leader may end the lease sooner."""
    with open_etcd(server.address) as lock:
        session = begin(lock, A)
        members = lock._members
        keep_alive = members.keep_alive
        renewals = 0

        def stale(lease: int) -> Any:
            nonlocal renewals
            renewals += 1
            answer = keep_alive(lease)
            answer.header.raft_term -= renewals < 3
            return answer

        monkeypatch.setattr(members, "keep_alive", stale)
        assert lock.renew(A, session, 60.0) == session
        assert renewals == 3
        renewals = -etcd_lock.ATTEMPTS
        with pytest.raises(LockUnavailable, match="leader"):
            lock.renew(A, session, 60.0)


@pytest.mark.parametrize(("store", "accepted"), [(B, True), (A, False)])
def test_swap_is_decided_again_if_the_lock_changed_meanwhile(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch, store: bytes, accepted: bool
) -> None:
    """The session of another store does not matter, one more session of its own does."""
    name = f"again-{accepted}"
    with open_etcd(server.address, name=name) as lock, open_etcd(server.address, name=name) as other:
        session = begin(lock, A)
        begin(other, B)
        lock.swap(claim(lock.read(), A, session))
        change = lock._change

        def late(*arguments: Any) -> Any:
            monkeypatch.undo()
            begin(other, store)
            return change(*arguments)

        monkeypatch.setattr(lock, "_change", late)
        assert lock.swap(claim(lock.read(), A, session))[0] == accepted


def test_foreign_keys_are_named(server: EtcdServer) -> None:
    server.control("put", "foreign/record", "mine")
    server.control("put", "foreign2/session/zz", "1")
    for name in ("foreign", "foreign2"):
        with open_etcd(server.address, name=name) as lock, pytest.raises(StorageError, match="another name"):
            lock.read()


def test_what_is_no_etcd_is_unavailable(tmp_path: Path) -> None:
    with open_etcd("127.0.0.1:1") as lock, pytest.raises(LockUnavailable, match=r"etcd://127\.0\.0\.1:1 does not"):
        lock.read()
    lock.close()
    with pytest.raises(LockUnavailable, match="closed"):
        lock.read()


def test_names_of_locks_are_independent(server: EtcdServer) -> None:
    with open_etcd(server.address, name="x") as lock, open_etcd(server.address, name="x/y") as inner:
        begin(inner, B)
        inner.swap(claim(inner.read(), B, begin(inner, B)))
        assert lock.read() == LockView(NO_RECORD, None)


# --- access


def test_password_comes_from_a_file(tmp_path: Path) -> None:
    with EtcdServer(tmp_path) as server:
        server.control("user", "add", "root:secret")
        server.control("user", "grant-role", "root", "root")
        server.control("auth", "enable")
        (password := tmp_path / "password").touch(0o600)
        address = f"etcd://{server.address}/pair?user=root&password-file={password}"
        password.write_text("wrong\n")
        with EtcdLock(EtcdAddress.parse(address)) as lock:
            password.unlink()
            with pytest.raises(LockUnavailable, match="No such file"):
                lock.read()
            password.write_text("wrong\n")
            with pytest.raises(LockUnavailable, match="other users may read it: chmod"):
                lock.read()
            password.chmod(0o600)
            with pytest.raises(LockUnavailable, match="authentication failed"):
                lock.read()
            password.write_text("secret\n")
            session = begin(lock, A)
            assert lock.swap(claim(lock.read(), A, session))[0]
            assert lock.renew(A, session, 60.0) == session
            lock._members._token = "expired.1"  # as after its time
            assert lock.renew(A, session, 60.0) == session
            lock._members._token = "expired.1"
            assert lock.swap(claim(lock.read(), A, session))[0]
        with open_etcd(server.address) as lock, pytest.raises(LockUnavailable, match="user name is empty"):
            lock.read()


def test_files_that_can_not_be_used_are_named_at_once(tmp_path: Path) -> None:
    """A retry can't help, and the answer of etcd would not name them."""
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.sign("node")
    _, other = authority.sign("other")
    empty, missing = tmp_path / "empty", tmp_path / "missing"
    empty.touch(0o600)
    empty.write_text("\n")
    cases = (
        (f"user=u&password-file={missing}", f"can't read {missing} (password-file of pair.lock): No such file"),
        (f"user=u&password-file={empty}", f"{empty} (password-file of pair.lock) has no password"),
        (f"ca={missing}", f"can't read {missing} (ca of pair.lock): No such file"),
        (f"ca={empty}", f"{empty} is not a PEM certificate (ca of pair.lock"),
        (f"ca={authority.trust}&cert={missing}&key={key}", f"can't read {missing} (cert of pair.lock)"),
        (f"ca={authority.trust}&cert={certificate}&key={missing}", f"can't read {missing} (key of pair.lock)"),
        (f"ca={authority.trust}&cert={certificate}&key={other}", f"{other} is not an unencrypted PEM private key of"),
    )
    for options, text in cases:
        with pytest.raises(EnvironmentFault, match=f"^{re.escape(text)}"):
            open_lock(f"etcd://127.0.0.1:1/pair?{options}")


def test_connection_uses_tls_with_a_certificate_of_the_client(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path, "authority"), Authority(tmp_path, "other")
    certificate, key = authority.sign("etcd")
    mine, my_key = authority.sign("node")
    options = (
        f"--cert-file={certificate}", f"--key-file={key}", f"--trusted-ca-file={authority.trust}",
        "--client-cert-auth",
    )  # fmt: skip
    with EtcdServer(tmp_path, (*FAST, *options)) as server:
        base = f"etcd://{server.address}/pair"
        whole = f"{base}?ca={authority.trust}&cert={mine}&key={my_key}"
        with EtcdLock(EtcdAddress.parse(whole)) as lock:
            assert lock.renew(A, begin(lock, A), 60.0) is not None
        wrong = (base, f"{base}?ca={authority.trust}", f"{base}?ca={other.trust}&cert={mine}&key={my_key}")
        for address in wrong:
            with EtcdLock(EtcdAddress.parse(address), timeout=1.0) as lock, pytest.raises(LockUnavailable):
                lock.read()


def test_address_is_read() -> None:
    full = "etcd://a:1,[::1]:2/dc/orders?ca=/c&cert=/d&key=/k&user=u&password-file=/p"
    assert EtcdAddress.parse(full) == EtcdAddress(("a:1", "[::1]:2"), "dc/orders", "/c", "/d", "/k", "u", "/p")


@pytest.mark.parametrize(
    "address",
    [
        "etcd://a:1", "etcd://a:1/", "etcd:///orders", "etcd://a/orders", "etcd://a:1,/orders", "file:/tmp/lock",
        "etcd://a:1/orders?password=secret", "etcd://a:1/orders?cert=/c", "etcd://a:1/orders?user=u",
        "etcd://a:1/orders?ca=", "etcd://a:1/orders?ca=/a&ca=/b", "etcd://a:1/orders?name=x", "etcd://u:secret@a:1/orders",
    ],
)  # fmt: skip
def test_wrong_address_says_how_to_write_one(address: str) -> None:
    with pytest.raises(InvalidAddress, match=r"etcd://HOST:PORT|together") as error:
        EtcdAddress.parse(address)
    assert "secret" not in str(error.value)


def test_comparison_with_a_missing_key_is_sent() -> None:
    """A revision of 0 is not left out, which etcd would take for no comparison."""
    assert etcd_pb2.Compare(target=2, key=b"k", mod_revision=0).SerializeToString().endswith(b"\x30\x00")


def test_lock_of_an_address(server: EtcdServer, tmp_path: Path) -> None:
    for address in (f"etcd://{server.address}/dc/orders", f"file:{tmp_path}/orders"):
        with open_lock(address) as lock:
            begin(lock, A)
            assert lock.clocked == address.startswith("etcd")
    assert pair_name(f"etcd://{server.address}/dc/orders?ca=/c") == "dc/orders"
    assert pair_name(f"file:{tmp_path}/orders") == "orders"


@pytest.mark.parametrize("address", ["file:", "zk://a:1/x", "", "etcd:a"])
def test_address_of_no_lock_is_refused(address: str) -> None:
    for call in (open_lock, pair_name):
        with pytest.raises(InvalidAddress):
            call(address)
