"""Service discovery: how a client finds the service of a namespace, and checks that it serves the right log

A new owner of a decision log writes its address into the log, and into a property of the topic. Reading the property
takes one request; reading the log may take seconds. The log is authoritative. The address in the property is returned
once for each owner; a caller that cannot connect to it reads the log.

A log is identified by the incarnation of its decision log; `broker_io.rpc.channel` checks it with each call.
"""

from __future__ import annotations

import os

from broker_io.batch import PlacedBatch
from broker_io.compacted import CompactedReader
from broker_io.environment import current
from broker_io.errors import Error, PositionTrimmed, TopicNotFound
from broker_io.port import AnnotatedBroker, Broker, PartitionedBroker
from broker_io.position import EARLIEST, Position
from broker_io.rpc.channel import LogIdentity
from snapshots.shard_count import shards_of
from snapshots.shards import Shard, shard_of
from txnbuffer.coordinator.decisions import OWNER_KEY, TOPIC, Owner, decode, decode_owner_address
from txnbuffer.errors import InvalidConfiguration, InvalidRequest, ServiceUnavailable, TopicNotCreated

_KEY = OWNER_KEY.encode()


def owner_address_of(broker: Broker, namespace: str, topic: str) -> str:
    """Return HOST:PORT of the newest owner of a topic's shard. Raises as `ServiceDiscovery.newest_address`."""
    return ServiceDiscovery(broker, namespace, _decisions_of(broker, topic)).newest_address()


def _decisions_of(broker: Broker, topic: str) -> str:
    """Return the name of the decision log of a topic's shard."""
    shards = shards_of(broker)
    return Shard(shard_of(topic, shards), shards).topic(TOPIC)


def check_creatable(broker: Broker, topic: str) -> None:
    """Raises TopicNotCreated if the service of the topic is configured not to create topics."""
    if not isinstance(broker, AnnotatedBroker):
        return
    try:
        annotated = decode_owner_address(broker.annotation(_decisions_of(broker, topic)) or "")
    except TopicNotFound:  # the namespace never had a service
        return
    if annotated is not None and not annotated.creates_topics:
        raise TopicNotCreated(topic)


class ServiceDiscovery:
    """Finds the newest owner of the decision log `topic`. The methods block; call them in a thread, one at a time.

    `namespace` is only used in error messages.
    """

    def __init__(self, broker: Broker, namespace: str, topic: str = TOPIC) -> None:
        self._broker = broker
        self._topic = topic
        self._namespace = namespace
        self._owner: Owner | None = None
        self._read_to = EARLIEST
        self._tried_epoch = 0

    def property_address(self) -> str | None:
        """Return HOST:PORT from the property of the topic, which may be outdated; None if it has no new owner."""
        if not isinstance(self._broker, AnnotatedBroker):
            return None
        try:
            text = self._broker.annotation(self._topic)
        except Error:  # reading the log raises the error again
            return None
        found = None if text is None else decode_owner_address(text)
        known = max(self._tried_epoch, 0 if self._owner is None else self._owner.epoch)
        if found is None or found.epoch <= known or not found.address:
            return None
        self._tried_epoch = found.epoch
        return found.address

    def newest_address(self) -> str:
        """Return HOST:PORT of the newest owner. Reads only what was appended to the log since the last call.

        Raises ServiceUnavailable if there never was an owner or it published no address, InvalidRequest if the
        namespace was divided into shards, and the errors of the broker.
        """
        self._read_on()
        if self._owner is None:
            raise never_owned(self._broker, self._namespace, self._topic)
        if not self._owner.address:
            raise ServiceUnavailable(
                f"the service of namespace {self._namespace} ({self._owner.owner}) published no address: "
                "give connect(…, service='HOST:PORT')"
            )
        return self._owner.address

    def _read_on(self) -> None:
        try:
            end = self._broker.last_position(self._topic)
            if end is None or end <= self._read_to:
                return
            try:
                self._read_to_end(end)
            except PositionTrimmed:  # compacted and trimmed since the last call
                self._read_to = EARLIEST
                self._read_to_end(end)
        except TopicNotFound:
            return

    def _read_to_end(self, end: Position) -> None:
        with CompactedReader(self._broker, self._topic, self._read_to) as reader:
            for placed in reader.read_to_end(end):
                self._apply(placed)
                self._read_to = reader.at

    def _apply(self, placed: PlacedBatch) -> None:
        for row, key in enumerate(placed.messages.keys.to_list()):
            if key == _KEY:
                entry = decode(placed.messages[row])
                if isinstance(entry, Owner) and (self._owner is None or entry.epoch >= self._owner.epoch):
                    self._owner = entry


def never_owned(broker: Broker, namespace: str, decisions: str) -> Error:
    """The error for a decision log that never had an owner.

    InvalidRequest if the namespace was divided into shards after the client was opened.
    """
    if decisions == TOPIC and isinstance(broker, PartitionedBroker) and (count := broker.partitions(TOPIC)):
        return InvalidRequest(f"namespace {namespace} now has {count} shards: open a new client")
    return ServiceUnavailable(
        f"no service has ever taken over namespace {namespace}: run `txnbuf serve` for it; if one runs, its log, its "
        "/role and its gRPC port say what it waits for"
    )


def log_identity_of(broker: Broker, namespace: str, decisions: str) -> LogIdentity:
    """Return the identity of the log of a cluster's namespace; `decisions`: the topic of its decision log."""

    def read_identity() -> str:
        try:
            return broker.incarnation(decisions)
        except TopicNotFound:
            raise never_owned(broker, namespace, decisions) from None
        except Error:
            raise
        except Exception as error:  # any other exception would end the session's reconnect loop
            raise ServiceUnavailable(f"cannot read the identity of the log of {namespace}: {error!r}") from error

    return LogIdentity(read_identity)


def read_ca_file(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a PEM file of certificates. Raises InvalidConfiguration."""
    try:
        found = current().disk.read(os.fspath(path))
    except OSError as error:
        raise InvalidConfiguration(f"cannot read the CA certificates in {path}: {error.strerror}") from error
    if b"-----BEGIN CERTIFICATE-----" not in found:
        raise InvalidConfiguration(f"{path} has no certificate in PEM format: name the file with the CA certificate")
    return found
