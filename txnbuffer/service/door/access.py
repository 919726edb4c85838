"""Access control of a running service: authenticates callers, decides by the policy, counts and logs what it denies

The policy, the tokens, the keys and the certificates are read again when their files change. A connection whose token
has expired or was revoked ends then; what a policy no longer allows is denied from the next request on.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from broker_io.environment import current
from broker_io.rpc.credential_files import ClientCertificate, CredentialFile, Watched
from txnbuffer.access.authenticator import NOBODY, Authenticator, Caller
from txnbuffer.access.limits import PrincipalLimits
from txnbuffer.access.policy import ALLOWED, EVERYTHING, Action, Policy, ResourceKind, ResourceName, policy_of
from txnbuffer.config import AccessConfig
from txnbuffer.coordinator.transaction import TAG_BEGIN, TAG_SIZE
from txnbuffer.errors import Error, InvalidConfiguration, NotAuthorized, Unauthenticated
from txnbuffer.service.door.tls import WatchedTls

MAX_REMEMBERED = 10_000
"""Answers that a connection remembers."""
LINES_PER_SECOND = 10
"""Lines in the log about denials; what is left out is counted in a later line."""

Log = Callable[..., Any]
E = TypeVar("E", bound=Error)


class Permissions:
    """What the caller of a connection may do. Answers are remembered until permissions may have changed.

    `tag` begins the names of its sessions, so that no other principal can continue one; "" without access control.
    """

    def __init__(self, access: Access | None, caller: Caller) -> None:
        self.principal = caller.principal
        self.tag = ""
        if access is not None and access.enabled:
            digest = hashlib.sha256(caller.principal.encode()).hexdigest()
            self.tag = TAG_BEGIN + digest[: TAG_SIZE - len(TAG_BEGIN)]
        self._access = access
        self._caller = caller
        self._generation = -1
        self._allowed: dict[tuple[Action, ResourceKind, str], None] = {}

    def refusal(self, action: Action, kind: ResourceKind, name: str = "") -> NotAuthorized | None:
        """Why the caller may not do something, which is counted and logged then; None if it may."""
        if self._access is None or self.allows(action, kind, name):
            return None
        return self._access.refusal(self._caller, action, ResourceName(kind, name))

    def allows(self, action: Action, kind: ResourceKind, name: str = "") -> bool:
        """Whether the caller may do something; nothing is logged."""
        access = self._access
        if access is None:
            return True
        if access.generation != self._generation or len(self._allowed) > MAX_REMEMBERED:
            self._allowed.clear()
            self._generation = access.generation
        key = action, kind, name
        if key in self._allowed:
            return True
        found = access.allows(self._caller, action, ResourceName(kind, name))
        if found:
            self._allowed[key] = None
        return found

    def limits(self, defaults: PrincipalLimits) -> PrincipalLimits:
        """The limits of the caller now."""
        return defaults if self._access is None else self._access.limits(self._caller, defaults)

    def allows_any(self, action: Action, kind: ResourceKind) -> bool:
        """Whether the caller may do something with at least one resource of a kind; nothing is logged."""
        if self._access is None:
            return True
        rules = self._access.policy.rules_of(self.principal)
        return any((action, kind) in ALLOWED[role] for rule in rules for role in rule.roles)

    def check(self, action: Action, kind: ResourceKind, name: str = "") -> None:
        """Raises NotAuthorized for what the caller may not do."""
        refusal = self.refusal(action, kind, name)
        if refusal is not None:
            raise refusal

    def check_valid(self) -> None:
        """Raises Unauthenticated if the caller has to authenticate again."""
        if self._access is not None:
            self._access.check_valid(self._caller)

    def denied(self, error: E) -> E:
        """Count and log an error that something else than the policy is the reason of; returns it."""
        if self._access is not None:
            self._access.deny(error, principal=self.principal)
        return error


EVERYTHING_ALLOWED = Permissions(None, NOBODY)
"""Permissions of clients in this process, and of a service without access control."""
PERMISSIONS: ContextVar[Permissions] = ContextVar("permissions", default=EVERYTHING_ALLOWED)
"""Those of the caller of the call that runs now."""


class Access:
    """`denied` counts denials by the name of their error; `generation` grows when permissions may have changed."""

    def __init__(
        self, config: AccessConfig, log: Log, *, insecure: bool = False, tls: WatchedTls | None = None
    ) -> None:
        self.insecure = insecure
        self.tls = tls
        self.denied: Counter[str] = Counter()
        self.generation = 0
        self._log = log
        self._check_seconds = config.check_seconds
        self._clock = current().clock
        self._authenticator = Authenticator(config, self._clock)
        self._policy: Watched[Policy] | None = None
        if config.policy:
            self._policy = CredentialFile(config.policy, "access.policy").watched(policy_of, secret=False)
        if self._authenticator.enabled and self._policy is None:
            raise InvalidConfiguration("authentication without a policy would deny everything: set access.policy")
        if self._policy is not None and not self._authenticator.enabled:
            raise InvalidConfiguration(
                "a policy without authentication can't be enforced: set access.tokens, access.jwt_key or "
                "access.client_ca"
            )
        self._second, self._lines, self._left_out = 0.0, 0, 0
        self._changed: list[Callable[[], None]] = []

    @property
    def enabled(self) -> bool:
        """Whether callers are authenticated."""
        return self._authenticator.enabled

    @property
    def policy(self) -> Policy:
        return EVERYTHING if self._policy is None else self._policy.value

    @property
    def problems(self) -> list[Error]:
        """Why files that have changed are not in use."""
        watched: list[Watched[Any]] = [*self._files(), *([] if self.tls is None else [self.tls])]
        return [one.problem for one in watched if one.problem is not None]

    def on_change(self, call: Callable[[], None]) -> None:
        """Call something when permissions may have changed, and each time that tokens may have expired."""
        self._changed.append(call)

    def authenticate(self, authorization: str | None, certificate: ClientCertificate | None, peer: str) -> Caller:
        """The caller of a call. Raises Unauthenticated; also NotAuthorized for one that no rule names."""
        try:
            caller = self._authenticator.authenticate(authorization, certificate)
        except Unauthenticated as error:
            self.deny(error, peer=peer)
            raise
        if not self.policy.rules_of(caller.principal):
            raise self._unnamed(caller, peer=peer)
        return caller

    def refuses(self, authorization: str | None) -> bool:
        """Whether a call can be refused before its message is read, by its token alone; nothing is logged."""
        if not self.enabled or (authorization is None and self._authenticator.takes_certificates):
            return False
        try:
            self._authenticator.authenticate(authorization, None)
        except Unauthenticated:
            return True
        return False

    def _unnamed(self, caller: Caller, **facts: str) -> NotAuthorized:
        error = NotAuthorized(f"no rule of the policy names {caller.principal!r}: ask for one")
        self.deny(error, principal=caller.principal, **facts)
        return error

    def check_valid(self, caller: Caller) -> None:
        """Raises Unauthenticated if a connected caller has to authenticate again, NotAuthorized if no rule names it."""
        try:
            self._authenticator.check_valid(caller)
        except Unauthenticated as error:
            self.deny(error, principal=caller.principal)
            raise
        if not self.policy.rules_of(caller.principal):
            raise self._unnamed(caller)

    def allows(self, caller: Caller, action: Action, resource: ResourceName) -> bool:
        return self.policy.allows(caller.principal, action, resource)

    def refusal(self, caller: Caller, action: Action, resource: ResourceName) -> NotAuthorized:
        """The error for something that the policy does not allow, which is counted and logged."""
        error = NotAuthorized(f"{caller.principal!r} may not {action.value} {resource}: ask for a rule that allows it")
        self.deny(error, principal=caller.principal, action=action.value, resource=str(resource))
        return error

    def limits(self, caller: Caller, defaults: PrincipalLimits) -> PrincipalLimits:
        """The limits of a caller."""
        return self.policy.limits(caller.principal, defaults)

    async def watch(self) -> None:
        """Read the files again when they change, until cancelled."""
        while True:
            await asyncio.sleep(self._check_seconds)
            self.refresh()

    def refresh(self) -> None:
        """Read the files again that have changed."""
        before = [*map(str, self.problems)]
        changed = self._authenticator.refresh()
        changed = (self._policy is not None and self._policy.refresh()) or changed
        if changed:
            self.generation += 1
            self._log("access changed")
        if self.tls is not None and self.tls.refresh():
            self._log("certificate changed")
        for error in self.problems:
            if str(error) not in before:
                self._log("access file not used", error=str(error))
        for call in self._changed:
            call()

    def _files(self) -> Iterator[Watched[Any]]:
        yield from self._authenticator.files
        if self._policy is not None:
            yield self._policy

    def deny(self, error: Error, **facts: str) -> None:
        """Count and log a denial."""
        self.denied[type(error).__name__] += 1
        now = self._clock.monotonic()
        if now - self._second >= 1.0:
            self._second, self._lines = now, 0
        self._lines += 1
        if self._lines > LINES_PER_SECOND:
            self._left_out += 1
            return
        left_out, self._left_out = self._left_out, 0
        more = {"left_out": left_out} if left_out else {}
        self._log("denied", error=str(error), **facts, **more)
