"""Runs `txnbuf` commands in this process, which saves the start of an interpreter."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from unittest import mock

from txnbuffer.cli import main

BAR_AT_ONCE = """
import sys
from txnbuffer import progress
from txnbuffer.cli import main
progress.SHOWN_AFTER = progress.INTERVAL = 0.0
main()
"""
"""Runs the command of its arguments, whose bar appears at once; otherwise short operations show none."""


def txnbuf(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Output and exit code of a command. For tests of signals, kills or the streams themselves start a process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    code: object = None
    with (
        mock.patch.object(sys, "argv", ["txnbuf", *arguments]),
        mock.patch.dict(os.environ, environ or {}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int)
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]  # of bytes
    return subprocess.CompletedProcess(["txnbuf", *arguments], code, *texts)
