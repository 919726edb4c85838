"""Runs the snippets of a page in order in an empty directory, and compares what they print with what the page shows.

Each block of Python is a program of its own; one after `<!-- TEST runs this -->` is left to that test. A block of
text right after a block shows what that printed, and `...` in it matches anything within a line. Commands of a console
that end in `&` run until the end. Blocks of TOML are files: the first line is `# FILE`.

`python page_runner.py PAGE` runs a page with the package and the `txnbuf` of that Python's environment.
"""

from __future__ import annotations

import contextlib
import fnmatch
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from broker_io.standalone import Port

BLOCK = re.compile(r"^(<!-- (?P<test>\S+) runs this -->\n+)?```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
PORTS = ("7711", "7712")
"""The ports of the pages; other ones take their place."""
DEADLINE = 200.0
"""Seconds that a command may take."""


class PageRunner:
    """Runs blocks in a directory, with these variables in the environment of commands."""

    def __init__(self, directory: Path, variables: Mapping[str, str]) -> None:
        self.directory = directory
        self.kinds: set[str] = set()
        """The kinds of the blocks that a page had."""
        self._background: list[subprocess.Popen[str]] = []
        self._environment = {**os.environ, **variables}
        self._ports = [Port() for _ in PORTS]

    def run(self, text: str) -> None:
        """Run the blocks of a page. Raises AssertionError with the block whose result is another one."""
        for number, port in zip(PORTS, self._ports, strict=True):
            text = text.replace(number, str(port.number))
        printed, source, end = "", "", 0
        for block in BLOCK.finditer(text):
            kind, content = block["kind"], block["text"]
            self.kinds.add(kind)
            shown = kind == "text" and not text[end : block.start()].strip()
            end = block.end()
            if not shown:
                check(printed == "", f"the page does not show what this prints:\n{source}{printed}")
            if kind == "toml":
                (self.directory / content.partition("\n")[0].removeprefix("# ")).write_text(content)
            elif shown:
                expect(printed, content, source)
                printed = ""
            elif kind == "python" and not block["test"]:
                printed, source = self._python(content), content
            elif kind == "console":
                self._console(content)
        check(printed == "", f"the page does not show what this prints:\n{source}{printed}")

    def stop(self) -> None:
        for process in self._background:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def _python(self, source: str) -> str:
        printed = io.StringIO()
        namespace: dict[str, Any] = {"__name__": "__main__"}
        with contextlib.redirect_stdout(printed):
            exec(compile(source, "block", "exec"), namespace)
        return printed.getvalue()

    def _console(self, content: str) -> None:
        for part in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]:
            line, _, shown = part.partition("\n")
            expect(self._command(line), shown, line)

    def _command(self, line: str) -> str:
        if line.endswith("&"):
            return self._serve(line.removesuffix("&"))
        done = subprocess.run(
            line,
            shell=True,
            cwd=self.directory,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        check(done.returncode == 0, f"{line}\nended with exit code {done.returncode}: {done.stderr}")
        return done.stdout

    def _serve(self, command: str) -> str:
        log = self.directory / "service.log"
        with log.open("w") as errors:
            started = ["/bin/sh", "-c", f"exec {command}"]
            process = subprocess.Popen(started, cwd=self.directory, env=self._environment, stderr=errors, text=True)
        self._background.append(process)
        while "serving" not in log.read_text():
            time.sleep(0.02)
            check(process.poll() is None, f"{command}\nended: {log.read_text()}")
        return "...\n"


def check(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def expect(printed: str, shown: str, what: str) -> None:
    """Compare what was printed with what the page shows."""
    found, wanted = printed.splitlines(), shown.splitlines()
    check(len(found) == len(wanted), f"{what}\nprinted:\n{printed}page:\n{shown}")
    for line, pattern in zip(found, wanted, strict=True):
        escaped = re.sub(r"([\[\]?*])", r"[\1]", pattern).replace("...", "*")
        check(fnmatch.fnmatchcase(line, escaped), f"{what}\nprinted: {line}\npage:    {pattern}")


def main(page: str) -> None:
    text = Path(page).read_text()
    own = os.path.dirname(sys.executable)
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        runner = PageRunner(Path(directory), {"PATH": f"{own}{os.pathsep}{os.environ.get('PATH', os.defpath)}"})
        try:
            runner.run(text)
        finally:
            runner.stop()


if __name__ == "__main__":
    main(sys.argv[1])
