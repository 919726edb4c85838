"""Configuration: TOML file, then environment, then flags; the later wins, and an unknown key is an error.

    [log]                       # options of file:DIR
    segment_bytes = 67108864    # a ledger is closed at about this size
    compression = "none"        # or "zstd"
    watermark_bytes = 268435456 # appends are refused while the disk has less free space
    max_message_bytes = 5242880 # key, value and properties of one message

    [snapshots]                 # when an owner writes a buffer snapshot
    changes = 1000              # after so many ended transactions
    interval_ms = 5000          # after so long, if anything changed
    recovery_target = 1.0       # seconds that replaying the log at recovery should take at most

    [pulsar]                    # a cluster: pulsar://HOST:PORT/TENANT/NAMESPACE; "": not given
    admin_url = ""              # of its REST interface; port 8080, or 8443 with TLS, of the first host
    token = ""                  # credentials: a token, a file with it, OAuth 2.0, or a certificate and its key
    token_file = ""
    oauth2_issuer_url = ""
    oauth2_private_key = ""     # path or URL of the credentials
    oauth2_audience = ""
    oauth2_scope = ""
    tls_cert = ""               # PEM files
    tls_key = ""
    tls_trust = ""              # the CA file
    max_unavailable = 60.0      # seconds that the cluster may be unavailable before requests fail
    client_log = ""             # the log file of the client library

    [service]                   # txnbuf serve
    listen = "127.0.0.1:7711"   # gRPC; port 0: any free one
    advertise = ""              # HOST:PORT where clients of a cluster find it; listen, or this host by its name
    shard = -1                  # cluster mode: which of the namespace's shards it serves; -1: the only one
    shards = 1                  # and their count, which is fixed when a namespace is first served
    standby = false             # cluster mode: wait until the active service has ended, instead of failing
    fence = false               # cluster mode: take the log from the active service, which ends; for one that hangs
    http = "127.0.0.1:7712"     # metrics and health; "" for none
    tls_cert = ""               # PEM files; needed for gRPC on another address than loopback
    tls_key = ""
    insecure = false            # allow to listen on any address without TLS
    create_topics = true        # create a topic at the first write; in cluster mode clients obey it, too
    drain_seconds = 10.0        # how long open transactions may continue after SIGTERM
    max_clients = 1000          # connections at once
    client_bytes = 8388608      # unacknowledged bytes of one client
    total_bytes = 268435456     # and all of them together

    [transactions]              # times in seconds
    timeout = 60.0              # an open transaction is aborted after this, unless it gave its own timeout
    max_timeout = 900.0         # the longest timeout that a transaction may give
    session_timeout = 30.0      # transactions of a client that is disconnected for longer are aborted
    verify_counts = false       # cluster mode: commit only if all records are in the topics; embedded always does
    remember = 3600.0           # how long the outcome of a transaction is kept
    max_open_session = 100000   # leased and open ids of one session
    max_open = 1000000          # and of all sessions

    [retention]                 # of data topics; what a snapshot, a transaction or a group still needs is kept
    seconds = 0.0               # messages older than this are removed; 0: none
    bytes = 0                   # the oldest are removed if a topic has more; 0: no limit
    check_seconds = 30.0        # how often the limits are checked

    [streams]                   # change streams
    memory_bytes = 268435456    # mutations in memory, of all topics together
    readers = 2                 # concurrent reads of the log, for streams older than memory
    max_connections = 1000      # at once
    max_streams = 1000          # of one connection
    slow_after = 720.0          # a stream ends if its reader grants nothing for so many seconds
    max_cursors = 64            # durable cursors of one topic
    cursor_bytes = 17179869184  # a durable cursor that retains more is dropped; 0: never

The environment has the same keys as `TXNBUFFER_LOG_SEGMENT_BYTES`, a flag as `--set log.segment_bytes=…`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from broker_io.port import MAX_MESSAGE_BYTES
from txnbuffer.errors import InvalidConfiguration

PREFIX = "TXNBUFFER_"
OAUTH2 = "oauth2_"

NO_SETTINGS = {
    *(f"{PREFIX}{name}" for name in ("SERVICE", "TLS_CA")),
    *(
        f"{PREFIX}{name}"
        for name in ("PULSAR_URL", "PULSAR_ADMIN", "PULSAR_IMAGE", "PULSAR_REQUIRE", "PULSAR_HOME", "CACHE")
    ),
}
"""Variables with our prefix that are not settings: options of commands, and of tests and demo on a real Pulsar."""

ABOVE_0 = {
    *(("service", "max_clients"), ("service", "shards"), ("retention", "check_seconds")),
    *(
        ("streams", name)
        for name in ("memory_bytes", "readers", "max_connections", "max_streams", "slow_after", "max_cursors")
    ),
}
"""Settings that must be above 0: otherwise nobody could connect, or retention would check without a pause."""

UNSET = ("service", "shard", -1)
"""The only default below 0: the setting is not given."""


@dataclass(frozen=True, slots=True)
class LogConfig:
    segment_bytes: int = 64 * 1024 * 1024
    compression: str = "none"
    watermark_bytes: int = 256 * 1024 * 1024
    max_message_bytes: int = MAX_MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class SnapshotConfig:
    changes: int = 1000
    interval_ms: int = 5000
    recovery_target: float = 1.0


@dataclass(frozen=True, slots=True)
class PulsarConfig:
    admin_url: str = ""
    token: str = field(default="", repr=False)
    token_file: str = ""
    oauth2_issuer_url: str = ""
    oauth2_private_key: str = ""
    oauth2_audience: str = ""
    oauth2_scope: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_trust: str = ""
    max_unavailable: float = 60.0
    client_log: str = ""

    def options(self) -> dict[str, Any]:
        """What `open_broker` takes for a cluster."""
        given = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) != ""}
        oauth2 = {name.removeprefix(OAUTH2): given.pop(name) for name in list(given) if name.startswith(OAUTH2)}
        return given | ({"oauth2": oauth2} if oauth2 else {})


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    listen: str = "127.0.0.1:7711"
    advertise: str = ""
    shard: int = -1
    shards: int = 1
    standby: bool = False
    fence: bool = False
    http: str = "127.0.0.1:7712"
    tls_cert: str = ""
    tls_key: str = ""
    insecure: bool = False
    create_topics: bool = True
    drain_seconds: float = 10.0
    max_clients: int = 1000
    client_bytes: int = 8 * 1024 * 1024
    total_bytes: int = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TransactionConfig:
    timeout: float = 60.0
    max_timeout: float = 900.0
    session_timeout: float = 30.0
    verify_counts: bool = False
    remember: float = 3600.0
    max_open_session: int = 100_000
    max_open: int = 1_000_000


@dataclass(frozen=True, slots=True)
class RetentionConfig:
    seconds: float = 0.0
    bytes: int = 0
    check_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class StreamsConfig:
    memory_bytes: int = 256 * 1024 * 1024
    readers: int = 2
    max_connections: int = 1000
    max_streams: int = 1000
    slow_after: float = 720.0
    max_cursors: int = 64
    cursor_bytes: int = 16 * 1024 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Config:
    log: LogConfig = field(default_factory=LogConfig)
    snapshots: SnapshotConfig = field(default_factory=SnapshotConfig)
    pulsar: PulsarConfig = field(default_factory=PulsarConfig)
    service: ServiceConfig = field(default_factory=ServiceConfig)
    transactions: TransactionConfig = field(default_factory=TransactionConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    streams: StreamsConfig = field(default_factory=StreamsConfig)


@dataclass(frozen=True, slots=True)
class _Setting:
    section: str
    key: str
    value: Any
    source: str


def load_config(
    path: str | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Iterable[str] = (),
    *,
    option: str = "--set",
) -> Config:
    """Read all sources; flags are `option` that. Raises InvalidConfiguration that names the source and the key."""
    config = Config()
    for setting in (*_from_file(path), *_from_environment(environ or {}), *_from_flags(flags, option)):
        config = _apply(config, setting)
    return config


def _from_file(path: str | None) -> Iterator[_Setting]:
    if path is None:
        return
    try:
        tables = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise InvalidConfiguration(f"can't read configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfiguration(f"{path} is not valid TOML: {error}") from error
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise InvalidConfiguration(f"{path}: key {section!r} stands outside a section; sections are {_sections()}")
        for key, value in table.items():
            yield _Setting(section, key, value, path)
        if not table:
            _section(Config(), section, path)


def _from_environment(environ: Mapping[str, str]) -> Iterator[_Setting]:
    for name, value in environ.items():
        if not name.startswith(PREFIX) or name in NO_SETTINGS:
            continue
        section, _, key = name.removeprefix(PREFIX).lower().partition("_")
        yield _Setting(section, key, value, f"environment variable {name}")


def _from_flags(flags: Iterable[str], option: str) -> Iterator[_Setting]:
    for flag in flags:
        name, equals, value = flag.partition("=")
        section, dot, key = name.partition(".")
        if not (equals and dot):
            raise InvalidConfiguration(f"{option} {flag}: write SECTION.KEY=VALUE")
        yield _Setting(section, key, value, f"{option} {flag}")


def _sections() -> str:
    return ", ".join(item.name for item in dataclasses.fields(Config))


def _section(config: Config, name: str, source: str) -> Any:
    if name not in {item.name for item in dataclasses.fields(Config)}:
        raise InvalidConfiguration(f"{source}: unknown section {name!r}; sections are {_sections()}")
    return getattr(config, name)


def _apply(config: Config, setting: _Setting) -> Config:
    section = _section(config, setting.section, setting.source)
    known = {item.name: item for item in dataclasses.fields(section)}
    if setting.key not in known:
        close = difflib.get_close_matches(setting.key, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"keys are {', '.join(known)}"
        raise InvalidConfiguration(f"{setting.source}: unknown key {setting.section}.{setting.key}; {hint}")
    value = _convert(getattr(section, setting.key), setting)
    return dataclasses.replace(config, **{setting.section: dataclasses.replace(section, **{setting.key: value})})


def _convert(example: Any, setting: _Setting) -> Any:
    kind = type(example)
    name = f"{setting.source}: {setting.section}.{setting.key} = {setting.value!r}"
    if kind is bool:
        if str(setting.value).lower() not in ("true", "false"):
            raise InvalidConfiguration(f"{name} is neither true nor false")
        return str(setting.value).lower() == "true"
    try:
        value = kind(setting.value)
    except (TypeError, ValueError):
        value = None
    # A bool, or a fraction where a whole number belongs, would pass the conversion unseen.
    if value is None or isinstance(setting.value, bool) or (kind is int and str(value) != str(setting.value).strip()):
        raise InvalidConfiguration(f"{name} is no {'number' if kind in (int, float) else 'text'}")
    if kind in (int, float) and (setting.section, setting.key, value) != UNSET:
        _check_number(name, value, (setting.section, setting.key) in ABOVE_0)
    if setting.key == "compression" and value not in ("none", "zstd"):
        raise InvalidConfiguration(f'{name} is neither "none" nor "zstd"')
    return value


def _check_number(name: str, value: float, above_0: bool) -> None:
    if not math.isfinite(value):
        raise InvalidConfiguration(f"{name} is no {'finite ' if math.isinf(value) else ''}number")
    if value < 0:
        raise InvalidConfiguration(f"{name} is below 0")
    if above_0 and not value:
        raise InvalidConfiguration(f"{name}: give {'1 or more' if isinstance(value, int) else 'a number above 0'}")
