"""A running service over gRPC: garbage, changed frames in any state and huge counts end only their own call."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from frame_rows import field
from fuzz.inventory import TARGETS
from fuzz.mutations import changed
from fuzz.stored import parted
from raw_session import OverGrpc, RawSession, transactional
from service_setup import starting_service

from broker_io.remote.messages import SERVICE
from broker_io.rpc import encoding
from broker_io.rpc.channel import VERSION_METADATA, error_of
from txnbuffer.errors import Error, MalformedFrame
from txnbuffer.model import Outcome
from txnbuffer.rpc.admin_encoding import ADMIN_PATH
from txnbuffer.rpc.session_encoding import SESSION, decode_client_frame
from txnbuffer.rpc.streams_encoding import STREAMS, decode_stream_client_frame
from txnbuffer.service.door.needs import ADMIN_REQUESTS

ROUNDS = 40
PATHS = {
    SESSION.path: ("session-states",),
    STREAMS.path: ("stream-states",),
    f"/{SERVICE}/Append": ("log-open-writer", "log-appends", "log-appends"),
    f"/{SERVICE}/Read": ("log-open-reader", "log-ask", "log-ask"),
}
"""The methods with streams, and the targets whose inputs are sent in this order."""
LOG_METHODS = (
    "Hello",
    "Topics",
    "Incarnation",
    "Ledgers",
    "Compaction",
    "PositionAt",
    "CreateTopic",
    "Trim",
    "Compact",
)


class Bystander:
    """A session of another client, which commits a transaction after each attack."""

    def __init__(self, port: int) -> None:
        self.link = OverGrpc(port)
        self.session = RawSession(self.link)
        self.ids = iter(range(0))

    async def open(self) -> None:
        await self.session.hello()
        await self.session.register("orders")
        self.ids = iter(await self.session.lease(2 * ROUNDS))

    async def commits(self) -> None:
        least = next(self.ids)
        await self.session.write(("orders", transactional([least])))
        assert await self.session.commit(least, ["orders"], [1]) is Outcome.COMMIT


@asynccontextmanager
async def attacked() -> AsyncIterator[tuple[Any, Bystander]]:
    """A channel to a service, and the session of another client."""
    async with starting_service() as (address, admit):
        await admit()
        port = int(address.rpartition(":")[2])
        bystander = Bystander(port)
        await bystander.open()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel, bystander
            await bystander.commits()
        await bystander.link.cut()


async def talk(channel: Any, path: str, frames: Sequence[bytes]) -> Error | None:
    """Send frames on a call of its own, end it, and return its error."""
    call = channel.stream_stream(path)(metadata=VERSION_METADATA, timeout=120)
    try:
        for frame in frames:
            await call.write(frame)
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return known(error)
    except grpc.aio.UsageError:  # the service has ended the call
        return None
    return None


def known(error: grpc.aio.AioRpcError) -> Error:
    """The error that the service has sent; gRPC says UNKNOWN if a handler raised anything else."""
    assert error.code() is not grpc.StatusCode.UNKNOWN, error.details()
    assert error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED, "the service did not end the call"
    return error_of(error, "the service", connected=True)


@pytest.mark.parametrize("path", PATHS)
async def test_streams_in_any_state(path: str) -> None:
    choose = random.Random(path)
    seeds = [seed for name in PATHS[path] for seed in TARGETS[name].seeds()]
    async with attacked() as (channel, bystander):
        for _ in range(ROUNDS):
            if PATHS[path][0].endswith("states"):
                frames = parted(changed(choose, choose.choice(seeds), seeds))
            else:
                frames = [seed if choose.random() < 0.6 else changed(choose, seed, seeds) for seed in seeds]
            await talk(channel, path, frames[:50])
            await bystander.commits()


async def test_requests_of_any_bytes() -> None:
    choose = random.Random(1)
    paths = [
        *(f"{ADMIN_PATH}/{name}" for name in ADMIN_REQUESTS),
        *(f"/{SERVICE}/{name}" for name in LOG_METHODS),
    ]
    seeds = [*TARGETS["admin-request"].seeds(), *TARGETS["log-request"].seeds()]
    async with attacked() as (channel, bystander):
        for _ in range(ROUNDS):
            for path in paths:
                try:
                    data = changed(choose, choose.choice(seeds), seeds)[:10_000]
                    await channel.unary_unary(path)(data, metadata=VERSION_METADATA, timeout=120)
                except grpc.aio.AioRpcError as error:
                    known(error)
            await bystander.commits()


async def test_metadata_of_any_text() -> None:
    async with attacked() as (channel, _):
        for version in ("", "-1", "9" * 5000, "3 ", "three", "2"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"{ADMIN_PATH}/Status")(b"", metadata=(("txnbuffer-version", version),))
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_rows_of_two_bytes_are_refused_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame within the size limit of a service could otherwise cost a hundred times its size, and a minute."""
    most = 20_000
    monkeypatch.setattr(encoding, "MAX_ROWS", most)
    for number in (2, 3, 8, 10, 12, 15):
        with pytest.raises(MalformedFrame, match="rows"):
            decode_client_frame(bytes([number << 3 | 2, 0]) * (most + 1))
    many = b"\x12\x00" * (most + 1)
    rows_in_rows = {
        "open transactions": field(1, many),
        "records of a commit": field(10, field(5, b"\1" * (2 * most + 2))),
        "records of a commit, each in a field": field(10, b"\x28\1" * (most + 1)),
        "branches of a commit": field(10, field(7, many)),
        "topics of a group": field(7, bytes([4 << 3 | 2, 0]) * (most + 1)),
    }
    for what, frame in rows_in_rows.items():
        with pytest.raises(MalformedFrame, match="rows"):
            decode_client_frame(frame)
            pytest.fail(what)
    with pytest.raises(MalformedFrame, match="rows"):
        decode_stream_client_frame(b"\x0a\x02\x2a\x00" * (most // 2 + 1))
    for single in (b"\x70\x00", b"\x98\x06\x00"):  # a number that a frame has once, an unknown one
        for decode in (decode_client_frame, decode_stream_client_frame):
            with pytest.raises(MalformedFrame, match="repeat fields that a message has once"):
                decode(single * (2 * most + 1))
    assert len(decode_client_frame(b"\x12\x00" * most).registers) == most
    assert len(decode_stream_client_frame(b"\x0a\x02\x2a\x00" * (most // 2))) == most // 2
