"""A session of raw frames, for tests that send the service frames that no client sends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from broker_io.batch import Batch, Blobs, Labels, Numbers
from txnbuffer.coordinator.messages import Commit, Leased
from txnbuffer.model import TxnId
from txnbuffer.rpc.frames import (
    ClientFrame,
    Failure,
    LeaseRequest,
    NamedRequest,
    Send,
    ServerFrame,
    SessionHello,
    Welcome,
)


def transactional(ids: Sequence[int], value: bytes = b"v", seq: int = 1, size: int = 1, most: int = 0) -> Batch:
    """A batch of `size` consecutive records of each transaction."""
    count = len(ids) * size
    texts = [f"{most}:{one}" for one in ids]
    return Batch(
        Blobs.of([b"%d" % one for one in ids for _ in range(size)]),
        Blobs.of([value] * count),
        {
            "tb.v": Labels.constant("1", count),
            "tb.txn": Labels(np.repeat(np.arange(len(ids), dtype=np.int32), size), tuple(texts)),
            "tb.seq": Numbers(np.tile(np.arange(seq, seq + size, dtype=np.int64), len(ids))),
        },
    )


class RawSession:
    """`link` has `send(frame)` and `async receive() -> ServerFrame | None`. Answers are stored by request number."""

    def __init__(self, link: Any) -> None:
        self.link = link
        self.session = ""
        self.welcome: Welcome | None = None
        self.answers: dict[int, Any] = {}
        self.failures: list[Failure] = []
        self.acknowledged = 0
        self.sent = 0
        self.request = 0
        self.goodbye: Any = None
        self.draining = False
        self.closed = False
        self.credits = 0

    async def hello(self, session: str = "", claims: Sequence[TxnId] = ()) -> Welcome:
        self.link.send(ClientFrame(hello=SessionHello(session, tuple(claims))))
        await self.until(lambda: self.welcome is not None)
        assert self.welcome is not None
        self.session = self.welcome.session
        return self.welcome

    async def lease(self, count: int) -> range:
        leased = await self.ask(leases=lambda request: (LeaseRequest(request, count),))
        assert isinstance(leased, Leased), leased
        return range(leased.first, leased.first + leased.size)

    async def register(self, *topics: str) -> None:
        for topic in topics:
            answer = await self.ask(registers=lambda request, topic=topic: (NamedRequest(request, topic),))
            if isinstance(answer, Exception):
                raise answer

    async def ask(self, **parts: Any) -> Any:
        """Send one request; `parts` are functions of the request number. Returns the answer."""
        self.request += 1
        request = self.request
        self.link.send(ClientFrame(**{name: make(request) for name, make in parts.items()}))
        await self.until(lambda: request in self.answers)
        return self.answers.pop(request)

    def send(self, *sends: tuple[str, Batch]) -> int:
        """Send records; the number of the last send."""
        self.link.send(ClientFrame(sends=tuple(Send(topic, batch) for topic, batch in sends)))
        self.sent += len(sends)
        return self.sent

    async def write(self, *sends: tuple[str, Batch]) -> list[Failure]:
        """Send records and wait until all are acknowledged or failed; the failures."""
        number = self.send(*sends)
        await self.until(lambda: self.acknowledged >= number)
        failures, self.failures = self.failures, []
        return failures

    async def commit(self, least: int, topics: Sequence[str], records: Sequence[int]) -> Any:
        return await self.ask(
            commits=lambda request: (Commit(request, TxnId(0, least), tuple(topics), tuple(records)),)
        )

    async def until(self, reached: Any, seconds: float = 120.0) -> None:
        async with asyncio.timeout(seconds):
            while not reached():
                if not await self.step():
                    raise EOFError(f"the connection ended: {self.goodbye}")

    async def step(self) -> bool:
        frame: ServerFrame | None = await self.link.receive()
        if frame is None:
            self.closed = True
            return False
        self.welcome = frame.welcome or self.welcome
        self.acknowledged = max(self.acknowledged, frame.acknowledged)
        self.failures += frame.failures
        self.answers.update(frame.answers)
        self.draining |= frame.draining
        self.goodbye = frame.goodbye or self.goodbye
        self.credits = self.credits if frame.credits is None else frame.credits
        return True


_links: WeakKeyDictionary[Any, list[InProcess]] = WeakKeyDictionary()


async def stop(engine: Any) -> None:
    """Stop an engine. It waits a second for each link in process whose last frames nobody receives, so take them."""
    last = [asyncio.create_task(link.take_last()) for link in _links.pop(engine, ())]
    await engine.stop()
    for task in last:
        task.cancel()
    await asyncio.gather(*last, return_exceptions=True)


class InProcess:
    """A link to an engine on this loop. The options are those of `Engine.connect`."""

    def __init__(self, engine: Any, **options: Any) -> None:
        self.connection = engine.connect(**options)
        self._last: list[ServerFrame] = []
        _links.setdefault(engine, []).append(self)

    def send(self, frame: ClientFrame) -> None:
        self.connection.receive(frame)

    async def receive(self) -> ServerFrame | None:
        return self._last.pop(0) if self._last else await self.connection.next()

    async def take_last(self) -> None:
        """Take the frames up to the end, for whoever receives them later."""
        while (frame := await self.connection.next()) is not None:
            self._last.append(frame)

    async def cut(self) -> None:
        self.connection.lost()


class OverGrpc:
    """A link over gRPC; `send_bytes` sends arbitrary bytes."""

    def __init__(self, port: int, metadata: Any = None) -> None:
        import grpc

        from broker_io.rpc.channel import VERSION_METADATA
        from txnbuffer.rpc.session_encoding import SESSION

        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
        self.call = self.channel.stream_stream(SESSION.path)(
            metadata=VERSION_METADATA if metadata is None else metadata
        )
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue()
        self._sender = asyncio.ensure_future(self._send_for_ever())

    def send(self, frame: ClientFrame) -> None:
        from txnbuffer.rpc.session_encoding import encode_client_frame

        self.send_bytes(encode_client_frame(frame))

    def send_bytes(self, data: bytes) -> None:
        self._waiting.put_nowait(data)

    async def receive(self) -> ServerFrame | None:
        import grpc

        from txnbuffer.rpc.session_encoding import decode_server_frame

        try:
            data = await self.call.read()
        except grpc.aio.AioRpcError as error:
            self.status = error
            return None
        return None if data is grpc.aio.EOF else decode_server_frame(data)

    async def cut(self) -> None:
        self._sender.cancel()
        self.call.cancel()
        await self.channel.close()

    async def _send_for_ever(self) -> None:
        while True:
            await self.call.write(await self._waiting.get())
