"""Admin client: requests of commands to a running service, or to the log itself"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from broker_io import is_cluster
from broker_io.addresses import shown_address
from broker_io.errors import Error, InvalidAddress, ServiceUnavailable, TopicNotFound
from broker_io.port import Broker
from snapshots.shard_count import shards_of
from snapshots.shards import Shard
from txnbuffer.cli.options import LogAddress, given, log_options
from txnbuffer.cli.output import narrate
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.errors import ForeignTopic, ForeignTransaction, counted
from txnbuffer.rpc.discovery import ServiceDiscovery
from txnbuffer.rpc.service_access import NO_ACCESS, ServiceAccess

if TYPE_CHECKING:
    from txnbuffer.service.offline import Ask

Answer = TypeVar("Answer")
LOG = logging.getLogger(__name__)
TIMEOUT = 30.0
SHOWN = "The state is shown as the log has it"


class ServiceAddress(NamedTuple):
    """The address of a running service, or the addresses of all shards or of a pair, separated by commas.

    `access` says how to connect to it.
    """

    address: str
    access: ServiceAccess = NO_ACCESS

    @property
    def each(self) -> list[ServiceAddress]:
        """Each address once, also if it is given twice, as HOST:PORT."""
        addresses = [address.strip().removeprefix("txnbuf://") for address in self.address.split(",")]
        return [ServiceAddress(one, self.access) for one in dict.fromkeys(addresses)]


def with_service(function: Callable[..., Any]) -> Callable[..., Any]:
    """`log_options`; they and the argument `address` give one argument `service`."""

    @functools.wraps(function)
    def wrapped(*arguments: Any, log: LogAddress, **named: Any) -> Any:
        return function(*arguments, service=service_at(log), **named)

    return log_options(wrapped)


def service_at(log: LogAddress) -> ServiceAddress:
    """The service at an address; at that of a cluster, the services of all shards, whose addresses it has."""
    if not is_cluster(log.address):
        if ignored := given("config_path", "flags"):
            raise click.UsageError(f"{ignored} can be used with the address of a cluster only")
        return ServiceAddress(log.address, log.access)
    with log.open_for_reading() as broker:
        return services_of(broker, log)


def services_of(broker: Broker, log: LogAddress) -> ServiceAddress:
    """The services of all shards of an opened cluster. Raises ServiceUnavailable if one never had a service."""
    count = shards_of(broker)
    decisions = [Shard(number, count).topic(DECISIONS) for number in range(count)]
    addresses = [ServiceDiscovery(broker, log.address, topic).newest_address() for topic in decisions]
    return ServiceAddress(",".join(addresses), log.access)


class ServiceResponses(NamedTuple):
    """The responses of the services, and the error of each service that gave none, by its address."""

    each: list[Any]
    missing: dict[str, Error]

    def rows(self, *order: str) -> list[dict[str, Any]]:
        """The rows of all responses; those of several services are sorted by the columns `order`."""
        rows = [row for response in self.each for row in response]
        if len(self.each) + len(self.missing) == 1:
            return rows
        return sorted(rows, key=lambda row: [str(row[name]) for name in order])

    def check(self) -> None:
        """Raises ServiceUnavailable if a service did not respond, so that the output is incomplete."""
        if self.missing:
            errors = "; ".join(str(error) for error in self.missing.values())
            called = counted(len(self.each) + len(self.missing), "service")
            raise ServiceUnavailable(
                f"the output is incomplete: {len(self.missing)} of {called} did not respond: {errors}"
            )


def call_owner(service: ServiceAddress, method: str, **request: Any) -> Any:
    """The response of the shard that owns the topic or transaction of the request.

    Raises the error of that shard; or ServiceUnavailable if no other shard owns it and one did not respond.
    """
    refused: Error | None = None
    unavailable: Error | None = None
    for one in service.each:
        try:
            return call(one, method, **request)
        except (ForeignTopic, ForeignTransaction) as error:
            refused = refused or error
        except TopicNotFound as error:
            refused = error
        except ServiceUnavailable as error:
            unavailable = unavailable or error
    raise unavailable or refused or AssertionError("a service has at least one address")


def call_all(service: ServiceAddress, method: str, **request: Any) -> ServiceResponses:
    """The responses of all shards; show them, then `check` them. Raises ServiceUnavailable if no shard responds.

    The addresses of a pair are one shard, which the live machine answers for.
    """
    responses = ServiceResponses([], {})
    for one in service.each:
        try:
            responses.each.append(call(one, method, **request))
        except ServiceUnavailable as error:
            responses.missing[one.address] = error
    if not responses.each:
        raise next(iter(responses.missing.values()))
    if responses.missing and call_owner(service, "Status")["shards"] == 1:
        responses.missing.clear()
    return responses


@contextlib.contextmanager
def opened(log: LogAddress) -> Iterator[Broker | None]:
    """The cluster or the directory at an address, opened for reading; None at the address of a service."""
    log.check_not_in_memory()
    if is_cluster(log.address) or log.address.startswith("file:"):
        with log.open_for_reading() as broker:
            yield broker
    else:
        yield None


def from_service(
    log: LogAddress, broker: Broker | None, ask: Callable[[ServiceAddress], Answer], otherwise: str
) -> Answer | None:
    """What the service answers; None if there is none and the log is opened, which `otherwise` tells the user."""
    if broker is not None and not is_cluster(log.address):
        return None
    try:
        return ask(service_at(log) if broker is None else services_of(broker, log))
    except ServiceUnavailable as error:
        if broker is None:
            raise
        narrate(f"{error}. {otherwise}")
        return None


def answers(log: LogAddress, method: str, *, complete: bool = False, **request: Any) -> ServiceResponses:
    """The responses of all shards; or of the log itself, with file:DIR and if no service of a cluster responds.

    `complete`: the log also responds if one service of a cluster does not.
    """
    with opened(log) as broker:
        if broker is None:
            return call_all(service_at(log), method, **request)
        responses = from_service(log, broker, lambda service: call_all(service, method, **request), SHOWN)
        if responses is not None and not (complete and responses.missing):
            return responses
        from txnbuffer.service.stored import NOT_STORED, StoredAnswers

        each = [] if responses is None else responses.each
        for problem in () if responses is None else responses.missing.values():
            narrate(f"{problem}. {SHOWN}")
        if method in NOT_STORED:
            narrate(f"This is what the log has, no service was asked: {NOT_STORED[method]}")
        return ServiceResponses([*each, StoredAnswers(broker).answer(method, **request)], {})


def changed(log: LogAddress, method: str, **request: Any) -> Any:
    """The response to a request that changes something; with file:DIR this command owns the log meanwhile."""
    log.check_not_in_memory()
    if not log.address.startswith("file:"):
        return call_owner(service_at(log), method, **request)

    async def change() -> Any:
        async with owning_directory(log) as ask:
            return await ask(method, **request)

    return asyncio.run(change())


@contextlib.asynccontextmanager
async def owning_directory(log: LogAddress) -> AsyncIterator[Ask]:
    """Own the log of a directory and ask its engine; nobody else can connect to it."""
    from txnbuffer.service.offline import owning

    log.open_for_reading().close()  # a directory without a log is refused, an owner would create one there
    with log.open_for_writing() as broker:
        async with owning(broker, click.get_current_context().command_path, log.config.compaction) as ask:
            yield ask


def call(service: ServiceAddress, method: str, *, timeout: float = TIMEOUT, **request: Any) -> Any:
    """The response of a service to one admin call. Raises the error that it returns, or ServiceUnavailable."""
    import grpc

    from broker_io.addresses import is_target
    from broker_io.rpc.channel import VERSION_METADATA, Endpoint, error_of
    from txnbuffer.rpc.admin_encoding import ADMIN_PATH, decode_admin_answer, encode_admin_request

    target = service.address.removeprefix("txnbuf://")
    if not is_target(target):
        kind = "the address of a cluster" if "pulsar" in target.partition("://")[0] else "not a service address"
        raise InvalidAddress(f"{shown_address(service.address)!r} is {kind}: give txnbuf://HOST:PORT of the service")
    message = encode_admin_request(request).SerializeToString()
    endpoint = Endpoint(target, service.access.load())
    metadata = (*VERSION_METADATA, *endpoint.metadata())
    LOG.debug("request %s to the service at %s", method, target)
    with endpoint.channel() as channel:
        rpc = channel.unary_unary(f"{ADMIN_PATH}/{method}")
        try:
            return decode_admin_answer(rpc(message, timeout=timeout, metadata=metadata))
        except grpc.RpcError as error:
            raise error_of(error, target) from None
