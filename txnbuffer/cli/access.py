"""Commands about access control: `txnbuf token` and `txnbuf access`"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

from broker_io.rpc.credential_files import CredentialFile
from snapshots.format import is_internal
from txnbuffer.access.policy import (
    Action,
    Policy,
    ResourceKind,
    ResourceName,
    check_principal,
    policy_of,
)
from txnbuffer.access.tokens import (
    ID_BYTES,
    NEVER,
    SECRET_BYTES,
    IssuedToken,
    TokenFile,
    issue,
    time_text,
    tokens_of,
    with_token,
    without_tokens,
)
from txnbuffer.cli.commands import CommandGroup
from txnbuffer.cli.options import with_config
from txnbuffer.cli.output import narrate, output_option, show_rows
from txnbuffer.config import Config
from txnbuffer.errors import EnvironmentFault, InvalidRequest, counted

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([1-9]\d{0,8})([smhd]?)")
MODE = 0o600


@click.group("token", cls=CommandGroup)
def token_command() -> None:
    """Create, list and revoke the tokens of a service.

    The file of the tokens is the setting access.tokens of `txnbuf serve`, which reads it again when it changes.
    """


def _file_option(option: str, setting: str, what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An option for a file that a setting of the section [access] names, too, as argument `path`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(config: Config, path: str | None, **named: Any) -> Any:
            path = path or getattr(config.access, setting)
            if not path:
                raise click.UsageError(f"which {what}? give {option}, or --config with the setting access.{setting}")
            return function(path=path, **named)

        help_text = f"The {what}; default: setting access.{setting}."
        return click.option(option, "path", metavar="FILE", help=help_text)(with_config(wrapped))

    return decorate


file_option = _file_option("--file", "tokens", "file of tokens")
policy_option = _file_option("--policy", "policy", "policy")


@token_command.command("create")
@file_option
@click.argument("principal")
@click.option("--expires", metavar="TIME", help="When it expires, from now: 90d, 12h, 30m. Default: never.")
def create_token(path: str, principal: str, expires: str | None) -> None:
    """Create a token for PRINCIPAL, and print it.

    It can't be printed again: the file has only its hash. The file is created if it does not exist.
    """
    try:
        check_principal(principal)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    now = int(time.time())
    ends = None if expires is None else now + _seconds(expires)
    text, token = issue(principal, secrets.token_bytes(ID_BYTES + SECRET_BYTES), now, ends)
    with _changing(path) as change:
        change(lambda file: with_token(file, token))
    click.echo(text)
    until = "never expires" if ends is None else f"expires at {time_text(ends)}"
    narrate(f"token {token.id} of {principal} {until}; keep it secret, it can't be shown again")


@token_command.command("list")
@file_option
@output_option
def list_tokens(path: str, output: str) -> None:
    """List all tokens, without their secrets."""
    now = time.time()
    show_rows([_row(token, now) for token in _read(path).tokens.values()], output, title="tokens")


def _row(token: IssuedToken, now: float) -> dict[str, Any]:
    expired = token.expires is not None and token.expires <= now
    return {
        "id": token.id,
        "principal": token.principal,
        "created": time_text(token.created),
        "expires": NEVER if token.expires is None else time_text(token.expires),
        "valid": not expired,
    }


@token_command.command("revoke")
@file_option
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--principal", metavar="NAME", help="Revoke all tokens of this principal.")
def revoke_token(path: str, ids: tuple[str, ...], principal: str | None) -> None:
    """Revoke the tokens with these IDs, which `txnbuf token list` shows.

    A running service ends the connections that were opened with them within access.check_seconds.
    """
    if bool(ids) == (principal is not None):
        raise click.UsageError("which tokens? give their IDs, or --principal")
    revoked: list[str] = []

    def without(file: TokenFile) -> TokenFile:
        unknown = [name for name in ids if name not in file.tokens]
        if unknown:
            raise InvalidRequest(f"{path} has no token {', '.join(unknown)}: see `txnbuf token list`")
        revoked.extend(ids or [one.id for one in file.tokens.values() if one.principal == principal])
        if not revoked:
            raise InvalidRequest(f"{path} has no token of {principal!r}: see `txnbuf token list`")
        return without_tokens(file, revoked)

    with _changing(path, create=False) as change:
        change(without)
    click.echo(f"revoked {', '.join(revoked)}")


def _seconds(text: str) -> int:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"--expires {text} is invalid: write a number and s, m, h or d, such as 90d")
    return int(match[1]) * UNITS[match[2]]


@contextlib.contextmanager
def _changing(path: str, *, create: bool = True) -> Iterator[Callable[[Callable[[TokenFile], TokenFile]], None]]:
    """A function that replaces the file as a whole; others that change it wait. Raises EnvironmentFault."""
    try:
        with _locked(path, create=create):
            yield lambda change: _replace(path, change(_read(path) if os.path.getsize(path) else TokenFile({})))
    except OSError as error:
        raise EnvironmentFault(f"cannot change the file of tokens {path}: {error.strerror}") from error


@contextlib.contextmanager
def _locked(path: str, *, create: bool) -> Iterator[None]:
    while True:
        held = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), MODE)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            if os.fstat(held).st_ino == os.stat(path).st_ino:  # or another process has replaced it meanwhile
                yield
                return
        finally:
            os.close(held)


def _read(path: str) -> TokenFile:
    return tokens_of(CredentialFile(path, "access.tokens").read(secret=True), path)


def _replace(path: str, file: TokenFile) -> None:
    """Write the file; it keeps its owner, who may be that of the service, and its permissions."""
    old, new = os.stat(path), f"{path}.new"
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, MODE), "w") as out:
        if os.fstat(out.fileno()).st_uid != old.st_uid:
            os.fchown(out.fileno(), old.st_uid, old.st_gid)
        os.fchmod(out.fileno(), old.st_mode & 0o777)
        out.write(file.format())
        out.flush()
        os.fsync(out.fileno())
    os.replace(new, path)
    directory = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@click.group("access", cls=CommandGroup)
def access_command() -> None:
    """Check a policy, and what it allows."""


def _policy(path: str) -> Policy:
    return policy_of(CredentialFile(path, "access.policy").read(), path)


@access_command.command("check")
@policy_option
def check_access(path: str) -> None:
    """Check a policy for mistakes."""
    policy = _policy(path)
    click.echo(f"{counted(len(policy.rules), 'rule')}, {counted(len(policy.limit_rules), 'limit')}: no mistake")


@access_command.command("may")
@policy_option
@click.argument("principal")
@click.argument("action", type=click.Choice([action.value for action in Action]))
@click.argument("kind", type=click.Choice([kind.value for kind in ResourceKind]))
@click.argument("name", required=False, default="")
def may_access(path: str, principal: str, action: str, kind: str, name: str) -> int:
    """Answer whether PRINCIPAL may do ACTION with a resource, such as `write topic orders`.

    The exit code is 1 if it may not.
    """
    resource = ResourceName(ResourceKind(kind), name)
    if (resource.kind is ResourceKind.SERVICE) == bool(name):
        raise click.UsageError("a topic, producer or group needs a NAME, and the service has none")
    if resource.kind is ResourceKind.TOPIC and is_internal(name):
        raise click.UsageError(f"{name} is an internal topic: only who may operate the service may change it")
    allowed = _policy(path).allows(principal, Action(action), resource)
    click.echo(f"{principal!r} {'may' if allowed else 'may not'} {action} {resource}")
    return 0 if allowed else 1
