"""The snippets of some pages, run in order in an empty directory, print what the page shows."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_process import kept_port
from source_tree import ROOT

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PORTS = ("7711", "7712")


class Guide:
    """Runs blocks; commands that end in & run until the end."""

    def __init__(self, directory: Path) -> None:
        self.namespace: dict[str, object] = {"__name__": "guide"}
        self.background: list[subprocess.Popen[str]] = []
        self.directory = directory
        binaries = directory / "bin"
        binaries.mkdir()
        txnbuf = binaries / "txnbuf"
        txnbuf.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m txnbuffer "$@"\n')
        txnbuf.chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def python(self, source: str) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, "guide.md", "exec"), self.namespace)
        return printed.getvalue()

    def command(self, line: str) -> str:
        if line.endswith("&"):
            errors = (self.directory / "service.log").open("w")
            self.background.append(
                subprocess.Popen(
                    ["/bin/sh", "-c", "exec " + line.removesuffix("&")],
                    stderr=errors,
                    env=self.environment,
                    text=True,
                )
            )
            errors.close()
            while "serving" not in (self.directory / "service.log").read_text():
                time.sleep(0.02)
                assert self.background[-1].poll() is None, (self.directory / "service.log").read_text()
            return "...\n"
        done = subprocess.run(
            line, shell=True, capture_output=True, text=True, timeout=200, env=self.environment, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def stop(self) -> None:
        for process in self.background:
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.fixture
def guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guide]:
    monkeypatch.chdir(tmp_path)
    opened = Guide(tmp_path)
    yield opened
    opened.stop()


def expect(printed: str, shown: str, what: str) -> None:
    """Compare what was printed with what the guide shows, in which `...` matches anything within a line."""
    found, wanted = printed.splitlines(), shown.splitlines()
    assert len(found) == len(wanted), f"{what}\nprinted:\n{printed}"
    for line, pattern in zip(found, wanted, strict=True):
        escaped = re.sub(r"([\[\]?*])", r"[\1]", pattern).replace("...", "*")
        assert fnmatch.fnmatchcase(line, escaped), f"{what}\nprinted: {line}\npage:    {pattern}"


KINDS = {"guide.md": {"python", "text", "console"}, "security.md": {"python", "text", "console", "toml"}}
"""The pages whose snippets are run, and the kinds of their blocks. The first line of a file is its name: `# FILE`."""


@pytest.mark.parametrize("page", KINDS)
def test_snippets_print_what_the_page_shows(guide: Guide, page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    for port in PORTS:
        text = text.replace(port, str(kept_port()))
    printed, source = "", ""
    blocks = BLOCK.findall(text)
    assert KINDS[page] == {kind for kind, _ in blocks}
    for kind, content in blocks:
        if kind != "text":
            assert printed == "", f"the page does not show what this prints:\n{source}"
        if kind == "toml":
            (guide.directory / content.partition("\n")[0].removeprefix("# ")).write_text(content)
        elif kind == "python":
            printed, source = guide.python(content), content
        elif kind == "text":
            expect(printed, content, source)
            printed = ""
        else:
            for part in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]:
                line, _, shown = part.partition("\n")
                expect(guide.command(line), shown, line)


def test_names_in_the_guide_exist() -> None:
    import txnbuffer
    from txnbuffer import Client, Transaction

    text = (ROOT / "docs" / "guide.md").read_text()
    known = set(dir(txnbuffer)) | set(dir(Client)) | set(dir(Transaction))
    errors = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert len(errors) == 6
    assert errors <= known
    assert set(re.findall(r"`client\.(\w+)", text)) <= set(dir(Client))
