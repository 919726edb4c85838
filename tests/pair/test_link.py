"""Links between two transports over real sockets: also bad ones, through a proxy that cuts, holds and changes bytes."""

from __future__ import annotations

import contextlib
import gc
import itertools
import queue
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import google_crc32c
import pytest
from certificates import Authority
from etcd_server import free_port
from fault_proxy import DOWN, UP, FaultProxy
from pair.link_samples import SAMPLES

from broker_io.errors import (
    DiskFailed,
    EnvironmentFault,
    InvalidAddress,
    ServiceUnavailable,
    TopicNotFound,
)
from broker_io.filelog.log.records import START, Fork, Kind, LogRecord, Mark
from broker_io.filelog.pair import link as link_module
from broker_io.filelog.pair.link_frames import CopyEnd, size_of
from broker_io.filelog.pair.port import CopyChunk, PairLink, StoreCopy
from broker_io.filelog.pair.transport import GrpcTransport, LinkSettings, name_fits
from broker_io.filelog.replication import messages as m
from broker_io.testing.contract.base import eventually as until

STORE = b"\x0a" * 16
SILENCE, PATIENT = 2.0, 20.0
"""Seconds until a link breaks: where a test waits for that, and where it must not happen on a loaded machine."""
WAIT = 120.0
MIB = 1024 * 1024


def records(size: int, lsn: int = 1) -> m.Records:
    return m.Records(1, STORE, (LogRecord(Mark(1, lsn, 7), lsn, Kind.DATA, b"x" * size),), lsn)


@dataclass
class Seen:
    """A node as a transport sees it: what arrived, by link."""

    events: queue.SimpleQueue[tuple[Any, ...]] = field(default_factory=queue.SimpleQueue)
    links: list[PairLink] = field(default_factory=list)
    live: bool = False
    slow: threading.Event | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    echo: bool = False

    def up(self, link: PairLink) -> None:
        self.links.append(link)
        self.events.put(("up", link.number))

    def received(self, number: int, message: m.Message) -> None:
        if self.echo:
            self.links[-1].send(message)
            return
        if self.slow is not None:
            self.slow.wait(WAIT)
        self.events.put(("received", number, message))

    def copy_chunk(self, number: int, chunk: CopyChunk) -> None:
        if self.slow is not None:
            self.slow.wait(WAIT)
        self.events.put(("chunk", number, chunk))

    def copy_end(self, number: int) -> None:
        self.events.put(("end", number))

    def down(self, number: int, reason: str) -> None:
        self.events.put(("down", number, reason))

    def read_prepared(self, name: str, offset: int, size: int) -> bytes:
        if name == "broken":
            raise DiskFailed("the disk is broken")
        if name not in self.files:
            raise TopicNotFound(f"there is no file {name}")
        return self.files[name][offset : offset + size]

    def next(self, kind: str) -> tuple[Any, ...]:
        """The next event, which must be of this kind."""
        event = self.events.get(timeout=WAIT)
        assert event[0] == kind, event
        return event[1:]

    def until(self, kind: str) -> tuple[Any, ...]:
        """The next event of this kind."""
        while (event := self.events.get(timeout=WAIT))[0] != kind:
            pass
        return event[1:]


@dataclass
class Node:
    transport: GrpcTransport
    seen: Seen

    @property
    def link(self) -> PairLink:
        return self.seen.links[-1]


Start = Callable[..., Node]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a node at a free port, without a peer unless given; keywords are those of LinkSettings."""
    with contextlib.ExitStack() as stack:

        def begin(*, live: bool = False, seen: Seen | None = None, **settings: Any) -> Node:
            node = Node(GrpcTransport(settings_of(**settings)), seen or Seen())
            node.seen.live = live
            stack.callback(node.transport.close)
            node.transport.start(node.seen, lambda: node.seen.live, lambda: not node.seen.live)
            return node

        yield begin


def settings_of(**settings: Any) -> LinkSettings:
    return LinkSettings(
        **{"pair": "orders", "listen": "127.0.0.1:0", "peer": "127.0.0.1:1", "idle_timeout": PATIENT, **settings}
    )


def linked(start: Start, **settings: Any) -> tuple[Node, Node]:
    """A primary and a backup with a link."""
    live = start(live=True)
    backup = start(peer=f"127.0.0.1:{live.transport.port}", **settings)
    backup.seen.next("up")
    live.seen.next("up")
    return live, backup


def test_messages_arrive_in_order_in_both_directions(start: Start) -> None:
    live, backup = linked(start)
    hello = m.Hello(3, STORE, START, START, False)
    for lsn in range(1, 200):
        live.link.send(records(lsn * 100, lsn))
        backup.link.send(hello._replace(epoch=lsn))
    for lsn in range(1, 200):
        assert backup.seen.next("received") == (backup.link.number, records(lsn * 100, lsn))
        assert live.seen.next("received") == (live.link.number, hello._replace(epoch=lsn))


def test_each_kind_of_message_arrives(start: Start) -> None:
    live, backup = linked(start)
    messages = [each for each in SAMPLES.values() if each is not None and not isinstance(each, CopyChunk | CopyEnd)]
    assert {type(each) for each in messages} == {*get_args(m.Message)}
    for message in messages:
        live.link.send(message)
        assert backup.seen.next("received")[1] == message


def test_large_record_arrives(start: Start) -> None:
    live, backup = linked(start)
    sent = records(40 * MIB)
    live.link.send(sent)
    assert backup.seen.next("received")[1] == sent


def test_round_trip_is_short(start: Start) -> None:
    """Far below what a sync of a disk takes. A machine that is busy delays some, but not each of them."""
    live, backup = linked(start)
    backup.seen.echo = True
    times = []
    for _ in range(300):
        began = time.perf_counter()
        live.link.send(records(300))
        live.seen.next("received")
        times.append(time.perf_counter() - began)
    assert sorted(times)[10] < 0.01


def test_end_of_a_link_is_reported_once_on_each_side(start: Start) -> None:
    live, backup = linked(start)
    backup.seen.live = True  # it does not connect again
    number, other = live.link.number, backup.link.number
    live.link.close()
    live.link.close()
    assert live.seen.next("down") == (number, "")
    found, reason = backup.seen.next("down")
    assert found == other
    assert reason
    live.link.send(records(10))
    time.sleep(0.3)
    assert live.seen.events.empty()
    assert backup.seen.events.empty()


def test_links_have_new_numbers_and_are_made_again(start: Start) -> None:
    live, backup = linked(start)
    for _ in range(3):
        number = backup.link.number
        backup.link.close()
        assert backup.seen.next("down") == (number, "")
        assert backup.seen.next("up") != (number,)
        assert {live.seen.events.get(timeout=WAIT)[0] for _ in range(2)} == {"up", "down"}
    live.link.send(records(10))
    assert backup.seen.next("received") == (backup.link.number, records(10))


def test_node_that_is_not_live_refuses_and_says_why(start: Start) -> None:
    other = start()
    backup = start(peer=f"127.0.0.1:{other.transport.port}")
    until(lambda: "not live" in backup.transport.problem)
    assert other.seen.events.empty()
    other.seen.live = True
    backup.seen.next("up")
    assert backup.transport.problem == ""


def test_live_does_not_connect(start: Start) -> None:
    other = start(live=True)
    live = start(live=True, peer=f"127.0.0.1:{other.transport.port}")
    time.sleep(0.6)
    assert other.seen.events.empty()
    live.seen.live = False
    other.seen.next("up")


def test_link_after_a_change_of_roles_goes_the_other_way(start: Start) -> None:
    port = free_port()
    live = start(live=True, peer=f"127.0.0.1:{port}")
    backup = start(listen=f"127.0.0.1:{port}", peer=f"127.0.0.1:{live.transport.port}")
    backup.seen.next("up")
    live.seen.live, backup.seen.live = False, True
    backup.link.close()
    backup.seen.until("up")
    until(lambda: len(live.seen.links) == 2)
    backup.seen.files["7"] = b"abc"
    assert live.transport.fetch("7", 0, 3) == b"abc"


def test_newer_link_ends_the_one_before_it(start: Start) -> None:
    live, backup = linked(start)
    first = live.link.number
    other = start(peer=f"127.0.0.1:{live.transport.port}")
    other.seen.next("up")
    ended = {live.seen.events.get(timeout=WAIT)[:2] for _ in range(2)}
    assert ("down", first) in ended
    backup.seen.until("down")


# --- who may connect


def test_node_of_another_pair_is_refused(start: Start) -> None:
    live = start(live=True)
    backup = start(peer=f"127.0.0.1:{live.transport.port}", pair="bücher")
    until(lambda: "belongs to the pair 'orders', not 'bücher'" in backup.transport.problem)
    assert live.seen.events.empty()


def test_node_of_another_version_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    live = start(live=True)
    with monkeypatch.context() as patch:
        patch.setattr(GrpcTransport, "_metadata", lambda _: (("txnbuffer-pair-version", "2"),))
        backup = start(peer=f"127.0.0.1:{live.transport.port}")
        until(lambda: "version '2'" in backup.transport.problem)
    backup.seen.next("up")


def test_missing_peer_is_named(start: Start) -> None:
    backup = start(peer="127.0.0.1:1")
    until(lambda: "127.0.0.1:1" in backup.transport.problem)


def test_what_is_no_node_is_named(start: Start) -> None:
    with contextlib.closing(__import__("socket").create_server(("127.0.0.1", 0))) as server:
        backup = start(peer=f"127.0.0.1:{server.getsockname()[1]}", idle_timeout=SILENCE)
        until(lambda: "no service answers" in backup.transport.problem or "lost" in backup.transport.problem)


def test_address_in_use_is_named(start: Start) -> None:
    node = start()
    with pytest.raises(EnvironmentFault, match="another process uses the port"):
        start(listen=f"127.0.0.1:{node.transport.port}")


def test_files_that_can_not_be_used_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    files, other = tls(authority, "node"), tls(authority, "other")
    GrpcTransport(settings_of(**files)).close()
    for change, text in (
        ({"authority": "/missing"}, r"can't read /missing \(pair.tls_ca\): No such file"),
        ({"certificate": "/missing"}, r"can't read /missing \(pair.tls_cert\): No such file"),
        ({"key": "/missing"}, r"can't read /missing \(pair.tls_key\): No such file"),
        ({"key": other["key"]}, f"{other['key']} is not an unencrypted PEM private key of .* .pair.tls_key"),
    ):
        with pytest.raises(EnvironmentFault, match=text):
            GrpcTransport(settings_of(**files | change))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"listen": "0.0.0.0:7000"}, "without TLS"),
        ({"listen": "127.0.0.1:7000", "peer": "db2:7000"}, "without TLS"),
        ({"listen": "7000"}, "HOST:PORT"),
        ({"listen": ":7000"}, "HOST:PORT"),
        ({"peer": "db2"}, "HOST:PORT"),
        ({"listen": "127.0.0.1:7000", "peer": "127.0.0.1:7000"}, "where this member listens"),
        ({"certificate": "/c"}, "its key"),
        ({"authority": "/c", "key": "/k"}, "its key"),
    ],
)
def test_unsafe_or_wrong_addresses_are_refused(settings: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidAddress, match=text):
        GrpcTransport(settings_of(**settings))


def test_tls_allows_any_address() -> None:
    settings_of(listen="0.0.0.0:7000", peer="db2:7000", certificate="/c", key="/k", authority="/a").check()


def tls(authority: Authority, name: str, trusted: Authority | None = None) -> dict[str, str]:
    certificate, key = authority.sign(name)
    trust = (trusted or authority).trust
    return {"certificate": str(certificate), "key": str(key), "authority": str(trust)}


def test_link_with_certificates_of_one_authority(start: Start, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    live = start(live=True, **tls(authority, "live"))
    backup = start(peer=f"localhost:{live.transport.port}", **tls(authority, "backup"))
    backup.seen.next("up")
    live.seen.next("up")
    live.link.send(records(MIB))
    assert backup.seen.next("received")[1] == records(MIB)


def test_certificate_of_another_authority_is_refused_by_both(start: Start, tmp_path: Path) -> None:
    authority, other = Authority(tmp_path, "authority"), Authority(tmp_path, "other")
    live = start(live=True, **tls(authority, "live"))
    target = f"localhost:{live.transport.port}"
    distrusted = start(peer=target, **tls(other, "distrusted", authority))
    until(lambda: "may not accept the certificate of this member" in distrusted.transport.problem)
    assert target in distrusted.transport.problem
    distrusting = start(peer=target, **tls(authority, "distrusting", other))
    until(lambda: "certificate" in distrusting.transport.problem)
    plain = start(peer=f"127.0.0.1:{live.transport.port}")
    until(lambda: str(live.transport.port) in plain.transport.problem)
    time.sleep(0.5)
    assert live.seen.events.empty()


def test_certificate_for_another_name_is_refused_and_both_say_so(start: Start, tmp_path: Path) -> None:
    """An authority may sign certificates of other machines too."""
    authority = Authority(tmp_path, "authority")
    live = start(live=True, peer="db2:7713", **tls(authority, "live"))
    backup = start(peer=f"localhost:{live.transport.port}", **tls(authority, "backup"))
    text = "certificate of the calling member is for localhost, 127.0.0.1, not for 'db2'"
    until(lambda: text in backup.transport.problem)
    assert "pair.peer_name" in backup.transport.problem
    until(lambda: text in live.transport.problem)
    assert live.seen.events.empty()


def test_certificate_may_have_a_name_of_its_own(start: Start, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    live = start(live=True, peer="db2:7713", peer_name="localhost", **tls(authority, "live"))
    other = start(peer=f"127.0.0.1:{live.transport.port}", peer_name="db1", **tls(authority, "other"))
    until(lambda: "certificate" in other.transport.problem)
    backup = start(peer=f"127.0.0.1:{live.transport.port}", peer_name="localhost", **tls(authority, "backup"))
    backup.seen.next("up")


def test_name_in_a_certificate_may_have_a_wildcard() -> None:
    assert all(name_fits(*each) for each in (("db2.example", "DB2.example"), ("*.example", "db2.example")))
    others = ("*.example", "a.db2.example"), ("*.example", "example"), ("db2", "db"), ("*", "db2"), ("*.", "db2")
    assert not any(name_fits(*each) for each in others)


def test_certificates_are_read_again(start: Start, tmp_path: Path) -> None:
    authority, newer = Authority(tmp_path, "authority"), Authority(tmp_path, "newer")
    files = tls(authority, "live")
    live = start(live=True, **files)
    for name, path in tls(newer, "live2").items():
        Path(files[name]).write_bytes(Path(path).read_bytes())
    backup = start(peer=f"localhost:{live.transport.port}", **tls(newer, "backup"))
    backup.seen.next("up")


# --- bad connections


@pytest.fixture
def proxied(start: Start) -> Iterator[tuple[Node, Node, FaultProxy]]:
    live = start(live=True, idle_timeout=SILENCE)
    with FaultProxy(live.transport.port) as proxy:
        backup = start(peer=proxy.address, idle_timeout=SILENCE)
        backup.seen.next("up")
        live.seen.next("up")
        yield live, backup, proxy
        backup.transport.close()


def test_cut_connection_is_noticed_at_once_and_made_again(proxied: tuple[Node, Node, FaultProxy]) -> None:
    live, backup, proxy = proxied
    began = time.monotonic()
    proxy.cut()
    for side in (backup, live):
        assert side.seen.next("down")[1] != ""
    assert time.monotonic() - began < WAIT / 2
    time.sleep(0.5)
    assert backup.seen.events.empty()
    proxy.heal()
    backup.seen.next("up")
    live.seen.next("up")
    live.link.send(records(10))
    assert backup.seen.next("received")[1] == records(10)


@pytest.mark.parametrize("held", [{UP}, {DOWN}, {UP, DOWN}])
def test_silent_connection_is_broken(proxied: tuple[Node, Node, FaultProxy], held: set[str]) -> None:
    live, backup, proxy = proxied
    began = time.monotonic()
    proxy.held |= held
    sides = [live] * (UP in held) + [backup] * (DOWN in held)
    for side in sides:
        assert "nothing came" in side.seen.next("down")[1]
    assert time.monotonic() - began > SILENCE / 2
    proxy.cut(refuse=False)
    proxy.heal()
    backup.seen.until("up")


def test_idle_link_stays(proxied: tuple[Node, Node, FaultProxy]) -> None:
    live, backup, proxy = proxied
    passed = dict(proxy.passed)
    time.sleep(3 * SILENCE)
    assert live.seen.events.empty()
    assert backup.seen.events.empty()
    assert all(proxy.passed[each] > passed[each] for each in (UP, DOWN))


def test_node_that_stores_slowly_is_not_silent(proxied: tuple[Node, Node, FaultProxy]) -> None:
    live, backup, _ = proxied
    backup.seen.slow = threading.Event()
    live.link.send(records(10))
    time.sleep(2.5 * SILENCE)
    backup.seen.slow.set()
    assert backup.seen.next("received")[1] == records(10)
    assert live.seen.events.empty()


def test_delay_breaks_nothing(proxied: tuple[Node, Node, FaultProxy]) -> None:
    live, backup, proxy = proxied
    proxy.delay = 0.3
    for lsn in range(1, 5):
        live.link.send(records(1000, lsn))
    assert [backup.seen.next("received")[1].commit for _ in range(4)] == [1, 2, 3, 4]
    assert live.seen.events.empty()


@pytest.mark.parametrize(
    ("way", "size"), [("flip", 300), ("drop", 300), ("flip", 200_000), ("drop", 200_000), ("repeat", 200_000)]
)
def test_changed_bytes_break_the_link_and_never_arrive(
    proxied: tuple[Node, Node, FaultProxy], way: str, size: int
) -> None:
    """A whole frame that comes twice, which TCP prevents, would be a record that does not follow."""
    live, backup, proxy = proxied
    sent = records(size)

    def change(direction: str, data: bytes) -> bytes:
        if direction != DOWN or b"xxxx" not in data or changed:
            return data
        changed.append(1)
        at = data.index(b"xxxx")
        return {
            "flip": data[:at] + b"y" + data[at + 1 :],
            "repeat": data + data,
            "drop": data[:at] + data[at + 1 :],
        }[way]

    changed: list[int] = []
    proxy.change = change
    live.link.send(sent)
    number = backup.link.number
    found = []
    while (event := backup.seen.events.get(timeout=WAIT))[:2] != ("down", number):
        found.append(event)
    assert changed
    assert found in ([], [("received", number, sent)])
    backup.seen.next("up")
    live.seen.until("up")
    live.link.send(sent)
    assert backup.seen.next("received")[1] == sent


def test_link_whose_outbox_is_full_is_broken(
    proxied: tuple[Node, Node, FaultProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    live, backup, _ = proxied
    monkeypatch.setattr(link_module, "OUTBOX_BYTES", 40 * MIB)
    backup.seen.slow = threading.Event()
    for lsn in range(1, 100):
        live.link.send(records(MIB, lsn))
        if not live.seen.events.empty():
            break
        time.sleep(0.01)
    assert "took nothing" in live.seen.next("down")[1]
    assert 40 <= lsn < 99
    backup.seen.slow.set()


def test_what_was_sent_leaves_the_outbox(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "OUTBOX_BYTES", 2 * size_of(records(MIB)))
    live, backup = linked(start)
    for lsn in range(1, 30):
        live.link.send(records(MIB, lsn))
        backup.seen.next("received")


# --- copies


class Files(StoreCopy):
    """A copy of one large file; `failing` is the chunk that can't be read."""

    def __init__(self, chunks: int, size: int = MIB, failing: int = -1) -> None:
        self.chunks, self.size, self.failing = chunks, size, failing
        self.read = 0
        self.closed = 0

    @property
    def mark(self) -> Mark:
        return Mark(1, 5, 9)

    @property
    def forks(self) -> tuple[Fork, ...]:
        return ()

    def __iter__(self) -> Iterator[CopyChunk]:
        for at in range(self.chunks):
            if at == self.failing:
                raise DiskFailed("chunk can't be read")
            assert not self.closed
            self.read += 1
            data = bytes([at % 251]) * self.size
            yield CopyChunk("segment", at * self.size, data, google_crc32c.value(data))

    def close(self) -> None:
        self.closed += 1


BEGIN = m.CopyBegin(1, STORE, Mark(1, 5, 9), ())


def test_copy_arrives_in_order_between_messages(start: Start) -> None:
    live, backup = linked(start)
    files = Files(20)
    live.link.send(records(1, 1))
    live.link.send_copy(BEGIN, files)
    live.link.send(records(1, 2))
    assert backup.seen.next("received")[1] == records(1, 1)
    assert backup.seen.next("received")[1] == BEGIN
    for at, chunk in enumerate(Files(20)):
        assert backup.seen.next("chunk")[1] == chunk, at
    backup.seen.next("end")
    assert backup.seen.next("received")[1] == records(1, 2)
    until(lambda: files.closed == 1)
    assert files.closed == 1


def test_slow_receiver_bounds_the_memory_of_a_copy(start: Start) -> None:
    live, backup = linked(start)
    backup.seen.slow = threading.Event()
    files = Files(400)
    gc.collect()
    tracemalloc.start()
    live.link.send_copy(BEGIN, files)
    time.sleep(SILENCE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert files.read < 30
    assert peak < 40 * MIB
    backup.seen.slow.set()
    for _ in range(400):
        backup.seen.until("chunk")
    backup.seen.next("end")
    assert live.seen.events.empty()


def test_copy_is_closed_if_the_link_ends(start: Start) -> None:
    live, backup = linked(start)
    backup.seen.slow = threading.Event()
    files, waiting = Files(400), Files(1)
    live.link.send_copy(BEGIN, files)
    live.link.send_copy(BEGIN, waiting)
    until(lambda: files.read > 0)
    live.link.close()
    backup.seen.slow.set()
    until(lambda: files.closed + waiting.closed == 2)
    assert files.read < 400
    late = Files(1)
    live.seen.until("down")
    live.link.send_copy(BEGIN, late)
    until(lambda: late.closed == 1)


def test_copy_that_can_not_be_read_breaks_the_link(start: Start) -> None:
    live, backup = linked(start)
    files = Files(9, failing=4)
    live.link.send_copy(BEGIN, files)
    assert "chunk can't be read" in live.seen.next("down")[1]
    until(lambda: files.closed == 1)
    ended = backup.seen.until("down")
    assert ended[0] == backup.seen.links[0].number


# --- prepared files


def test_prepared_file_is_fetched_by_the_backup(start: Start) -> None:
    live, backup = linked(start)
    live.seen.files["7-1"] = bytes(range(256)) * 40_000
    content = b"".join([backup.transport.fetch("7-1", at, 3 * MIB) for at in range(0, 11 * MIB, 3 * MIB)])
    assert content == live.seen.files["7-1"]
    with pytest.raises(TopicNotFound, match="no file 8"):
        backup.transport.fetch("8", 0, 10)
    with pytest.raises(ServiceUnavailable, match="the disk is broken"):  # of the peer, not ours
        backup.transport.fetch("broken", 0, 10)


def no_fetch(node: Node) -> None:
    node.seen.until("down")
    until(lambda: node.transport._channel is None)
    with pytest.raises(ServiceUnavailable, match="no link"):
        node.transport.fetch("7", 0, 3)


def test_fetch_needs_a_link(start: Start) -> None:
    live, backup = linked(start)
    live.transport.close()
    no_fetch(backup)


def test_live_fetches_files_of_its_backup_over_a_connection_of_its_own(start: Start) -> None:
    live, backup = linked(start)
    backup.seen.files["7"] = b"abc"
    live.transport._settings = live.transport._settings._replace(peer=f"127.0.0.1:{backup.transport.port}")
    assert [live.transport.fetch("7", at, 1) for at in range(3)] == [b"a", b"b", b"c"]
    backup.transport.close()
    no_fetch(live)


def test_fetch_that_gets_no_answer_ends(proxied: tuple[Node, Node, FaultProxy]) -> None:
    live, backup, proxy = proxied
    live.seen.files["7"] = b"abc"
    assert backup.transport.fetch("7", 1, 9) == b"bc"
    proxy.held |= {UP, DOWN}
    with pytest.raises(ServiceUnavailable):
        backup.transport.fetch("7", 0, 3)


def test_threads_end_with_the_transports(start: Start) -> None:
    before = {each for each in threading.enumerate() if each.name.startswith("pair")}
    live, backup = linked(start)
    assert {each for each in threading.enumerate() if each.name.startswith("pair")} > before
    backup.transport.close()
    live.transport.close()
    live.transport.close()
    until(lambda: not {each for each in threading.enumerate() if each.name.startswith("pair")} - before)
    assert backup.seen.next("down")[1] == ""
    live.seen.next("down")


def test_closing_ends_an_attempt_to_connect(start: Start) -> None:
    live = start(live=True)
    with FaultProxy(live.transport.port) as proxy:
        proxy.held |= {DOWN}
        backup = start(peer=proxy.address, idle_timeout=WAIT)
        until(lambda: proxy.passed[UP] > 0)
        began = time.monotonic()
        backup.transport.close()
        assert time.monotonic() - began < WAIT / 2


def test_closing_while_connecting_ends(start: Start) -> None:
    for _, live in zip(range(3), itertools.cycle([True, False]), strict=False):
        other = start(live=live)
        backup = start(peer=f"127.0.0.1:{other.transport.port}")
        backup.transport.close()
        other.transport.close()
