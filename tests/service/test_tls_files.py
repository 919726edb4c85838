"""Certificates and keys are checked before anything is opened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from certificates import openssl, self_signed

from broker_io.errors import EnvironmentFault
from txnbuffer.config import Config
from txnbuffer.service.process import check


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cert.pem with key.pem, other.pem: the key of another one, locked.pem: key.pem with a password, junk.pem."""
    place = tmp_path_factory.mktemp("pems")
    self_signed(place)
    (other := place / "other").mkdir()
    Path(self_signed(other)[1]).rename(place / "other.pem")
    locked = ["-aes128", "-passout", "pass:secret", "-out", place / "locked.pem"]
    openssl("ec", "-in", place / "key.pem", *locked)
    (place / "junk.pem").write_text("junk\n")
    (place / "binary.pem").write_bytes(b"\xff\x00" * 100)
    for file in place.glob("*.pem"):
        file.chmod(0o600)
    return place


def checked(place: Path, cert: str, key: str) -> None:
    service = replace(Config().service, tls_cert=str(place / cert), tls_key=str(place / key))
    check(replace(Config(), service=service))


def test_a_certificate_with_its_key_is_fine(pems: Path) -> None:
    checked(pems, "cert.pem", "key.pem")


@pytest.mark.parametrize(
    ("cert", "key", "message"),
    [
        ("none.pem", "key.pem", "can't read {}/none.pem (service.tls_cert): No such file"),
        ("cert.pem", "none.pem", "can't read {}/none.pem (service.tls_key): No such file"),
        ("junk.pem", "key.pem", "{}/junk.pem is not a PEM certificate"),
        ("binary.pem", "key.pem", "{}/binary.pem is not a PEM certificate"),
        ("key.pem", "key.pem", "{}/key.pem is not a PEM certificate"),
        ("cert.pem", "junk.pem", "{}/junk.pem is not an unencrypted PEM private key"),
        ("cert.pem", "binary.pem", "{}/binary.pem is not an unencrypted PEM private key"),
        ("cert.pem", "cert.pem", "{}/cert.pem is not an unencrypted PEM private key"),
        ("cert.pem", "other.pem", "{}/other.pem is not an unencrypted PEM private key"),
        ("cert.pem", "locked.pem", "{}/locked.pem is not an unencrypted PEM private key"),
    ],
)
def test_a_file_that_tls_can_not_use_is_named(pems: Path, cert: str, key: str, message: str) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        checked(pems, cert, key)
    assert str(caught.value).startswith(message.format(pems))


@pytest.mark.parametrize(("name", "mode", "message"), [
    ("key.pem", 0o644, "can't read {}/key.pem (service.tls_key): other users may read it: chmod o-rwx,g-w"),
    ("key.pem", 0o620, "can't read {}/key.pem (service.tls_key): other users may change it: chmod o-rwx,g-w"),
    ("key.pem", 0o666, "can't read {}/key.pem (service.tls_key): other users may read and change it"),
    ("cert.pem", 0o666, "can't read {}/cert.pem (service.tls_cert): other users may change it: chmod go-w"),
])  # fmt: skip
def test_a_file_with_loose_permissions_is_refused(pems: Path, name: str, mode: int, message: str) -> None:
    (pems / name).chmod(mode)
    with pytest.raises(EnvironmentFault) as caught:
        checked(pems, "cert.pem", "key.pem")
    assert str(caught.value).startswith(message.format(pems))


def test_a_key_that_its_group_reads_is_fine(pems: Path) -> None:
    (pems / "key.pem").chmod(0o640)
    (pems / "cert.pem").chmod(0o644)
    checked(pems, "cert.pem", "key.pem")
