"""Telling a topic that has lost its snapshot from one that never had transactions, or was made anew."""

from __future__ import annotations

from broker_io.errors import TopicNotFound
from broker_io.port import Broker
from txnbuffer.columns import any_transactional

LOST = "its log holds transactions, so it had one"


def holds_transactions(broker: Broker, topic: str) -> bool:
    """Whether a log that has no snapshot holds a message of a transaction; then it had one. Raises as a reader does."""
    try:
        with broker.reader(topic) as reader:
            while (placed := reader.read()) is not None:
                if any_transactional(placed.messages):
                    return True
    except TopicNotFound:
        pass
    return False


def was_deleted(topic: str) -> TopicNotFound:
    """Why a topic that is there is not the one that is asked for."""
    return TopicNotFound(f"topic {topic!r} was deleted; one that was made anew has to be registered")
