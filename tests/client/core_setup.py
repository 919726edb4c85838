"""Session cores for tests: connected, with leased ids, with an open transaction; and routes for clients."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from txnbuffer.client.path.record_path import OpenTransaction, RecordPath, ServicePath
from txnbuffer.client.path.send_columns import SendColumns
from txnbuffer.client.session.session_core import SessionCore
from txnbuffer.coordinator.messages import Done, Leased
from txnbuffer.rpc.frames import ClientFrame, ServerFrame, Welcome


def rows(*values: bytes) -> SendColumns:
    return SendColumns([b"k"] * len(values), list(values), None, None, sum(map(len, values)) + len(values))


def routes_with(groups: Callable[..., Awaitable[Any]]) -> Any:
    """Routes that call `groups` for each chunk of records of a topic, which they know already."""
    return SimpleNamespace(known=lambda topic, partition: True, groups=groups)


def taken(core: SessionCore) -> ClientFrame:
    """The next frame; there must be one."""
    frame = core.take_frame()
    assert frame is not None
    return frame


def welcomed(ids: int = 64, path: RecordPath | None = None) -> SessionCore:
    """A core that is connected and has leased ids."""
    core = SessionCore(path or ServicePath())
    core.hello()
    core.receive(ServerFrame(welcome=Welcome("s", 0, 1, 1000), credits=10_000))
    core.receive(ServerFrame(answers=((taken(core).leases[0].request, Leased(1, ids)),)))
    core.take_frame()
    return core


def register(core: SessionCore, frame: ClientFrame) -> None:
    """Answer the registrations of a frame."""
    core.receive(ServerFrame(answers=tuple((request, Done()) for request, _ in frame.registers)))


def registered(core: SessionCore, topic: str = "a") -> OpenTransaction:
    """A transaction with one record that was sent early."""
    transaction = core.begin()
    core.send(topic, rows(b"v"), transaction)
    core.transactions.send_all_early()
    frame = taken(core)
    assert frame.sends == ()
    register(core, frame)
    assert [send.topic for send in taken(core).sends] == [topic]
    return transaction
