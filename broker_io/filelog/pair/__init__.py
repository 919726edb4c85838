"""The shell of a pair: the node that drives a member, its store, its lock, the link to its peer, and its broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_io.addresses import shown_address
from broker_io.errors import InvalidAddress

if TYPE_CHECKING:
    from broker_io.filelog.pair.port import PairLock


def open_lock(address: str) -> PairLock:
    """The lock of a pair: `etcd://HOST:PORT/NAME`, whose options `EtcdAddress.parse` lists, or `file:PATH` for tests.

    It connects when it is first used. Raises InvalidAddress, and EnvironmentFault for files that can't be used.
    """
    scheme, _, path = address.partition(":")
    if scheme == "file" and path:
        from broker_io.filelog.pair.file_lock import FileLock

        return FileLock(path)
    from broker_io.filelog.pair.etcd_lock import EtcdAddress, EtcdLock

    return EtcdLock(EtcdAddress.parse(address))


def pair_name(lock: str) -> str:
    """The name of the pair with the lock at this address: the same for both members. Raises InvalidAddress."""
    scheme, _, path = lock.partition(":")
    if scheme == "file":
        if not path:
            raise InvalidAddress(f"{shown_address(lock)!r} is not the address of a lock: write file:PATH")
        return path.rpartition("/")[2]
    from broker_io.filelog.pair.etcd_lock import EtcdAddress

    return EtcdAddress.parse(lock).name
