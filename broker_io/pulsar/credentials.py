"""Credentials for a cluster, both for the client library and for the REST interface."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field

import pulsar

from broker_io.addresses import is_loopback, is_target, shown_address, split_address
from broker_io.environment import current
from broker_io.errors import CallerError, InvalidAddress, NotAuthorized, ServiceUnavailable
from broker_io.permissions import read_checked

SECURE = ("https", "pulsar+ssl")
OAUTH2_SECONDS = 20.0
RENEW_EARLY = 30.0
"""Seconds before its expiry at which a token is renewed."""


@dataclass(frozen=True)
class Credentials:
    """Credentials: at most one of `token`, `token_file`, `oauth2` and a client certificate.

    `oauth2` has `issuer_url` and `private_key` (a path, `file:` or `data:` URL of the credentials), optionally
    `audience` and `scope`. `tls_trust` is the CA file, `tls_cert` and `tls_key` are the client's certificate and key;
    all are PEM. `role` is what the cluster calls their holder, needed only where names have to begin with it.
    `token_without_tls` allows to send a token, or the secret of `oauth2`, to other machines without encryption.
    """

    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    oauth2: Mapping[str, str] | None = field(default=None, repr=False)
    tls_trust: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    role: str | None = None
    token_without_tls: bool = False

    def __post_init__(self) -> None:
        ways = [self.token, self.token_file, self.oauth2, self.tls_cert]
        if sum(way is not None for way in ways) > 1:
            raise CallerError("more than one of token, token_file, oauth2 and tls_cert is given: choose one")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise CallerError("only one of tls_cert and tls_key is given: give both")
        if self.token is not None:
            _check_token(self.token, "token")
        if self.oauth2 is not None:
            if not {"issuer_url", "private_key"} <= {*self.oauth2}:
                raise CallerError("oauth2 requires issuer_url and private_key: give both")
            for name, text in self.oauth2.items():
                if not isinstance(text, str):
                    raise CallerError(f"{name} of oauth2 must be a text, got a {type(text).__name__}")
            if "@" in (issuer := self.oauth2["issuer_url"]):
                raise CallerError(f"issuer_url {shown_address(issuer)!r} has a user or a password in it: leave it out")
            self.check_sent_to(issuer)

    def check_sent_to(self, url: str) -> None:
        """Raises InvalidAddress if a token would be sent to the host of a URL without encryption."""
        scheme, _, rest = url.lower().rpartition("://")
        if self.token_without_tls or scheme in SECURE or not (self.token or self.token_file or self.oauth2):
            return
        hosts = rest.partition("/")[0].split(",")
        if not all(is_loopback(split_address(host)[0] if is_target(host) else host) for host in hosts):
            raise InvalidAddress(
                f"the credentials would be sent to {shown_address(url)} without encryption: use "
                f"{SECURE[scheme == 'pulsar']}://, or allow it with token_without_tls"
            )

    def current_token(self) -> str | None:
        """The token; a token file is read each time, because the token may be renewed there. Raises CallerError."""
        if self.token_file is None:
            return None if self.token is None else _check_token(self.token, "token")
        try:
            text = read_checked(self.token_file, secret=True).decode("ascii")
        except UnicodeError:  # its text would show a part of the token
            raise CallerError(f"the token file {self.token_file} contains non-ASCII characters") from None
        except OSError as error:
            raise CallerError(f"the token file {self.token_file} can't be read ({error.strerror})") from None
        return _check_token(text, f"token file {self.token_file}")

    def for_client(self) -> pulsar.Authentication | None:
        """The authentication object of the client library."""
        if self.oauth2 is not None:
            _content(self.oauth2["private_key"])  # the library's error would not say what is wrong
            return pulsar.AuthenticationOauth2(json.dumps(dict(self.oauth2)))
        if self.tls_cert is not None:
            return pulsar.AuthenticationTLS(self.tls_cert, self.tls_key)
        if self.current_token() is None:
            return None
        return pulsar.AuthenticationToken(lambda: self.current_token() or "")

    def tls_context(self) -> ssl.SSLContext:
        """Raises CallerError for files that can't be read."""
        try:
            context = ssl.create_default_context(cafile=self.tls_trust)
            if self.tls_cert is not None and self.tls_key is not None:
                read_checked(self.tls_key, secret=True)
                context.load_cert_chain(self.tls_cert, self.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise CallerError(
                f"the TLS files {self.tls_trust}, {self.tls_cert} can't be used ({error.strerror})"
            ) from None
        return context


def _check_token(text: object, what: str) -> str:
    """The token without surrounding white space. Raises CallerError, which does not contain the token."""
    token = text.strip() if isinstance(text, str) else ""
    if not token:
        raise CallerError(f"the {what} is empty or not a string: set it to a token, or leave it out")
    if not all("!" <= character <= "~" for character in token):
        raise CallerError(f"the {what} has white space or characters other than ASCII in it: copy it again")
    return token


def check_hop(base: str, url: str, credentials: Credentials) -> None:
    """Raises InvalidAddress for a URL that `base` leads to and that must not get what is sent to `base`."""
    if base.lower().startswith("https:") and not url.lower().startswith("https:"):
        raise InvalidAddress(f"{base} leads to {shown_address(url)}, which has no TLS: let it name an https:// address")
    credentials.check_sent_to(url)


class Bearer:
    """The Authorization header of REST calls; OAuth 2.0 tokens are fetched and reused until they expire."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        environment = current()
        self._monotonic = environment.clock.monotonic
        self._lock = environment.threads.lock()
        self._token: str | None = None
        self._until = 0.0

    def headers(self) -> dict[str, str]:
        token = self._credentials.current_token() if self._credentials.oauth2 is None else self._fetched()
        return {} if token is None else {"Authorization": f"Bearer {token}"}

    def _fetched(self) -> str:
        with self._lock:
            if self._token is None or self._monotonic() > self._until:
                self._token, seconds = _fetch_token(self._credentials)
                self._until = self._monotonic() + max(1.0, seconds - RENEW_EARLY)
            return self._token


def _fetch_token(credentials: Credentials) -> tuple[str, float]:
    """A token of the client credentials flow, and its lifetime in seconds."""
    import httpx2
    from authlib.oauth2.base import OAuth2Error
    from authlib.oauth2.client import OAuth2Client

    oauth2 = credentials.oauth2 or {}
    issuer = oauth2["issuer_url"].rstrip("/")

    def check(request: httpx2.Request) -> None:
        if request.url.scheme == "http":
            check_hop(issuer, str(request.url), credentials)

    hooks = {"request": [check]}
    try:
        secret = json.loads(_content(oauth2["private_key"]))
        optional = {name: oauth2[name] for name in ("audience", "scope") if oauth2.get(name)}
        with httpx2.Client(verify=ssl.create_default_context(), timeout=OAUTH2_SECONDS, event_hooks=hooks) as web:
            place = f"{issuer}/.well-known/openid-configuration"
            found = web.get(place, follow_redirects=True).raise_for_status().json()
            answer = OAuth2Client(web).fetch_token(
                found["token_endpoint"],
                grant_type="client_credentials",
                client_id=secret["client_id"],
                client_secret=secret["client_secret"],
                auth=httpx2.Auth(),  # the form has the credentials
                **optional,
            )
        return str(answer["access_token"]), float(answer.get("expires_in", 3600))
    except (httpx2.HTTPStatusError, OAuth2Error) as error:
        if isinstance(error, httpx2.HTTPStatusError) and error.response.is_server_error:
            raise ServiceUnavailable(f"the token issuer {issuer} fails ({_said(error)})") from None
        raise NotAuthorized(f"{issuer} refuses a token ({_said(error)}): check the credentials of oauth2") from None
    except (
        httpx2.InvalidURL,
        httpx2.UnsupportedProtocol,
        httpx2.TooManyRedirects,
        OSError,
        ValueError,
        AttributeError,
        KeyError,
        OverflowError,
        TypeError,
    ) as error:
        raise NotAuthorized(f"no token from {issuer} ({error!r}): check the parameters of oauth2") from None
    except httpx2.RequestError as error:
        raise ServiceUnavailable(f"the token issuer {issuer} does not answer ({error!r})") from None


def _said(error: Exception) -> str:
    """The first line; httpx2 adds a link to an explanation of the status."""
    return str(error).partition("\n")[0]


def _content(place: str) -> bytes:
    """The credentials at a path or URL. Raises CallerError."""
    try:
        if place.startswith("data:"):
            return base64.b64decode(place.partition(",")[2], validate=True)
        return read_checked(place.removeprefix("file://").removeprefix("file:"), secret=True)
    except ValueError:
        raise CallerError(
            "private_key of oauth2 is not a valid data: URL: write data:application/json;base64,…"
        ) from None
    except OSError as error:
        raise CallerError(f"private_key of oauth2 can't be read ({error.strerror})") from None
