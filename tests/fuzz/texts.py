"""Targets: texts and JSON: configuration, tokens, offsets, addresses, positions and other arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click
from fuzz.stored import golden
from fuzz.target import Target
from joserfc.jwk import ECKey

from broker_io import check_address
from broker_io.addresses import is_target
from broker_io.environment import Environment, use
from broker_io.errors import InvalidAddress
from broker_io.filelog.pair.etcd_lock import EtcdAddress
from broker_io.key_digest import KeyDigest
from broker_io.partitions import partition_of
from broker_io.position import Position
from broker_io.pulsar.cluster import from_local_name, to_local_name
from broker_io.testing import SeededRandomness, SimulatedClock, SimulatedDisk
from txnbuffer.access.jwt import Verifier
from txnbuffer.access.policy import parse_policy as parse_access_policy
from txnbuffer.access.tokens import TokenFile, issue, parse_tokens
from txnbuffer.cli.compact import parse_policy
from txnbuffer.cli.options import parse_txn
from txnbuffer.cli.produce import _send
from txnbuffer.cli.tail import parse_start
from txnbuffer.client.serializers import AvroSerializer, JsonSerializer
from txnbuffer.client.streams.tokens import FileTokens
from txnbuffer.config import load_config
from txnbuffer.coordinator.decisions import decode_owner_address
from txnbuffer.errors import (
    InvalidConfiguration,
    InvalidPolicy,
    InvalidRequest,
    InvalidTokenFile,
    RelayTargetTaken,
    Unauthenticated,
    UnreadableToken,
)
from txnbuffer.model import TxnId
from txnbuffer.pipeline.exports import ExportRun, UnreadableExport
from txnbuffer.pipeline.offsets import Offset
from txnbuffer.pipeline.options import reading_options
from txnbuffer.recovery.audit import LogDigest
from txnbuffer.rpc.admin_encoding import decode_admin_body
from txnbuffer.service.door.http_guard import page_refusal
from txnbuffer.service.servers.admin import _cursor_position
from txnbuffer.service.servers.grpc_server import check_listening
from txnbuffer.sinks.relay_targets import RelayMark
from txnbuffer.streams.failover import ResumeToken

PATH = "/config.toml"


def _on_disk(data: bytes, call: Callable[[], object]) -> None:
    """Call a function in an environment whose disk has this one file."""
    disk = SimulatedDisk()
    file = disk.open(PATH, write=True, create=True)
    file.write(0, [data])
    file.close()
    with use(Environment(SimulatedClock(), disk, SeededRandomness(1))):
        call()


def _text(call: Callable[[str], object]) -> Callable[[bytes], object]:
    """A decoder of text for bytes; those that are not UTF-8 become surrogates, as in arguments of a command."""
    return lambda data: call(data.decode(errors="surrogateescape"))


def _replaced(call: Callable[[str], object]) -> Callable[[bytes], object]:
    """The same for text that was UTF-8: of a message, or of metadata."""
    return lambda data: call(data.decode(errors="replace"))


def _settings(text: str) -> None:
    """Environment variables and flags: lines NAME=VALUE, SECTION.KEY=VALUE."""
    environ = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and line.startswith("TXN"))
    load_config(None, environ, [line for line in text.splitlines() if not line.startswith("TXN")])


def _json(call: Callable[[Any], object]) -> Callable[[bytes], object]:
    """A decoder of what a JSON library has decoded already."""

    def decode(data: bytes) -> object:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return call(value)

    return decode


def _options(text: str) -> None:
    given = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    reading_options("file:/data", ("orders",), None, given)


def _mark(data: bytes) -> None:
    properties = dict(line.split("=", 1) for line in data.decode(errors="replace").splitlines() if "=" in line)
    RelayMark.of("target", properties)


class _Txn:
    """A transaction that takes anything."""

    def send(self, *_: Any, **__: Any) -> None: ...
    def delete(self, *_: Any, **__: Any) -> None: ...


def _line(data: bytes) -> None:
    for as_json, separator in ((False, None), (True, None)):
        _send(_Txn(), "orders", data, 1, as_json, separator)  # type: ignore[arg-type]  # it takes anything


POLICY = b"""
[[allow]]
principals = ["orders", "team-*"]
roles = ["write"]
topics = ["orders-*"]
producers = ["*"]
[[limit]]
principals = ["team-*"]
sessions = 5
"""
_KEY = ECKey.import_key({
    "kty": "EC", "crv": "P-256", "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU",
    "y": "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0", "d": "jpsQnnGQmL-YBIffH1136cspYG6-0iY7X1fCE9-E9LI",
})  # fmt: skip
"""The key of an example of RFC 7515."""
VERIFIER = Verifier(_KEY.as_pem(private=False), "key.pem")
SIGNED = (
    b"eyJ0eXAiOiJKV1QiLCJhbGciOiJFUzI1NiJ9.eyJzdWIiOiJvcmRlcnMiLCJleHAiOjE3NjQwMDAxMDB9."
    b"FOxqgPZkcyIhtuTkqg33ExlpmyTRtA_pWmeWTY2xyhFET1zmrzQxXRxetE_R3x766YppmvtmcH-GRL98t9PzMQ"
)
"""A token signed with that key for `orders`, until 1,764,000,100; each signature by such a key is another one."""

CONFIGURATION = b"""
default_profile = "p"
address = "file:/log"
[profiles.p]
address = "txnbuf://127.0.0.1:7711"
token_file = "/token"
[profiles.p.pulsar]
token = "text"
[log]
segment_bytes = 67108864
compression = "zstd"
[service]
listen = "127.0.0.1:7711"
standby = true
[transactions]
timeout = 60.0
max_open = 1_000_000
[pulsar]
token = "t"
"""
TOKENS = b'{"orders":"token","users":""}'
AVRO = {
    "type": "record",
    "name": "R",
    "fields": [{"name": "a", "type": "long"}, {"name": "b", "type": {"type": "array", "items": "string"}}],
}
TIMES = [b"beginning", b"end", b"3:17", b"3:17:2", b"2026-01-02T03:04:05+00:00"]
DIGEST = b"0000000000000007b34623adbc37b77db3a72c54402b51fe"
SINKS = b'relay.source={"topic":"orders","incarnation":"9f","version":3}\nrelay.position=3:17\nrelay.seqno=9'
READING = b'start=3:17\nend={"orders":"end"}\ncolumns=key,value\nmax_messages_per_trigger=5\ninclude_aborted=true'

TEXTS = (
    Target(
        "etcd-address",
        _text(EtcdAddress.parse),
        ("broker_io.filelog.pair.etcd_lock.EtcdAddress.parse",),
        (InvalidAddress,),
        lambda: [b"etcd://a:1,[::1]:2/dc/orders?ca=/c&cert=/d&key=/k&user=u&password-file=/p"],
    ),
    Target(
        "config-file",
        lambda data: _on_disk(data, lambda: load_config(PATH)),
        ("txnbuffer.config.load", "txnbuffer.config._tables", "txnbuffer.config._read", "txnbuffer.config._convert"),
        (InvalidConfiguration,),
        lambda: [CONFIGURATION],
    ),
    Target(
        "config-settings",
        _text(_settings),
        ("txnbuffer.config.load", "txnbuffer.config._from_environment", "txnbuffer.config._from_flags"),
        (InvalidConfiguration,),
        lambda: [b"TXNBUFFER_LOG_SEGMENT_BYTES=5\nservice.standby=true\nstreams.slow_after=1.5"],
    ),
    Target(
        "resume-token",
        _replaced(ResumeToken.parse),
        ("txnbuffer.streams.failover.ResumeToken.parse", "txnbuffer.streams.failover._read"),
        (UnreadableToken,),
        golden("streams/token*.json"),
    ),
    Target(
        "token-file",
        lambda data: _on_disk(data, lambda: FileTokens(PATH).load("orders")),
        ("txnbuffer.client.streams.tokens.FileTokens.load", "txnbuffer.client.streams.tokens.FileTokens._read"),
        (UnreadableToken,),
        lambda: [TOKENS],
    ),
    Target(
        "offset",
        _json(Offset.of_json),
        ("txnbuffer.pipeline.offsets.Offset.of_json",),
        (InvalidRequest,),
        golden("pipeline/offset-1*.json"),
    ),
    Target(
        "export-run",
        lambda data: ExportRun.decode(PATH, data),
        ("txnbuffer.pipeline.exports.ExportRun.decode",),
        (UnreadableExport,),
        golden("pipeline/run-1.json"),
    ),
    Target(
        "reading-options",
        _replaced(_options),
        (
            "txnbuffer.pipeline.options.ReadOptions.of",
            "txnbuffer.pipeline.options._place",
            "txnbuffer.pipeline.options._json",
        ),
        (InvalidRequest,),
        lambda: [READING],
    ),
    Target("relay-mark", _mark, ("txnbuffer.sinks.relay_targets.RelayMark.of",), (RelayTargetTaken,), lambda: [SINKS]),
    Target("position", _text(Position.parse), ("broker_io.position.Position.parse",), (ValueError,), lambda: TIMES),
    Target(
        "transaction-id",
        _text(TxnId.parse),
        ("txnbuffer.model.TxnId.parse",),
        (ValueError,),
        lambda: [b"0:17", b"3:9223372036854775807"],
    ),
    Target(
        "key-digest", _text(KeyDigest.parse), ("broker_io.key_digest.KeyDigest.parse",), (ValueError,), lambda: [DIGEST]
    ),
    Target(
        "log-digest",
        _text(LogDigest.parse),
        ("txnbuffer.recovery.audit.LogDigest.parse", "broker_io.key_digest.KeyDigest.parse"),
        (InvalidRequest,),
        lambda: [b"1-5000-" + DIGEST],
    ),
    Target("start", _text(parse_start), ("txnbuffer.cli.tail.parse_start",), (click.BadParameter,), lambda: TIMES),
    Target(
        "compaction-policy",
        _text(parse_policy),
        ("txnbuffer.cli.compact.parse_policy",),
        (InvalidRequest,),
        lambda: [b"dirty_ratio=0.5,most_lag=60", b"grace=1e3, least_lag=0"],
    ),
    Target(
        "transaction-argument",
        _text(parse_txn),
        ("txnbuffer.cli.options.parse_txn",),
        (InvalidRequest,),
        lambda: [b"0:17"],
    ),
    Target(
        "produced-line",
        _line,
        ("txnbuffer.cli.produce._send", "txnbuffer.cli.produce._send_json"),
        (InvalidRequest,),
        lambda: [
            b'{"key":"a","value":{"x":1},"topic":"t","properties":{"a":"b"},"event_time":5}',
            b'{"key":"a","delete":true}',
            b'{"value_base64":"aGk="}',
        ],
    ),
    Target(
        "json-value",
        JsonSerializer().loads,
        ("txnbuffer.client.serializers.JsonDeserializer.loads",),
        (InvalidRequest,),
        lambda: [b'{"a":[1,2.5,null,"x"]}'],
    ),
    Target(
        "avro-value",
        AvroSerializer(AVRO).loads,
        ("txnbuffer.client.serializers.AvroDeserializer.loads",),
        (InvalidRequest,),
        lambda: [AvroSerializer(AVRO).dumps({"a": 5, "b": ["x", "y"]})],
    ),
    Target(
        "broker-address",
        _text(check_address),
        ("broker_io.check_address", "broker_io.pulsar.cluster.parse_address"),
        (InvalidAddress,),
        lambda: [
            b"memory:x",
            b"file:/data",
            b"txnbuf://localhost:7711",
            b"pulsar://a:6650,b:6651/public/default",
            b"pulsar+ssl://[::1]:6651/t/n",
        ],
    ),
    Target(
        "service-address",
        _replaced(lambda text: (is_target(text), decode_owner_address(text))),
        ("broker_io.rpc.channel.is_target", "txnbuffer.coordinator.decisions.decode_owner_address"),
        (),
        lambda: [b"localhost:7711", b"[::1]:7711", b"7 localhost:7711 no-topics"],
    ),
    Target(
        "access-policy",
        _text(lambda text: parse_access_policy(text, "policy.toml")),
        ("txnbuffer.access.policy.parse_policy",),
        (InvalidPolicy,),
        lambda: [POLICY],
    ),
    Target(
        "issued-tokens",
        _text(lambda text: parse_tokens(text, "tokens")),
        ("txnbuffer.access.tokens.parse_tokens", "txnbuffer.access.tokens._parse"),
        (InvalidTokenFile,),
        lambda: [TokenFile({token.id: token for _, token in [issue("orders", bytes(38), 0, 5)]}).format().encode()],
    ),
    Target(
        "signed-token",
        _replaced(lambda text: VERIFIER.verify(text, 1_764_000_000)),
        ("txnbuffer.access.jwt.Verifier.verify",),
        (Unauthenticated,),
        lambda: [SIGNED],
    ),
    Target(
        "http-body",
        decode_admin_body,
        ("txnbuffer.rpc.admin_encoding.decode_admin_body",),
        (InvalidRequest,),
        lambda: [b"{}", b'{"topic": "orders", "at": 5}', b'{"seconds": %s}' % (b"9" * 4000), b'{"grace": 1e400}'],
    ),
    Target(
        "host-header",
        _text(lambda text: page_refusal({"host": text}, "https", frozenset({"txn.example"}))),
        ("txnbuffer.service.door.http_guard.page_refusal",),
        (),
        lambda: [b"txn.example:7712", b"[::1]:1", b"localhost", b"127.0.0.1:80@other"],
    ),
    Target(
        "listen-address",
        _text(lambda text: check_listening(text, tls=False, authenticated=False, insecure=False)),
        ("txnbuffer.service.servers.grpc_server.check_listening",),
        (InvalidConfiguration,),
        lambda: [b"127.0.0.1:7711", b"[::1]:0", b"localhost:1"],
    ),
    Target(
        "cursor-position",
        _replaced(_cursor_position),
        ("txnbuffer.service.servers.admin._cursor_position",),
        (InvalidRequest, UnreadableToken),
        lambda: [b"17", *golden("streams/token.json")()],
    ),
    Target(
        "topic-name",
        _replaced(lambda text: (from_local_name(text), from_local_name(to_local_name(text)), partition_of(text))),
        ("broker_io.pulsar.cluster.from_local_name", "broker_io.partitions.partition_of"),
        (),
        lambda: [b"a=2Fb", b"t-partition-0", b"=3D"],
    ),
)
