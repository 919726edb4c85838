"""Verification of JSON Web Tokens: what is accepted, and each way to forge or misuse one."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from joserfc import jwt
from joserfc.jwk import ECKey, KeySet, OctKey, OKPKey, RSAKey

from txnbuffer.access.jwt import LEEWAY, MAX_BYTES, TokenBearer, Verifier
from txnbuffer.errors import InvalidConfiguration, Unauthenticated

NOW = 1_764_000_000
RSA, OTHER = RSAKey.generate_key(2048), RSAKey.generate_key(2048)
EC, ED = ECKey.generate_key("P-256"), OKPKey.generate_key("Ed25519")
PEM = RSA.as_pem(private=False)


def signed(claims: dict[str, Any], key: Any = RSA, algorithm: str = "RS256") -> str:
    return jwt.encode({"alg": algorithm}, claims, key, algorithms=[algorithm])


def part(value: dict[str, Any] | bytes) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@pytest.mark.parametrize(("key", "algorithm"), [(RSA, "RS256"), (RSA, "PS512"), (EC, "ES256"), (ED, "Ed25519")])
def test_token_signed_by_the_key_names_its_bearer(key: Any, algorithm: str) -> None:
    verifier = Verifier(key.as_pem(private=False), "key.pem")
    assert verifier.verify(signed({"sub": "orders"}, key, algorithm), NOW) == TokenBearer("orders", None)
    assert verifier.verify(signed({"sub": "o", "exp": NOW + 5}, key, algorithm), NOW) == ("o", NOW + 5 + LEEWAY)


def test_keys_are_pem_der_or_jwks() -> None:
    der = RSA.public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    jwks = json.dumps(KeySet([OTHER, RSA, EC]).as_dict(private=False)).encode()
    both = OTHER.as_pem(private=False) + PEM
    for keys in (PEM, der, jwks, both):
        assert Verifier(keys, "keys").verify(signed({"sub": "a"}), NOW).principal == "a"


REFUSED = [
    (signed({"sub": "a"}, OTHER), "is not signed by a key that this service trusts"),
    (signed({"sub": "a"}, EC, "ES256"), "is not signed by a key"),
    (part({"alg": "none"}) + "." + part({"sub": "a"}) + ".", "is not signed by a key"),
    ("", "is not signed by a key"),
    ("a.b.c", "is not signed by a key"),
    ("x" * (MAX_BYTES + 1), f"has over {MAX_BYTES} bytes"),
    (signed({"sub": "a", "exp": NOW - LEEWAY}), "has expired: get a new one"),
    (signed({"sub": "a", "exp": "soon"}), "the claim 'exp' of the token is not a time"),
    (signed({"sub": "a", "nbf": NOW + LEEWAY + 1}), "is not valid yet"),
    (signed({}), "has no claim 'sub' that names its bearer"),
    (signed({"sub": 5}), "has no claim 'sub'"),
    (signed({"sub": "a*"}), "names no possible principal"),
]


@pytest.mark.parametrize(("token", "error"), REFUSED)
def test_foreign_expired_and_forged_tokens_are_refused(token: str, error: str) -> None:
    with pytest.raises(Unauthenticated) as raised:
        Verifier(PEM, "key.pem").verify(token, NOW)
    assert error in str(raised.value)
    assert not token or token not in str(raised.value)


@pytest.mark.parametrize("secret", [PEM, PEM.strip(), PEM.decode().replace("\n", "").encode()])
def test_hmac_with_the_public_key_as_secret_is_refused(secret: bytes) -> None:
    head = part({"alg": "HS256"}) + "." + part({"sub": "a"})
    token = head + "." + part(hmac.new(secret, head.encode(), hashlib.sha256).digest())
    with pytest.raises(Unauthenticated, match="is not signed by a key"):
        Verifier(PEM, "key.pem").verify(token, NOW)


def test_changed_claims_are_refused() -> None:
    head, _, signature = signed({"sub": "a"}).split(".")
    with pytest.raises(Unauthenticated, match="is not signed by a key"):
        Verifier(PEM, "key.pem").verify(".".join([head, part({"sub": "admin"}), signature]), NOW)


@pytest.mark.parametrize("audience", [None, "other", ["other"], 5])
def test_wrong_audience_is_refused(audience: Any) -> None:
    verifier = Verifier(PEM, "key.pem", audience="txnbuffer")
    claims = {"sub": "a"} if audience is None else {"sub": "a", "aud": audience}
    with pytest.raises(Unauthenticated, match="is for another audience"):
        verifier.verify(signed(claims), NOW)
    for right in ("txnbuffer", ["other", "txnbuffer"]):
        assert verifier.verify(signed({"sub": "a", "aud": right}), NOW).principal == "a"


def test_wrong_issuer_is_refused() -> None:
    verifier = Verifier(PEM, "key.pem", issuer="https://login")
    assert verifier.verify(signed({"sub": "a", "iss": "https://login"}), NOW).principal == "a"
    with pytest.raises(Unauthenticated, match="is of another issuer"):
        verifier.verify(signed({"sub": "a", "iss": "https://logi"}), NOW)


def test_claim_that_names_the_bearer_is_chosen() -> None:
    verifier = Verifier(PEM, "key.pem", claim="client")
    assert verifier.verify(signed({"sub": "a", "client": "b"}), NOW).principal == "b"


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        (b"", "keys has no public keys in PEM, DER or JWKS"),
        (b"{}", "keys has no public keys"),
        (b'{"keys": []}', "keys has no public keys"),
        (b"nonsense", "keys has no public keys"),
        (RSA.as_pem(private=True), "keys has a private key: give only public keys"),
        (json.dumps(KeySet([OctKey.generate_key(256)]).as_dict(private=True)).encode(), "a key of the kind 'oct'"),
    ],
)
def test_file_without_public_keys_is_refused(keys: bytes, error: str) -> None:
    with pytest.raises(InvalidConfiguration) as raised:
        Verifier(keys, "keys")
    assert error in str(raised.value)
