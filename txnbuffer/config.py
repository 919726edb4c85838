"""Configuration from a TOML file, the environment and flags. Later ones take precedence; unknown keys are errors

    [log]                       # options of file:DIR
    segment_bytes = 67108864    # a ledger is closed at about this size
    compression = "none"        # or "zstd"
    watermark_bytes = 268435456 # appends are rejected while the disk has less free space
    max_message_bytes = 5242880 # key, value and properties of one message
    compaction_bytes = 134217728 # memory for the keys of a topic while it is compacted
    scrub_bytes = 4194304       # stored bytes verified in a second; 0: all once, after the start

    [snapshots]                 # when an owner writes a buffer snapshot
    changes = 1000              # after this many ended transactions
    interval_ms = 5000          # after this time, if anything changed
    recovery_target = 1.0       # maximum seconds that recovery should take to replay the log

    [pulsar]                    # options of pulsar://HOST:PORT/TENANT/NAMESPACE; "": not set
    admin_url = ""              # the REST interface; default: port 8080, or 8443 with TLS, of the first host
    token = ""                  # credentials: a token, a file with it, OAuth 2.0, or a certificate and its key
    token_file = ""
    oauth2_issuer_url = ""
    oauth2_private_key = ""     # path or URL of the credentials
    oauth2_audience = ""
    oauth2_scope = ""
    tls_cert = ""               # PEM files
    tls_key = ""
    tls_trust = ""              # the CA file
    token_without_tls = false   # send a token also to other machines without TLS: anyone between sees it
    max_unavailable = 60.0      # seconds that the cluster may be unavailable before requests fail
    role = ""                   # begins the subscriptions of readers, where the namespace requires that
    client_log = ""             # the log file of the client library

    [service]                   # txnbuf serve
    listen = "127.0.0.1:7711"   # address for gRPC; port 0: any free port
    advertise = ""              # HOST:PORT for clients of a cluster; default: listen, or the name of this host
    shard = -1                  # cluster mode: the shard that it serves; -1: the only one
    shards = 1                  # cluster mode: number of shards; fixed when a namespace is first served
    standby = false             # cluster mode: if a service is active, wait until it has ended
    standby_bytes = 268435456   # approximate memory of a standby for topics that it keeps warm; 0: none
    fence = false               # cluster mode: replace an active service that hangs, which ends or is a standby then
    http = "127.0.0.1:7712"     # address for health, metrics and requests of operators; "": none
    tls_cert = ""               # PEM files; required on other addresses than loopback, with the section [access]
    tls_key = ""
    insecure = false            # allow other addresses than loopback without TLS and authentication
    require_plug_in = false     # cluster mode: serve no clients while a broker lacks the plug-in for plain consumers
    create_topics = true        # create topics at the first write; also applies to clients of a cluster
    drain_seconds = 10.0        # how long open transactions may continue after SIGTERM
    max_clients = 1000          # concurrent sessions of clients
    max_connections = 4096      # concurrent connections to both ports, one of eight to HTTP; at most half of the
                                # descriptors of the process
    max_address_connections = 0 # those of one address to each port; 0: half of the connections to it
    client_bytes = 8388608      # maximum unacknowledged bytes of one client
    total_bytes = 268435456     # maximum unacknowledged bytes of all clients

    [access]                    # who may do what: txnbuf serve; files are read again when they change
    policy = ""                 # rules: what each principal may do; required with authentication
    tokens = ""                 # tokens of `txnbuf token create`
    jwt_key = ""                # public keys of JSON Web Tokens, such as those of a cluster: PEM, DER or JWKS
    jwt_claim = "sub"           # the claim with the name of the principal
    jwt_issuer = ""             # required issuer and audience; "": any
    jwt_audience = ""
    client_ca = ""              # require client certificates that this CA has signed (PEM)
    check_seconds = 1.0         # how often the files are checked, and the tokens of connected clients

    [limits]                    # of each principal, unless the policy says otherwise; 0: no limit
    sessions = 0                # connected sessions; without authentication all clients are one principal
    open_transactions = 0       # leased and open transaction ids
    bytes_in_flight = 0         # unacknowledged bytes of records; clients wait
    streams = 0                 # change streams
    requests_per_second = 0.0   # transactions, ordinary sends, and requests of operators
    topics_created = 0          # since the service has started
    overload_ms = 50            # refuse work above fair shares while the queue delay is above this and three times
                                # the usual delay; 0: never

    [pair]                      # txnbuf serve of file:DIR as one of two machines that have all data
    lock = ""                   # etcd://HOST:PORT,…/NAME, or file:PATH for tests on one machine
    listen = ""                 # address for the other machine
    peer = ""                   # HOST:PORT where the other machine listens
    found = false               # at the first start of the pair, on the machine that has the log: begin the pair
    min_in_sync = 1             # 2: acknowledge only what both machines have stored
    lease_seconds = 10.0        # a machine that does not renew its lease in this time may be replaced
    lanes = 2                   # threads of a backup that apply records, of different topics at the same time
    window_bytes = 67108864     # how far the backup may be behind before appends wait
    keep_bytes = 1073741824     # journal and replaced files that are kept for a backup that catches up
    tls_cert = ""               # PEM files, required for other addresses than loopback: certificate, key, and the CA
    tls_key = ""                # certificate that signed those of both machines
    tls_ca = ""

    [transactions]              # times in seconds
    timeout = 60.0              # an open transaction is aborted after this time, if it has no timeout of its own
    max_timeout = 900.0         # the longest timeout that a transaction may have
    session_timeout = 30.0      # transactions of a client that is disconnected for longer are aborted
    verify_counts = false       # cluster mode: commit only if all records are in the topics; embedded: always
    remember = 3600.0           # how long the outcome of a transaction is kept
    max_open_session = 100000   # maximum leased and open transaction ids of one session
    max_open = 1000000          # maximum leased and open transaction ids of all sessions

    [retention]                 # of data topics; what snapshots, transactions, groups and cursors need is kept
    seconds = 0.0               # older messages are removed; 0: no limit
    bytes = 0                   # the oldest messages of larger topics are removed; 0: no limit
    check_seconds = 30.0        # how often the limits are checked

    [compaction]                # of data topics that have a policy; only on an embedded log
    check_seconds = 30.0        # how often the policies are checked
    bytes_per_second = 0        # maximum bytes that are read and written in a second, at least 4096; 0: no limit
    least_dead = 0.2            # a ledger is rewritten if at least this part of its records can be removed

    [streams]                   # change streams
    memory_bytes = 268435456    # maximum bytes of mutations in memory, of all topics
    readers = 2                 # concurrent reads of the log, for mutations that are not in memory
    max_connections = 1000      # concurrent connections
    max_streams = 1000          # streams of one connection
    slow_after = 720.0          # seconds after which a stream ends whose reader accepts no mutations
    max_cursors = 64            # durable cursors of one topic
    cursor_bytes = 17179869184  # a durable cursor that retains more bytes is dropped; 0: never

The environment variable of a key is `TXNBUFFER_LOG_SEGMENT_BYTES`, the flag `--set log.segment_bytes=…`. No flag sets
a secret, because other users of the machine see the arguments of a process. A file with a secret in it is refused if
others may read it.

Before the sections, and in each profile, the file may say what commands work on. A profile has the same keys and
sections, which take precedence over those at the top level:

    default_profile = "dev"     # the profile that is used if neither --profile nor TXNBUFFER_PROFILE names one
    address = "file:/srv/log"   # the ADDRESS of commands that are given none
    tls_ca = ""                 # how to connect to the service at this address: PEM files, and a file with the token;
    tls_cert = ""               # not used for another address
    tls_key = ""
    token_file = ""

    [profiles.dev]
    address = "txnbuf://dev.example:7711"
    tls_ca = "/etc/ssl/dev.pem"
    [profiles.dev.streams]
    readers = 4
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from broker_io.environment import current
from broker_io.permissions import read_checked
from broker_io.port import MAX_MESSAGE_BYTES
from txnbuffer.errors import InvalidConfiguration

PREFIX = "TXNBUFFER_"
OAUTH2 = "oauth2_"
SECRET = "secret"  # noqa: S105 - the name of a key
"""Key of the metadata of settings that are secrets, or are if they begin with its value."""
HIDDEN = "(hidden)"
"""Shown instead of a secret."""
USER_INFO = re.compile("//[^/]*@")
"""User and password in a URL."""

NO_SETTINGS = {
    *(
        PREFIX + name
        for name in ("ADDRESS", "TLS_CA", "TLS_CERT", "TLS_KEY", "TOKEN", "TOKEN_FILE", "CACHE", "DATABASE")
    ),
    *(PREFIX + name for name in ("CONFIG", "PROFILE")),
    *(f"{PREFIX}PULSAR_{name}" for name in ("URL", "ADMIN", "IMAGE", "REQUIRE", "HOME")),
}
"""Variables with this prefix that are not settings, but options of commands, tests and the demo."""

CONNECTION = ("address", "tls_ca", "tls_cert", "tls_key", "token_file")
"""Keys of a file outside of its sections, and of a profile: what commands work on, and how they connect to it."""
DEFAULT_PROFILE, PROFILES = "default_profile", "profiles"

ABOVE_0 = {
    "service": ("max_clients", "max_connections", "shards"),
    "pair": ("min_in_sync", "lease_seconds", "lanes", "window_bytes"),
    "access": ("check_seconds",),
    "retention": ("check_seconds",),
    "compaction": ("check_seconds",),
    "streams": ("memory_bytes", "readers", "max_connections", "max_streams", "slow_after", "max_cursors"),
}
"""Settings that must be above 0: with 0 no client could connect, or retention would check without a pause."""

LEAST = {("compaction", "bytes_per_second"): 4096}
"""The least value of settings where 0 means that there is no limit; with less, a gigabyte would take days."""

MOST = {("compaction", "least_dead"): 1.0, ("pair", "min_in_sync"): 2}
"""The largest values of settings."""

UNSET = ("service", "shard", -1)
"""The only default below 0; it means that the setting is not given."""


@dataclass(frozen=True, slots=True)
class LogConfig:
    segment_bytes: int = 64 * 1024 * 1024
    compression: str = "none"
    watermark_bytes: int = 256 * 1024 * 1024
    max_message_bytes: int = MAX_MESSAGE_BYTES
    compaction_bytes: int = 128 * 1024 * 1024
    scrub_bytes: int = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SnapshotConfig:
    changes: int = 1000
    interval_ms: int = 5000
    recovery_target: float = 1.0


def _secret(begin: str = "") -> Any:
    """A setting whose value is a secret if it begins so, and not shown then."""
    return field(default="", repr=False, metadata={SECRET: begin})


@dataclass(frozen=True, slots=True)
class PulsarConfig:
    admin_url: str = ""
    token: str = _secret()
    token_file: str = ""
    oauth2_issuer_url: str = ""
    oauth2_private_key: str = _secret("data:")
    oauth2_audience: str = ""
    oauth2_scope: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_trust: str = ""
    token_without_tls: bool = False
    max_unavailable: float = 60.0
    role: str = ""
    client_log: str = ""

    def options(self) -> dict[str, Any]:
        """Return the options of `open_broker` for a cluster."""
        values = {name: getattr(self, name) for name in self.__slots__}
        given = {name: value for name, value in values.items() if value != "" and value is not False}
        oauth2 = {name.removeprefix(OAUTH2): given.pop(name) for name in list(given) if name.startswith(OAUTH2)}
        return given | ({"oauth2": oauth2} if oauth2 else {})


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    listen: str = "127.0.0.1:7711"
    advertise: str = ""
    shard: int = -1
    shards: int = 1
    standby: bool = False
    standby_bytes: int = 256 * 1024 * 1024
    fence: bool = False
    http: str = "127.0.0.1:7712"
    tls_cert: str = ""
    tls_key: str = ""
    insecure: bool = False
    require_plug_in: bool = False
    create_topics: bool = True
    drain_seconds: float = 10.0
    max_clients: int = 1000
    max_connections: int = 4096
    max_address_connections: int = 0
    client_bytes: int = 8 * 1024 * 1024
    total_bytes: int = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class AccessConfig:
    policy: str = ""
    tokens: str = ""
    jwt_key: str = ""
    jwt_claim: str = "sub"
    jwt_issuer: str = ""
    jwt_audience: str = ""
    client_ca: str = ""
    check_seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    sessions: int = 0
    open_transactions: int = 0
    bytes_in_flight: int = 0
    streams: int = 0
    requests_per_second: float = 0.0
    topics_created: int = 0
    overload_ms: int = 50


@dataclass(frozen=True, slots=True)
class PairConfig:
    lock: str = ""
    listen: str = ""
    peer: str = ""
    found: bool = False
    min_in_sync: int = 1
    lease_seconds: float = 10.0
    lanes: int = 2
    window_bytes: int = 64 * 1024 * 1024
    keep_bytes: int = 1024 * 1024 * 1024
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    peer_name: str = ""


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
class CompactionConfig:
    check_seconds: float = 30.0
    bytes_per_second: int = 0
    least_dead: float = 0.2


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
    access: AccessConfig = field(default_factory=AccessConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    pair: PairConfig = field(default_factory=PairConfig)
    transactions: TransactionConfig = field(default_factory=TransactionConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    compaction: CompactionConfig = field(default_factory=CompactionConfig)
    streams: StreamsConfig = field(default_factory=StreamsConfig)


@dataclass(frozen=True, slots=True)
class _Setting:
    section: str
    key: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration and where it comes from."""

    config: Config
    connection: Mapping[str, str]
    """The values of `CONNECTION` that the file has."""
    sources: Mapping[str, str]
    """The sources of the values that are not built in: of `section.key`, and of the keys of `connection`."""
    path: str | None = None
    profile: str | None = None


def load_config(
    path: str | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Iterable[str] = (),
    *,
    option: str = "--set",
) -> Config:
    """Return the configuration from all sources. `option`: the flag's name, for errors. Raises InvalidConfiguration."""
    return load(path, environ, flags, option=option).config


def load(
    path: str | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Iterable[str] = (),
    *,
    option: str = "--set",
    profile: str | None = None,
) -> LoadedConfig:
    """`load_config` with the sources. `profile`: that of the file instead of the one of the environment.

    Raises InvalidConfiguration.
    """
    environ = environ or {}
    if path is None and profile is not None:
        raise InvalidConfiguration(f"there is no profile {profile!r}: no configuration file is used")
    chosen = profile or environ.get(f"{PREFIX}PROFILE") or None
    name, tables = (None, []) if path is None else _tables(path, chosen)
    connection: dict[str, tuple[str, str]] = {}
    for source, table in tables:
        found = {key: (_text(key, table[key], source), source) for key in CONNECTION if table.get(key)}
        connection = found if "address" in found else connection | found  # credentials belong to their address
    sources = {key: source for key, (_, source) in connection.items()}
    config = Config()
    of_files = [setting for source, table in tables for setting in _settings(table, source)]
    for setting in (*of_files, *_from_environment(environ), *_from_flags(flags, option)):
        config = _apply(config, setting)
        sources[f"{setting.section}.{setting.key}"] = setting.source
    return LoadedConfig(config, {key: text for key, (text, _) in connection.items()}, sources, path, name)


def _tables(path: str, profile: str | None) -> tuple[str | None, list[tuple[str, dict[str, Any]]]]:
    """The name of the profile of a file, if one is used, and the tables in effect with their sources."""
    top = _read(path)
    profiles, default = top.pop(PROFILES, {}), top.pop(DEFAULT_PROFILE, None)
    if not isinstance(profiles, dict):
        raise InvalidConfiguration(f"{path}: {PROFILES} must be tables: write [{PROFILES}.NAME]")
    tables = {name: (f"{path}, profile {name}", table) for name, table in profiles.items()}
    for source, table in ((path, top), *tables.values()):
        if not isinstance(table, dict):
            raise InvalidConfiguration(f"{source} must be a table, got {_shown(table)}")
        for setting in _settings(table, source):  # those of a profile that is not used are checked as well
            _apply(Config(), setting)
        for key in CONNECTION:
            _text(key, table.get(key, ""), source)
    name = default if profile is None else profile
    if name is None:
        return None, [(path, top)]
    if not isinstance(name, str) or name not in tables:
        whose = f"{DEFAULT_PROFILE} names" if profile is None else "there is"
        raise InvalidConfiguration(f"{path}: {whose} no profile {_shown(name)}; it has {', '.join(tables) or 'none'}")
    return name, [(path, top), tables[name]]


def _read(path: str) -> dict[str, Any]:
    """The content of a file, which must be private if there is a secret in it."""
    secret = ""
    try:
        tables = tomllib.loads(current().disk.read(path).decode())
        if secret := _first_secret(tables):
            read_checked(path, secret=True)
    except OSError as error:
        what = f"configuration {path}, which has the secret {secret}" if secret else f"configuration {path}"
        raise InvalidConfiguration(f"cannot read {what}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidConfiguration(f"{path} is not valid TOML: {error}") from error
    return tables


def _first_secret(tables: dict[str, Any]) -> str:
    """The name of a setting in a file that is a secret, or has a password in its URL; empty if there is none."""
    profiles = tables.get(PROFILES)
    for table in (tables, *(profiles.values() if isinstance(profiles, dict) else ())):
        for section, values in table.items() if isinstance(table, dict) else ():
            for key, value in values.items() if isinstance(values, dict) else ():
                if _is_secret(section, key, value) or (isinstance(value, str) and USER_INFO.search(value)):
                    return f"{section}.{key}"
    return ""


def _settings(table: Mapping[str, Any], source: str) -> Iterator[_Setting]:
    """The settings in the sections of a table."""
    for section, values in table.items():
        if section in CONNECTION:
            continue
        if not isinstance(values, dict):
            raise InvalidConfiguration(
                f"{source}: key {section!r} is outside of a section; keys there are {', '.join(CONNECTION)}, and "
                f"sections are {_sections()}"
            )
        for key, value in values.items():
            yield _Setting(section, key, value, source)
        if not values:
            _section(Config(), section, source)


def _text(key: str, value: Any, source: str) -> str:
    if not isinstance(value, str):
        raise InvalidConfiguration(f"{source}: {key} must be text, got {_shown(value)}")
    return value


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
        if option == "--set" and _is_secret(section, key, value):
            raise InvalidConfiguration(
                f"{option} {name}: other users of this machine see the arguments of a process: set the environment "
                f"variable {PREFIX}{section.upper()}_{key.upper()}, or name a file that has it"
            )
        yield _Setting(section, key, value, f"{option} {name}")


def _is_secret(section: str, key: str, value: Any) -> bool:
    if section not in {item.name for item in dataclasses.fields(Config)}:
        return False
    known = {item.name: item for item in dataclasses.fields(getattr(Config(), section))}
    begin = known[key].metadata.get(SECRET) if key in known else None
    return begin is not None and bool(value) and str(value).startswith(begin)


def shown(config: Config) -> dict[str, dict[str, Any]]:
    """All settings by section, to be shown: without secrets."""

    def text(section: str, key: str, value: Any) -> Any:
        if _is_secret(section, key, value):
            return HIDDEN
        return USER_INFO.sub(f"//{HIDDEN}@", value) if isinstance(value, str) else value

    return {
        section: {key: text(section, key, value) for key, value in values.items()}
        for section, values in dataclasses.asdict(config).items()
    }


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
    name, got = f"{setting.source}: {setting.section}.{setting.key}", f"got {_shown(setting.value)}"
    if kind is bool:
        if str(setting.value).lower() not in ("true", "false"):
            raise InvalidConfiguration(f"{name} must be true or false, {got}")
        return str(setting.value).lower() == "true"
    try:
        value = kind(setting.value)
        exact = kind is not int or str(value) == str(setting.value).strip()
    except (TypeError, ValueError, OverflowError):
        value = None
    # The conversion accepts a bool, and a fraction for an integer: reject them here.
    if value is None or isinstance(setting.value, bool) or not exact:
        wanted = {int: "an integer", float: "a number"}.get(kind, "text")
        raise InvalidConfiguration(f"{name} must be {wanted}, {got}")
    if kind in (int, float) and (setting.section, setting.key, value) != UNSET:
        _check_number(name, value, setting)
    if setting.key == "compression" and value not in ("none", "zstd"):
        raise InvalidConfiguration(f'{name} must be "none" or "zstd", {got}')
    return value


def _shown(value: Any) -> str:
    """A value for an error; Python refuses to write integers of thousands of digits."""
    try:
        return f"{value!r:.200}"
    except ValueError:
        return "a number of thousands of digits"


def _check_number(name: str, value: float, setting: _Setting) -> None:
    above_0 = setting.key in ABOVE_0.get(setting.section, ())
    least, most = (table.get((setting.section, setting.key)) for table in (LEAST, MOST))
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidConfiguration(f"{name} must be a {'finite ' if math.isinf(value) else ''}number, got {value}")
    if value < 0 or (above_0 and not value):
        bound = "at least 0" if not above_0 else "at least 1" if isinstance(value, int) else "above 0"
        raise InvalidConfiguration(f"{name} must be {bound}, got {value}")
    if least is not None and 0 < value < least:
        raise InvalidConfiguration(f"{name} must be 0 (no limit) or at least {least}, got {value}")
    if most is not None and value > most:
        raise InvalidConfiguration(f"{name} must be at most {most:g}, got {value}")
