"""The log of a running service for other processes: `txnbuf://HOST:PORT` as a broker.

All topics can be read. The service's own topics, and those that sessions have written to, belong to the engine,
which alone may append to them, trim and delete them; any other topic can be written to beside it.
"""

from __future__ import annotations

from typing import Any

from broker_io import serve_broker
from broker_io.errors import ProtectedTopic
from snapshots.keys import is_internal
from txnbuffer.service.engine import Engine


def log_service(engine: Engine) -> Any:
    """The log service of an engine's broker; the caller adds its handler to a grpc.aio server, and closes it."""
    limits = engine.limits

    def guard(topic: str, change: str) -> None:
        check_change(engine.topics.by_name, topic, change)

    return serve_broker(
        engine.broker,
        guard=guard,
        max_message_bytes=limits.max_message_bytes,
        max_append_bytes=limits.max_message_bytes + limits.client_bytes,
    )


def check_change(owned: dict[str, Any], topic: str, change: str) -> None:
    """Raises ProtectedTopic for a change that would take a topic from the engine."""
    if is_internal(topic):
        raise ProtectedTopic(f"topic {topic!r} is the service's own: it can be read, and changed by the service alone")
    if change == "create":
        return
    if change == "own":
        raise ProtectedTopic(
            f"topic {topic!r} can't have an exclusive writer beside the service that owns the log: open a shared one"
        )
    if topic in owned:
        raise ProtectedTopic(f"sessions write to topic {topic!r}, so it belongs to the service: send in a session")
