"""Commands that connect to a service with TLS, and errors of unusable certificate files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from click.testing import CliRunner
from export_world import run_job
from relay_kills import RelayProcess
from service_process import ServiceProcess

from txnbuffer import connect
from txnbuffer.cli.app import app
from txnbuffer.errors import Error, InvalidConfiguration
from txnbuffer.rpc.discovery import read_ca_file


@pytest.fixture
def trust(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


@pytest.fixture
def address(tmp_path: Path, trust: Authority) -> Iterator[str]:
    """A service with TLS, with one committed record."""
    cert, key = trust.sign("service")
    with ServiceProcess(tmp_path / "log", "--tls-cert", str(cert), "--tls-key", str(key)) as service:
        address = f"txnbuf://127.0.0.1:{service.port}"
        with connect(address, tls_ca=str(trust.trust)) as client, client.transaction() as txn:
            txn.send("orders", b"secret", key="k")
        yield address


def test_records_are_read_streamed_and_relayed_over_tls(tmp_path: Path, trust: Authority, address: str) -> None:
    relay = RelayProcess(
        tmp_path / "relay.log", address, "orders", "clean", "--no-follow", "--tls-ca", str(trust.trust)
    )
    assert relay.finish()[0] == 0, relay.log.read_text()
    known = {"TXNBUFFER_TLS_CA": str(trust.trust)}
    option = ["--tls-ca", str(trust.trust)]
    for command, environment in (
        (["clean", *option], {}),
        (["orders"], known),
        (["orders", "--stream", *option], {}),
        (["orders", "--stream"], known),
    ):
        done = CliRunner().invoke(app, ["tail", address, *command], env=environment)
        assert done.exit_code == 0, done.output
        assert done.stdout.endswith("k\tsecret\n")
    for command in (["inspect", "log", address], ["verify", address], ["recover", address, "orders"]):
        done = CliRunner().invoke(app, command, env=known)
        assert done.exit_code == 0, done.output


def test_a_query_writes_and_a_job_reads_over_tls(spark: Any, tmp_path: Path, trust: Authority, address: str) -> None:
    sink = spark.range(1).selectExpr("CAST('q' AS STRING) value").write.format("txnbuffer").mode("append")
    sink.options(broker=address, topic="orders", tls_ca=str(trust.trust)).save()
    job = ("export", address, f"{tmp_path}/table")
    with pytest.raises(Error):
        run_job(spark, *job)
    assert run_job(spark, *job, "--tls-ca", str(trust.trust))[0] == 0
    found = spark.read.parquet(f"{tmp_path}/table/run=1").selectExpr("CAST(value AS STRING)")
    assert sorted(row.value for row in found.collect()) == ["q", "secret"]


@pytest.mark.parametrize("what", ["missing", "empty", "directory"])
def test_error_names_a_file_without_certificates(tmp_path: Path, what: str) -> None:
    path = tmp_path / what
    if what == "empty":
        path.touch()
    elif what == "directory":
        path.mkdir()
    with pytest.raises(InvalidConfiguration, match=what):
        read_ca_file(path)
    for command in (["tail"], ["tail", "--stream"], ["materialize"]):
        targets = ["sqlite:none"] if command == ["materialize"] else []
        arguments = [*command, "txnbuf://127.0.0.1:1", "orders", *targets, "--tls-ca", str(path)]
        done = CliRunner().invoke(app, arguments)
        assert isinstance(done.exception, InvalidConfiguration)


def test_grpc_prints_nothing_about_a_wrong_certificate(tmp_path: Path, trust: Authority) -> None:
    """Its lines would be among those of the service and the errors of commands, which have the same reason."""
    cert, key = trust.sign("service")
    other = Authority(tmp_path, "other").trust
    with ServiceProcess(tmp_path / "log", "--tls-cert", str(cert), "--tls-key", str(key)) as service:
        command = [sys.executable, "-m", "txnbuffer", "list", f"txnbuf://127.0.0.1:{service.port}", "--tls-ca"]
        for environment, quiet in (({}, True), ({"GRPC_VERBOSITY": "INFO"}, False)):
            done = subprocess.run(
                [*command, str(other)], capture_output=True, text=True, check=False, env={**os.environ, **environment}
            )
            assert done.returncode == 3
            lines = done.stderr.splitlines()
            assert "CERTIFICATE_VERIFY_FAILED" in done.stderr
            assert (len(lines) == 1) is quiet, lines
        assert all(line.startswith("{") for line in service.lines), service.lines
