"""Access control over gRPC: who is refused, what each principal may do, and what happens when that changes."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from access_world import AccessedService, accessed
from certificates import self_signed
from commands import txnbuf
from service_setup import engine_on, eventually

from broker_io import open_broker
from broker_io.batch import Batch, Message
from broker_io.errors import NotAuthorized, ServiceUnavailable, TopicNotFound, Unauthenticated
from broker_io.memory import MemoryBroker
from txnbuffer import connect
from txnbuffer.access.authenticator import Authenticator
from txnbuffer.client.client import Client
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.errors import ForeignTransaction
from txnbuffer.service.door.tls import ServerTls, WatchedTls

ROW = Batch.of([Message(b"k", b"v")])


async def send(client: Client, topic: str) -> None:
    async with client.transaction() as txn:
        await txn.send(topic, b"v", key="k")


async def write_as(service: AccessedService, principal: str, topic: str) -> None:
    async with service.connect(principal) as client:
        await send(client, topic)


def read_as(service: AccessedService, principal: str, topic: str) -> int:
    with open_broker(service.address, token=service.tokens.text[principal]) as remote, \
            CommittedReader(remote, topic) as reader:  # fmt: skip
        batch = reader.read()
        return 0 if batch is None else len(batch)


async def test_clients_without_a_known_token_are_refused(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        for options in ({}, {"token": "txnb_000000000000_" + "0" * 64}, {"token": "a.b.c"}):
            with pytest.raises(Unauthenticated):
                await connect(service.address, **options)
            with pytest.raises(Unauthenticated):
                await asyncio.to_thread(open_broker, service.address, **options)
        assert len(service.denials()) >= 3
        assert service.access.denied["Unauthenticated"] >= 6
        assert "txnb_" not in str(service.log)
        await write_as(service, "writer", "a")


async def test_each_principal_does_what_its_roles_allow(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        await write_as(service, "writer", "a")
        await write_as(service, "root", "b")
        for principal in ("writer", "processor"):
            with pytest.raises(NotAuthorized, match=f"'{principal}' may not write topic 'b'"):
                await write_as(service, principal, "b")
        with pytest.raises(NotAuthorized, match="'processor' may not write topic 'a'"):
            await write_as(service, "processor", "a")
        for principal in ("reader", "operator"):
            with pytest.raises(NotAuthorized, match=f"'{principal}' may not begin transactions"):
                await write_as(service, principal, "a")
        for principal in ("reader", "processor", "root"):
            assert await asyncio.to_thread(read_as, service, principal, "a") == 1
        for principal in ("writer", "operator"):
            with pytest.raises(NotAuthorized, match=f"'{principal}' may not read topic 'a'"):
                await asyncio.to_thread(read_as, service, principal, "a")
        for principal in ("reader", "processor"):
            with pytest.raises(TopicNotFound, match="no topic 'b' to read"):
                await asyncio.to_thread(read_as, service, principal, "b")
        assert ("writer", "write", "topic 'b'") in service.denials()


async def test_names_of_producers_need_a_right(tmp_path: Path) -> None:
    async def write_named(client: Client, name: str) -> None:
        async with client.transaction(name=name, number=1) as txn:
            await txn.send("a", b"v")

    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        async with service.connect("writer") as client:
            await write_named(client, "w-1")
            with pytest.raises(NotAuthorized, match="'writer' may not use producer 'x'"):
                await write_named(client, "x")
            with pytest.raises(NotAuthorized, match="'writer' may not use producer 'x'"):
                await client.delete_name("x")
        for principal in ("reader", "processor"):
            async with service.connect(principal) as client:
                with pytest.raises(NotAuthorized, match="may not use producer 'w-1'"):
                    await write_named(client, "w-1")


async def test_streams_need_to_read_their_topic(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        await write_as(service, "root", "a")
        await write_as(service, "root", "b")
        async with service.connect("reader") as client:
            async with client.stream("a", to="now") as stream:
                assert sum([len(batch) async for batch in stream]) == 1
            with pytest.raises(NotAuthorized, match="'reader' may not read topic 'b'"):
                async with client.stream("b", to="now") as stream:
                    [batch async for batch in stream]


async def test_session_of_another_principal_can_not_be_continued(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        async with service.connect("root") as client, service.connect("writer") as other:
            await send(client, "a")
            other.session.core.session = client.session.core.session  # what an eavesdropper would know
            for connection in engine.connections:
                if connection.permissions.principal == "writer":
                    connection.close(ServiceUnavailable("connect again"))
            with pytest.raises(NotAuthorized, match="belongs to another principal"):
                await send(other, "a")
            await send(client, "a")
        assert ("writer", None, None) in service.denials()


async def test_revoked_token_ends_its_connections(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        await write_as(service, "root", "a")
        async with service.connect("writer") as client, service.connect("root") as root:
            await send(client, "a")
            service.tokens.revoke("writer")
            service.access.refresh()
            with pytest.raises(Unauthenticated, match=r"revoked"):
                await send(client, "a")
            await send(root, "a")


async def test_renewed_token_is_used_without_an_error(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        (path := tmp_path / "token").touch(0o600)
        path.write_text(service.tokens.text["writer"] + "\n")
        async with connect(service.address, token_file=str(path)) as client:
            await send(client, "a")
            old = service.tokens.text["writer"]
            service.tokens.revoke("writer")
            path.write_text(service.tokens.add("writer"))
            assert service.tokens.text["writer"] != old
            service.access.refresh()
            await send(client, "a")


async def test_expired_token_ends_its_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        service.tokens.add("writer", expires=int(time.time()) + 3600)
        service.access.refresh()
        async with service.connect("writer") as client:
            await send(client, "a")
            monkeypatch.setattr(Authenticator, "_now", lambda _: int(time.time()) + 3601)
            service.access.refresh()
            with pytest.raises(Unauthenticated, match="expired"):
                await send(client, "a")


async def test_changed_policy_counts_from_the_next_request_on(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        await write_as(service, "root", "a")
        async with service.connect("writer") as client:
            await send(client, "a")
            text = service.policy.read_text()
            service.policy.write_text(text.replace('topics = ["a*"]', 'topics = ["z*"]'))
            service.access.refresh()
            with pytest.raises(NotAuthorized, match="'writer' may not write topic 'a'"):
                await send(client, "a")
            service.policy.write_text("nonsense")
            service.access.refresh()
            with pytest.raises(NotAuthorized, match="'writer' may not write topic 'a'"):
                await send(client, "a")
            assert [str(error).partition(": ")[0] for error in service.access.problems] == [
                f"{service.policy} is not valid TOML"
            ]
            service.policy.write_text(text)
            service.access.refresh()
            assert service.access.problems == []
            await send(client, "a")


def change_in_place(path: Path, data: bytes) -> None:
    """Change a file as no time, size or name of it shows."""
    before = path.stat()
    assert len(data) == before.st_size
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


async def test_a_token_file_that_is_changed_in_place_with_its_old_time_is_read_again(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        async with service.connect("writer") as client:
            await send(client, "a")
        revoked = service.tokens.path.read_bytes().replace(b"writer", b"writes")
        change_in_place(service.tokens.path, revoked)
        service.access.refresh()
        with pytest.raises(NotAuthorized):
            await connect(service.address, token=service.tokens.text["writer"])


def test_certificates_that_are_changed_in_place_with_their_old_time_are_read_again(tmp_path: Path) -> None:
    certificate, key = map(Path, self_signed(tmp_path))
    tls = ServerTls(str(certificate), str(key))
    files, watched = tls.files.identity(), WatchedTls(tls)
    change_in_place(certificate, certificate.read_bytes().replace(b"BEGIN", b"begin"))
    assert tls.files.identity() != files  # which gRPC's handshakes compare
    assert not watched.refresh()
    assert "is not a PEM certificate" in str(watched.problem)


async def test_changed_policy_ends_streams_that_it_no_longer_allows(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        await write_as(service, "root", "a")
        async with service.connect("reader") as client, client.stream("a") as stream:
            while len(await anext(stream)) == 0:
                pass
            service.policy.write_text(service.policy.read_text().replace('topics = ["a*"]', 'topics = ["z*"]'))
            service.access.refresh()
            with pytest.raises(NotAuthorized, match="'reader' may not read topic 'a'"):
                await anext(stream)


async def test_internal_topics_are_for_operators_of_the_service(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        await write_as(service, "root", "a")
        await write_as(service, "root", "b")

        def topics(principal: str) -> list[str]:
            with open_broker(service.address, token=service.tokens.text[principal]) as remote:
                return remote.topics()

        assert await asyncio.to_thread(topics, "reader") == ["a"]
        assert {"a", "b", DECISIONS} < {*await asyncio.to_thread(topics, "root")}

        def ledgers(principal: str) -> None:
            with open_broker(service.address, token=service.tokens.text[principal]) as remote:
                remote.ledgers(DECISIONS)

        with pytest.raises(NotAuthorized, match="'operator' may not operate the service"):
            await asyncio.to_thread(ledgers, "operator")


async def test_admin_requests_need_their_role(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        await write_as(service, "root", "a")
        await write_as(service, "root", "b")

        async def command(principal: str, *words: str) -> Any:
            environment = {"TXNBUFFER_TOKEN": service.tokens.text[principal], "TXNBUFFER_ADDRESS": service.address}
            return await asyncio.to_thread(txnbuf, *words, environ=environment)

        assert (await command("operator", "describe", "a")).returncode == 0
        denied = await command("operator", "describe", "b")
        assert (denied.returncode, "'operator' may not read topic 'b'" in denied.stderr) == (2, True)
        assert "'operator' may not operate the service" in (await command("operator", "abort", "0:1")).stderr
        listed = await command("operator", "list", "--output", "json")
        assert '"a"' in listed.stdout
        assert '"b"' not in listed.stdout
        assert '"b"' in (await command("root", "list", "--output", "json")).stdout
        await eventually(lambda: service.access.denied["NotAuthorized"] >= 2)


JOB_POLICY = """
[[allow]]
principals = ["processor"]
roles = ["process"]
topics = ["in"]
groups = ["job"]

[[allow]]
principals = ["processor"]
roles = ["write"]
topics = ["out"]

[[allow]]
principals = ["root"]
roles = ["read", "write", "process", "operate"]
topics = ["*"]
groups = ["*"]
producers = ["*"]
"""


async def test_job_needs_to_process_its_input_and_to_write_its_output(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path, JOB_POLICY) as service:
        await write_as(service, "root", "in")

        async def handle(txn: Any, record: Any) -> None:
            await txn.send("out", record.value)

        async with service.connect("processor") as client:
            assert (await client.process("in", "job", handle, idle_timeout=0.5)).records == 1
            with pytest.raises(NotAuthorized, match="'processor' may not join group 'other'"):
                await client.process("in", "other", handle)
        assert await asyncio.to_thread(read_as, service, "root", "out") == 1


async def test_reader_moves_its_durable_cursor_with_the_right_to_its_name(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        await write_as(service, "root", "a")
        async with service.connect("processor") as client:
            async with client.stream("a", to="now", cursor="g-1") as stream:
                assert sum([len(batch) async for batch in stream]) == 1
            with pytest.raises(NotAuthorized):
                async with client.stream("a", to="now", cursor="x") as stream:
                    [batch async for batch in stream]


async def test_state_of_another_principals_transaction_is_not_shown(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        await write_as(service, "root", "a")
        async with service.connect("root") as root, service.connect("writer") as writer, root.transaction() as txn:
            await txn.send("a", b"v")
            with pytest.raises(ForeignTransaction, match="belongs to another principal"):
                await writer.outcome(txn.id)
            assert service.access.denied["ForeignTransaction"] == 1


async def test_principal_that_was_removed_from_the_policy_is_disconnected(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        await write_as(service, "root", "a")
        async with service.connect("writer") as client:
            await send(client, "a")
            service.policy.write_text(service.policy.read_text().replace('["writer"]', '["other"]'))
            service.access.refresh()
            with pytest.raises(NotAuthorized, match="no rule of the policy names 'writer'"):
                await send(client, "a")


async def test_long_names_are_cut_in_denials(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        async with service.connect("writer") as client:
            with pytest.raises(NotAuthorized) as raised:
                await client.send("b" * 350, b"v")
        assert len(str(raised.value)) < 250
        assert max(len(str(line)) for line in service.log) < 600


async def test_read_that_waits_delivers_nothing_after_revocation(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        await write_as(service, "root", "a")

        def wait_for_more() -> object:
            with (
                open_broker(service.address, token=service.tokens.text["reader"]) as remote,
                remote.reader("a") as reader,
            ):
                while reader.read(timeout=0.2) is not None:
                    pass
                reading.set()
                return reader.read(timeout=120.0)

        reading = threading.Event()
        waiting = asyncio.create_task(asyncio.to_thread(wait_for_more))
        await asyncio.to_thread(reading.wait, 120.0)
        await asyncio.sleep(0.5)
        service.tokens.revoke("reader")
        service.access.refresh()
        await write_as(service, "root", "a")
        with pytest.raises(Unauthenticated):
            await waiting
