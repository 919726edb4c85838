"""The configuration file of a user and its profiles: which file is read, what takes precedence, and what is refused"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
import pytest
from commands import txnbuf

from txnbuffer import connect
from txnbuffer.cli.options import access_of
from txnbuffer.config import load, load_config
from txnbuffer.errors import InvalidConfiguration

FILE = """
default_profile = "dev"
address = "file:/top"
token_file = "/top/token"

[log]
segment_bytes = 1
watermark_bytes = 1
max_message_bytes = 1
compaction_bytes = 1

[profiles.dev]
address = "file:DEV"

[profiles.dev.log]
watermark_bytes = 2
max_message_bytes = 2
compaction_bytes = 2

[profiles.prod]
address = "txnbuf://prod:7711"
tls_ca = "/ca.pem"
token_file = "/prod/token"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the file of a user."""
    home = tmp_path / "config"
    home.mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    (home / "txnbuffer.toml").write_text(FILE.replace("DEV", str(tmp_path / "log")))
    return home


def configuration(*words: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    done = txnbuf("config", "show", "--output", "json", *words, environ=environ)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_flag_before_environment_before_profile_before_top_level_before_default(home: Path) -> None:
    file = str(home / "txnbuffer.toml")
    environ = {"TXNBUFFER_LOG_MAX_MESSAGE_BYTES": "3", "TXNBUFFER_LOG_COMPACTION_BYTES": "3"}
    found = configuration("--set", "log.compaction_bytes=4", environ=environ)
    names = ("segment_bytes", "watermark_bytes", "max_message_bytes", "compaction_bytes", "compression")
    assert [found["log"][name] for name in names] == [1, 2, 3, 4, "none"]
    assert [found["sources"].get(f"log.{name}") for name in names] == [
        file,
        f"{file}, profile dev",
        "environment variable TXNBUFFER_LOG_MAX_MESSAGE_BYTES",
        "--set log.compaction_bytes",
        None,
    ]
    table = txnbuf("config", "show").stdout
    assert [line.split()[1:] for line in table.splitlines() if line.startswith("log.compression ")] == [
        ["none", "default"]
    ]


def test_flag_before_environment_before_default_profile(home: Path) -> None:
    by_variable = {"TXNBUFFER_PROFILE": "prod"}
    assert configuration()["profile"] == "dev"
    assert configuration(environ=by_variable)["profile"] == "prod"
    assert configuration("--profile", "dev", environ=by_variable)["profile"] == "dev"
    done = txnbuf("--profile", "prod", "config", "show", "--output", "json")
    assert json.loads(done.stdout)["connection"]["address"] == "txnbuf://prod:7711"


def test_given_file_takes_the_place_of_that_of_the_user(home: Path, tmp_path: Path) -> None:
    (other := tmp_path / "other.toml").write_text("[log]\nsegment_bytes = 7\n")
    (third := tmp_path / "third.toml").write_text("[log]\nsegment_bytes = 8\n")
    by_variable = {"TXNBUFFER_CONFIG": str(other)}
    assert configuration(environ=by_variable)["file"] == str(other)
    found = configuration("--config", str(third), environ=by_variable)
    assert (found["log"]["segment_bytes"], found["log"]["watermark_bytes"] > 2) == (8, True)
    (home / "txnbuffer.toml").unlink()
    assert configuration()["file"] is None
    for words, environ in ((("--profile", "dev"), {}), ((), {"TXNBUFFER_CONFIG": "/nowhere.toml"})):
        done = txnbuf("config", "show", *words, environ=environ)
        assert done.returncode == 2
        assert "cannot read configuration" in done.stderr


def test_commands_work_on_the_address_of_the_profile(home: Path, tmp_path: Path) -> None:
    with connect(f"file:{tmp_path / 'log'}") as client:
        client.send("orders", "1")
    assert json.loads(txnbuf("tail", "orders", "--output", "json").stdout)["value"] == "1"
    other = {"TXNBUFFER_ADDRESS": f"file:{tmp_path / 'none'}"}
    assert "none" in txnbuf("tail", "orders", environ=other).stderr
    refused = txnbuf("tail", "orders", "--profile", "prod", environ={"TXNBUFFER_TOKEN_FILE": "/of/environment"})
    assert (refused.returncode != 0, "/ca.pem" in refused.stderr) == (True, True)
    words = ("plugin", "check", "--profile", "prod")
    assert "txnbuf://prod:7711 is not the address of a Pulsar cluster" in txnbuf(*words).stderr


def access(address: str, **given: str) -> dict[str, Any]:
    context = click.Context(click.Command("tail"))
    context.params = {"address": address, "config_path": None, **given}
    context.meta["txnbuffer.cli.global_options.profile"] = "prod"
    found = access_of(context)
    return {name: getattr(found, name) for name in ("tls_ca", "token", "token_file")}


def test_credentials_of_a_profile_are_for_its_address_only(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prod = "txnbuf://prod:7711"
    assert access(prod) == {"tls_ca": "/ca.pem", "token": None, "token_file": "/prod/token"}
    assert access("txnbuf://other:7711") == {"tls_ca": None, "token": None, "token_file": None}
    assert access(prod, tls_ca="/mine", token_file="/my") == {"tls_ca": "/mine", "token": None, "token_file": "/my"}
    monkeypatch.setenv("TXNBUFFER_TOKEN", "text")
    assert access(prod) == {"tls_ca": "/ca.pem", "token": "text", "token_file": None}


def test_address_of_a_profile_does_not_get_the_credentials_of_another(home: Path) -> None:
    file = str(home / "txnbuffer.toml")
    assert "token_file" not in load(file, profile="dev").connection
    text = Path(file).read_text().replace('default_profile = "dev"', "")
    Path(file).write_text(text)
    assert load(file).connection == {"address": "file:/top", "token_file": "/top/token"}


def test_a_service_does_not_use_the_file_of_a_user(home: Path, tmp_path: Path) -> None:
    """It refuses to start with this port, and before that reads its file, in which a key is wrong."""
    (home / "txnbuffer.toml").write_text("[service]\nlisten = 'no port'\n[profiles.p]\n")
    words = ("serve", f"file:{tmp_path / 'log'}", "--listen", "nowhere.invalid:x")
    assert "nowhere.invalid:x" in txnbuf(*words).stderr
    (home / "txnbuffer.toml").write_text("[service]\nlistne = 1\n[profiles.p]\n")
    assert "listne" not in txnbuf(*words).stderr
    for more, environ in ((("--profile", "p"), {}), ((), {"TXNBUFFER_PROFILE": "p"})):
        assert "listne" in txnbuf(*words, *more, environ=environ).stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[profiles.p.log]\nsegment_byte = 1", ", profile p: unknown key log.segment_byte; did you mean"),
        ("[profiles.p]\nadress = 'x'", ", profile p: key 'adress' is outside of a section; keys there are address, "),
        ("[profiles.p.logs]\nx = 1", ", profile p: unknown section 'logs'"),
        ("[profiles.p.log]\nsegment_bytes = 'x'", ", profile p: log.segment_bytes must be an integer"),
        ("[profiles.p]\naddress = 1", ", profile p: address must be text, got 1"),
        ("[profiles]\np = 1", ", profile p must be a table, got 1"),
        ("profiles = 1", ": profiles must be tables: write [profiles.NAME]"),
        ("address = ['x']", ": address must be text, got ['x']"),
        ("default_profile = 'q'\n[profiles.p]", ": default_profile names no profile 'q'; it has p"),
        ("default_profile = 1", ": default_profile names no profile 1; it has none"),
        ("[profiles.p.profiles.q]", ", profile p: unknown section 'profiles'"),
    ],
)
def test_unknown_key_of_a_profile_is_an_error_even_if_it_is_not_used(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "file.toml"
    path.write_text(text)
    with pytest.raises(InvalidConfiguration) as caught:
        load_config(str(path))
    assert str(caught.value).startswith(f"{path}{message}")


def test_unknown_profile_is_an_error(home: Path) -> None:
    done = txnbuf("config", "show", "--profile", "pord")
    assert done.returncode == 2
    assert f"{home / 'txnbuffer.toml'}: there is no profile 'pord'; it has dev, prod" in done.stderr


SECRETS = {
    "pulsar.token": "[pulsar]\ntoken = 's3cret'",
    "pulsar.oauth2_private_key": "[profiles.p.pulsar]\noauth2_private_key = 'data:s3cret'",
    "pulsar.admin_url": "[pulsar]\nadmin_url = 'https://me:s3cret@host'",
}


@pytest.mark.parametrize(("setting", "text"), SECRETS.items())
def test_file_with_a_secret_that_others_may_read_is_refused(tmp_path: Path, setting: str, text: str) -> None:
    path = tmp_path / "file.toml"
    path.write_text(text)
    path.chmod(0o644)
    with pytest.raises(InvalidConfiguration) as caught:
        load_config(str(path))
    assert f"configuration {path}, which has the secret {setting}: other users may read it: chmod" in str(caught.value)
    assert "s3cret" not in str(caught.value)
    path.chmod(0o640)
    load_config(str(path))
    path.chmod(0o644)
    path.write_text(text.replace("s3cret", "").replace("data:", "").replace("me:@", ""))
    load_config(str(path))


def test_tests_do_not_read_the_file_of_who_runs_them() -> None:
    assert not os.path.exists(os.environ["XDG_CONFIG_HOME"])
