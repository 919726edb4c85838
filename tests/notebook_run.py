"""Run a notebook in a new kernel and write it with its outputs: `notebook_run.py NOTEBOOK RESULT`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

CELL_SECONDS = 800


def main(source: str, result: str) -> None:
    import nbformat
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    notebook = nbformat.read(source, as_version=4)
    resources = {"metadata": {"path": str(Path(result).parent)}}
    with tempfile.TemporaryDirectory() as sockets:  # ports could be taken; socket paths have to be short
        manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/k")
        client = NotebookClient(notebook, km=manager, timeout=CELL_SECONDS, startup_timeout=300, resources=resources)
        client.execute()
    nbformat.write(notebook, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
