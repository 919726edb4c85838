"""The connections of a pair's node: gRPC, by `replication.proto`

The node that is not live calls `Follow` of the one that is; the call is the link. Its metadata name the version of the
protocol and the pair. A node that is not live ends the call as UNAVAILABLE, one of another version or pair as
FAILED_PRECONDITION; the answer's initial metadata have the version if the call was accepted.

    txnbuffer-pair-version   the version of the protocol, 1
    txnbuffer-pair-bin       the name of the pair, UTF-8
    txnbuffer-pair-takes     the messages that the sender takes besides those of 0.2.0: `damaged-topics`

The last one is in the initial metadata too, and separates its words by spaces; 0.2.0 neither sends nor reads it.

Off loopback the link needs TLS with certificates of both nodes, signed by one authority. They are read again for each
connection. The certificate of each has the name by which the other one knows it, as a subject alternative name: gRPC
checks that of the node that is called, this module that of the caller.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import google_crc32c

from broker_io.addresses import is_loopback, is_target, port_of, shown_address, split_address
from broker_io.environment import Thread, current
from broker_io.errors import (
    CallerError,
    EnvironmentFault,
    Error,
    InvalidAddress,
    NotAuthorized,
    NotLive,
    PeerError,
    ServiceUnavailable,
    TopicNotFound,
    VersionMismatch,
)
from broker_io.filelog.pair.link import GrpcLink
from broker_io.filelog.pair.link_frames import LATER
from broker_io.filelog.pair.port import LinkEvents, Transport
from broker_io.rpc.channel import ERROR_KEY, error_of, obstacle
from broker_io.rpc.credential_files import ClientCertificate, CredentialFile, TlsFiles
from broker_io.rpc.encoding import encode_error, parse, serialize
from broker_io.rpc.replication_pb2 import LinkFetch, LinkFetched

VERSION = 1
VERSION_KEY = "txnbuffer-pair-version"
PAIR_KEY = "txnbuffer-pair-bin"
TAKES_KEY = "txnbuffer-pair-takes"
SERVICE = "txnbuffer.v1.Replication"
FOLLOW, FETCH = f"/{SERVICE}/Follow", f"/{SERVICE}/Fetch"

CLOSED, REFUSED = "Socket closed", "; it may not accept the certificate of this member"
"""Part of gRPC's error if the other node ends the handshake, and what this may mean."""
SUBJECT_NAMES = "x509_subject_alternative_name"
"""Where gRPC has the subject alternative names of the peer's certificate."""

RETRY_SECONDS = 0.2
"""The pause between attempts to connect."""
FETCH_SECONDS = 10.0
LAST_SECONDS = 0.5
"""How long calls may take to end once their links are closed."""
WORKERS = 8
"""Calls at once: a link that ends may still be there when the next one begins."""
OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


class LinkSettings(NamedTuple):
    """How a node reaches its peer.

    - `pair`: the name of the pair, which both have.
    - `listen`: HOST:PORT to listen at. `peer`: that of the other node.
    - `certificate`, `key`, `authority`: files (PEM) for TLS; all of them or none.
    - `peer_name`: the name in the certificate of the other node, or the host of `peer`.
    - `idle_timeout`: seconds without a frame after which a link is broken.
    """

    pair: str
    listen: str
    peer: str
    certificate: str = ""
    key: str = ""
    authority: str = ""
    peer_name: str = ""
    idle_timeout: float = 2.0

    @property
    def tls(self) -> bool:
        return bool(self.authority)

    @property
    def files(self) -> TlsFiles:
        """The files of a link with TLS."""
        return TlsFiles(
            CredentialFile(self.certificate, "pair.tls_cert"),
            CredentialFile(self.key, "pair.tls_key"),
            CredentialFile(self.authority, "pair.tls_ca"),
        )

    @property
    def expected_name(self) -> str:
        """The subject alternative name that the certificate of the other node must have."""
        return self.peer_name or split_address(self.peer)[0]

    def check_files(self) -> None:
        """Raises EnvironmentFault for files that can't be used."""
        if self.tls:
            self.files.check()

    def check(self) -> None:
        """Raises InvalidAddress for wrong addresses, and for those that other machines reach without TLS."""
        if len({bool(self.certificate), bool(self.key), bool(self.authority)}) > 1:
            raise InvalidAddress("TLS between the members of a pair needs a certificate, its key and a CA certificate")
        host, port = split_address(self.listen)
        if not host or port_of(port) is None:
            raise InvalidAddress(
                f"{shown_address(self.listen)!r} is not an address to listen at for the other member: write HOST:PORT"
            )
        if not is_target(self.peer):
            raise InvalidAddress(
                f"{shown_address(self.peer)!r} is not the address of the other member of the pair: write HOST:PORT"
            )
        if self.peer == self.listen:
            raise InvalidAddress(f"{self.peer!r} is where this member listens: give the address of the other one")
        for address in (self.listen, self.peer):
            if not self.tls and not is_loopback(split_address(address)[0]):
                raise InvalidAddress(
                    f"{address}: without TLS anyone could read and change the log: give a certificate, its key and a "
                    "CA certificate for the link of the pair"
                )


class GrpcTransport(Transport):
    """Listens for the peer and connects to it; has at most one link at a time.

    `port` is the number of the port at which it listens.
    """

    def __init__(self, settings: LinkSettings) -> None:
        """Raises InvalidAddress, and EnvironmentFault for files that can't be used."""
        settings.check()
        settings.check_files()
        environment = self._environment = current()
        self.problem = "the other member has not connected yet"
        self.port = 0
        self._settings = settings
        self._takes = " ".join(LATER.values())
        self._mutex = environment.threads.lock()
        self._wake = environment.threads.event()
        self._numbers = itertools.count(1)
        self._link: GrpcLink | None = None
        self._connecting: GrpcLink | None = None
        self._channel: Any = None
        self._readers: dict[int, Thread] = {}
        self._closed = False
        self._server: Any = None
        self._events: LinkEvents
        self._may_accept: Callable[[], bool]
        self._may_connect: Callable[[], bool]
        self._executor = environment.threads.executor(WORKERS, "pair")
        self._connector = environment.threads.thread(self._connect_loop, name="pair link", daemon=True)

    def start(self, events: LinkEvents, may_accept: Callable[[], bool], may_connect: Callable[[], bool]) -> None:
        self._events, self._may_accept, self._may_connect = events, may_accept, may_connect
        self._listen()
        self._connector.start()

    def fetch(self, name: str, offset: int, size: int) -> bytes:
        import grpc

        channel = self._fetch_channel()
        if channel is None:
            raise ServiceUnavailable("there is no link to the other member of the pair: try again")
        request = serialize(LinkFetch(name=name, offset=offset, size=size))
        try:
            answer = channel.unary_unary(FETCH)(request, timeout=FETCH_SECONDS, metadata=self._metadata())
            found = parse(LinkFetched, answer)
        except grpc.RpcError as error:
            cause = error_of(error, self._settings.peer, connected=True)
            if isinstance(cause, PeerError | TopicNotFound):
                raise cause from None
            raise ServiceUnavailable(f"the other member of the pair can't read {name} ({cause})") from None
        except ValueError as error:  # also of a channel that was closed
            raise ServiceUnavailable(f"the other member of the pair sent no part of {name} ({error})") from None
        if google_crc32c.value(found.data) != found.crc:
            raise ServiceUnavailable(f"a part of {name} has changed on the way: fetch it again")
        data: bytes = found.data
        return data

    def _fetch_channel(self) -> Any:
        """The channel of the link, or another one, if the peer has made the link; None without a link."""
        with self._mutex:
            if self._link is not None and self._channel is None:
                self._channel = self._open_channel(self._settings.peer)
            return self._channel

    def close(self) -> None:
        with self._mutex:
            closed, self._closed = self._closed, True
            links, readers = (self._link, self._connecting), [*self._readers.values()]
        if closed:
            return
        self._wake.set()
        for link in links:
            if link is not None:
                link.close()
        if self._server is not None:
            self._server.stop(LAST_SECONDS).wait()
            self._connector.join()
        for reader in readers:
            reader.join()
        self._executor.shutdown()

    # --- links

    def _new_link(self) -> GrpcLink:
        with self._mutex:
            return GrpcLink(next(self._numbers), self._settings.idle_timeout, self._environment)

    def _begin(self, link: GrpcLink, frames: Iterator[bytes], channel: Any = None) -> None:
        """Use a link in place of the one before it, in a thread of its own."""

        def read() -> None:
            try:
                link.run(frames, self._events)
            finally:
                if channel is not None:
                    channel.close()
                self._forget(link)

        reader = self._environment.threads.thread(read, name=f"pair link {link.number}", daemon=True)
        with self._mutex:
            old, self._link = self._link, link
            former, self._channel, self.problem = self._channel, channel, ""
            closed = self._closed
            if not closed:
                self._readers[link.number] = reader
                reader.start()
        if old is not None:
            old.close()
        if former is not None:
            former.close()
        if closed:
            link.close()

    def _forget(self, link: GrpcLink) -> None:
        channel = None
        with self._mutex:
            if self._link is link:
                channel = self._channel
                self._link = self._channel = None
                self.problem = link.reason or "the link was closed"
            self._readers.pop(link.number, None)
        if channel is not None:
            channel.close()
        self._wake.set()

    # --- the node that is live

    def _listen(self) -> None:
        import grpc

        settings, outer = self._settings, self

        class LinkHandler(grpc.GenericRpcHandler):
            def service(self, details: Any) -> Any:
                if details.method == FOLLOW:
                    return grpc.stream_stream_rpc_method_handler(outer._follow)
                return grpc.unary_unary_rpc_method_handler(outer._fetch) if details.method == FETCH else None

        executor: Any = self._executor  # typed as a thread pool, but every executor will do
        server = grpc.server(executor, [LinkHandler()], options=OPTIONS, maximum_concurrent_rpcs=WORKERS)
        try:
            if settings.tls:
                self.port = server.add_secure_port(settings.listen, settings.files.server_credentials())
            else:
                self.port = server.add_insecure_port(settings.listen)
        except RuntimeError as error:
            why = obstacle(settings.listen) or str(error)
            raise EnvironmentFault(f"can't listen at {settings.listen} for the other member: {why}") from error
        server.start()
        self._server = server

    def _follow(self, frames: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """A call of the other node."""
        self._check_call(context)
        if not self._may_accept():
            _refuse(context, NotLive("this member of the pair is not live"))
        link = self._new_link()
        link.cancel, link.takes = context.cancel, _taken(context.invocation_metadata())
        if not context.add_callback(lambda: link.fail("the connection was lost")):
            return iter(())
        context.send_initial_metadata(((VERSION_KEY, str(VERSION)), (TAKES_KEY, self._takes)))
        self._begin(link, frames)
        return link.frames()

    def _fetch(self, data: bytes, context: Any) -> bytes:
        self._check_call(context)
        try:
            request = parse(LinkFetch, data)
            found = self._events.read_prepared(request.name, request.offset, request.size)
        except ValueError as error:
            _refuse(context, CallerError(str(error)))
        except Error as error:
            _refuse(context, error)
        return serialize(LinkFetched(data=found, crc=google_crc32c.value(found)))

    def _check_call(self, context: Any) -> None:
        """End a call of another version, for another pair, or without the certificate of the other node."""
        if self._settings.tls:
            self._check_certificate(context)
        metadata = dict(context.invocation_metadata())
        version = metadata.get(VERSION_KEY, "")
        if version != str(VERSION):
            text = f"the calling member has version {version!r} of the link, this one {VERSION}"
            _refuse(context, VersionMismatch(f"{text}: run the same release on both"))
        name = metadata.get(PAIR_KEY, b"").decode(errors="replace")
        if name != self._settings.pair:
            text = f"this node belongs to the pair {self._settings.pair!r}, not {name!r}"
            _refuse(context, VersionMismatch(f"{text}: give both the same lock, or the address of the other member"))

    def _check_certificate(self, context: Any) -> None:
        """End a call whose certificate has expired, or is that of another machine: one authority may sign many."""
        certificate = ClientCertificate.of_call(context)
        if certificate is None or self._environment.clock.now_ms() >= certificate.expires * 1000:
            _refuse(context, NotAuthorized("the certificate of the calling member has expired: give it a new one"))
        expected = self._settings.expected_name
        names = [name.decode(errors="replace") for name in context.auth_context().get(SUBJECT_NAMES, ())]
        if any(name_fits(name, expected) for name in names):
            return
        shown = ", ".join(names) or "no name"
        text = f"the certificate of the calling member is for {shown}, not for {expected!r}"
        if self._link is None:
            self.problem = f"refused a call from {context.peer()}: {text}"
        _refuse(context, NotAuthorized(f"{text}: give pair.peer or pair.peer_name the name in its certificate"))

    # --- the node that is not live

    def _connect_loop(self) -> None:
        """Connect while there is no link and there may be one; break links over which nothing comes."""
        clock = self._environment.clock
        while not self._closed:
            link = self._link
            if link is None and self._may_connect():
                self._connect(self._settings.peer)
            elif link is not None and (idle := link.idle_for(clock.monotonic())) > self._settings.idle_timeout:
                link.fail(f"nothing came from the other member for {idle:.1f} s")
            self._wake.wait(min(RETRY_SECONDS, self._settings.idle_timeout / 5))
            self._wake.clear()

    def _connect(self, target: str) -> None:
        import grpc

        link = self._connecting = self._new_link()
        channel = None
        try:
            channel = self._open_channel(target)
            call = channel.stream_stream(FOLLOW)(link.frames(), metadata=self._metadata())
            link.cancel = call.cancel
            timer = self._environment.threads.timer(self._settings.idle_timeout, call.cancel)
            timer.start()
            answer = call.initial_metadata()
            timer.cancel()
            accepted, link.takes = VERSION_KEY in dict(answer), _taken(answer)
            if not accepted:
                call.code()  # waits for the end of the call
                raise error_of(call, target)
        except (Error, ValueError, grpc.RpcError) as error:
            self.problem = f"{error}{REFUSED if self._settings.tls and CLOSED in str(error) else ''}"
            link.close()
            if channel is not None:
                channel.close()
        else:
            self._begin(link, call, channel)

    def _open_channel(self, target: str) -> Any:
        import grpc

        if not self._settings.tls:
            return grpc.insecure_channel(target, OPTIONS)
        name = self._settings.peer_name
        options = [*OPTIONS, ("grpc.ssl_target_name_override", name)] if name else OPTIONS
        return grpc.secure_channel(target, grpc.ssl_channel_credentials(*self._settings.files.read()), options)

    def _metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return (VERSION_KEY, str(VERSION)), (PAIR_KEY, self._settings.pair.encode()), (TAKES_KEY, self._takes)


def _taken(metadata: Any) -> frozenset[str]:
    """The messages of `LATER` that the other member takes, as its metadata say."""
    return frozenset(dict(metadata).get(TAKES_KEY, "").split())


def name_fits(pattern: str, name: str) -> bool:
    """Whether a name in a certificate, which may have a wildcard as its first label, is that of a host."""
    pattern, name = pattern.lower(), name.lower()
    return pattern == name or (pattern.startswith("*.") and pattern[1:] == name[name.find(".") :])


def _refuse(context: Any, error: Error) -> NoReturn:
    """End a call with an error, which `error_of` finds."""
    import grpc

    message = encode_error(error)
    context.set_trailing_metadata(((ERROR_KEY, message.SerializeToString()),))
    context.abort(grpc.StatusCode[error.grpc_status], message.message)
    raise error  # abort raises
