"""A pair's lock in etcd

Keys: `NAME/record` has the record with the number of the session that made it, as `lock_state` describes. A store with
a session has `NAME/session/STORE`, its id in hex; its value is the number of the session, which is that of an etcd
lease, and the key ends with that lease. The primary has its lease as long as its key names the session of the record.

A swap reads all of this and replaces the record in a transaction, which compares the revisions of the record and of the
sender's key. So what `accepts` decided still holds when the record is replaced, as a lease of the old primary can end
meanwhile, but not begin; and a swap that arrives late finds another revision.

A leader of etcd that has lost its office without knowing may renew a lease that its successor ends. A linearizable read
that follows shows the term of the successor, so a renewal counts only if that read has the same term as the renewal.

Members of etcd are asked in turn, and a member that fails is asked last. A read that has no answer from one of them is
repeated at the next; a change is not, because it may have happened. The API is used through gRPC, which the project
needs anyway.
"""

from __future__ import annotations

import math
import urllib.parse
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError

from broker_io.addresses import is_loopback, is_target, shown_address, split_address
from broker_io.environment import current
from broker_io.errors import EnvironmentFault, InvalidAddress, LockUnavailable, StorageError
from broker_io.filelog.log.records import Store
from broker_io.filelog.pair.lock_state import decode_record, encode_record
from broker_io.filelog.replication.lease import LockLease
from broker_io.filelog.replication.lock import NO_RECORD, LockRecord, LockView, Swap, accepts
from broker_io.port import Resource
from broker_io.rpc import etcd_pb2
from broker_io.rpc.credential_files import CredentialFile, check_authority, check_certificate

A = TypeVar("A")

TIMEOUT = 2.0
"""Seconds that a call may take, an attempt at each member of etcd included."""
ATTEMPTS = 5
"""Attempts of a change while others change the lock at the same time."""
OPTIONS = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
WITH_LEADER = ("hasleader", "true")
"""A member without a leader refuses a call with this at once."""
KEY_VALUE, LEASE = "/etcdserverpb.KV", "/etcdserverpb.Lease"
AUTHENTICATE = "/etcdserverpb.Auth/Authenticate"


class EtcdAddress(NamedTuple):
    """Where a lock is, and the files with what is needed to reach it; TLS is used if a CA certificate is given."""

    targets: tuple[str, ...]
    name: str
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password_file: str = ""

    @classmethod
    def parse(cls, address: str) -> EtcdAddress:
        """Read `etcd://HOST:PORT[,HOST:PORT…]/NAME[?ca=FILE&cert=FILE&key=FILE&user=USER&password-file=FILE]`.

        Raises InvalidAddress.
        """
        shown = shown_address(address)
        scheme, _, rest = address.partition("://")
        place, _, query = rest.partition("?")
        hosts, _, name = place.partition("/")
        targets = tuple(hosts.split(","))
        fields = urllib.parse.parse_qsl(query, keep_blank_values=True)
        options = {option.replace("-", "_"): value for option, value in fields}
        known = {*cls._fields} - {"targets", "name"}
        whole = len(options) == len(fields) and options.keys() <= known and all(options.values())
        if scheme != "etcd" or not name.strip("/") or not all(map(is_target, targets)) or not whole:
            raise InvalidAddress(
                f"{shown!r} is not the address of a lock in etcd: write etcd://HOST:PORT,HOST:PORT/NAME, then if "
                "needed ?ca=FILE&cert=FILE&key=FILE&user=USER&password-file=FILE"
            )
        found = cls(targets, name.strip("/"), **options)
        if bool(found.cert) != bool(found.key) or bool(found.user) != bool(found.password_file):
            raise InvalidAddress(f"{shown!r}: give cert and key together, and user and password-file together")
        open_hosts = [target for target in targets if not is_loopback(split_address(target)[0])]
        if not found.ca and (found.cert or (found.user and open_hosts)):
            what = "certificate would not be used" if found.cert else f"password would be sent to {open_hosts[0]}"
            raise InvalidAddress(f"{shown!r}: the {what} without TLS: give the CA certificate of etcd, ca=FILE")
        return found

    def file(self, option: str) -> CredentialFile:
        """The file that an option names."""
        return CredentialFile(getattr(self, option), f"{option.replace('_', '-')} of pair.lock")

    def check_files(self) -> None:
        """Raises EnvironmentFault for files that can't be used."""
        if self.ca:
            check_authority(self.file("ca"))
        if self.cert:
            check_certificate(self.file("cert"), self.file("key"))
        if self.user:
            self.file("password_file").read_password()


class _StoreSession(NamedTuple):
    number: int
    revision: int


@dataclass(frozen=True)
class _SeenKeys:
    """The keys of a lock as one read shows them; a revision is 0 for a key that is missing."""

    record: LockRecord
    session: int
    revision: int
    sessions: dict[Store, _StoreSession]
    term: int

    @property
    def view(self) -> LockView:
        live, number = self.record.live, self.session_of(self.record.live)
        held = number is not None and number == self.session
        return LockView(self.record, LockLease(live, self.session, 0) if held else None)

    def session_of(self, store: Store) -> int | None:
        found = self.sessions.get(store)
        return found.number if found else None

    def revision_of(self, store: Store) -> int:
        found = self.sessions.get(store)
        return found.revision if found else 0


class EtcdLock(Resource):
    """The lock of a pair in etcd; `PairLock` describes the calls."""

    clocked = True

    def __init__(self, address: EtcdAddress, *, timeout: float = TIMEOUT) -> None:
        """Raises EnvironmentFault for files that can't be used."""
        address.check_files()
        self._members = _EtcdMembers(address, timeout)
        self._record = f"{address.name}/record".encode()
        self._sessions = f"{address.name}/session/".encode()
        prefix = f"{address.name}/".encode()
        self._everything = etcd_pb2.RangeRequest(key=prefix, range_end=prefix[:-1] + b"0")

    def read(self) -> LockView:
        return self._read().view

    def swap(self, swap: Swap) -> tuple[bool, LockView]:
        seen, sender = self._read(), swap.record.live
        for _ in range(ATTEMPTS):
            if not accepts(seen.view, swap, session_alive=seen.session_of(sender) == swap.session):
                return False, seen.view
            unchanged = {self._record: seen.revision, self._key(sender): seen.revision_of(sender)}
            done, seen = self._change(unchanged, self._record, encode_record(swap.record, swap.session), 0)
            if done:
                return True, seen.view
        raise LockUnavailable(f"{self._members}: other members keep changing the lock: try again")

    def renew(self, store: Store, session: int | None, ttl: float) -> int | None:
        if session is None:
            return self._begin(store, math.ceil(ttl))
        for _ in range(ATTEMPTS):
            answer = self._members.keep_alive(session)
            seen = self._read()
            if answer.TTL <= 0 or seen.session_of(store) != session:
                return None
            if seen.term == answer.header.raft_term:
                return session
        raise LockUnavailable(f"{self._members}: etcd has no stable leader: try again")

    def end_session(self, session: int) -> None:
        import grpc

        request = etcd_pb2.LeaseRevokeRequest(ID=session)
        self._members.ask(f"{LEASE}/LeaseRevoke", request, bytes, allowed=grpc.StatusCode.NOT_FOUND)

    def close(self) -> None:
        self._members.close()

    def _begin(self, store: Store, ttl: int) -> int:
        """Begin a session: give the store's key to a new lease, and end the lease of the former session."""
        grant = etcd_pb2.LeaseGrantRequest(TTL=ttl)
        number: int = self._members.ask(f"{LEASE}/LeaseGrant", grant, etcd_pb2.LeaseGrantResponse.FromString).ID
        seen = self._read()
        for _ in range(ATTEMPTS):
            former, key = seen.session_of(store), self._key(store)
            done, seen = self._change({key: seen.revision_of(store)}, key, str(number).encode(), number)
            if done:
                if former is not None:
                    with suppress(LockUnavailable):  # then its lease ends by itself
                        self.end_session(former)
                return number
        raise LockUnavailable(f"{self._members}: other processes use store {store.hex()}: end them")

    def _key(self, store: Store) -> bytes:
        return self._sessions + store.hex().encode()

    def _read(self) -> _SeenKeys:
        answer = self._members.ask(
            f"{KEY_VALUE}/Range", self._everything, etcd_pb2.RangeResponse.FromString, repeatable=True
        )
        return self._seen(answer.header.raft_term, answer.kvs)

    def _change(self, unchanged: dict[bytes, int], key: bytes, value: bytes, lease: int) -> tuple[bool, _SeenKeys]:
        """Put a value if keys still have these revisions; whether it was put, and the lock after that."""
        compare = [etcd_pb2.Compare(target=2, key=each, mod_revision=at) for each, at in unchanged.items()]
        put = etcd_pb2.RequestOp(request_put=etcd_pb2.PutRequest(key=key, value=value, lease=lease))
        read = etcd_pb2.RequestOp(request_range=self._everything)
        request = etcd_pb2.TxnRequest(compare=compare, success=[put, read], failure=[read])
        answer = self._members.ask(f"{KEY_VALUE}/Txn", request, etcd_pb2.TxnResponse.FromString)
        return answer.succeeded, self._seen(answer.header.raft_term, answer.responses[-1].response_range.kvs)

    def _seen(self, term: int, pairs: Any) -> _SeenKeys:
        """Raises StorageError and UnsupportedFormat for keys that are not those of a lock."""
        record, session, revision = NO_RECORD, 0, 0
        sessions: dict[Store, _StoreSession] = {}
        for each in pairs:
            if each.key == self._record:
                record, session = decode_record(each.value, f"{self._members}/{self._record.decode()}")
                revision = each.mod_revision
            elif each.key.startswith(self._sessions):
                store, number = self._decode_session(each.key, each.value)
                sessions[store] = _StoreSession(number, each.mod_revision)
        return _SeenKeys(record, session, revision, sessions, term)

    def _decode_session(self, key: bytes, value: bytes) -> tuple[Store, int]:
        """A store and its session. Raises StorageError."""
        try:
            return bytes.fromhex(key.removeprefix(self._sessions).decode()), int(value)
        except ValueError:
            text = f"{self._members}: the key {key!r} is not that of a session: use another name for the lock"
            raise StorageError(text) from None


class _EtcdMembers:
    """The members of an etcd cluster, and the connection to one of them."""

    def __init__(self, address: EtcdAddress, timeout: float) -> None:
        self._address = address
        self._timeout = timeout
        self._monotonic = current().clock.monotonic
        self._next = 0
        self._channel: Any = None
        self._token = ""
        self._closed = False

    def __str__(self) -> str:
        return f"etcd://{','.join(self._address.targets)}"

    def ask(
        self, method: str, request: Any, decode: Callable[[bytes], A], *, repeatable: bool = False, allowed: Any = None
    ) -> A:
        """The answer to a request, which another member is asked if one does not answer and it is repeatable.

        An answer with the status `allowed` is an empty one. Raises LockUnavailable.
        """

        def send(channel: Any, timeout: float, metadata: Any) -> A:
            return decode(channel.unary_unary(method)(request.SerializeToString(), timeout, metadata))

        return self._attempt(send, len(self._address.targets) if repeatable else 1, allowed, decode)

    def keep_alive(self, lease: int) -> Any:
        """The answer to a renewal of a lease. Raises LockUnavailable."""

        def send(channel: Any, timeout: float, metadata: Any) -> Any:
            request = etcd_pb2.LeaseKeepAliveRequest(ID=lease).SerializeToString()
            call = channel.stream_stream(f"{LEASE}/LeaseKeepAlive")(iter([request]), timeout, metadata)
            try:
                return etcd_pb2.LeaseKeepAliveResponse.FromString(next(call))
            finally:
                call.cancel()

        return self._attempt(send, len(self._address.targets), None, bytes)

    def close(self) -> None:
        self._closed = True
        self._disconnect()

    def _attempt(self, send: Callable[..., A], attempts: int, allowed: Any, decode: Callable[[bytes], A]) -> A:
        import grpc

        until = self._monotonic() + self._timeout
        authenticated = False
        while True:
            try:
                timeout = max(until - self._monotonic(), 0.01) / attempts
                return send(self._connected(), timeout, self._metadata(timeout))
            except grpc.RpcError as error:
                if error.code() is allowed:
                    return decode(b"")
                if error.code() is grpc.StatusCode.UNAUTHENTICATED and not authenticated:
                    self._token, authenticated = "", True  # the token is too old, so nothing was done
                    continue
                failure = LockUnavailable(f"{self} does not answer ({error.code().name}: {error.details()})")
            except (ValueError, StopIteration, DecodeError, EnvironmentFault) as error:  # closed, not etcd, a file
                failure = LockUnavailable(f"{self} does not answer ({error})")
            self._disconnect()
            attempts -= 1
            if attempts <= 0 or self._closed:
                raise failure from None

    def _connected(self) -> Any:
        import grpc

        if self._channel is None:
            if self._closed:
                raise ValueError("the lock is closed")
            address = self._address
            target = address.targets[self._next % len(address.targets)]
            if address.ca:
                files = [
                    address.file(each).read(secret=each == "key") if getattr(address, each) else None
                    for each in ("ca", "key", "cert")
                ]
                self._channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(*files), OPTIONS)
            else:
                self._channel = grpc.insecure_channel(target, OPTIONS)
        return self._channel

    def _metadata(self, timeout: float) -> tuple[tuple[str, str], ...]:
        """The metadata of a call; log in first if there is a user. Raises RpcError."""
        address = self._address
        if not address.user:
            return (WITH_LEADER,)
        if not self._token:
            password = address.file("password_file").read_password()
            request = etcd_pb2.AuthenticateRequest(name=address.user, password=password).SerializeToString()
            answer = self._connected().unary_unary(AUTHENTICATE)(request, timeout)
            self._token = etcd_pb2.AuthenticateResponse.FromString(answer).token
        return (WITH_LEADER, ("token", self._token))

    def _disconnect(self) -> None:
        """Forget a connection that may hang; the next call is for the next member."""
        channel, self._channel = self._channel, None
        self._token = ""  # is known to the member that gave it
        self._next += 1
        if channel is not None:
            channel.close()
