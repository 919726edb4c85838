"""Where the service of a cluster's namespace is: what its newest owner wrote into the decision log.

The owner leaves a note beside the log too, which costs one question where the log may take seconds. It counts for less
than the log: each owner's note is followed once, and whoever gets nowhere with it looks into the log.
"""

from __future__ import annotations

from broker_io.batch import PlacedBatch
from broker_io.errors import Error, PositionTrimmed, TopicNotFound
from broker_io.port import Broker, NotingBroker, PartitionedBroker
from broker_io.position import EARLIEST, Position
from snapshots.shard_count import shards_of
from snapshots.shards import Shard, shard_of
from txnbuffer.coordinator.entries import OWNER_KEY, TOPIC, Owner, decode
from txnbuffer.coordinator.whereabouts import decode_note
from txnbuffer.errors import InvalidRequest, ServiceUnavailable, TopicNotMade

PATIENCE = 0.25
"""Seconds of silence after which another reader is asked, and then the log is taken to be read."""

_KEY = OWNER_KEY.encode()


def owner_of(broker: Broker, namespace: str, topic: str) -> str:
    """HOST:PORT of the service that has a topic: the newest owner of its shard. Raises as `Finder.look`."""
    return Finder(broker, namespace, _decisions_of(broker, topic)).look()


def _decisions_of(broker: Broker, topic: str) -> str:
    """The decision log of a topic's shard."""
    shards = shards_of(broker)
    return Shard(shard_of(topic, shards), shards).topic(TOPIC)


def check_made(broker: Broker, topic: str) -> None:
    """Raises TopicNotMade where the service of a topic, which is missing, wants none to be made."""
    if not isinstance(broker, NotingBroker):
        return
    try:
        noted = decode_note(broker.noted(_decisions_of(broker, topic)) or "")
    except TopicNotFound:  # no service was ever there
        return
    if noted is not None and not noted.makes_topics:
        raise TopicNotMade(topic)


class Finder:
    """Blocks while it reads, so it belongs into a thread; one call at a time. `namespace` is named in errors.

    `topic`: the decision log that is looked at.
    """

    def __init__(self, broker: Broker, namespace: str, topic: str = TOPIC) -> None:
        self._broker = broker
        self._topic = topic
        self._namespace = namespace
        self._owner: Owner | None = None
        self._read_to = EARLIEST
        self._followed = 0

    def noted(self) -> str | None:
        """HOST:PORT as a newer owner than any before noted it, which may be out of date; None if there is no such."""
        if not isinstance(self._broker, NotingBroker):
            return None
        try:
            text = self._broker.noted(self._topic)
        except Error:  # the log will tell what is wrong, if anything is
            return None
        found = None if text is None else decode_note(text)
        known = max(self._followed, 0 if self._owner is None else self._owner.epoch)
        if found is None or found.epoch <= known or not found.address:
            return None
        self._followed = found.epoch
        return found.address

    def look(self) -> str:
        """HOST:PORT of the newest owner, from what the log got since the last look.

        Raises ServiceUnavailable if no service was ever there or it told no address, and what the broker raises.
        """
        self._read_on()
        if self._owner is None:
            self._check_shards()
            raise ServiceUnavailable(
                f"no service has ever taken over namespace {self._namespace}: run `txnbuf serve --broker …` for it"
            )
        if not self._owner.address:
            raise ServiceUnavailable(
                f"the service of namespace {self._namespace} ({self._owner.owner}) told no address: "
                "give connect(…, service='HOST:PORT')"
            )
        return self._owner.address

    def _check_shards(self) -> None:
        """Raises InvalidRequest where the namespace got its shards after it was looked at for them."""
        broker = self._broker
        if self._topic == TOPIC and isinstance(broker, PartitionedBroker) and (count := broker.partitions(TOPIC)):
            raise InvalidRequest(f"namespace {self._namespace} has {count} shards by now: open another client")

    def _read_on(self) -> None:
        try:
            end = self._broker.last_position(self._topic)
            if end is None or end <= self._read_to:
                return
            try:
                self._read_to_end(end)
            except PositionTrimmed:  # compacted and trimmed since the last look
                self._read_to = EARLIEST
                self._read_to_end(end)
        except TopicNotFound:
            return

    def _read_to_end(self, end: Position) -> None:
        """Read up to an end that may be compacted away: then nobody finds anything more, nor while a broker is slow."""
        found = True
        while found and self._read_to < end:
            found = False
            start = self._read_to
            with self._broker.reader(self._topic, start, inclusive=start == EARLIEST, compacted=True) as reader:
                while self._read_to < end and (placed := reader.read(timeout=PATIENCE)) is not None:
                    found = True
                    self._take(placed)

    def _take(self, placed: PlacedBatch) -> None:
        for row, key in enumerate(placed.messages.keys.to_list()):
            if key == _KEY:
                entry = decode(placed.messages[row])
                if isinstance(entry, Owner) and (self._owner is None or entry.epoch >= self._owner.epoch):
                    self._owner = entry
        self._read_to = placed.positions.last
