"""Files that are read again when they change, such as a policy or a key, and the permissions that they must have"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from broker_io import permissions
from broker_io.environment import current
from txnbuffer.errors import EnvironmentFault, Error

T = TypeVar("T")


def read_checked(path: str, what: str, *, secret: bool) -> bytes:
    """The bytes of a file that `what` describes. Raises EnvironmentFault, also for loose permissions."""
    try:
        return permissions.read_checked(path, secret=secret)
    except PermissionError as error:
        raise EnvironmentFault(f"{what} {path}: {error.strerror}") from error
    except OSError as error:
        raise EnvironmentFault(f"cannot read {what} {path}: {error.strerror}") from error


class WatchedFile(Generic[T]):
    """The parsed contents of a file, `value`.

    `parse` takes the bytes and the path, and raises an `Error` that names the path. Raises EnvironmentFault, and
    the error of `parse`, for a file that can't be used at the start. Later such a file leaves the last one in use:
    `problem` is the error then.
    """

    def __init__(self, path: str, what: str, parse: Callable[[bytes, str], T], *, secret: bool) -> None:
        self.path = path
        self.problem: Error | None = None
        self._what = what
        self._parse = parse
        self._secret = secret
        self._seen = file_identity(path)
        self.value = self._read()

    def refresh(self) -> bool:
        """Read the file again if it has changed; whether `value` is another one now."""
        seen = file_identity(self.path)
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
        return self._parse(read_checked(self.path, self._what, secret=self._secret), self.path)


def file_identity(path: str) -> tuple[int, ...] | None:
    """A value that changes with a file and with its permissions; None if it is not there."""
    disk = current().disk
    try:
        return (*disk.identity(path), disk.permissions(path))
    except OSError:
        return None
