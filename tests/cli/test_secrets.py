"""Secrets are in no output, log, error, dump of an object and list of arguments, and their files are private."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from access_world import POLICY, Tokens
from certificates import self_signed
from commands import txnbuf
from http_answers import ask
from service_process import ServiceProcess

from broker_io import open_broker
from broker_io.errors import CallerError, Error
from broker_io.pulsar.credentials import Credentials
from broker_io.rpc.credentials import ClientCredentials, token_of_file
from txnbuffer import connect
from txnbuffer.cli.options import LogAddress
from txnbuffer.config import load_config, shown
from txnbuffer.errors import EnvironmentFault, InvalidConfiguration
from txnbuffer.pipeline.options import ReadOptions, WriteOptions
from txnbuffer.rpc.service_access import ServiceAccess

CANARY = "canary-5a0f3c1e9b7d4826a1c5e8f70b2d6394"
DATA = f"data:application/json;base64,{CANARY}"
IN_ENVIRONMENT = {"TXNBUFFER_PULSAR_TOKEN": CANARY, "TXNBUFFER_PULSAR_OAUTH2_PRIVATE_KEY": DATA}


def test_objects_with_secrets_do_not_show_them(tmp_path: Path) -> None:
    config = load_config(environ=IN_ENVIRONMENT)
    access = ServiceAccess(token=CANARY)
    cluster = {"broker": "pulsar://h:1/a/b", "pulsar.token": CANARY}
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text(CANARY)
    service = {"broker": "txnbuf://127.0.0.1:1", "token_file": str(tmp_path / "token")}
    made: list[Any] = [
        config,
        config.pulsar,
        access,
        access.load(),
        ClientCredentials(b"ca", b"certificate", CANARY.encode(), CANARY),
        Credentials(token=CANARY),
        Credentials(oauth2={"issuer_url": "https://i", "private_key": DATA}),
        LogAddress("pulsar://h:1/a/b", config, access),
        connect("txnbuf://127.0.0.1:1", token=CANARY),
        ReadOptions.of(cluster | {"topics": "a"}),
        ReadOptions.of(service | {"topics": "a"}),
        WriteOptions.of(cluster | {"topic": "a"}, streaming=False),
        WriteOptions.of(service | {"topic": "a"}, streaming=False),
    ]
    for one in made:
        assert CANARY not in repr(one), type(one)
        assert CANARY not in str(one), type(one)


def test_configuration_hides_secrets(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.touch(0o600)
    file.write_text(f'[pulsar]\nadmin_url = "https://me:{CANARY}@h/x"\n')
    for output in ("table", "json"):
        done = txnbuf("config", "show", "--config", str(file), "--output", output, environ=IN_ENVIRONMENT)
        assert (done.returncode, CANARY in done.stdout) == (0, False)
        assert done.stdout.count("(hidden)") == 3
    settings = shown(load_config(environ={"TXNBUFFER_PULSAR_OAUTH2_PRIVATE_KEY": "/path"}))["pulsar"]
    assert (settings["oauth2_private_key"], settings["token"]) == ("/path", "")


@pytest.mark.parametrize(
    "setting", [f"pulsar.token={CANARY}", f"pulsar.oauth2_private_key={DATA}"], ids=["token", "oauth2"]
)
def test_no_flag_sets_a_secret(setting: str) -> None:
    name = setting.partition("=")[0]
    done = txnbuf("config", "show", "--set", setting)
    assert (done.returncode, CANARY in done.stdout + done.stderr) == (2, False)
    assert f"set the environment variable TXNBUFFER_{name.upper().replace('.', '_')}" in done.stderr
    load_config(flags=["pulsar.oauth2_private_key=/path"])
    with pytest.raises(InvalidConfiguration) as error:
        load_config(flags=[f"pulsar.tokne={CANARY}"])
    assert CANARY not in str(error.value)


def test_files_of_secrets_that_others_read_are_refused(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    token = tmp_path / "token"
    token.touch(0o644)
    token.write_text(CANARY)
    Path(key).chmod(0o644)
    remedy = "other users may read it: chmod o-rwx,g-w"
    tls = ServiceAccess(tls_ca=certificate, tls_cert=certificate, tls_key=key)
    oauth2 = {"issuer_url": "https://i", "private_key": f"file://{token}"}
    tries: list[tuple[type[Error], Callable[[], object]]] = [
        (EnvironmentFault, token_of_file(token)),
        (EnvironmentFault, tls.load),
        (CallerError, Credentials(token_file=str(token)).current_token),
        (CallerError, Credentials(oauth2=oauth2).for_client),
        (CallerError, Credentials(tls_cert=certificate, tls_key=key).tls_context),
    ]
    for kind, call in tries:
        with pytest.raises(kind, match=remedy) as error:
            call()
        assert CANARY not in str(error.value)
    token.chmod(0o640)
    Path(key).chmod(0o640)
    for _, call in tries[:3]:
        call()


def test_secrets_of_a_service_and_of_its_commands_are_nowhere(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path, ("root", "reader"))
    (policy := tmp_path / "policy.toml").write_text(POLICY)
    policy.chmod(0o644)
    hidden = [CANARY, *tokens.text.values(), *(text.rpartition("_")[2] for text in tokens.text.values())]
    settings = {"TXNBUFFER_ACCESS_TOKENS": str(tokens.path), "TXNBUFFER_ACCESS_POLICY": str(policy), **IN_ENVIRONMENT}
    outputs: list[str] = []

    def run(*words: str, token: str) -> int:
        done = txnbuf(*words, environ={"TXNBUFFER_TOKEN": token})
        outputs.extend((done.stdout, done.stderr))
        return done.returncode

    with ServiceProcess(tmp_path / "log", environment=settings) as service:
        at = f"txnbuf://127.0.0.1:{service.port}"
        assert run("list", at, token=tokens.text["root"]) == 0
        assert run("streams", at, token=tokens.text["root"]) == 0
        assert run("sessions", at, token=tokens.text["reader"]) == 2
        wrong = tokens.text["root"][:-1] + ("0" if tokens.text["root"][-1] != "0" else "1")
        for text in (wrong, CANARY):
            hidden.append(text)
            assert run("list", at, token=text) == 2
            outputs += [str(ask(service.http, "/admin/List", {}, token=text))]
            with pytest.raises(Error) as error:
                open_broker(f"txnbuf://127.0.0.1:{service.port}", token=text)
            outputs.append(repr(error.value))
            with pytest.raises(Error) as error:
                asyncio.run(opened(f"txnbuf://127.0.0.1:{service.port}", text))
            outputs.append(repr(error.value))
        for request in ("Status", "Sessions"):
            outputs.append(str(ask(service.http, f"/admin/{request}", {}, token=tokens.text["root"])))
        outputs += [str(ask(service.http, path, token=tokens.text["root"])) for path in ("/metrics", "/health")]
        arguments = Path(f"/proc/{service.process.pid}/cmdline")
        if sys.platform == "linux":
            outputs.append(arguments.read_text())
        tokens.path.write_text(tokens.path.read_text() + f"broken {CANARY}\n")
        service.wait_event("access file not used")
        service.terminate()
        assert service.finish() == 0
        outputs += service.lines
    listed = txnbuf("token", "list", "--file", str(tokens.path))
    assert "line 4 is not a token" in listed.stderr
    outputs += [listed.stdout, listed.stderr]
    text = json.dumps(outputs)
    assert "denied" in text
    assert [secret for secret in hidden if secret in text] == []


async def opened(address: str, token: str) -> None:
    async with connect(address, token=token):
        pass
