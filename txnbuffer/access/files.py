"""Files that are read again when they change, such as a policy or a key"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from broker_io.rpc.credential_files import CredentialFile, Watched

T = TypeVar("T")


class WatchedFile(Watched[T]):
    """The parsed contents of a file, `value`.

    `parse` takes the bytes and the path, and raises an `Error` that names the path. Raises EnvironmentFault, and
    the error of `parse`, for a file that can't be used at the start.
    """

    def __init__(self, file: CredentialFile, parse: Callable[[bytes, str], T], *, secret: bool) -> None:
        self.path = file.path
        super().__init__(file.identity, lambda: parse(file.read(secret=secret), file.path))
