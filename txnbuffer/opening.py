"""`connect`: what opens clients

It imports the client and the databases, which the client does not import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any

from broker_io import PulsarOptions
from txnbuffer.client.connection import ClusterOptions, PendingConnection
from txnbuffer.client.path.send_columns import Batching
from txnbuffer.client.serializers import DeserializerChoice, Deserializers, Schema, SerializerChoice, Serializers
from txnbuffer.errors import InvalidRequest
from txnbuffer.progress import OnProgress
from txnbuffer.rpc.service_access import ServiceAccess

if TYPE_CHECKING:
    from txnbuffer.client.client import Client
    from txnbuffer.client.database_transaction import DatabaseLinks


def connect(
    address: str,
    *,
    read_only: bool = False,
    serializer: SerializerChoice = None,
    deserializers: DeserializerChoice = None,
    timeout: float = 10.0,
    max_unavailable: float = 60.0,
    tls_ca: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    token: str | Callable[[], str] | None = None,
    token_file: str | None = None,
    service: str | None = None,
    broker_options: PulsarOptions | None = None,
    schemas: Mapping[str, Schema] | None = None,
    batching: Batching = "messages",
    progress: OnProgress | None = None,
    databases: Mapping[str, Any] | None = None,
) -> PendingConnection:
    """Connect to an embedded log, to a service, or to a Pulsar cluster.

        async with connect("file:data") as client: ...    # asyncio: a Client
        with connect("file:data") as client: ...          # sync: a SyncClient

    - `address`: `memory:` or `file:DIR` opens a log in this process and locks it until the client is closed.
      `txnbuf://HOST:PORT` is a service that owns a log; `txnbuf://HOST:PORT,HOST:PORT` a pair of services.
      `pulsar://HOST:PORT/TENANT/NAMESPACE` (or `pulsar+ssl://`) is a Pulsar cluster; it needs a running service
      (`txnbuf serve`) that records which transactions committed.
    - `serializer`: converts values that are not bytes or text: `JsonSerializer()`, or a mapping by topic, for example.
    - `deserializers`: convert what readers and handlers get, for example `JsonDeserializer()`; one, or a mapping.
    - `read_only`: the client has readers, `topics` and `last_visible`; everything else raises ReadOnly. It writes
      nothing and locks nothing, for a log that another process owns, or that nobody may change.
    - `timeout`: seconds for one attempt to connect to a service; it does not limit calls or transactions.
    - `max_unavailable`: seconds that calls wait for a new connection after the connection was lost. Then they raise
      ServiceUnavailable; a commit in flight raises OutcomeUnknown: call `client.outcome`.
    - `tls_ca`: path of a PEM file with the CA certificates to trust; without it the connection to the service is not
      encrypted. `tls_cert`, `tls_key`: paths of PEM files with a certificate of this client and its key.
    - `token`, `token_file`: who this client is: a token, a function that returns one, or a file with it. The function
      is called, and the file read, for each connection, so a token can be renewed. A token is not sent to another
      machine without TLS. On a cluster, the token of `broker_options` is used if none is given here.
    - `databases`: by name, for `client.transaction(database=…)`; see `Database`.
    - `progress`: called with a `Progress` while the log opens and its state is recovered, which may take seconds.

    Only for a cluster:

    - `service`: HOST:PORT of the service. Without it the client finds the service through the cluster.
    - `broker_options`: options of `open_broker`. The default of `admin_url` is in TXNBUFFER_PULSAR_ADMIN_URL.
    - `schemas`: topics and their schemas from the Pulsar client library. Values are encoded with the schema, and the
      schema is registered with the cluster.
    - `batching`: "messages" sends each record as one message. "records" packs records that are sent together into
      record sets, which is many times faster; only readers of this package can read them. Each send can override it.

    Raises InvalidAddress and InvalidRequest. Entering the block raises the errors of opening a log or a cluster.
    """
    access = ServiceAccess(tls_ca, tls_cert, tls_key, token, token_file)
    cluster = ClusterOptions.of(service, broker_options, schemas).at(address)
    rest = (batching, Deserializers(deserializers), read_only, progress, _opening(databases))
    chosen = Serializers(serializer, schemas)
    return PendingConnection(address, chosen, timeout, max_unavailable, access, cluster, *rest)


def _opening(databases: object) -> Callable[[Client], DatabaseLinks] | None:
    """What opens the databases of a client. Raises InvalidRequest."""
    if not isinstance(databases, Mapping | NoneType):
        raise InvalidRequest(f"databases must be a mapping by name, got {type(databases).__name__}")
    return partial(_open_databases, databases) if databases else None


def _open_databases(databases: Mapping[str, Any], client: Client) -> DatabaseLinks:
    from txnbuffer.databases.links import Databases

    return Databases(client, client, databases)
