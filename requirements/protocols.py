"""Generate the modules of the protocol files, next to them: `make protocols`."""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOCOLS = (
    "broker_io/rpc/etcd.proto",
    "broker_io/rpc/log.proto",
    "broker_io/rpc/replication.proto",
    "txnbuffer/rpc/admin.proto",
    "txnbuffer/rpc/session.proto",
    "txnbuffer/rpc/streams.proto",
)


def generate(target: Path) -> None:
    """Write the modules and their types under `target`."""
    arguments = ["protoc", f"-I{ROOT}", f"--python_out={target}", f"--pyi_out={target}", *PROTOCOLS]
    if protoc.main(arguments):
        raise ValueError(f"protoc rejected the protocol files {', '.join(PROTOCOLS)}: see its messages above")


if __name__ == "__main__":
    sys.exit(generate(ROOT))
