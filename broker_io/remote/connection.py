"""The connection of a process to a log service: calls, and their failures as errors of the tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from broker_io.errors import ERROR_TRAILER, Closed, Error, InvalidAddress, PeerError, ServiceUnavailable
from broker_io.remote import messages
from broker_io.remote.messages import SERVICE, Reply, TopicRequest
from broker_io.waits import RetryPolicy

T = TypeVar("T")

OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
]
CALL_SECONDS = 60.0
"""Timeout of a request."""


class RemoteConnection:
    """A connection to a service; `retry` repeats idempotent calls for up to `max_unavailable` seconds."""

    def __init__(self, target: str, root_certificates: bytes | None, max_unavailable: float) -> None:
        self.target = target
        self.closed = False
        self._max_unavailable = max_unavailable
        if root_certificates is None:
            self._channel = grpc.insecure_channel(target, OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(root_certificates), OPTIONS)
        self._calls: dict[str, Any] = {}

    def check(self) -> None:
        if self.closed:
            raise Closed(f"the connection to {self.target} was closed in this process: open it again")

    def ask(self, method: str, topic: str = "", number: int = 0, *, slow: bool = False) -> Reply:
        """The reply to one request. Raises the error of the service, or ServiceUnavailable."""
        self.check()
        if method not in self._calls:
            self._calls[method] = self._channel.unary_unary(f"/{SERVICE}/{method}")
        request = messages.encode_request(TopicRequest(topic, number))
        try:
            return messages.decode_reply(self._calls[method](request, timeout=None if slow else CALL_SECONDS))
        except grpc.RpcError as error:
            raise self.to_error(error) from None

    def stream(self, method: str, requests: Any) -> Any:
        """The answers of a stream; `cancel` ends it."""
        return self._channel.stream_stream(f"/{SERVICE}/{method}")(requests)

    def retry(self, attempt: Callable[[], T]) -> T:
        policy = RetryPolicy(self._max_unavailable, self.check)
        return policy(f"the service at {self.target}", attempt)

    def to_error(self, error: Any) -> Error:
        """The error of the tree for a failed call."""
        if self.closed:
            return Closed(f"the connection to {self.target} was closed in this process: open it again")
        trailer = dict(error.trailing_metadata() or ()).get(ERROR_TRAILER)
        if trailer is not None:
            return messages.decode_error(trailer)
        if error.code() == grpc.StatusCode.UNIMPLEMENTED:
            return PeerError(f"the server at {self.target} serves no log: give the address of `txnbuf serve`")
        return ServiceUnavailable(f"no service answers at {self.target} ({error.details()}): is it running?")

    def close(self) -> None:
        self.closed = True
        self._channel.close()


def target_of(rest: str, address: str) -> str:
    """HOST:PORT of an address without its scheme. Raises InvalidAddress."""
    host, colon, port = rest.removeprefix("//").rpartition(":")
    valid = rest.startswith("//") and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if not valid or not host or any(char in host for char in "/?#@ ") or (":" in host) != host.startswith("["):
        raise InvalidAddress(f"{address!r} is not the address of a service: write txnbuf://HOST:PORT")
    return f"{host}:{port}"
