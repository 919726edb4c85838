"""Files that are read again when they change, such as a policy or a key, and the permissions that they must have"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from broker_io.rpc.credential_files import CredentialFile
from txnbuffer.errors import Error

T = TypeVar("T")


class WatchedFile(Generic[T]):
    """The parsed contents of a file, `value`.

    `parse` takes the bytes and the path, and raises an `Error` that names the path. Raises EnvironmentFault, and
    the error of `parse`, for a file that can't be used at the start. Later such a file leaves the last one in use:
    `problem` is the error then.
    """

    def __init__(self, file: CredentialFile, parse: Callable[[bytes, str], T], *, secret: bool) -> None:
        self.path = file.path
        self._file = file
        self.problem: Error | None = None
        self._parse = parse
        self._secret = secret
        self._seen = file.identity()
        self.value = self._read()

    def refresh(self) -> bool:
        """Read the file again if it has changed; whether `value` is another one now."""
        seen = self._file.identity()
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            self.value = self._read()
        except Error as error:
            self.problem = error
            return False
        self.problem = None
        return True

    def _read(self) -> T:
        return self._parse(self._file.read(secret=self._secret), self.path)
