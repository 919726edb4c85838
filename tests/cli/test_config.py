"""Configuration: the order of the sources, and one clear error for invalid input."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from txnbuffer.cli.app import app
from txnbuffer.config import Config, load_config
from txnbuffer.errors import InvalidConfiguration, ServiceUnavailable


def written(directory: Path, text: str) -> str:
    path = directory / "txnbuf.toml"
    path.write_text(text)
    return str(path)


def test_defaults_without_any_source() -> None:
    assert load_config() == Config()


def test_the_later_source_wins(tmp_path: Path) -> None:
    path = written(tmp_path, "[log]\nsegment_bytes = 1\nwatermark_bytes = 1\nmax_message_bytes = 1\n")
    environ = {"TXNBUFFER_LOG_WATERMARK_BYTES": "2", "TXNBUFFER_LOG_MAX_MESSAGE_BYTES": "2", "HOME": "/"}
    log = load_config(path, environ, ["log.max_message_bytes=3"]).log
    assert (log.segment_bytes, log.watermark_bytes, log.max_message_bytes) == (1, 2, 3)


def test_types_are_kept(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, '[log]\ncompression = "zstd"\n[snapshots]\nrecovery_target = 2\n'))
    assert config.log.compression == "zstd"
    assert config.snapshots.recovery_target == 2.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[log]\nsegment_byte = 1", "unknown key log.segment_byte; did you mean 'segment_bytes'?"),
        ("[log]\nqqq = 1", "unknown key log.qqq; keys are segment_bytes, "),
        ("[logs]\nx = 1", "unknown section 'logs'; sections are log, snapshots"),
        ("[logs]", "unknown section 'logs'"),
        ("[__doc__]\nx = 1", "unknown section '__doc__'"),
        ("segment_bytes = 1", "key 'segment_bytes' is outside of a section"),
        ("[log]\nsegment_bytes = 'many'", "log.segment_bytes must be an integer, got 'many'"),
        ("[log]\nsegment_bytes = 1.5", "log.segment_bytes must be an integer, got 1.5"),
        ("[log]\nsegment_bytes = true", "log.segment_bytes must be an integer, got True"),
        ("[log]\nsegment_bytes = -1", "log.segment_bytes must be at least 0, got -1"),
        ("[service]\nshard = -2", "service.shard must be at least 0, got -2"),
        ("[snapshots]\nrecovery_target = 'soon'", "recovery_target must be a number, got 'soon'"),
        ("[service]\nmax_clients = -1", "max_clients must be at least 1, got -1"),
        ("[snapshots]\nrecovery_target = nan", "recovery_target must be a number, got nan"),
        ("[transactions]\ntimeout = inf", "timeout must be a finite number, got inf"),
        ("[service]\nmax_clients = 0", "max_clients must be at least 1, got 0"),
        ("[retention]\ncheck_seconds = 0", "check_seconds must be above 0, got 0.0"),
        ("[compaction]\nleast_dead = 1.5", "compaction.least_dead must be at most 1, got 1.5"),
        ("[compaction]\nleast_dead = -0.1", "compaction.least_dead must be at least 0, got -0.1"),
        ("[compaction]\nbytes_per_second = 50", "bytes_per_second must be 0 (no limit) or at least 4096, got 50"),
        ("[compaction]\nbytes_per_second = -1", "compaction.bytes_per_second must be at least 0, got -1"),
        ("[log]\ncompression = 'lz4'", 'log.compression must be "none" or "zstd", got \'lz4\''),
        ("[log", "is not valid TOML"),
    ],
)
def test_error_names_the_file_and_the_invalid_value(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InvalidConfiguration) as caught:
        load_config(path)
    assert str(caught.value).startswith(path)
    assert message in str(caught.value)


def test_defaults_may_be_written_out() -> None:
    assert load_config(flags=["service.shard=-1"]) == Config()


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(InvalidConfiguration, match=r"cannot read configuration /nowhere\.toml"):
        load_config("/nowhere.toml")


def test_unknown_variable_with_the_prefix_is_an_error() -> None:
    with pytest.raises(InvalidConfiguration, match="TXNBUFFER_LOG_SEGMENT: unknown key"):
        load_config(environ={"TXNBUFFER_LOG_SEGMENT": "1"})


@pytest.mark.parametrize("name", ["TXNBUFFER_LOGS_SEGMENT_BYTES", "TXNBUFFER_SNAPSHOT_CHANGES", "TXNBUFFER_X"])
def test_a_variable_of_no_section_is_an_error(name: str) -> None:
    with pytest.raises(InvalidConfiguration, match=f"environment variable {name}: unknown section"):
        load_config(environ={name: "1"})


@pytest.mark.parametrize("name", ["PULSAR_URL", "PULSAR_IMAGE", "PULSAR_HOME", "TLS_CA"])
def test_variables_that_are_no_settings_are_ignored(name: str) -> None:
    assert load_config(environ={f"TXNBUFFER_{name}": "some text", "TXNBUF": "1"}) == Config()


def test_given_credentials_are_passed_to_the_cluster(tmp_path: Path) -> None:
    assert Config().pulsar.options() == {"max_unavailable": 60.0}
    path = written(tmp_path, '[pulsar]\noauth2_issuer_url = "https://issuer"\noauth2_private_key = "file:key"\n')
    environ = {"TXNBUFFER_PULSAR_ADMIN_URL": "http://localhost:1", "TXNBUFFER_PULSAR_URL": "pulsar://localhost"}
    assert load_config(path, environ, ["pulsar.max_unavailable=5"]).pulsar.options() == {
        "admin_url": "http://localhost:1",
        "oauth2": {"issuer_url": "https://issuer", "private_key": "file:key"},
        "max_unavailable": 5.0,
    }


def test_token_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXNBUFFER_PULSAR_TOKEN", "s3cret")
    assert "s3cret" not in repr(load_config(environ={"TXNBUFFER_PULSAR_TOKEN": "s3cret"}))
    for output in ("json", "table"):
        shown = CliRunner().invoke(app, ["config", "show", "--output", output])
        assert shown.exit_code == 0
        assert "s3cret" not in shown.output


@pytest.mark.parametrize("flag", ["segment_bytes=1", "log.segment_bytes"])
def test_malformed_flag_is_an_error(flag: str) -> None:
    with pytest.raises(InvalidConfiguration, match=rf"^--set {flag}: write SECTION\.KEY=VALUE"):
        load_config(flags=[flag])


def test_error_names_the_option_of_a_malformed_setting() -> None:
    for flag in ("log", "log.pulsar=1", "none.key=1", "log.segment_bytes=--set 1"):
        with pytest.raises(InvalidConfiguration, match=f"^option {flag.partition('=')[0]}: "):
            load_config(flags=[flag], option="option")


CLUSTER = "pulsar://127.0.0.1:2/acme/shop"


@pytest.mark.parametrize(
    "command",
    [
        ["tail", CLUSTER, "orders"],
        ["tail", CLUSTER, "orders", "--stream"],
        ["inspect", "log", CLUSTER],
        ["inspect", "buffer", CLUSTER, "orders"],
        ["inspect", "snapshot", CLUSTER],
        ["verify", CLUSTER],
        ["recover", CLUSTER, "orders"],
        ["produce", CLUSTER, "orders"],
    ],
    ids=lambda words: " ".join(words).replace(f" {CLUSTER}", ""),
)
def test_every_command_opens_a_cluster_as_configured(tmp_path: Path, command: list[str]) -> None:
    """No server listens at port 1, which only the file names."""
    path = written(tmp_path, '[pulsar]\nadmin_url = "http://127.0.0.1:1"\nmax_unavailable = 0.1\n')
    failure = CliRunner().invoke(app, [*command, "--config", path]).exception
    assert isinstance(failure, ServiceUnavailable)
    assert "no admin interface answers at http://127.0.0.1:1 " in str(failure)
    again = CliRunner().invoke(app, [*command, "--config", path, "--set", "pulsar.admin_url=http://127.0.0.1:3"])
    assert "http://127.0.0.1:3 " in str(again.exception)
