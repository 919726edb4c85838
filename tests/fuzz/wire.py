"""Targets: messages of the wire protocol, of client and service, and what Pulsar's client library and admin interface
return."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import xxhash
from fuzz.mutations import seal_blocks
from fuzz.stored import golden, parted, to_message
from fuzz.target import Target
from google.protobuf.message import DecodeError

from broker_io.errors import (
    ClusterRefused,
    Damaged,
    InvalidAddress,
    MalformedMessage,
    NotAuthorized,
    ServiceUnavailable,
    StorageError,
    UnsupportedFormat,
)
from broker_io.filelog.pair.etcd_lock import EtcdAddress, EtcdLock
from broker_io.filelog.pair.link_frames import decode_frame
from broker_io.pulsar.admin import AdminClient
from broker_io.pulsar.ledgers import read_state
from broker_io.pulsar.messages import decode_messages, is_hole, properties_of
from broker_io.remote import messages as log_messages
from broker_io.rpc import channel, etcd_pb2, log_pb2
from broker_io.rpc.credential_files import certificate_end
from txnbuffer.errors import InvalidRequest, MalformedFrame
from txnbuffer.rpc.admin_encoding import decode_admin_answer, decode_admin_request, encode_admin_request
from txnbuffer.rpc.admin_pb2 import AdminAnswer
from txnbuffer.rpc.session_encoding import (
    _CLIENT_ROWS,
    client_frame_parts,
    decode_client_frame,
    decode_server_frame,
)
from txnbuffer.rpc.streams_encoding import decode_stream_client_frame, decode_stream_server_frame

ENCODING = "broker_io.rpc.encoding"
REMOTE = "broker_io.remote.messages"
SESSION = "txnbuffer.rpc.session_encoding"
STREAMS = "txnbuffer.rpc.streams_encoding"


def _requests() -> list[bytes]:
    arguments = [
        {},
        {"topic": "orders", "cursor": "backup", "at": "now"},
        {"txn": "0:17", "group": "g", "seconds": 1.5},
    ]
    return [encode_admin_request(each).SerializeToString() for each in arguments]


def _log_request(data: bytes) -> object:
    return log_messages.parse(log_pb2.TopicRequest, data)


class _FailedCall:
    """A failed gRPC call with these bytes as the trailer of the error."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def trailing_metadata(self) -> Any:
        return ((channel.ERROR_KEY, self._data),)

    def code(self) -> Any:
        import grpc

        return grpc.StatusCode.INTERNAL

    def details(self) -> str:
        return self._data.decode(errors="replace")


def _trailer(data: bytes) -> object:
    import grpc

    failed = type("Failed", (_FailedCall, grpc.RpcError), {})(data)
    return channel.error_of(failed, "localhost:1")


def _metadata(data: bytes) -> object:
    version, _, log = data.decode(errors="replace").partition("\n")
    return channel.rejection({channel.VERSION_KEY: version, channel.LOG_KEY: log}, "9f")


# --- Pulsar ---


class _PulsarMessage:
    """A message of Pulsar's client library with any bytes where it has text; it decodes them as the library does."""

    def __init__(self, data: bytes) -> None:
        message = to_message(data)
        self._message, self._data = message, data

    def partition_key(self) -> str:
        return (self._message.key or b"").decode()

    def properties(self) -> dict[str, str]:
        self._data.partition(b"\n\n")[0].decode()
        return dict(self._message.properties or {})

    def has_null_value(self) -> bool:
        return self._message.value is None

    def data(self) -> bytes:
        return self._message.value or b""

    def length(self) -> int:
        return len(self.data())

    def event_timestamp(self) -> int:
        return int.from_bytes(self._data[:8], "big")

    def int_schema_version(self) -> int:
        return int.from_bytes(self._data[8:16], "big", signed=True)

    def topic_name(self) -> str:
        return "orders"

    def message_id(self) -> Any:
        return type("Id", (), {"ledger_id": lambda _: 3, "entry_id": lambda _: 4})()


def _pulsar(data: bytes) -> None:
    messages = [*map(_PulsarMessage, parted(data))]
    if messages:
        properties = [*map(properties_of, messages)]
        list(decode_messages(messages, properties))
    for message in messages:
        with suppress(UnicodeDecodeError):
            is_hole(message)


def _pulsar_seeds() -> list[bytes]:
    from fuzz.stored import joined

    return [joined([b"k\na=b\n\nvalue", b"tb64:aGVsbG8=\na=b\n\n\0", b"\n\n"])]


STATS: dict[str, Any] = {
    "ledgers": [{"ledgerId": 3, "entries": 5, "size": 100}, {"ledgerId": 4, "entries": 0, "size": 0}],
    "currentLedgerEntries": 2,
    "currentLedgerSize": 50,
    "lastConfirmedEntry": "4:1",
    "cursors": {"txnbuffer": {"markDeletePosition": "3:-1"}},
}


def _client_frame_parts(data: bytes) -> None:
    """A frame in parts of few rows, which together have the rows of the whole."""
    whole = decode_client_frame(data)
    for most in (1, 3):
        parts = [*client_frame_parts(data, most)]
        rows = [{name: len(getattr(part, name)) for name in _CLIENT_ROWS} for part in parts]
        assert all(sum(each.values()) <= most for each in rows)
        for name in _CLIENT_ROWS:
            assert sum(each[name] for each in rows) == len(getattr(whole, name)), name
        assert (parts[0].hello, parts[-1].bye) == (whole.hello, whole.bye)


def _certificate(end: bytes) -> bytes:
    """The beginning of a certificate in DER, with the time at which it expires."""

    def sequence(content: bytes, tag: int = 0x30) -> bytes:
        return bytes((tag, 0x82)) + len(content).to_bytes(2) + content

    version, serial, start = b"\xa0\x03\x02\x01\x02", b"\x02\x01\x07", b"\x17\x0d251231235959Z"
    return sequence(sequence(version + serial + sequence(b"") * 2 + sequence(start + end)))


def _admin_answer(data: bytes) -> object:
    """An answer of Pulsar's admin interface: its status in two bytes, then its content."""
    client = SimpleNamespace(url="http://localhost:8080")
    status = 200 + int.from_bytes(data[:2], "big") % 400
    return AdminClient._checked_answer(client, "GET", "persistent/t/n/orders", status, data[2:])  # type: ignore[arg-type]  # it has all that is used


def _stats(data: bytes) -> object:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return read_state(value)


def _bytes_of(name: str) -> Callable[[], list[bytes]]:
    return golden(f"log_service/{name}.bin")


def _etcd_answer(data: bytes) -> object:
    """An answer of etcd to a read of everything that a lock has there."""
    lock = EtcdLock(EtcdAddress.parse("etcd://localhost:1/pair"))
    with suppress(DecodeError):  # the lock handles it for all answers
        return lock._seen(0, etcd_pb2.RangeResponse.FromString(data).kvs)
    return None


def _etcd_answers() -> list[bytes]:
    pairs = [
        {"key": b"pair/record", "value": golden("pair/lock-record.json")()[0], "mod_revision": 7},
        {"key": b"pair/session/0a0b", "value": b"12", "mod_revision": 8},
    ]
    return [etcd_pb2.RangeResponse(kvs=pairs).SerializeToString()]


def _seal_frame(data: bytes) -> bytes:
    """The frame of a link with a right checksum."""
    return data[:1] + xxhash.xxh3_64_intdigest(data[9:]).to_bytes(8, "little") + data[9:]


WIRE = (
    Target(
        "link-frame",
        decode_frame,
        tuple(
            f"broker_io.filelog.pair.link_frames.{name}"
            for name in (
                "decode_frame",
                "_checked",
                "_decode_records",
                "_decode_rewrite_done",
                "_decode_copy_chunk",
            )
        ),
        (MalformedMessage,),
        golden("pair/frame-*.bin"),
        _seal_frame,
    ),
    Target(
        "etcd-answer",
        _etcd_answer,
        ("broker_io.filelog.pair.etcd_lock.EtcdLock._decode_session",),
        (StorageError,),
        _etcd_answers,
    ),
    Target(
        "client-frame",
        decode_client_frame,
        (f"{SESSION}.decode_client_frame", f"{ENCODING}.split_blocks", f"{ENCODING}.decode_block", f"{ENCODING}.parse"),
        (MalformedFrame, UnsupportedFormat),
        golden("session/client-*.bin"),
        seal_blocks,
    ),
    Target(
        "client-frame-parts",
        _client_frame_parts,
        (f"{SESSION}.client_frame_parts",),
        (MalformedFrame, UnsupportedFormat),
        golden("session/client-*.bin"),
        seal_blocks,
    ),
    Target(
        "client-certificate",
        lambda data: certificate_end.__wrapped__(ssl.DER_cert_to_PEM_cert(data).encode()),
        ("broker_io.rpc.credential_files.certificate_end",),
        (),
        lambda: [_certificate(b"\x17\x0d301231235959Z"), _certificate(b"\x18\x0f20801231235959Z")],
    ),
    Target(
        "server-frame",
        decode_server_frame,
        (f"{SESSION}.decode_server_frame", f"{SESSION}.decode_error"),
        (MalformedFrame,),
        golden("session/server-*.bin"),
    ),
    Target(
        "stream-client-frame",
        decode_stream_client_frame,
        (f"{STREAMS}.decode_stream_client_frame",),
        (MalformedFrame,),
        golden("streams/client-*.bin"),
    ),
    Target(
        "stream-server-frame",
        decode_stream_server_frame,
        (f"{STREAMS}.decode_stream_server_frame", f"{STREAMS}._read_column"),
        (MalformedFrame, UnsupportedFormat),
        golden("streams/server-*.bin"),
        seal_blocks,
    ),
    Target(
        "admin-request",
        decode_admin_request,
        ("txnbuffer.rpc.admin_encoding.decode_admin_request",),
        (InvalidRequest,),
        _requests,
    ),
    Target(
        "admin-answer",
        decode_admin_answer,
        ("txnbuffer.rpc.admin_encoding.decode_admin_answer",),
        (MalformedFrame,),
        lambda: [AdminAnswer(json='{"a":[1]}').SerializeToString()],
    ),
    Target("log-request", _log_request, (f"{REMOTE}.parse",), (MalformedMessage,), _bytes_of("request")),
    Target(
        "log-open-writer",
        log_messages.decode_open_writer,
        (f"{REMOTE}.decode_open_writer",),
        (MalformedMessage,),
        _bytes_of("open-writer"),
    ),
    Target(
        "log-appends",
        log_messages.decode_appends,
        (f"{REMOTE}.decode_appends",),
        (MalformedMessage, UnsupportedFormat),
        _bytes_of("appends"),
        seal_blocks,
    ),
    Target(
        "log-appended",
        lambda data: log_messages.decode_appended(data, 1000),
        (f"{REMOTE}.decode_appended", f"{REMOTE}.decode_runs", f"{REMOTE}.decode_error"),
        (MalformedMessage,),
        _bytes_of("appended*"),
    ),
    Target(
        "log-open-reader",
        log_messages.decode_open_reader,
        (f"{REMOTE}.decode_open_reader", f"{REMOTE}.decode_position"),
        (MalformedMessage,),
        _bytes_of("open-reader"),
    ),
    Target(
        "log-opened", log_messages.decode_opened, (f"{REMOTE}.decode_opened",), (MalformedMessage,), _bytes_of("opened")
    ),
    Target("log-ask", log_messages.decode_ask, (f"{REMOTE}.decode_ask",), (MalformedMessage,), _bytes_of("ask")),
    Target(
        "log-answer",
        log_messages.decode_answer,
        (f"{REMOTE}.decode_answer",),
        (MalformedMessage, UnsupportedFormat),
        _bytes_of("answer*"),
        seal_blocks,
    ),
    Target(
        "error-trailer",
        _trailer,
        ("broker_io.rpc.channel.error_of", f"{ENCODING}.decode_error"),
        (),
        _bytes_of("error"),
    ),
    Target("call-metadata", _metadata, ("broker_io.rpc.channel.rejection",), (), lambda: [b"3\n9f", b"2\n", b"\n8e"]),
    Target(
        "pulsar-admin",
        _admin_answer,
        ("broker_io.pulsar.admin.AdminClient._checked_answer", "broker_io.pulsar.admin._reason"),
        (ClusterRefused, InvalidAddress, NotAuthorized, ServiceUnavailable),
        lambda: [b"\0\0" + json.dumps(STATS).encode(), b"\0\xcc" + b'{"reason":"Topic not found"}', b"\0\0<html>"],
    ),
    Target(
        "pulsar-ledgers",
        _stats,
        ("broker_io.pulsar.ledgers.read_state",),
        (ClusterRefused,),
        lambda: [json.dumps(STATS).encode()],
    ),
    Target(
        "pulsar-messages",
        _pulsar,
        ("broker_io.pulsar.messages.decode_messages", "broker_io.partitions.key_of_text"),
        (Damaged,),
        _pulsar_seeds,
    ),
)
