"""`txnbuf token` and `txnbuf access`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from access_world import POLICY
from commands import txnbuf

from txnbuffer.access.tokens import parse_tokens


def create(path: Path, principal: str, *more: str) -> str:
    done = txnbuf("token", "create", principal, "--file", str(path), *more)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_created_token_is_in_the_file_as_a_hash(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    first, second = create(path, "orders"), create(path, "team a", "--expires", "90d")
    file = parse_tokens(path.read_text(), str(path))
    assert [token.principal for token in file.tokens.values()] == ["orders", "team a"]
    assert file.find(first) is not None
    assert file.find(second) is not None
    assert first.rpartition("_")[2] not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_list_shows_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    text = create(path, "orders", "--expires", "12h")
    done = txnbuf("token", "list", "--file", str(path), "--output", "json")
    (row,) = json.loads(done.stdout)
    assert (row["id"], row["principal"], row["valid"]) == (text.split("_")[1], "orders", True)
    assert text.rpartition("_")[2] not in done.stdout


def test_revoked_token_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    first, second, third = create(path, "a"), create(path, "b"), create(path, "b")
    assert txnbuf("token", "revoke", "--file", str(path), first.split("_")[1]).returncode == 0
    assert txnbuf("token", "revoke", "--file", str(path), "--principal", "b").returncode == 0
    file = parse_tokens(path.read_text(), str(path))
    assert [file.find(text) for text in (first, second, third)] == [None, None, None]


def test_tokens_of_many_processes_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    command = [sys.executable, "-m", "txnbuffer", "token", "create", "--file", str(path)]
    running = [subprocess.Popen([*command, f"p{n}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for n in range(6)]
    for process in running:
        process.communicate(timeout=60)
    file = parse_tokens(path.read_text(), str(path))
    assert sorted(token.principal for token in file.tokens.values()) == [f"p{n}" for n in range(6)]


def test_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    create(path, "a")
    path.chmod(0o640)
    create(path, "b")
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["create", "a*"], 2, "'a*' can't name a principal"),
        (["create", "a", "--expires", "soon"], 2, "--expires soon is invalid: write a number and s, m, h or d"),
        (["revoke"], 2, "which tokens? give their IDs, or --principal"),
        (["revoke", "000000000000"], 2, "has no token 000000000000: see `txnbuf token list`"),
        (["revoke", "--principal", "x"], 2, "has no token of 'x': see `txnbuf token list`"),
    ],
)
def test_mistakes_with_tokens_change_nothing(tmp_path: Path, words: list[str], code: int, error: str) -> None:
    path = tmp_path / "tokens"
    create(path, "orders")
    before = path.read_bytes()
    done = txnbuf("token", *words, "--file", str(path))
    assert done.returncode == code
    assert error in done.stderr
    assert path.read_bytes() == before


def test_file_that_is_missing_or_loose_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    done = txnbuf("token", "list", "--file", str(path))
    assert (done.returncode, f"can't read {path} (access.tokens): No such file" in done.stderr) == (5, True)
    assert txnbuf("token", "revoke", "x", "--file", str(path)).returncode == 5
    assert not path.exists()
    create(path, "a")
    os.chmod(path, 0o644)
    done = txnbuf("token", "create", "b", "--file", str(path))
    assert "other users may read it: chmod o-rwx,g-w" in done.stderr
    assert "which file of tokens?" in txnbuf("token", "list").stderr


def test_policy_is_checked_and_asked(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    config = tmp_path / "txnbuf.toml"
    config.write_text(f'[access]\npolicy = "{path}"\n')
    assert txnbuf("access", "check", "--policy", str(path)).stdout == "5 rules, 0 limits: no mistake\n"
    may = txnbuf("access", "may", "writer", "write", "topic", "abc", "--config", str(config))
    assert (may.returncode, may.stdout) == (0, "'writer' may write topic 'abc'\n")
    may = txnbuf("access", "may", "writer", "operate", "service", "--config", str(config))
    assert (may.returncode, may.stdout) == (1, "'writer' may not operate the service\n")
    may = txnbuf("access", "may", "root", "write", "topic", "__txnbuffer_x", "--config", str(config))
    assert (may.returncode, "__txnbuffer_x is an internal topic" in may.stderr) == (2, True)
    path.write_text(POLICY.replace("roles", "role", 1))
    done = txnbuf("access", "check", "--policy", str(path))
    assert done.returncode == 2
    assert "[[allow]] number 1: unknown key 'role'; did you mean 'roles'?" in done.stderr
