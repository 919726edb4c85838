"""Brokers of topics behind one port: in memory, in files, of a running service, and of a Pulsar cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from broker_io.addresses import shown_address
from broker_io.errors import InvalidAddress, MissingDependency, UnknownOption

if TYPE_CHECKING:
    # These import numpy, which would slow down `txnbuf --help`.
    import pulsar

    from broker_io.environment import Environment
    from broker_io.partitions import Hashing
    from broker_io.port import BackupProgress, BackupReport, Broker
    from broker_io.remote.service import Caller, Gate, Guard, Listed, LogService, Refused
    from broker_io.rpc.channel import LogIdentity

CLUSTERS = ("pulsar", "pulsar+ssl")


class FileOptions(TypedDict, total=False):
    """Options of `open_broker` for `file:`; `FileBroker.open` describes them."""

    environment: Environment | None
    read_only: bool
    committer: bool
    segment_bytes: int
    journal_bytes: int
    compression: str | None
    watermark_bytes: int
    max_message_bytes: int
    compacted_prefix: str
    compaction_bytes: int


class RemoteOptions(TypedDict, total=False):
    """Options of `open_broker` for `txnbuf:`; `RemoteBroker` describes them."""

    root_certificates: bytes | None
    certificate: bytes | None
    key: bytes | None
    token: str | Callable[[], str] | None
    max_unavailable: float
    log_identity: LogIdentity | None


class PulsarOptions(TypedDict, total=False):
    """Options of `open_broker` for `pulsar:`, and of `connect(broker_options=)`; `PulsarBroker` describes them."""

    admin_url: str | None
    token: str | None
    token_file: str | None
    oauth2: Mapping[str, str] | None
    tls_trust: str | None
    tls_cert: str | None
    tls_key: str | None
    max_unavailable: float
    close_timeout: float | None
    compacted_prefix: str
    batching: bool
    max_message_bytes: int
    client_log: str | None
    hashing: Hashing
    schemas: Mapping[str, pulsar.schema.Schema] | None
    role: str | None
    token_without_tls: bool


class LogServiceOptions(TypedDict, total=False):
    """Options of `serve_broker`; `LogService` describes them."""

    guard: Guard | None
    gate: Gate
    listed: Listed
    caller: Caller
    refused: Refused
    max_message_bytes: int
    max_append_bytes: int | None
    identity: str | None


@overload
def open_broker(address: str, **options: Unpack[FileOptions]) -> Broker: ...
@overload
def open_broker(address: str, **options: Unpack[RemoteOptions]) -> Broker: ...
@overload
def open_broker(address: str, **options: Unpack[PulsarOptions]) -> Broker: ...
def open_broker(address: str, **options: object) -> Broker:
    """The broker of an address: `memory:`, `memory:NAME` shared in this process, `file:DIR`, `txnbuf://HOST:PORT`,
    `txnbuf://HOST:PORT,HOST:PORT` for a pair, or `pulsar://HOST:PORT/TENANT/NAMESPACE` (`pulsar+ssl://…`; without a
    namespace `public/default`).

    `options` are those of the backend: of `FileBroker.open` for `file:`, of `RemoteBroker` for `txnbuf:`, of
    `PulsarBroker` for `pulsar:`; `memory:` has none.
    Raises InvalidAddress, UnknownOption, MissingDependency, and the errors of the backend.
    """
    check_address(address)
    scheme, _, place = address.partition(":")
    opening: Callable[..., Broker]
    try:
        if scheme == "file":
            from broker_io.filelog.log import FileBroker

            opening = FileBroker.open
        elif scheme == "memory":
            from broker_io.memory import open_memory

            opening = open_memory
        elif scheme in CLUSTERS:
            from broker_io.pulsar.broker import PulsarBroker

            opening, place = PulsarBroker, address
        else:
            from broker_io.remote.broker import RemoteBroker
            from broker_io.rpc.channel import service_targets

            opening, place = RemoteBroker, ",".join(service_targets(address))
    except ModuleNotFoundError as error:
        package = "'txnbuffer[pulsar]'" if scheme in CLUSTERS else "grpcio"
        raise MissingDependency(f"{address} requires a package ({error}): pip install {package}") from None
    _check_options(address, opening, options)
    checked: dict[str, Any] = options
    return opening(place, **checked)


def check_backup(path: str, progress: BackupProgress) -> BackupReport:
    """Verify all of a backup that `BackupBroker.back_up` wrote.

    Raises CallerError if there is no such file, Damaged, UnsupportedFormat, DiskFailed, and what `progress` raises.
    """
    from broker_io.environment import current
    from broker_io.filelog.log.backup import check_backup

    return check_backup(current().disk, path, progress)


def restore_backup(path: str, address: str, progress: BackupProgress) -> BackupReport:
    """Restore a log from a backup as `file:DIR`, a missing or empty directory.

    Raises InvalidAddress, CallerError if the directory has files, Locked, DiskFull, and as `check_backup`. After an
    error, nothing opens what is in the directory.
    """
    from broker_io.environment import current
    from broker_io.filelog.log.backup import restore_backup

    check_address(address)
    scheme, _, directory = address.partition(":")
    if scheme != "file":
        raise InvalidAddress(f"{shown_address(address)!r} is not a directory: give file:DIR")
    return restore_backup(current(), path, directory, progress)


def is_cluster(address: str) -> bool:
    """Whether this is the address of a cluster, which other programs write to as well."""
    return address.partition(":")[0] in CLUSTERS


def check_address(address: str) -> None:
    """Check the form of an address without opening it. Raises InvalidAddress."""
    if not isinstance(address, str):
        raise InvalidAddress(f"an address must be text such as 'file:DIR', got {address!r}")
    scheme, colon, rest = address.partition(":")
    if scheme in CLUSTERS:
        from broker_io.pulsar.cluster import parse_address

        parse_address(address)
    elif not colon or scheme not in ("file", "memory", "txnbuf") or (scheme == "file" and not rest):
        raise InvalidAddress(
            f"{shown_address(address)!r} is not a broker address: write memory:, memory:NAME, file:DIR, "
            "txnbuf://HOST:PORT or pulsar://HOST:PORT/TENANT/NAMESPACE"
        )
    elif scheme == "file" and (rest.startswith("~") or (rest.startswith("//") and not rest.startswith("///"))):
        what = "~ is not replaced by a home directory" if rest.startswith("~") else "it names a host"
        raise InvalidAddress(f"{address!r} is not the address of a directory, as {what}: write file: and its path")


def canonical_address(address: str) -> str:
    """One text for all addresses of one namespace of a cluster; others stay as they are. Raises InvalidAddress."""
    if is_cluster(address):
        from broker_io.pulsar.cluster import parse_address

        parsed = parse_address(address)
        return f"{parsed.service}/{parsed.namespace}"
    return address


def _check_options(address: str, opening: Callable[..., Any], options: Mapping[str, object]) -> None:
    """Raises UnknownOption for options that `opening`, which takes an address and options, does not have."""
    import inspect

    known = [*inspect.signature(opening).parameters][1:]
    unknown = [repr(name) for name in options if name not in known]
    if unknown:
        choice = f"use {', '.join(known)}" if known else "give none"
        raise UnknownOption(f"{address!r} has no option {', '.join(unknown)}: {choice}")


def serve_broker(broker: Broker, **options: Unpack[LogServiceOptions]) -> LogService:
    """The service that makes a broker available as `txnbuf://HOST:PORT`; add it to a grpc.aio server.

    `options` are those of `LogService`. Raises MissingDependency.
    """
    try:
        from broker_io.remote.service import LogService
    except ModuleNotFoundError as error:
        raise MissingDependency(f"serving a log requires a package ({error}): pip install grpcio") from None
    return LogService(broker, **options)
