"""The two modes of a service: what differs between an embedded log and a cluster.

In embedded mode the service owns the log: clients write through it, so it knows each message without reading. In
cluster mode applications write to the topics of a cluster themselves: the service reads these topics and writes only
markers and its internal topics.

`Mode` is what all other parts of the service ask; `EmbeddedMode` and `ClusterMode` implement it. An engine makes one
of them when it starts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from typing import ClassVar, Protocol, TypeVar

from broker_io.batch import PlacedBatch
from broker_io.errors import Error
from broker_io.port import Broker, Reader
from snapshots.shards import Shard
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.coordinator.messages import CoordinatorConfig
from txnbuffer.recovery.followed_topic import FollowedTopic
from txnbuffer.service.appends import Appends
from txnbuffer.service.connection import Limits
from txnbuffer.service.loop import Loop
from txnbuffer.service.takeover import OwnedLog
from txnbuffer.service.topic import ServiceTopic, Topics

T = TypeVar("T")
Count = Callable[[ServiceTopic, "tuple[int, ...]"], None]
Reregister = Callable[[str], Awaitable[Error | None]]


class RecordCounts(Protocol):
    """Calls a function for transactions once the buffer has applied a topic's log up to its end at the request."""

    def ask(self, topic: ServiceTopic, least: tuple[int, ...]) -> None:
        """Request the call for transactions in a topic."""

    def applied(self, topic: ServiceTopic) -> None:
        """Make the calls that are due, after a topic's buffer has applied messages."""


class MissingTopics(Protocol):
    """Decides what became of topics that are missing."""

    def missing(self, name: str) -> None:
        """Find out whether a topic was deleted or re-created."""


class Mode(ABC):
    """What differs between the modes.

    `config`: the coordinator's default configuration. `max_shards`: the maximum number of shards of a log.
    `takes_records`: whether clients send records to the service. `stop_seconds`: how long a stopping engine waits for
    the acknowledgement of appends in flight.
    """

    config: ClassVar[CoordinatorConfig]
    max_shards: ClassVar[int]
    takes_records: ClassVar[bool]
    stop_seconds: ClassVar[float]

    def __init__(self, loop: Loop, broker: Broker, coordinator: Coordinator, appends: Appends, shard: Shard) -> None:
        self._loop = loop
        self._broker = broker
        self._coordinator = coordinator
        self._appends = appends
        self._shard = shard

    @classmethod
    @abstractmethod
    def limits(cls, limits: Limits, broker: Broker, /) -> Limits:
        """Return the limits that apply on a broker."""

    @classmethod
    @abstractmethod
    def check_config(cls, config: CoordinatorConfig, /) -> None:
        """Raises InvalidConfiguration if the coordinator can't work in this mode."""

    # The engine

    @abstractmethod
    def start(self, owned: OwnedLog, topics: Topics, take: Callable[[PlacedBatch], None]) -> None:
        """Start what the mode does in the background; `take` is called with messages of other shards."""

    @abstractmethod
    def turn(self) -> None:
        """At the begin of each turn: deliver what was read."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop reading."""

    @abstractmethod
    def end_error(self, error: Error) -> Error:
        """Return the error by which an engine ends that an error has stopped."""

    # Topics

    @abstractmethod
    def make_topic(self, name: str, topics: Topics) -> ServiceTopic:
        """Return a new entry of a data topic."""

    @abstractmethod
    def load(self, topic: ServiceTopic) -> None:
        """Open a recovered topic."""

    @abstractmethod
    def expected(self, registered: Iterable[str]) -> Iterable[str]:
        """Return the registered topics that were deleted if they were not recovered."""

    @abstractmethod
    def is_temporary(self, problem: Error | None) -> bool:
        """Whether the problem of a topic may go away, so that the topic is registered again."""

    @abstractmethod
    async def prepare(self, topic: ServiceTopic, topics: Topics, *, create: bool) -> FollowedTopic | None:
        """Prepare the registration of a topic; `create` it if missing."""

    @abstractmethod
    def follow(self, topic: ServiceTopic, followed: FollowedTopic, reader: Reader, topics: Topics) -> None:
        """Feed the messages of a topic to its buffer from now on; `reader` continues where recovery ended."""

    @abstractmethod
    def stopped(self, topic: ServiceTopic, problem: Error) -> None:
        """Handle a stopped topic."""

    @abstractmethod
    async def exclusively(self, topics: Topics, names: Iterable[str], function: Callable[[], T]) -> T:
        """Call a function that may read the logs of topics; nothing is applied to them meanwhile."""

    @abstractmethod
    def sequence(self, followed: FollowedTopic) -> None:
        """Assign seqnos to applied messages, if that does not block the loop."""

    # Registrations and requests

    @abstractmethod
    def check_new(self, name: str, *, create: bool) -> None:
        """Raises TopicNotCreated at once for a missing topic that must not be created, unless that takes time."""

    @abstractmethod
    async def hold(self, topic: ServiceTopic) -> None:
        """Suspend the appends to a topic, so that its log does not change."""

    @abstractmethod
    async def registered(self, topic: ServiceTopic, *, fresh: bool) -> Error | None:
        """Complete a registration, a `fresh` one or a repeated one; return the error if that failed."""

    # Effects

    @abstractmethod
    def record_counts(self, count: Count) -> RecordCounts:
        """Return what calls `count` once records are applied."""

    @abstractmethod
    def missing_topics(self, topics: Topics, reregister: Reregister) -> MissingTopics:
        """Return what finds out about missing topics; `reregister` registers one again if it exists."""
